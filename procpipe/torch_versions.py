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


def release_of(version: str) -> tuple[int, int]:
    """Return the release that a version belongs to: ``2.11.0+cu130`` is of (2, 11)."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


#: The release of this process's torch.
RELEASE = release_of(torch.__version__)

if RELEASE < OLDEST:
    oldest, *others = (".".join(map(str, release)) for release in TESTED)
    raise ImportError(
        f"procpipe needs torch {oldest} or newer, but this is torch {torch.__version__}: versions "
        f"{', '.join((oldest, *others))} are tested; install one with pip install 'torch>={oldest}'"
    )
