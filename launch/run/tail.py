"""Follows the ranks' log files: all of rank 0's, and reports of stalls of the others.

If rank 0 fails, its traceback is part of the report at the end, and must not be shown twice. So
standard error from the start of a traceback on is held back for some seconds, in which the process
either ends or continues. Once a rank has failed, it is held back until the report: a rank may take
longer to end.
"""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import BinaryIO

_MAX_READ_BYTES = 1 << 20

#: How long a traceback is held back.
_HOLD_S = 5.0

_LAST_WORDS = re.compile(
    rb'^(?:(?:  \+ Exception Group )?Traceback \(most recent call last\):|  File "|'
    rb"procpipe: rank \d+(?: \([^)]*\))? ends, because )",
    re.MULTILINE,
)
_STARTS = (
    b"Traceback (most recent call last):",
    b"  + Exception Group Traceback (most recent call last):",
    b'  File "',
    b"procpipe: rank ",
)

_STALL = b"procpipe: no progress for"


class HeldBack:
    """Passes text on, but holds back for ``hold_s`` what may be a process's final traceback."""

    def __init__(self, hold_s: float = _HOLD_S) -> None:
        self._hold_s = hold_s
        self._kept = b""
        self._since_s: float | None = None
        self._is_line_start = True

    def feed(self, data: bytes) -> bytes:
        """Take text; return what is to be shown now."""
        if self._since_s is not None:
            self._kept += data
            return self.release() if time.monotonic() > self._since_s + self._hold_s else b""
        data = self._kept + data
        self._kept = b""
        pad = b"" if self._is_line_start else b" "  # so that no line seems to start there
        match = _LAST_WORDS.search(pad + data)
        if match is not None:
            self._since_s = time.monotonic()
            split = match.start() - len(pad)
        else:
            split = len(data) - self._num_undecided(data)
        self._kept = data[split:]
        self._is_line_start = data[:split].endswith(b"\n") if split else self._is_line_start
        return data[:split]

    def keep(self) -> None:
        """Hold text back from now on until :meth:`release`, however long that takes."""
        self._hold_s = math.inf

    def release(self) -> bytes:
        """Return what is held back."""
        kept, self._kept, self._since_s = self._kept, b"", None
        self._is_line_start = kept.endswith(b"\n") if kept else self._is_line_start
        return kept

    def _num_undecided(self, data: bytes) -> int:
        """Return the length of the unfinished last line, if it may begin a traceback."""
        line = data.rpartition(b"\n")[2]
        if len(line) == len(data) and not self._is_line_start:
            return 0
        may_be = any(start.startswith(line) or line.startswith(start) for start in _STARTS)
        return len(line) if may_be else 0


class StallFilter:
    """Passes on only a rank's reports of stalls: a line, and the indented ones after it."""

    def __init__(self) -> None:
        self._partial = b""
        self._is_open = False

    def feed(self, data: bytes) -> bytes:
        """Take text; return the reports in it."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        found = []
        for line in lines:
            self._is_open = line.startswith(_STALL) or (self._is_open and line.startswith(b"  "))
            if self._is_open:
                found.append(line + b"\n")
        return b"".join(found)


class Tail:
    """What is appended to a log file that may not exist yet, as far as its filter passes it on.

    Attributes:
        to_stderr: whether it is shown on standard error, which has a filter for each rank.
        partial: what of an unfinished line was read.
    """

    def __init__(self, path: Path, shown: HeldBack | StallFilter | None = None) -> None:
        self._path = path
        self._shown = shown
        self._file: BinaryIO | None = None
        self.to_stderr = shown is not None
        self.partial = b""

    def read(self, *, to_end: bool = False) -> bytes:
        """Return what is new, up to 1 MiB or to the end."""
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                return b""
        data = self._file.read(-1 if to_end else _MAX_READ_BYTES)
        return data if self._shown is None else self._shown.feed(data)

    def keep(self) -> None:
        """Show no more of what may be the end of the process until :meth:`release`."""
        if isinstance(self._shown, HeldBack):
            self._shown.keep()

    def release(self) -> bytes:
        """Return what is held back."""
        return self._shown.release() if isinstance(self._shown, HeldBack) else b""

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
