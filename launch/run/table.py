"""What the user sees during a run: rank 0's output, and a table of all stages.

    rank 0's logs ───────────┐
    ranks' boards ─ Rows ────┼─> the view's thread ──> rank 0's output, scrolling
    launcher ─── print() ────┘                         the live table below it        (terminal)
                                                       or the table now and then      (elsewhere)

One thread writes everything in order, and the launcher's main thread and its signal handlers never
wait for a slow terminal. An error here ends the view, never the run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from procpipe.job.board import Page
from procpipe.job.grid import Grid
from procpipe.launch.run.ranks import Rank, find
from procpipe.words import bytes_text

_TICK_S = 0.1
_REFRESH_S = 0.3

#: Without a terminal: when the first table is written, and after what time at most the next one.
_FIRST_S, _LATER_S = 10.0, 600.0
_WIDTH = 120

#: Rates are of about so many seconds.
_WINDOW_S = 5.0

#: From when on a wait's or a task's seconds are shown.
_LONG_S = 1.0


class View:
    """The screen of a run, written by a thread of its own.

    Args:
        newest: returns the ranks of the newest attempt.
        caption: is below the table.
        is_quiet: whether there is no table.
    """

    def __init__(self, newest: Callable[[], list[Rank]], caption: str, *, is_quiet: bool) -> None:
        width = None if sys.stderr.isatty() else _WIDTH
        self._console = Console(stderr=True, width=width)
        is_smart = self._console.is_terminal and not self._console.is_dumb_terminal
        self._can_draw = is_smart and not is_quiet
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self.shows_errors = True  # what rank 0 writes to standard error
        self._newest, self._caption = newest, caption
        self._began_s = time.monotonic()
        self._next_s = 0.0
        self._next_print_s = float("inf") if is_quiet else self._began_s + _FIRST_S
        self._lines: deque[str] = deque()
        self._rows = Rows([])
        self._tails: list[_Tail] = []
        self._reported_ns = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="procpipe view", daemon=True)
        self._thread.start()

    def print(self, line: str) -> None:
        """Show a line soon; safe in a signal handler."""
        self._lines.append(line)

    def stop(self) -> None:
        """Show what was written so far, and end."""
        self._is_over.set()
        self._thread.join()

    def print_last(self, text: str, style: str = "") -> None:
        """Write after ``stop``; if that fails, the exit code must still be right."""
        with contextlib.suppress(OSError):
            self._console.print(Text(text, style), soft_wrap=True)

    def summary(self) -> str:
        """Return how long the run took, what it did, and where its logs are."""
        page = next((page for rank in self._rows.ranks if (page := rank.read())), None)
        steps = f", {page.num_steps:,} steps" if page is not None and page.num_steps else ""
        return f"{self.time_text()}{steps}, {self._caption}"

    def time_text(self) -> str:
        """Return how long the run has taken: "0:02:05"."""
        return str(timedelta(seconds=int(time.monotonic() - self._began_s)))

    # -- the view's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over.wait(_TICK_S):
                self._show()
                self._draw()
            self._show()
            self._copy_output(is_last=True)
        except Exception as error:  # a closed terminal, or a bug here: the run goes on
            self.print_last(f"procpipe: nothing more is shown ({type(error).__name__}: {error})")
        finally:
            with contextlib.suppress(Exception):
                self._live.stop()

    def _show(self) -> None:
        """Show what is new: an attempt, rank 0's output, the launcher's lines, a stall."""
        ranks = self._newest()
        if ranks and ranks is not self._rows.ranks:
            self._copy_output(is_last=True)
            self._rows = Rows(ranks)
            self._tails = []
            with contextlib.suppress(FileNotFoundError):  # the script has removed them
                if ranks[0].number == 0:
                    self._tails.append(_Tail(ranks[0].stdout.open("rb"), 1))
                    self._tails.append(_Tail(ranks[0].stderr.open("rb"), 2))
        if any(rank.board is None for rank in ranks):  # soon: a rank may fail in its first step
            find(ranks)
        self._copy_output()
        while self._lines:
            self._console.print(Text(self._lines.popleft()), soft_wrap=True)
        self._show_stall(ranks)

    def _show_stall(self, ranks: Sequence[Rank]) -> None:
        """Show the report of a stall that another rank than 0 has written into its log."""
        readings = [(rank, page) for rank in ranks if (page := rank.read()) is not None]
        for rank, page in readings:
            if rank.number and page.reported_ns > self._reported_ns:
                self._reported_ns = page.reported_ns
                head = f"no progress for {page.waited_s:.1f} s, reported by rank {rank.number}"
                lines = [f"  {each.name}: {now.where()}" for each, now in readings]
                self._console.print(Text("\n".join([f"procpipe: {head}", *lines])), soft_wrap=True)

    def _copy_output(self, *, is_last: bool = False) -> None:
        for tail in [*self._tails]:
            data = tail.file.read()
            if tail.descriptor == 2 and not self.shows_errors:
                continue
            if not (self._live.is_started and os.isatty(tail.descriptor)):
                try:
                    while data:
                        data = data[os.write(tail.descriptor, data) :]
                except OSError as error:  # a pipe that was closed, a full disk: the other goes on
                    self._tails.remove(tail)
                    name = Path(tail.file.name).name
                    self.print(f"procpipe: no more of rank 0's {name} is shown ({error})")
                continue
            *lines, tail.partial = (tail.partial + data).split(b"\n")
            if is_last and tail.partial:
                lines.append(tail.partial)
                tail.partial = b""
            if lines:
                text = Text("\n").join(Text.from_ansi(_last_state(line)) for line in lines)
                self._console.print(text, soft_wrap=True)

    def _draw(self) -> None:
        now_s = time.monotonic()
        if not self._rows.ranks or now_s < self._next_s:
            return
        self._next_s = now_s + _REFRESH_S
        find(self._rows.ranks)
        table = self._rows.table()
        caption = Text(f"{self.time_text()}  {self._caption}", "dim", no_wrap=True)
        if self._can_draw:
            unfinished = [_last_state(tail.partial) for tail in self._tails if tail.partial]
            texts = (Text.from_ansi(line) for line in unfinished)
            self._live.start()
            self._live.update(Group(*texts, Rule(style="dim"), table, caption), refresh=True)
        elif now_s >= self._next_print_s:
            self._next_print_s = now_s + min(now_s - self._began_s, _LATER_S)
            self._console.print(Group(caption, table))


@dataclass
class _Tail:
    """A log file that grows, and the descriptor of this process that it goes to."""

    file: BinaryIO
    descriptor: int
    partial: bytes = b""  # an unfinished line


def _last_state(line: bytes) -> str:
    """Return what a terminal shows of a line, in which carriage returns overwrite."""
    states = [state for state in line.decode(errors="replace").split("\r") if state]
    return states[-1] if states else ""


class Rows:
    """The table: a row for each stage, computed from its board.

    A board has counters that only grow. Rates come from two readings, each taken just after the end
    of a step, some seconds apart:

        busy    seconds in tasks              divided by the seconds between the readings
        bubble  seconds in steps, less busy   likewise; the rest is the user's own code
    """

    def __init__(self, ranks: list[Rank], clock: Callable[[], float] = time.monotonic) -> None:
        self.ranks = ranks
        self._clock = clock
        self._readings: defaultdict[Rank, deque[tuple[float, Page]]] = defaultdict(deque)

    def table(self) -> Table:
        """Read all boards, and lay out the table."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for name in ("rank", "stage", "device"):
            table.add_column(name, no_wrap=True)
        for name in ("step", "samples/s", "busy", "bubble", "memory"):
            table.add_column(name, no_wrap=True, justify="right")
        table.add_column("now", no_wrap=True, overflow="ellipsis")
        for rank in self.ranks:
            page = rank.read()
            cells = self._cells(rank, page) if page is not None else [""] * 7
            table.add_row(str(rank.number), *cells, _now(rank, page))
        return table

    def _cells(self, rank: Rank, page: Page) -> list[str]:
        stage = Grid.of(page).stage_name(page.place).removeprefix("stage ")
        num_bytes = page.device_bytes
        with contextlib.suppress(psutil.Error):  # it has ended
            if rank.process is not None and not num_bytes:
                num_bytes = rank.process.memory_info().rss
        steps, memory = f"{page.num_steps:,}", bytes_text(num_bytes) if num_bytes else ""
        return [stage, page.device, steps, *self._rates(rank, page), memory]

    def _rates(self, rank: Rank, page: Page) -> tuple[str, str, str]:
        """Return samples a second, and the shares of busy and bubble."""
        if not page.num_steps:  # the first step is slower
            return "", "", ""
        now_s, past = self._clock(), self._readings[rank]
        if past and page.num_steps < past[-1][1].num_steps:  # another Stage, another board
            past.clear()
        if not past or page.num_steps > past[-1][1].num_steps:
            past.append((now_s, page))
        while len(past) > 2 and past[1][0] < now_s - _WINDOW_S:
            past.popleft()
        (first_s, old), (last_s, new) = past[0], past[-1]
        if last_s <= first_s:
            return "", "", ""
        seconds = last_s - first_s
        rate = (new.num_samples - old.num_samples) / seconds
        busy = min(1.0, (new.busy_s - old.busy_s) / seconds)
        in_steps = min(1.0, (new.step_s - old.step_s) / seconds)
        rate_text = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
        return rate_text, f"{busy:.0%}", f"{max(0.0, in_steps - busy):.0%}"


def _now(rank: Rank, page: Page | None) -> Text:
    """Return what a stage does, in words; in yellow if it has done so for long."""
    if rank.process is None or page is None:
        return Text("no Stage yet")
    with contextlib.suppress(psutil.NoSuchProcess):
        if rank.process.status() != psutil.STATUS_ZOMBIE:
            return _activity(page)
    return Text("ended")


def _activity(page: Page) -> Text:
    if page.waits_for and page.waited_s >= _LONG_S:
        return Text(f"waits {page.waited_s:.0f} s for {page.waits_for}", "yellow")
    if page.task and not page.waits_for:
        is_long = page.task_s >= _LONG_S
        layer = f" {page.layer.removeprefix('layer ')}" if page.layer else ""
        since = f" for {page.task_s:.0f} s" if is_long else ""
        return Text(f"{page.task}{layer}{since}", "yellow" if is_long else "")
    if page.call:
        return Text(f"{page.call}()")
    return Text("user's code" + (f" for {page.heard_s:.0f} s" if page.heard_s >= _LONG_S else ""))
