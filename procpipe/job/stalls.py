"""Reports what each rank waits for: on its board, and on standard error when nothing progresses.

    procpipe: no progress for 30.0 s, reported by rank 0
      stage 0 (rank 0): in B3, waiting 30.0 s for gradient from stage 1 (rank 1)
      stage 1 (rank 1): in F5, layer 'conv4' (Conv2d), for 30.1 s; its process 4711 is stopped …

Each rank reads the boards of its host. All waiting ranks time out at about the same time; the first
prints and marks its board; the others stay silent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

import psutil

from procpipe.channel.monitor import Reports
from procpipe.errors import ProcpipeError
from procpipe.job.board import Board
from procpipe.job.endings import end_at_once, line_of, note_victim
from procpipe.job.grid import Grid
from procpipe.job.transports import Transports
from procpipe.notes import write_note

#: Each rank waits this long for every lower one to be the first to print.
_TURN_S = 0.02


class StallReports(Reports):
    """Reports the waits of one rank, which has this board and place; reads the others' boards.

    Attributes:
        transports: the rank's, on whose device transfers may be queued.
    """

    transports: Transports

    def __init__(self, board: Board, grid: Grid) -> None:
        self.grid = grid
        self._board = board
        self._boards: dict[int, Board] = {grid.rank: board}

    def open_boards(self, files_of: Mapping[int, Sequence[int]]) -> None:
        """Open the boards of the peers on this host, once they are connected."""
        self._boards |= {peer: Board.opened(files[0]) for peer, files in files_of.items()}

    def close(self) -> None:
        """Drop the boards of the peers, each of which takes a descriptor."""
        self._boards = {self.grid.rank: self._board}

    def note_wait(self, what: str, since_s: float) -> None:
        """Write on the board what this rank waits for, or that it does not."""
        self._board.note_wait(what, int(since_s * 1e9))

    def stalled(self, what: str, waited_s: float) -> None:
        """Print what every stage is doing, unless another rank has just done so."""
        grid, ours = self.grid, self.grid.rank
        time.sleep(_TURN_S * ours)
        readings = {rank: board.read() for rank, board in self._boards.items()}
        if any(
            reading.seconds_since(reading.reported_ns) < waited_s / 2
            for rank, reading in readings.items()
            if rank != ours
        ):
            return
        self._board.page.reported_ns = time.monotonic_ns()
        lines = [
            f"procpipe: no progress for {waited_s:.1f} s, reported by rank {grid.numbers[ours]}"
        ]
        for rank in range(grid.num_ranks):
            who = f"  {grid.name_of(rank)}:"
            if rank in readings:
                reading = readings[rank]
                lines.append(f"{who} {reading.where()}{_state_of(reading.pid)}")
            else:
                lines.append(f"{who} unknown: on another host, or not connected yet")
        write_note("\n".join(lines))

    def last_seen(self, peer: int) -> str:
        """Return a sentence on what a peer of this host was doing when it ended."""
        if peer not in self._boards:
            return ""
        return f"it was last seen {self._boards[peer].read().where()}"

    def busy_with(self) -> list[int]:
        """Return the peers with which transfers are queued on this rank's device."""
        return self.transports.busy_with()

    def end_process(self, error: ProcpipeError) -> None:
        """End this process, whose main thread is stuck in a wait for its device."""
        note_victim(error, self._board.read())
        line = line_of(error, self._board.read())
        ours = self.grid.rank_name(self.grid.rank)
        end_at_once(line or f"procpipe: {ours} ends, because {error}")


def _state_of(pid: int) -> str:
    """Describe a process that does not run, as the end of a sentence; "" for one that does."""
    status = ""
    with contextlib.suppress(psutil.Error):  # it has just ended, which the monitor notices
        status = psutil.Process(pid).status()
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return f"; its process {pid} is stopped (kill -CONT {pid} continues it)"
    if status == psutil.STATUS_DISK_SLEEP:
        return f"; its process {pid} waits for a disk or a driver"
    return ""
