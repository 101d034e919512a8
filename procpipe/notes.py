"""Notes to the user on standard error; writing one never raises. A leaf: every part may use it."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import warnings
from pathlib import Path

#: How the names of the files of procpipe's own code begin.
_OWN_CODE = f"{Path(__file__).parent}{os.sep}"


def write_note(text: str) -> None:
    """Write lines to standard error at once, or drop them where that cannot be done."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"{text}\n")  # in one piece, unlike print
        sys.stderr.flush()


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the line that calls procpipe; raise ``category`` if a filter makes it an error."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_CODE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
