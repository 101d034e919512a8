"""What the live table and the plain lines show: one row for each stage, computed from its board.

Of several replicas, the rows of each are together. Of several pipelines in a DeviceMesh, stages are
named with their ranks, and rates are those of one pipeline.

A board has counters that only grow. Rates come from two readings, each taken just after the end of
a step, about five seconds apart:

    busy    seconds in tasks              divided by the seconds between the readings
    bubble  seconds in steps, less busy   likewise; the rest is the user's own code
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import psutil

from procpipe.job.board import Page
from procpipe.job.grid import Grid
from procpipe.launch.run.ranks import Attempt, Rank
from procpipe.words import bytes_text, cpus_text

_WINDOW_S = 5.0

#: From when on a wait's or a task's seconds are shown.
_LONG_S = 1.0


@dataclass
class Row:
    """One stage now.

    Attributes:
        name: the stage for people.
        now: what it does or waits for, in words.
        is_stuck: whether it has done so for long.
        is_part: whether its pipeline has only some of the ranks of the job.
        replica: its replica; None if there is only one.
        cells: what the table shows, by column; "" for what is unknown or none.
    """

    name: str
    now: str
    is_stuck: bool
    is_part: bool = False
    replica: int | None = None
    cells: dict[str, str] = field(default_factory=dict)


class RowReader:
    """Reads the boards of an attempt as rows; keeps the readings that rates need."""

    def __init__(self, attempt: Attempt, clock: Callable[[], float] = time.monotonic) -> None:
        self._attempt = attempt
        self._clock = clock
        self._readings: defaultdict[int, deque[tuple[float, Page]]] = defaultdict(deque)

    def rows(self) -> list[Row]:
        """Read all boards."""
        readings = [rank.board.read() if rank.board else None for rank in self._attempt.ranks]
        # Ranks without a Stage yet belong to replicas, too.
        num_replicas = max((each.num_replicas for each in readings if each is not None), default=1)
        pairs = zip(self._attempt.ranks, readings, strict=True)
        return [self._row(rank, reading, num_replicas) for rank, reading in pairs]

    def _row(self, rank: Rank, reading: Page | None, num_replicas: int) -> Row:
        grid = Grid(rank.number, self._attempt.num_ranks, num_replicas)
        is_part = reading is not None and reading.num_ranks < grid.num_ranks
        if reading is not None and is_part:
            grid = Grid.of(reading)
        replica = grid.replica if num_replicas > 1 else None
        cells = {
            "rank": str(rank.number) if is_part else "",
            "replica": "" if replica is None else str(replica),
            "stage": str(grid.stage),
            **_of_board(reading),
            **dict(zip(("samples/s", "busy", "bubble"), self._rates(rank, reading), strict=True)),
            **_of_process(rank),
        }
        name = grid.stage_name(grid.rank) + (f" (rank {rank.number})" if is_part else "")
        return Row(name, *_now(rank, reading), is_part, replica, cells)

    def _rates(self, rank: Rank, reading: Page | None) -> tuple[str, str, str]:
        """Return samples a second, and the shares of busy and bubble."""
        past = self._readings[rank.number]
        if reading is None or not reading.num_steps:  # the first step is slower
            return "", "", ""
        now_s = self._clock()
        if past and reading.step_s < past[-1][1].step_s:  # another Stage, another board
            past.clear()
        if not past or reading.num_steps > past[-1][1].num_steps:
            past.append((now_s, reading))
        while len(past) > 2 and past[1][0] < now_s - _WINDOW_S:
            past.popleft()
        (first_s, first), (last_s, last) = past[0], past[-1]
        time_s = last_s - first_s
        if time_s <= 0:
            return "", "", ""
        busy = min(1.0, (last.busy_s - first.busy_s) / time_s)
        in_steps = min(1.0, (last.step_s - first.step_s) / time_s)
        rate = (last.num_samples - first.num_samples) / time_s
        return rate_text(rate), f"{busy:.0%}", f"{max(0.0, in_steps - busy):.0%}"


def _of_board(reading: Page | None) -> dict[str, str]:
    if reading is None or not reading.device:
        return {"device": "", "step": "", "m-batch": "", "GPU": ""}
    num, used = reading.num_micro_batches, reading.device_bytes
    return {
        "device": reading.device,
        "step": f"{reading.num_steps:,}",
        "m-batch": f"{reading.micro_batch + 1}/{num}" if num else "",
        "GPU": bytes_text(used) if used else "",
    }


def _of_process(rank: Rank) -> dict[str, str]:
    with contextlib.suppress(psutil.Error):
        if rank.process is not None and not rank.has_ended:
            cores = cpus_text(rank.process.cpu_affinity())
            return {"cores": cores, "memory": bytes_text(rank.process.memory_info().rss)}
    return {"cores": "", "memory": ""}


def _now(rank: Rank, reading: Page | None) -> tuple[str, bool]:
    """Return what a stage does, in words, and whether it has done so for long."""
    if rank.process is None:
        return "starts", False
    if rank.has_ended:
        return "ended", False
    if reading is None:
        return "no Stage yet", False
    if reading.waits_for and reading.waited_s >= _LONG_S:
        return f"waits {reading.waited_s:.0f} s for {reading.waits_for}", True
    if reading.task and not reading.waits_for:
        lasts_long = reading.task_s >= _LONG_S
        since = f" for {reading.task_s:.0f} s" if lasts_long else ""
        layer = f" {reading.layer.removeprefix('layer ')}" if reading.layer else ""
        return f"{reading.task}{layer}{since}", lasts_long
    if not reading.call and reading.heard_s >= _LONG_S:
        return f"user's code for {reading.heard_s:.0f} s", False
    return (f"{reading.call}()" if reading.call else "user's code"), False


def summary(attempt: Attempt) -> str:
    """Return the mini-batches of an attempt, and the samples a second within them; "" for none."""
    board = next((rank.board for rank in attempt.ranks if rank.board is not None), None)
    reading = board.read() if board is not None else None
    if reading is None or not reading.num_steps:
        return ""
    steps = "1 step" if reading.num_steps == 1 else f"{reading.num_steps:,} steps"
    rate = reading.num_samples / reading.step_s if reading.step_s else 0.0
    is_part = reading.num_ranks < attempt.num_ranks or reading.num_replicas > 1
    of = " a pipeline" if is_part else ""
    return f"{steps}, {rate_text(rate)} samples/s{of} in steps"


def rate_text(rate: float) -> str:
    """Write a rate with three digits or without fractions."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def plain_line(rows: Sequence[Row], time_text: str) -> str:
    """Write all rows in one line, for a log."""
    first = next((row for row in rows if row.cells["device"]), None)
    if first is None:
        return f"{time_text}: no rank has begun its first step yet"
    parts = [f"{time_text}: step {first.cells['step']}"]
    if rate := first.cells["samples/s"]:
        of = " a pipeline" if first.is_part or first.replica is not None else ""
        parts.append(f"{rate} samples/s{of}")
    for name in ("busy", "bubble", "memory", "GPU"):
        if any(row.cells[name] for row in rows):
            blocks = groupby(rows, key=lambda row: row.replica)
            texts_of = (" ".join(row.cells[name] or "-" for row in block) for _, block in blocks)
            parts.append(f"{name} {' | '.join(texts_of)}")
    return "; ".join([", ".join(parts), *(f"{row.name} {row.now}" for row in rows if row.is_stuck)])
