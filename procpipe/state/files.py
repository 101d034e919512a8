"""The files of a run's saved states: one a rank. A state is whole when all of them are there.

    runs/digits/
      000007-step-120/   stage-0-of-2.pt   stage-1-of-2.pt            whole
      000009-step-140/   stage-0-of-2.pt   stage-1-of-2.pt.ab12.tmp   being written, or left

Each rank writes its own file by ``torch.save``, and gives it its name by a rename, once it is on
the disk. Files are added to a folder and never replaced, so whatever is killed when, a folder
either lacks a file or is whole.

A process of an earlier attempt may have been stopped while it saved, and go on when the job has
been restarted. It cannot harm a newer state:

1  A new number is higher than that of any folder, also of one that is not whole, and only a newer
   folder lets an older one be removed. So no number is used twice, and the old process finds its
   folder gone.
2  Each file has the nonce of its save. Files of several saves in a folder are no whole state.

What a rank's file holds, read by ``torch.load(weights_only=True)``:

    save          the nonce
    about         version of procpipe and torch, step, num_stages, balance, placement
    model         values by their names in the full model
    optimizer     state by the names of parameters, and groups (optimizers.py)
    extra         the rank's own values (extras.py)
    generators    its random number generators
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from procpipe.errors import SavedStateError
from procpipe.state.stored import read_torch

_FOLDER = re.compile(r"(\d{6,})(?:-step-(\d+))?")
_FILE = re.compile(r"stage-(\d+)-of-(\d+)\.pt")

#: What a rank's file holds.
_PARTS = ("save", "about", "model", "optimizer", "extra", "generators")


@dataclass(frozen=True)
class SavedState:
    """One saved state; later ones have larger numbers."""

    number: int
    step: int | None
    path: Path


# -- folders -------------------------------------------------------------------------------------


def saved_in(root: Path) -> list[SavedState]:
    """Return the saved states of a run that have all their files, oldest first."""
    return [entry for entry in _folders(root) if files_of(entry.path)]


def files_of(folder: Path) -> list[Path]:
    """Return the files of a saved state by rank; none if one of them is missing."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _FILE.fullmatch(path.name):
            found[tuple(map(int, match.groups()))] = path
    number = max((of for _, of in found), default=0)
    ranks = [(rank, number) for rank in range(number)]
    return [found[rank] for rank in ranks] if found.keys() >= set(ranks) else []


def find(path: Path, step: int | None = None) -> SavedState | None:
    """Return the newest whole state of a run; or ``path`` itself, if it is a saved state.

    Raises:
        SavedStateError: a file of the newest is damaged.
    """
    if step is None and files_of(path):
        return SavedState(0, None, path)
    for entry in reversed(saved_in(path)):
        if step in (None, entry.step):
            is_alone = len(files_of(entry.path)) == 1
            if is_alone or _is_of_one_save(_contents(entry.path)):
                return entry
    return None


def begin(root: Path, step: int | None) -> Path:
    """Make the folder of a new saved state, on rank 0; remove what crashes have left.

    No rank of this job may be writing into another folder there.
    """
    root.mkdir(parents=True, exist_ok=True)
    earlier = _folders(root)
    number = max((entry.number for entry in earlier), default=0) + 1
    path = root / (f"{number:06d}" + ("" if step is None else f"-step-{step}"))
    path.mkdir()  # on the disk with the first file in it
    for entry in earlier:
        if not files_of(entry.path):
            shutil.rmtree(entry.path, ignore_errors=True)
    return path


def remove_old(root: Path, keep: int | None) -> None:
    """Remove all saved states but the newest ``keep``, on rank 0; None keeps all."""
    for entry in saved_in(root)[:-keep] if keep is not None else ():
        shutil.rmtree(entry.path, ignore_errors=True)


def not_shared(rank: int, path: Path, where_it_is: str, do: str) -> FileNotFoundError:
    """Return the error of a rank that does not find what another rank has made or found."""
    return FileNotFoundError(
        f"rank {rank} does not find {path} on {socket.gethostname()}, {where_it_is}: {do} a file "
        "system that all ranks share"
    )


def name_of(rank: int, num_ranks: int) -> str:
    """Return the name of a rank's file."""
    return f"stage-{rank}-of-{num_ranks}.pt"


def _folders(root: Path) -> list[SavedState]:
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        if match := _FOLDER.fullmatch(path.name):
            number, step = match.groups()
            found.append(SavedState(int(number), None if step is None else int(step), path))
    return sorted(found, key=lambda entry: (entry.number, entry.path.name))


# -- files ---------------------------------------------------------------------------------------


def write(path: Path, values: dict[str, Any], nonce: str) -> None:
    """Write a file by ``torch.save``; it has its name when it is on the disk.

    Raises:
        OSError: it could not be written; the disk is full, say.
    """
    temporary = path.with_name(f"{path.name}.{nonce}.tmp")
    with open(temporary, "wb") as file:
        try:
            torch.save(values, file)
        except RuntimeError as error:  # torch's writer, after the file's own error
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
    for folder in (path.parent, path.parent.parent):
        _sync(folder)


def read(folder: Path) -> list[dict[str, Any]]:
    """Return what each rank has saved, with a Stored for each tensor.

    Raises:
        SavedStateError: a file is damaged, or of another kind, or of another save.
    """
    found = _contents(folder)
    if found and not _is_of_one_save(found):
        raise SavedStateError(f"{folder} has files of several saves: load an older saved state")
    return found


def _contents(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in files_of(folder):
        contents = read_torch(path)
        if not isinstance(contents, dict) or contents.keys() != set(_PARTS):
            raise SavedStateError(
                f"{path}: it was not written by state.save: it holds a {type(contents).__name__}, "
                f"but no dict of {', '.join(_PARTS)}"
            )
        found.append(contents)
    return found


def _is_of_one_save(contents: list[dict[str, Any]]) -> bool:
    return len({of_rank["save"] for of_rank in contents}) == 1


def _sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
