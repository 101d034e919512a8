"""Notes to the user on standard error; writing one never raises. A leaf: every part may use it."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import warnings
from pathlib import Path
from typing import TextIO

#: How the names of the files of procpipe's own code begin.
_OWN_CODE = f"{Path(__file__).parent}{os.sep}"


def write_note(text: str) -> None:
    """Write lines to standard error at once, or drop them where that cannot be done.

    Raises nothing, even if standard error is missing, closed, a broken pipe, on a full disk, of an
    encoding without these characters, or an object whose methods raise.
    """
    stream = sys.stderr
    with contextlib.suppress(Exception):
        if stream is sys.__stderr__:
            _write_through(sys.__stderr__, f"{text}\n")
            return
        try:
            stream.write(f"{text}\n")
        except UnicodeError:
            stream.write(f"{text}\n".encode("ascii", "backslashreplace").decode())
        stream.flush()


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the line that calls procpipe, and drop a warning that cannot be written.

    Raises ``category`` if the user's filter makes it an error.
    """
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_CODE):
        level, frame = level + 1, frame.f_back
    try:
        warnings.warn(text, category, stacklevel=level)
    except Warning:
        raise
    except Exception:  # Python ignores a broken pipe, but not a closed standard error
        return


def _write_through(stream: TextIO | None, text: str) -> None:
    """Write past the stream's buffer.

    What stays in the buffer would be written again as Python ends, with exit code 120 if it fails.
    """
    if stream is None:
        return
    stream.flush()
    data = text.encode(stream.encoding, "backslashreplace")
    while data:
        data = data[os.write(stream.fileno(), data) :]
