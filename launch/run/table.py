"""What the user sees during a run: rank 0's output, and the progress of every stage.

    rank 0's logs ───────────┐
    ranks' boards ─ rows.py ─┼─> the view's thread ──> rank 0's output, scrolling
    launcher ─── print() ────┘                         the live table below it        (terminal)
                                                       or a plain line at intervals   (elsewhere)

One thread writes everything in order, and the launcher's main thread and its signal handlers never
wait for a slow terminal. An error here ends the view, never the run.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from procpipe.job.grid import Grid
from procpipe.launch.run.ranks import Attempt
from procpipe.launch.run.rows import Row, RowReader, plain_line, summary

_TICK_S = 0.1
_REFRESH_S = 0.5

#: When plain lines are written: two soon after the start, then one every minute.
_PLAIN_TIMES_S = (10, 30)
_PLAIN_EVERY_S = 60

#: The live table: the space between columns, the least width of "now", and the columns that a
#: narrow terminal leaves out, the first ones first.
_GAP = 2
_MIN_NOW = 6
_COLUMNS = (
    *("rank", "replica", "stage", "device", "cores", "step", "m-batch", "samples/s", "busy"),
    *("bubble", "memory", "GPU"),
)
_DISPENSABLE = ("cores", "m-batch", "device", "bubble", "memory", "GPU", "busy", "samples/s")


class View:
    """The screen of a run, written by a thread of its own; the caption is below the table.

    The mode is "live", "plain", "off", or "auto": live on a terminal and plain elsewhere.

    Attributes:
        is_quiet: whether to show no more of what ranks write to standard error.
    """

    def __init__(self, attempt: Callable[[], Attempt | None], mode: str, caption: str) -> None:
        sys.stdout, sys.stderr = _writable(sys.stdout), _writable(sys.stderr)
        to_stdout = sys.stdout.isatty() and not sys.stderr.isatty()
        is_forced = True if mode == "live" else None
        self._console = Console(
            stderr=not to_stdout,
            highlight=False,
            markup=False,
            emoji=False,
            force_terminal=is_forced,
        )
        if mode == "auto":
            can_draw = self._console.is_terminal and not self._console.is_dumb_terminal
            mode = "live" if can_draw else "plain"
        self.is_quiet = False
        self._newest = attempt
        self._mode = mode
        self._caption = caption
        self._began_s = time.monotonic()
        self._live: Live | None = None
        self._messages: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._attempt: Attempt | None = None
        self._reader: RowReader | None = None
        self._tails: list[_Tail] = []
        self._reported_ns: dict[int, int] = {}
        self._drawn_s = 0.0
        self._next_plain_s: float = _PLAIN_TIMES_S[0]
        self._thread = threading.Thread(target=self._run, name="procpipe view", daemon=True)
        self._thread.start()

    def print(self, text: str) -> None:
        """Show a line; safe in a signal handler."""
        self._messages.put(text)

    def stop(self) -> None:
        """Show what was written so far, and end."""
        self._messages.put(None)
        self._thread.join()

    def print_last(self, text: str | Text | Rule) -> None:
        """Write after ``stop``; if that fails, the exit code must still be right."""
        with contextlib.suppress(OSError):
            if self._console.is_terminal:
                self._console.print(text, soft_wrap=True)
            else:
                print(text, file=sys.stderr, flush=True)

    def print_failure(self, headline: str, body: str) -> None:
        """Write a report after ``stop``."""
        if self._console.is_terminal:
            self.print_last(Rule("procpipe: the run failed", style="red"))
        self.print_last(Text(headline, style="bold red"))
        self.print_last(f"\n{body}")

    def summary(self) -> str:
        """Return how long the run took, what it did, and where its logs are."""
        steps = summary(self._attempt) if self._attempt is not None else ""
        return ", ".join(part for part in (self.time_text(), steps, self._caption) if part)

    def time_text(self) -> str:
        """Return how long the run has taken: "2.3 s", "2:05", "1:02:05"."""
        seconds = time.monotonic() - self._began_s
        return f"{seconds:.1f} s" if seconds < 60 else _clock(seconds)

    # -- the view's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._show_messages():
                self._follow()
                self._copy_output()
                self._draw()
            self._follow()
            self._copy_output(is_last=True)
        except Exception as error:  # a closed terminal, or a bug here: the run goes on
            self._stop_live()
            with contextlib.suppress(Exception):
                text = f"procpipe: nothing more is shown ({type(error).__name__}: {error})"
                print(text, file=sys.stderr)
        finally:
            self._stop_live()

    def _show_messages(self) -> bool:
        """Show the launcher's lines, waiting a moment for them; return whether to go on."""
        timeout_s = _TICK_S
        while True:
            try:
                text = self._messages.get(timeout=timeout_s)
            except queue.Empty:
                return True
            if text is None:
                return False
            self._copy_output()
            self._write_line(text)
            timeout_s = 0.001

    def _follow(self) -> None:
        """Look for the processes and boards of the newest attempt."""
        newest = self._newest()
        if newest is None:
            return
        is_new = newest is not self._attempt
        if is_new:
            self._copy_output(is_last=True)
            self._attempt, self._reader = newest, RowReader(newest)
            first = [rank for rank in newest.ranks if rank.number == 0]
            self._tails = [_Tail(rank.stdout, sys.stdout) for rank in first]
            self._tails += [_Tail(rank.stderr, sys.stderr) for rank in first]
        newest.look()
        self._show_stalls(newest)

    def _show_stalls(self, attempt: Attempt) -> None:
        """Show the report of a stall that another rank than 0 has written into its log."""
        for rank in attempt.ranks:
            reading = rank.board.read() if rank.board is not None and rank.number else None
            if reading is None or reading.reported_ns <= self._reported_ns.get(rank.number, 0):
                continue
            self._reported_ns[rank.number] = reading.reported_ns
            lines = [
                f"procpipe: no progress for {reading.waited_s:.1f} s, reported by rank "
                f"{rank.number}"
            ]
            readings = [each.read() for each in attempt.ranks]
            lines += [
                f"  {Grid.of(read).name_of(read.place)}: {read.where()}"
                for read in readings
                if read
            ]
            self._write_line("\n".join(lines))

    def _copy_output(self, *, is_last: bool = False) -> None:
        for tail in self._tails:
            if not (self.is_quiet and tail.stream is sys.stderr):
                self._write(tail, tail.read(), is_last=is_last)

    def _write(self, tail: _Tail, data: bytes, *, is_last: bool) -> None:
        is_ours = tail.stream.isatty() or tail.stream is self._console.file
        if self._live is None or not is_ours:
            _write_raw(tail.stream, data)
            return
        *lines, tail.partial = (tail.partial + data).split(b"\n")
        if is_last and tail.partial:
            lines.append(tail.partial)
            tail.partial = b""
        if lines:
            texts = [Text.from_ansi(_last_state(line)) for line in lines]
            self._console.print(Text("\n").join(texts), soft_wrap=True)

    def _write_line(self, text: str) -> None:
        if self._live is not None:
            self._console.print(Text(text), soft_wrap=True)
        else:
            _write_raw(sys.stderr, f"{text}\n".encode())

    def _draw(self) -> None:
        now_s = time.monotonic()
        if self._reader is None or self._mode == "off" or now_s < self._drawn_s + _REFRESH_S:
            return
        self._drawn_s = now_s
        rows = self._reader.rows()
        elapsed_s = now_s - self._began_s
        if self._mode == "live":
            if self._live is None:
                self._live = Live(
                    console=self._console,
                    auto_refresh=False,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._live.start()
            self._live.update(self._frame(rows, elapsed_s), refresh=True)
        elif elapsed_s >= self._next_plain_s:
            times_s = (*_PLAIN_TIMES_S, (elapsed_s // _PLAIN_EVERY_S + 1) * _PLAIN_EVERY_S)
            self._next_plain_s = min(later_s for later_s in times_s if later_s > elapsed_s)
            self._write_line(f"procpipe: {plain_line(rows, _clock(elapsed_s))}")

    def _frame(self, rows: list[Row], elapsed_s: float) -> RenderableType:
        unfinished = [_last_state(tail.partial) for tail in self._tails if tail.partial]
        caption = f"{_clock(elapsed_s)}  {self._caption}"
        return Group(
            *(Text.from_ansi(line) for line in unfinished),
            Rule(style="dim"),
            live_table(rows, self._console.width),
            Text(caption, style="dim", no_wrap=True, overflow="ellipsis"),
        )

    def _stop_live(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(Exception):
                live.stop()


class _Tail:
    """What is appended to a log file, which may not exist yet, and the stream that it goes to."""

    def __init__(self, path: Path, stream: TextIO) -> None:
        self.stream = stream
        self.partial = b""  # an unfinished line
        self._path = path
        self._file: BinaryIO | None = None

    def read(self) -> bytes:
        """Return what is new."""
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                return b""
        return self._file.read()


def live_table(rows: list[Row], width: int) -> Table:
    """Return the live table; columns are left out if the terminal's ``width`` is too small."""
    columns = {name: [row.cells[name] for row in rows] for name in _COLUMNS}
    for name in ("rank", "replica", "GPU"):  # not needed in every run
        if not any(columns[name]):
            del columns[name]
    if replicas := columns.get("replica"):  # only in the first of a replica's rows
        columns["replica"] = ["" if one == last else one for last, one in pairwise(["", *replicas])]
    widths = {name: max(map(len, [name, *cells])) + _GAP for name, cells in columns.items()}
    for name in _DISPENSABLE:
        if sum(widths.values()) + _MIN_NOW > width and name in columns:
            del columns[name], widths[name]
    table = Table(
        box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold", expand=True
    )
    for name in columns:
        is_text = name in ("rank", "replica", "stage", "device", "cores")
        table.add_column(name, no_wrap=True, justify="left" if is_text else "right")
    table.add_column("now", no_wrap=True, overflow="ellipsis", ratio=1)
    for row, *cells in zip(rows, *columns.values(), strict=True):
        style = "yellow" if row.is_stuck else ""
        table.add_row(*cells, Text(row.now, style=style, overflow="ellipsis"))
    return table


def _clock(seconds: float) -> str:
    """Write a time like a clock: "2:05" or "1:02:05"."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _last_state(line: bytes) -> str:
    """Return what a terminal shows of a line, in which carriage returns overwrite."""
    states = [state for state in line.decode(errors="replace").split("\r") if state]
    return states[-1] if states else ""


def _writable(stream: TextIO | None) -> TextIO:
    """Return the stream, made to accept any text; /dev/null if it was closed at the start."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


def _write_raw(stream: TextIO, data: bytes) -> None:
    """Pass bytes on unchanged; to a stream that fails, nothing more is written."""
    if data:
        try:
            stream.flush()
            stream.buffer.write(data)
            stream.buffer.flush()
        except OSError:  # closed, or no space left: what is in the buffer is dropped
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
