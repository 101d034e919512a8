"""The versions of torch that procpipe works with. Importing this module refuses older ones.

Before torch 2.11, autocast with recomputation silently drops gradients from the second step on: a
weight's copy in the shorter dtype, made without a graph, is reused where one is needed.

Uses only torch's version, since an older torch may lack any other name.
"""

from __future__ import annotations

import re

import torch

#: The releases that the tests have run with; the first that works.
TESTED = ((2, 11), (2, 13), (2, 15))
OLDEST = TESTED[0]


def release_of(version: str) -> tuple[int, int] | None:
    """Return the release that a version belongs to; None for a text that names none.

    ``2.11.0+cu130`` is of (2, 11), ``2.16.0a0+git1234567`` of (2, 16).
    """
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def check_torch_version(version: str) -> None:
    """Refuse versions of torch that do not work; accept one that names no release.

    Raises:
        ImportError: the version is too old.
    """
    release = release_of(version)
    if release is not None and release < OLDEST:
        oldest, *others = (".".join(map(str, release)) for release in TESTED)
        raise ImportError(
            f"procpipe needs torch {oldest} or newer, but this is torch {version}: versions "
            f"{', '.join((oldest, *others))} are tested; install one with "
            f"pip install 'torch>={oldest}'"
        )


def is_tested(version: str) -> bool:
    """Return whether a version is of a release that the tests have run with."""
    return release_of(version) in TESTED


check_torch_version(torch.__version__)
