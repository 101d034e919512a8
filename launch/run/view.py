"""What the user sees during a run: rank 0's output, and the progress of every stage.

    ranks' logs ─────── Tail ──┐
    ranks' boards ─ RowReader ─┼─> the view's thread ──> rank 0's output, scrolling
    launcher ─────── print() ──┘                         the live table below it        (terminal)
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
from itertools import pairwise
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from procpipe.launch.run.ranks import Attempt, Ranks
from procpipe.launch.run.rows import Row, RowReader, plain_line
from procpipe.launch.run.tail import HeldBack, StallFilter, Tail

_TICK_S = 0.1
_REFRESH_S = 0.5

#: When plain lines are written: two soon after the start, then one every minute.
_PLAIN_TIMES_S = (10, 30)
_PLAIN_EVERY_S = 60

#: The live table: the space between columns, the least width of "now", and the columns that a
#: narrow terminal leaves out, the first ones first.
_GAP = 2
_MIN_NOW = 6
_DISPENSABLE = ("cores", "m-batch", "device", "bubble", "memory", "GPU", "busy", "samples/s")


class View:
    """The screen of a run, written by a thread of its own; the caption is below the table.

    The mode is "live", "plain", "off", or "auto": live on a terminal and plain elsewhere.
    """

    def __init__(self, ranks: Ranks, mode: str, caption: str) -> None:
        self._ranks = ranks
        self._caption = caption
        self._began_s = time.monotonic()
        self.console = _console(mode == "live")  # others may use it after stop()
        if mode == "auto":
            can_draw = self.console.is_terminal and not self.console.is_dumb_terminal
            mode = "live" if can_draw else "plain"
        self._mode = mode
        self._live: Live | None = None
        self._messages: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._attempt: Attempt | None = None
        self._reader: RowReader | None = None
        self._tails: list[Tail] = []
        self._drawn_s = 0.0
        self._next_plain_s: float = _PLAIN_TIMES_S[0]
        self._is_quiet = False
        self._is_failed = False
        self._thread = threading.Thread(target=self._run, name="procpipe view", daemon=True)
        self._thread.start()

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began_s

    @property
    def is_off(self) -> bool:
        """Whether the user wants to see rank 0's output and failures only."""
        return self._mode == "off"

    def print(self, text: str) -> None:
        """Show a line; safe in a signal handler."""
        self._messages.put(text)

    def hide_stderr(self) -> None:
        """Show no more of what ranks write to standard error, as they are being ended."""
        self._is_quiet = True

    def stop(self, *, is_failed: bool) -> None:
        """Show what was written so far, and end.

        If the run has failed, a report follows, which has the traceback that is held back.
        """
        self._is_failed = is_failed
        self._messages.put(None)
        self._thread.join()

    # -- the view's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._show_messages():
                self._follow()
                self._copy_output()
                self._draw()
            self._copy_output(is_last=True)
        except Exception as error:  # a closed terminal, or a bug here: the run goes on
            self._stop_live()
            with contextlib.suppress(Exception):
                text = f"procpipe: nothing more is shown ({type(error).__name__}: {error})"
                print(text, file=sys.stderr)
        finally:
            self._stop_live()
            for tail in self._tails:
                tail.close()

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
        attempt = self._ranks.attempt
        if attempt is self._attempt or attempt is None:
            return
        self._copy_output(is_last=True, is_failed=True)
        for tail in self._tails:
            tail.close()
        self._attempt, self._reader = attempt, RowReader(attempt)
        self._tails = []
        for rank in attempt.ranks:
            is_first = rank.number == 0
            if is_first:
                self._tails.append(Tail(rank.logs.stdout))
            self._tails.append(Tail(rank.logs.stderr, HeldBack() if is_first else StallFilter()))

    def _copy_output(self, *, is_last: bool = False, is_failed: bool = False) -> None:
        for tail in self._tails:
            if tail.to_stderr and self._is_quiet:
                continue
            if self._attempt is not None and self._attempt.failed_s is not None:
                tail.keep()  # a report will follow
            data = tail.read(to_end=is_last)
            if is_last and not (is_failed or self._is_failed):
                data += tail.release()
            if data or is_last:
                self._write(tail, data, is_last=is_last)

    def _write(self, tail: Tail, data: bytes, *, is_last: bool) -> None:
        stream = sys.stderr if tail.to_stderr else sys.stdout
        if self._live is None or not self._is_ours(stream):
            _write_raw(stream, data)
            return
        *lines, tail.partial = (tail.partial + data).split(b"\n")
        if is_last and tail.partial:
            lines.append(tail.partial)
            tail.partial = b""
        if lines:
            self.console.print(
                Text("\n").join(Text.from_ansi(_last_state(line)) for line in lines),
                soft_wrap=True,
            )

    def _is_ours(self, stream: TextIO) -> bool:
        """Return whether a stream is the terminal that has the table."""
        return stream.isatty() or stream is self.console.file

    def _write_line(self, text: str) -> None:
        if self._live is not None:
            self.console.print(Text(text), soft_wrap=True)
        else:
            _write_raw(sys.stderr, f"{text}\n".encode())

    def _draw(self) -> None:
        if self._reader is None or self._mode == "off":
            return
        now_s = time.monotonic()
        if now_s < self._drawn_s + _REFRESH_S:
            return
        self._drawn_s = now_s
        rows = self._reader.rows()
        if self._mode == "live":
            if self._live is None:
                self._live = Live(console=self.console, auto_refresh=False, transient=True,
                                  redirect_stdout=False, redirect_stderr=False)  # fmt: skip
                self._live.start()
            self._live.update(self._frame(rows), refresh=True)
        elif (elapsed_s := self.elapsed_s) >= self._next_plain_s:
            times_s = (*_PLAIN_TIMES_S, (elapsed_s // _PLAIN_EVERY_S + 1) * _PLAIN_EVERY_S)
            self._next_plain_s = min(later_s for later_s in times_s if later_s > elapsed_s)
            self._write_line(f"procpipe: {plain_line(rows, time_text(elapsed_s))}")

    def _frame(self, rows: list[Row]) -> RenderableType:
        unfinished = [_last_state(tail.partial) for tail in self._tails if tail.partial]
        caption = f"{time_text(self.elapsed_s)}  {self._caption}"
        return Group(
            *(Text.from_ansi(line) for line in unfinished),
            Rule(style="dim"),
            live_table(rows, self.console.width),
            Text(caption, style="dim", no_wrap=True, overflow="ellipsis"),
        )

    def _stop_live(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(Exception):
                live.stop()


def live_table(rows: list[Row], width: int) -> Table:
    """Return the live table; columns are left out if the terminal's ``width`` is too small."""
    columns = _columns(rows)
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


def _columns(rows: list[Row]) -> dict[str, list[str]]:
    """Return the texts of the columns that this run needs."""
    texts = [row.cells() for row in rows]
    columns = {name: [each[name] for each in texts] for name in texts[0]}
    replicas = columns["replica"]
    is_needed = {
        "rank": any(row.is_part for row in rows),
        "replica": any(replicas),
        "GPU": any(row.device_bytes or row.device.startswith("cuda") for row in rows),
    }
    # A replica's number stands only in the first of its rows.
    columns["replica"] = ["" if one == last else one for last, one in pairwise(["", *replicas])]
    return {name: cells for name, cells in columns.items() if is_needed.get(name, True)}


def time_text(seconds: float) -> str:
    """Write a time like a clock: "2:05" or "1:02:05"."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _console(is_forced: bool) -> Console:
    """Return a console on standard error, or on standard output if only that is a terminal."""
    to_stdout = sys.stdout.isatty() and not sys.stderr.isatty()
    return Console(
        stderr=not to_stdout,
        highlight=False,
        markup=False,
        emoji=False,
        force_terminal=True if is_forced else None,
    )


def _last_state(line: bytes) -> str:
    """Return what a terminal shows of a line, in which carriage returns overwrite."""
    states = [state for state in line.decode(errors="replace").split("\r") if state]
    return states[-1] if states else ""


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
