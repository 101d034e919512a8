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
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import psutil

from procpipe.job.board import Page
from procpipe.job.grid import Grid
from procpipe.launch.run.ranks import Attempt, Rank
from procpipe.words import bytes_text, cpus_text

_WINDOW_S = 5.0

_RANK = re.compile(r" \(rank \d+\)")

#: From when on a wait's or a task's seconds are shown.
_LONG_S = 1.0


@dataclass
class Row:
    """One stage now."""

    rank: int
    device: str = ""  # what it computes on; "" before it has made a Stage
    cores: str = ""  # the logical CPUs its process may run on, as "0-3"
    step: int = 0  # mini-batches done
    micro_batch: str = ""  # "3/8": that of the newest task; "" before the first
    samples_per_s: float | None = None  # over the last seconds; None before two steps
    busy: float | None = None  # share of the time in tasks, likewise
    bubble: float | None = None  # share of the time idle in steps, likewise
    rss_bytes: int = 0  # resident memory
    device_bytes: int = 0  # memory of the device in use by tensors
    now: str = ""  # what it does or waits for, in words
    is_stuck: bool = False  # whether it has done so for long
    stage: int = 0  # its index, within its replica
    replica: int | None = None  # its replica; None if there is only one
    name: str = ""  # the stage for people
    is_part: bool = False  # whether its pipeline has only some of the ranks of the job

    def cells(self) -> dict[str, str]:
        """Return what the live table shows, by column; "" for what is unknown or none."""
        return {
            "rank": str(self.rank),
            "replica": "" if self.replica is None else str(self.replica),
            "stage": str(self.stage),
            "device": self.device,
            "cores": self.cores,
            "step": f"{self.step:,}" if self.device else "",
            "m-batch": self.micro_batch,
            "samples/s": "" if self.samples_per_s is None else rate_text(self.samples_per_s),
            "busy": "" if self.busy is None else f"{self.busy:.0%}",
            "bubble": "" if self.bubble is None else f"{self.bubble:.0%}",
            "memory": bytes_text(self.rss_bytes) if self.rss_bytes else "",
            "GPU": bytes_text(self.device_bytes) if self.device_bytes else "",
        }


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


class RowReader:
    """Reads the boards of an attempt as rows; keeps the readings that rates need."""

    def __init__(self, attempt: Attempt, clock: Callable[[], float] = time.monotonic) -> None:
        self._attempt = attempt
        self._clock = clock
        self._readings: defaultdict[int, deque[tuple[float, Page]]] = defaultdict(deque)

    def rows(self) -> list[Row]:
        """Read all boards."""
        ranks = self._attempt.ranks
        readings = [rank.board.read() if rank.board is not None else None for rank in ranks]
        # Ranks without a Stage yet belong to replicas, too.
        num_replicas = max((each.num_replicas for each in readings if each is not None), default=1)
        return [
            self._row(rank, reading, num_replicas)
            for rank, reading in zip(ranks, readings, strict=True)
        ]

    def _row(self, rank: Rank, reading: Page | None, num_replicas: int) -> Row:
        grid = Grid(rank.number, self._attempt.num_ranks, num_replicas)
        is_part = reading is not None and reading.num_ranks < grid.num_ranks
        if reading is not None and is_part:
            grid = Grid.of(reading)
        now, is_stuck = _now(rank, reading, names_ranks=is_part)
        row = Row(
            rank.number,
            now=now,
            is_stuck=is_stuck,
            stage=grid.stage,
            replica=grid.replica if num_replicas > 1 else None,
            name=grid.stage_name(grid.rank) + (f" (rank {rank.number})" if is_part else ""),
            is_part=is_part,
        )
        if rank.pid is not None and not rank.has_ended:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(rank.pid)
                row.rss_bytes = process.memory_info().rss
                row.cores = cpus_text(process.cpu_affinity())
        if reading is not None:
            row.device = reading.device
            row.step, num = reading.num_steps, reading.num_micro_batches
            row.micro_batch = f"{reading.micro_batch + 1}/{num}" if num else ""
            row.samples_per_s, row.busy, row.bubble = self._rates(rank.number, reading)
            row.device_bytes = reading.device_bytes
        return row

    def _rates(self, rank: int, reading: Page) -> tuple[float | None, float | None, float | None]:
        """Return samples a second, and the shares of busy and bubble."""
        past = self._readings[rank]
        if not reading.num_steps:  # the first step is slower
            return None, None, None
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
            return None, None, None
        busy = min(1.0, (last.busy_s - first.busy_s) / time_s)
        in_steps = min(1.0, (last.step_s - first.step_s) / time_s)
        rate = (last.num_samples - first.num_samples) / time_s
        return rate, busy, max(0.0, in_steps - busy)


def rate_text(rate: float) -> str:
    """Write a rate with three digits or without fractions."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def plain_line(rows: Sequence[Row], time_text: str) -> str:
    """Write all rows in one line, for a log."""
    first = next((row for row in rows if row.device), None)
    if first is None:
        return f"{time_text}: no rank has begun its first step yet"
    parts = [f"{time_text}: step {first.step:,}"]
    if first.samples_per_s is not None:
        of = " a pipeline" if first.is_part or first.replica is not None else ""
        parts.append(f"{rate_text(first.samples_per_s)} samples/s{of}")
    cells = [(row.replica, row.cells()) for row in rows]
    for name in ("busy", "bubble", "memory", "GPU"):
        if any(texts[name] for _, texts in cells):
            blocks = groupby(cells, key=lambda cell: cell[0])
            texts_of = (" ".join(texts[name] or "-" for _, texts in block) for _, block in blocks)
            parts.append(f"{name} {' | '.join(texts_of)}")
    return "; ".join([", ".join(parts), *(f"{row.name} {row.now}" for row in rows if row.is_stuck)])


def _now(rank: Rank, reading: Page | None, *, names_ranks: bool) -> tuple[str, bool]:
    """Return what a stage does, in words, and whether it has done so for long."""
    if rank.has_ended:
        return ("ended" if rank.code == 0 else f"ended ({rank.code})"), False
    if rank.pid is None:
        return "starts", False
    if reading is None:
        return "no Stage yet", False
    if reading.waits_for and reading.waited_s >= _LONG_S:
        what = reading.waits_for
        if not names_ranks:  # the number of the stage is enough
            what = _RANK.sub("", what)
        return f"waits {reading.waited_s:.0f} s for {what}", True
    if reading.task and not reading.waits_for:
        lasts_long = reading.task_s >= _LONG_S
        since = f" for {reading.task_s:.0f} s" if lasts_long else ""
        layer = f" {reading.layer.removeprefix('layer ')}" if reading.layer else ""
        return f"{reading.task}{layer}{since}", lasts_long
    if not reading.call and reading.heard_s >= _LONG_S:
        return f"user's code for {reading.heard_s:.0f} s", False
    return (f"{reading.call}()" if reading.call else "user's code"), False
