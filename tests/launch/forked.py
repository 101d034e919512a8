"""Lets ``procpipe doctor`` and ``plan --check`` start their ranks as forks.

That saves seconds.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import pytest

from procpipe.launch import start_ranks
from tests.dist.forks import Forked, fork_server


def start_as_forks(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    """Start torchrun, and so many of its ranks, as forks: tests/dist/launchers.py.

    Args:
        monkeypatch: undoes it.
        num_ranks: how many of its ranks are forks.
    """

    def start(arguments: list[str], environment: dict[str, str], log: BinaryIO) -> Forked:
        with open(os.devnull) as stdin:
            files = (stdin.fileno(), log.fileno(), log.fileno())
            return fork_server().start(
                arguments, env=environment, cwd=Path.cwd(), files=files, num_ranks=num_ranks
            )

    monkeypatch.setattr(start_ranks, "_start", start)
