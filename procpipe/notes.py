"""Notes to the user on standard error; writing one never raises. A leaf: every part may use it."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

#: How the names of the files of procpipe's own code begin.
_OWN_CODE = f"{Path(__file__).parent}{os.sep}"


def write_note(text: str) -> None:
    """Write lines to standard error at once, or drop them where that cannot be done."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"{text}\n")  # in one piece, unlike print
        sys.stderr.flush()


@contextlib.contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[], object]]:
    """Show a bar on standard error while something runs, if that is a terminal.

    Yields what notes that one more of ``total`` is done; without a total the bar only moves.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console  # here, as it takes 0.1 s
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        yield partial(bar.advance, bar.add_task(what, total=total))


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the line that calls procpipe; raise ``category`` if a filter makes it an error."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_CODE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
