"""The folders of a run's saved states: names, order, and how one appears and goes in one go.

    runs/digits/
      000007-step-120/         saved states; the highest number was saved last
      000008-step-140/
      .saving-000009-…/        being written, or left by a crash: locked while its process lives
      .removing-000006-…/      being removed

A folder gets its name by one rename, once all in it is on the disk, and loses it by one. So what
has a name is whole, whatever crashes when. Only rank 0 does any of this; no torch here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Draft", "Entry", "find", "saved_in", "sync_folder"]

_NAME = re.compile(r"(\d{6,})(?:-step-(\d+))?")
_SAVING, _REMOVING = ".saving-", ".removing-"


@dataclass(frozen=True, order=True)
class Entry:
    """One saved state; later ones are larger."""

    number: int
    step: int | None
    path: Path


def saved_in(root: Path) -> list[Entry]:
    """Return the saved states of a run, oldest first."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match:
            number, step = match.groups()
            found.append(Entry(int(number), None if step is None else int(step), path))
    return sorted(found, key=lambda entry: entry.number)


def find(path: Path, step: int | None, index_name: str) -> Entry | None:
    """Return the newest saved state of a run; or ``path`` itself, if it is one saved state."""
    if step is None and (path / index_name).is_file():
        return Entry(0, None, path)
    fitting = [entry for entry in saved_in(path) if step is None or entry.step == step]
    return fitting[-1] if fitting else None


class Draft:
    """A saved state that is being written.

    Args:
        root: the run's folder; made if it is not there.
        step: part of the name.

    Attributes:
        path: where to write.
        final_path: its name when it is whole.
    """

    def __init__(self, root: Path, step: int | None) -> None:
        root.mkdir(parents=True, exist_ok=True)
        _clean(root)
        entries = saved_in(root)
        number = entries[-1].number + 1 if entries else 1
        name = f"{number:06d}" if step is None else f"{number:06d}-step-{step}"
        self.final_path = root / name
        self.path = root / f"{_SAVING}{name}-{secrets.token_hex(4)}"
        self.path.mkdir()
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def publish(self, keep: int | None) -> None:
        """Give it its name, and remove all but the newest ``keep``."""
        root = self.final_path.parent
        os.rename(self.path, self.final_path)
        sync_folder(root)
        self.let_go()
        for entry in saved_in(root)[:-keep] if keep is not None else ():
            _remove(entry.path)

    def let_go(self) -> None:
        """Leave it as it is; unless it has its name, the next one to be written removes it."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            fcntl.flock(lock, fcntl.LOCK_UN)  # also where a forked process has the descriptor
            os.close(lock)


def _clean(root: Path) -> None:
    """Remove what crashes left, but nothing that a living process writes."""
    for path in list(root.glob(f"{_SAVING}*")):
        with _locked(path) as is_ours:
            if is_ours:
                shutil.rmtree(path, ignore_errors=True)
    for path in list(root.glob(f"{_REMOVING}*")):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    going = path.with_name(f"{_REMOVING}{path.name}")
    os.rename(path, going)
    shutil.rmtree(going, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
