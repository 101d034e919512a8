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
from pathlib import Path
from typing import Any

import torch

from procpipe.errors import SavedStateError
from procpipe.state.values import read_torch

_FOLDER = re.compile(r"\d{6,}(-step-\d+)?")
_FILE = re.compile(r"stage-(\d+)-of-(\d+)\.pt")


# -- folders -------------------------------------------------------------------------------------


def saved_in(root: Path) -> list[Path]:
    """Return the folders of saved states that have all their files, oldest first."""
    return [folder for folder in _folders(root) if _files_of(folder)]


def find(path: Path, step: int | None = None) -> Path | None:
    """Return the newest whole state of a run; or ``path`` itself, if it is a saved state.

    Raises:
        SavedStateError: a file of the newest is damaged.
    """
    is_one = step is None and _files_of(path)
    for folder in [path] if is_one else reversed(saved_in(path)):
        is_asked_for = step is None or folder.name.endswith(f"-step-{step}")
        # One file is whole; of several the nonces are compared.
        if is_asked_for and (len(_files_of(folder)) == 1 or read(folder)):
            return folder
    return None


def begin(root: Path, step: int | None) -> Path:
    """Make the folder of a new saved state, on rank 0; remove what crashes have left.

    No rank of this job may be writing into another folder there.
    """
    root.mkdir(parents=True, exist_ok=True)
    earlier = _folders(root)
    number = _number(earlier[-1]) + 1 if earlier else 1
    path = root / (f"{number:06d}" + ("" if step is None else f"-step-{step}"))
    path.mkdir()  # on the disk with the first file in it
    for folder in earlier:
        if not _files_of(folder):
            shutil.rmtree(folder, ignore_errors=True)
    return path


def remove_old(root: Path, keep: int | None) -> None:
    """Remove all saved states but the newest ``keep``, on rank 0; None keeps all."""
    for folder in saved_in(root)[:-keep] if keep is not None else ():
        shutil.rmtree(folder, ignore_errors=True)


def _folders(root: Path) -> list[Path]:
    found = root.iterdir() if root.is_dir() else ()
    return sorted((path for path in found if _FOLDER.fullmatch(path.name)), key=_number)


def _number(folder: Path) -> int:
    return int(folder.name.partition("-")[0])


# -- files ---------------------------------------------------------------------------------------


def write(folder: Path, rank: int, num_ranks: int, values: dict[str, Any]) -> None:
    """Write a rank's file by ``torch.save``; it has its name when it is on the disk.

    Raises:
        OSError: it could not be written; the disk is full, say.
    """
    path, nonce = folder / f"stage-{rank}-of-{num_ranks}.pt", values["save"]
    temporary = path.with_name(f"{path.name}.{nonce}.tmp")
    with open(temporary, "wb") as file:
        try:
            torch.save(values, file)
        except RuntimeError as error:  # torch's writer, after the file's own error
            cause = error.__context__
            raise cause if isinstance(cause, OSError) else error from None
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
    for names in (folder, folder.parent):
        descriptor = os.open(names, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(folder: Path) -> list[dict[str, Any]]:
    """Return what each rank has saved, with a Stored for each tensor; none if it is not whole.

    Raises:
        SavedStateError: a file is damaged, or not of ``save``.
    """
    paths = _files_of(folder)
    found = [read_torch(path) for path in paths]
    for path, values in zip(paths, found, strict=True):
        if not isinstance(values, dict) or "save" not in values:
            raise SavedStateError(f"{path} was not written by state.save")
    return found if len({of_rank["save"] for of_rank in found}) == 1 else []


def _files_of(folder: Path) -> list[Path]:
    """Return the files of a saved state by rank; none if one of them is missing."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _FILE.fullmatch(path.name):
            found[tuple(map(int, match.groups()))] = path
    number = max((of for _, of in found), default=0)
    ranks = [(rank, number) for rank in range(number)]
    return [found[rank] for rank in ranks] if found.keys() >= set(ranks) else []
