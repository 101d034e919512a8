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


#: The release of this process's torch; one without a number is accepted.
RELEASE = release_of(torch.__version__)

if RELEASE is not None and RELEASE < OLDEST:
    oldest, *others = (".".join(map(str, release)) for release in TESTED)
    raise ImportError(
        f"procpipe needs torch {oldest} or newer, but this is torch {torch.__version__}: versions "
        f"{', '.join((oldest, *others))} are tested; install one with pip install 'torch>={oldest}'"
    )
