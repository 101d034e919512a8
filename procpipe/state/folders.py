"""The folders of a run's saved states: their names and order; each is published by one rename.

    runs/digits/
      000007-step-120/         saved states; the highest number was saved last
      000008-step-140/
      .saving-000009/          being written, or left by a crash
      .removing-000006-…/      being removed, or left by a crash

A folder gets its name by one rename, once its files are on the disk, and loses it by another. So a
named folder is complete, whatever crashes when.

Several jobs may save into one folder at a time. The job that makes the draft of a number has that
number. Every rank of a job holds a shared lock on the draft until it is published; no folder is
moved or removed without an exclusive lock on it. Locks end with their process. No torch here.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

#: torch's index, which each saved state has.
METADATA = ".metadata"

_NAME = re.compile(r"(\d{6,})(?:-step-(\d+))?")
_SAVING, _REMOVING = ".saving-", ".removing-"

#: How often to try for a free number, of which other jobs may take one each time.
_MAX_TRIES = 1000


@dataclass(frozen=True, order=True)
class SavedState:
    """One saved state; later ones are larger."""

    number: int
    step: int | None
    path: Path


def saved_in(root: Path, prefix: str = "") -> list[SavedState]:
    """Return the saved states of a run, oldest first; also those whose names have a prefix."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        match = _NAME.fullmatch(path.name.removeprefix(prefix))
        if match:
            number, step = match.groups()
            found.append(SavedState(int(number), None if step is None else int(step), path))
    return sorted(found, key=lambda entry: entry.number)


def find(path: Path, step: int | None = None) -> SavedState | None:
    """Return the newest saved state of a run; or ``path`` itself, if it is one saved state."""
    if step is None and (path / METADATA).is_file():
        return SavedState(0, None, path)
    fitting = [entry for entry in saved_in(path) if step is None or entry.step == step]
    return fitting[-1] if fitting else None


def not_shared(rank: int, path: Path, where_it_is: str, do: str) -> FileNotFoundError:
    """Return the error of a rank that does not find what another rank has made or found."""
    return FileNotFoundError(
        f"rank {rank} does not find {path} on {socket.gethostname()}, {where_it_is}: {do} a file "
        "system that all ranks share"
    )


class Hold:
    """A lock on a folder, by default shared, so that no job removes it, under whatever name.

    A folder that we have just made is locked exclusively first, in case another job has removed it
    since and made one of the same name. If another process has the lock, or the folder is gone, it
    is not held.
    """

    def __init__(self, path: Path, *modes: int) -> None:
        self.is_held = False
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            return
        try:
            for mode in modes or (fcntl.LOCK_SH,):  # unlocked for a moment between two
                fcntl.flock(self._descriptor, mode | fcntl.LOCK_NB)
            # Before we had the lock, another folder may have taken its place.
            self.is_held = os.path.samestat(os.fstat(self._descriptor), os.stat(path))
        except (BlockingIOError, FileNotFoundError):
            pass
        finally:
            if not self.is_held:
                os.close(self._descriptor)

    def __enter__(self) -> bool:
        return self.is_held

    def __exit__(self, *_: object) -> None:
        self.let_go()

    def let_go(self) -> None:
        """Unlock it, if it is locked."""
        if self.is_held:
            self.is_held = False
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also where a forked process has it
            os.close(self._descriptor)


class Draft(Hold):
    """A saved state that is being written, on rank 0; makes the run's folder if it is missing.

    Unless it was published before it is let go, the next draft removes it.

    Attributes:
        path: where to write.
        final_path: its name when it is complete.

    Raises:
        OSError: other jobs took every number first.
    """

    def __init__(self, root: Path, step: int | None) -> None:
        root.mkdir(parents=True, exist_ok=True)
        _clean(root)
        for _ in range(_MAX_TRIES):
            number = max((e.number for e in saved_in(root, _SAVING)), default=0) + 1
            self.path = root / f"{_SAVING}{number:06d}"
            try:
                self.path.mkdir()
            except FileExistsError:
                continue  # another job was faster
            super().__init__(self.path, fcntl.LOCK_EX, fcntl.LOCK_SH)
            # Another job removed ours before we locked it, or published before we made it.
            if self.is_held and all(entry.number < number for entry in saved_in(root)):
                break
            if self.is_held:
                self.path.rmdir()
            self.let_go()
        else:
            raise OSError(
                f"other jobs saved into {root} each of the {_MAX_TRIES} times that this one tried: "
                "give each job a folder of its own"
            )
        self.final_path = root / (f"{number:06d}" + ("" if step is None else f"-step-{step}"))

    def publish(self, keep: int | None) -> None:
        """Rename it, and remove all others but the newest ``keep`` and those that are locked."""
        root = self.final_path.parent
        os.rename(self.path, self.final_path)
        sync_folder(root)
        for entry in saved_in(root)[:-keep] if keep is not None else ():
            _remove(entry.path)


def _clean(root: Path) -> None:
    """Remove what crashes left; what a living process writes or removes is locked."""
    for path in [*root.glob(f"{_SAVING}*"), *root.glob(f"{_REMOVING}*")]:
        with Hold(path, fcntl.LOCK_EX) as is_ours:
            if is_ours:
                shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove a saved state, unless a process holds it or removes it."""
    with Hold(path, fcntl.LOCK_EX) as is_ours:
        if is_ours:
            going = path.with_name(f"{_REMOVING}{path.name}-{secrets.token_hex(4)}")
            os.rename(path, going)
            shutil.rmtree(going, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
