"""Which versions of torch procpipe works with. Importing this module refuses older ones.

Before torch 2.11, autocast with recomputation drops gradients silently from the second step on: a
weight's copy in the shorter dtype, made without a graph, is used again where one is needed.

Reads nothing of torch but its version, since an older torch may lack any other name.
"""

from __future__ import annotations

import re

import torch

__all__ = ["NEWEST_TESTED", "OLDEST", "check_torch_version", "is_tested", "release_of"]

#: The first that works, and the last that the tests have run with.
OLDEST, NEWEST_TESTED = (2, 11), (2, 15)


def release_of(version: str) -> tuple[int, int] | None:
    """Return the release that a version belongs to; None for a text that names none.

    ``2.11.0+cu130`` is of (2, 11), ``2.16.0a0+git1234567`` of (2, 16).
    """
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def check_torch_version(version: str) -> None:
    """Refuse versions of torch that do not work; one that names no release is let pass.

    Raises:
        ImportError: the version is too old.
    """
    release = release_of(version)
    if release is not None and release < OLDEST:
        oldest, newest = (".".join(map(str, release)) for release in (OLDEST, NEWEST_TESTED))
        raise ImportError(
            f"procpipe needs torch {oldest} or newer, but this is torch {version}: versions "
            f"{oldest} to {newest} are tested; install one with pip install 'torch>={oldest}'"
        )


def is_tested(version: str) -> bool:
    """Tell whether a version is of a release between those that the tests have run with."""
    release = release_of(version)
    return release is not None and OLDEST <= release <= NEWEST_TESTED


check_torch_version(torch.__version__)
