"""The rank processes of this host in one attempt: their files, their boards, what they note.

torch's agent starts and ends them. A board outlives its process, so it says afterwards what a rank
was doing in the end.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from procpipe.job.board import Board, Page

#: How often a rank's newest board is looked for: a script may make several stages.
_LOOK_AGAIN_S = 2.0


@dataclass
class Rank:
    """A rank process: its number, its folder of files, and what is known of it."""

    number: int
    folder: Path
    process: psutil.Process | None = None  # None until it is found
    board: Board | None = None  # what it is doing; None before it makes a Stage

    def __post_init__(self) -> None:
        self.stdout = self.folder / "stdout.log"
        self.stderr = self.folder / "stderr.log"
        self.error = self.folder / "error.json"

    @property
    def has_ended(self) -> bool:
        """Whether its process is over."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return self.process is not None and (
                not self.process.is_running() or self.process.status() == psutil.STATUS_ZOMBIE
            )
        return True

    def read(self) -> Page | None:
        """Read the board; of a rank that has failed, as of that moment."""
        if self.board is None:
            return None
        reading = self.board.read()
        if reading.has_failed:
            reading.now_ns = reading.written_ns
        return reading

    def recorded(self) -> dict[str, Any]:
        """Return the exception that it recorded for torch's agent: type and text, traceback."""
        message: dict[str, Any] = _read_json(self.error).get("message", {})
        return message

    def victim_of(self) -> dict[str, Any]:
        """Return what it noted when another rank's failure ended it (``World.note_victim``)."""
        return _read_json(self.folder / "victim.json")


@dataclass
class Attempt:
    """One start of all ranks of this host: the first, a restart, or with other hosts."""

    num_ranks: int  # those of all hosts
    ranks: Sequence[Rank]  # those of this host
    num_restarts: int = 0  # after failures
    failed: dict[int, int] = field(default_factory=dict)  # the exit codes of the first to fail
    _looked_s: float = 0.0

    def look(self) -> None:
        """Find processes and boards that are new."""
        is_due = time.monotonic() > self._looked_s + _LOOK_AGAIN_S
        if any(rank.process is None for rank in self.ranks):
            self._find_processes()
        for rank in self.ranks:
            if rank.process is not None and (is_due or rank.board is None):
                rank.board = Board.of_process(rank.process.pid) or rank.board
        if is_due:
            self._looked_s = time.monotonic()

    def _find_processes(self) -> None:
        missing = {str(rank.error): rank for rank in self.ranks if rank.process is None}
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                rank = missing.get(child.environ().get("TORCHELASTIC_ERROR_FILE", ""))
                if rank is not None:
                    rank.process = child


def _read_json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}
