"""One clear error where a part of procpipe is asked for that this installation has left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed(part: str, what: str) -> Iterator[None]:
    """Replace the error of a missing part within: ``what`` needs ``part``, ``"procpipe.replicas"``.

    Raises:
        ModuleNotFoundError: the part is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or not f"{error.name}.".startswith(f"{part}."):
            raise
        raise ModuleNotFoundError(
            f"{what} needs {part}, which this installation of procpipe lacks: install all of it",
            name=error.name,
        ) from None
