"""Tensors in files: mapped into memory, and read when they are copied.

Pages of a mapped file count as memory of the process as long as the file is mapped. So they are
given back once a tensor has been copied: a process holds no more than one tensor beside its own.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from procpipe.errors import SavedStateError
from procpipe.state.values import replaced

#: Advice for Linux: pages can be dropped; those of a file are read anew when they are used.
_MADV_DONTNEED = 4

#: Where a file is in memory: from, to.
_Ranges = Sequence[tuple[int, int]]


class Stored:
    """A tensor in a file; or in several, each with a shard."""

    def __init__(self, shape: Iterable[int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self._pieces: list[tuple[Sequence[int], Tensor, _Ranges]] = []  # each after its offsets

    @classmethod
    def whole(cls, tensor: Tensor, ranges: _Ranges) -> Stored:
        """Return a tensor that is whole in a file."""
        found = cls(tensor.shape, tensor.dtype)
        found._pieces.append(([0] * tensor.dim(), tensor, ranges))
        return found

    def add(self, offsets: Sequence[int], shard: Stored) -> None:
        """Add what is there from these offsets on."""
        self._pieces += [(offsets, piece, ranges) for _, piece, ranges in shard._pieces]

    def read(self, into: Tensor | None = None, *, device: torch.device | str = "cpu") -> Tensor:
        """Copy it into a tensor of this shape and any dtype and device, by default a new one.

        Raises:
            SavedStateError: a shard is missing.
        """
        target = torch.empty(self.shape, dtype=self.dtype, device=device) if into is None else into
        num_found = sum(piece.numel() for _, piece, _ in self._pieces)
        if num_found != math.prod(self.shape):
            raise SavedStateError(
                f"there are shards of {num_found} of the {math.prod(self.shape)} elements of a "
                f"tensor {self.shape}"
            )
        for offsets, piece, ranges in self._pieces:
            ends = (at + size for at, size in zip(offsets, piece.shape, strict=True))
            target[tuple(map(slice, offsets, ends))].copy_(piece)
            _give_back(piece, ranges)
        return target


def read_torch(path: Path) -> Any:
    """Return what a file of ``torch.save`` holds, with a Stored for each tensor.

    Raises:
        FileNotFoundError: there is none.
        SavedStateError: it is damaged, of another kind, or ``weights_only=True`` refuses it.
    """
    with open(path, "rb") as file:
        is_archive = file.read(2) == b"PK"  # others, of torch before 1.6, cannot be mapped
    try:
        found = torch.load(path, map_location="cpu", mmap=is_archive, weights_only=True)
    except Exception as error:  # of many kinds, where bytes are damaged
        raise SavedStateError(
            f"{path}: it is no whole file of torch.save that weights_only=True reads: {error}"
        ) from None
    ranges = _ranges_of(path)
    return replaced(found, Tensor, lambda tensor: Stored.whole(tensor, ranges))


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Return what a file of safetensors holds.

    Raises:
        FileNotFoundError: there is none.
        SavedStateError: it is damaged, or of another kind.
    """
    try:
        opened: Any = safetensors.safe_open(path, "pt")
    except safetensors.SafetensorError as error:
        raise SavedStateError(f"{path}: it is no whole file of safetensors: {error}") from None
    ranges, keys = _ranges_of(path), opened.keys()
    return {key: Stored.whole(opened.get_tensor(key), ranges) for key in keys}


def _ranges_of(path: Path) -> _Ranges:
    """Return where a file is in memory, as the system lists it."""
    real, found = os.path.realpath(path), []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, *_, name = line.split(maxsplit=5)
        if name == real:
            start, stop = place.split("-")
            found.append((int(start, 16), int(stop, 16)))
    return found


def _give_back(piece: Tensor, ranges: _Ranges) -> None:
    """Give back the pages of a tensor that has been copied."""
    storage, page = piece.untyped_storage(), os.sysconf("SC_PAGESIZE")
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    begin, end = -(-begin // page) * page, end // page * page
    # Memory that is not of a file would lose its values.
    if begin < end and any(start <= begin and end <= stop for start, stop in ranges):
        address, length = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
        ctypes.CDLL(None).madvise(address, length, _MADV_DONTNEED)
