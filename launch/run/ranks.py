"""The rank processes of this host in one attempt: their files, their boards, how they ended.

torch's agent starts and ends them. A board outlives its process, so it says afterwards what a rank
was doing in the end.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from procpipe.job.board import Board, Page
from procpipe.job.grid import Grid


@dataclass(eq=False)
class Rank:
    """A rank process: its number, its folder of files, and what is known of it."""

    number: int
    folder: Path
    process: psutil.Process | None = None  # None before it makes a Stage
    board: Board | None = None  # what it is doing; None likewise
    code: int = 0  # its exit code if it failed, negative after a signal; 0 if that is not known

    def __post_init__(self) -> None:
        self.stdout = self.folder / "stdout.log"
        self.stderr = self.folder / "stderr.log"
        self.error = self.folder / "error.json"

    def read(self) -> Page | None:
        """Read the board; of a rank that has failed, as of that moment."""
        if self.board is None:
            return None
        reading = self.board.read()
        if reading.has_failed:
            reading.now_ns = reading.written_ns
        return reading

    @property
    def name(self) -> str:
        """The rank for people: "stage 1 (rank 1)"."""
        if (reading := self.read()) is None:
            return f"rank {self.number}"
        return f"{Grid.of(reading).stage_name(reading.place)} (rank {self.number})"

    def exception(self) -> str:
        """Return the exception that it recorded for torch's agent: type and text."""
        message: dict[str, Any] = _read_json(self.error).get("message", {})
        return str(message.get("message", ""))

    def note(self) -> dict[str, Any]:
        """Return what it noted if another rank's failure may have ended it (``note_victim``)."""
        return _read_json(self.folder / "victim.json")


def find(ranks: Sequence[Rank]) -> None:
    """Find the newest board of each rank, among this process's children."""
    by_number = {rank.number: rank for rank in ranks}
    children = [rank.process for rank in ranks if rank.process is not None]
    if len(children) < len(ranks):  # this looks at all processes of the host
        children = psutil.Process().children()
    for child in children:
        board = Board.of_process(child.pid)
        if board is not None and (rank := by_number.get(board.read().rank)):
            rank.process, rank.board = child, board


def _read_json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}
