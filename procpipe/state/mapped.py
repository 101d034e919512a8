"""Files of ``torch.save`` and of safetensors in memory: a tensor is read when it is copied.

Pages of a mapped file count as memory of the process as long as the file is mapped. So they are
given back once a tensor has been copied: a process holds no more than one tensor beside its own.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from procpipe.errors import SavedStateError

#: Advice for Linux: pages can be dropped; those of a file are read anew when they are used.
_MADV_DONTNEED = 4


class Mapped:
    """Opens files, and copies tensors out of them."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # where the files are in memory

    def open_torch(self, path: Path) -> Any:
        """Return what a file of ``torch.save`` holds; nothing in it is executed.

        Raises:
            FileNotFoundError: there is none.
            SavedStateError: it is damaged, of another kind, or ``weights_only=True`` refuses it.
        """
        is_archive = _begins_with(path, b"PK")  # others, of torch before 1.6, cannot be mapped
        try:
            found = torch.load(path, map_location="cpu", mmap=is_archive, weights_only=True)
        except Exception as error:  # of many kinds, where bytes are damaged
            raise SavedStateError(
                f"{path}: it is no whole file of torch.save that weights_only=True reads: {error}"
            ) from None
        self._note(path)
        return found

    def open_safetensors(self, path: Path) -> Any:
        """Return a file of safetensors, as ``safetensors.safe_open`` does.

        Raises:
            FileNotFoundError: there is none.
            ModuleNotFoundError: the package safetensors is missing.
            SavedStateError: it is damaged, or of another kind.
        """
        package = safetensors()
        try:
            opened = package.safe_open(path, "pt")
        except package.SafetensorError as error:
            raise SavedStateError(f"{path}: it is no whole file of safetensors: {error}") from None
        self._note(path)
        return opened

    def copy(self, value: Tensor, target: Tensor) -> None:
        """Copy a tensor of a file into one of any device and dtype; give its pages back."""
        target.copy_(value)
        storage, page = value.untyped_storage(), os.sysconf("SC_PAGESIZE")
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        begin, end = -(-begin // page) * page, end // page * page
        # Memory that is not of a file would lose its values.
        if begin < end and any(start <= begin and end <= stop for start, stop in self._ranges):
            address, length = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
            ctypes.CDLL(None).madvise(address, length, _MADV_DONTNEED)

    def _note(self, path: Path) -> None:
        """Note where a file is in memory, as the system lists it."""
        real = os.path.realpath(path)
        for line in Path("/proc/self/maps").read_text().splitlines():
            place, *_, name = line.split(maxsplit=5)
            if name == real:
                start, stop = place.split("-")
                self._ranges.append((int(start, 16), int(stop, 16)))


def safetensors() -> Any:
    """Return the package safetensors, with its part for torch."""
    try:
        import safetensors as package
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"files of safetensors need the package safetensors ({error}): pip install "
            "safetensors, or use files of torch.save",
            name=error.name,
        ) from None
    return package


def _begins_with(path: Path, start: bytes) -> bool:
    with open(path, "rb") as file:
        return file.read(len(start)) == start
