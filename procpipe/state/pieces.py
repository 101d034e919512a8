"""Reads and writes tensors of files in pieces, so that no copy of a file or a tensor is held.

    safetensors   8 bytes                    the length of the header, little-endian
                  {"weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …}
                  the bytes of all tensors, from offset 0

Mapping a file into memory would be shorter, but each page that was read counts as memory of the
process as long as the file is mapped.

Source: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from procpipe.errors import SavedStateError
from procpipe.state.files import filled, naming, open_regular

#: As the package safetensors; all of a header is read at once.
_MAX_HEADER_BYTES = 100_000_000

#: The bytes of a tensor that are held while it is read or written, beside the tensor itself.
_PIECE_BYTES = 1 << 20

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Place:
    """Where the elements of a tensor are in a file, one after the other."""

    path: Path  # the file
    offset: int  # of the first byte
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, into: Tensor | None = None) -> Tensor:
        """Read it into a tensor of this shape, of any dtype and on any device, or a new one.

        Raises:
            SavedStateError: the file has become shorter.
        """
        if into is None:
            into = torch.empty(self.shape, dtype=self.dtype)
        if not into.is_contiguous():
            return into.copy_(self.read())
        with naming(self.path), open_regular(self.path) as file:
            file.seek(self.offset)
            for piece, buffer, data in _pieces(into.view(-1), self.dtype):
                filled(file, data)
                piece.copy_(buffer)
        return into


def read_header(path: Path) -> dict[str, Place]:
    """Return where each tensor of a safetensors file is.

    Raises:
        SavedStateError: it is damaged, or of another kind.
    """
    with naming(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        start = 8 + length
        if start > size or length > _MAX_HEADER_BYTES:
            raise SavedStateError(
                f"it is not a safetensors file: it has {size} bytes, its header {length}"
            )
        try:
            header = dict(json.loads(bytes(filled(file, memoryview(bytearray(length))))))
        except (ValueError, TypeError, RecursionError) as error:
            raise SavedStateError(f"it is not a safetensors file: {error}") from None
        header.pop("__metadata__", None)
        return {key: _place(path, start, size, key, entry) for key, entry in header.items()}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Write tensors of any device to a file; return the number of their bytes.

    Raises:
        TypeError: one is not dense, or has a dtype that the format lacks.
    """
    # The largest elements first, so that all are aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, value in ordered:
        if value.dtype not in _NAMES or value.layout != torch.strided:
            raise TypeError(
                f"{key} is a {value.layout} tensor of {value.dtype}, which safetensors cannot hold"
            )
        offsets = [offset, offset := offset + value.nbytes]
        shape = list(value.shape)
        header[key] = {"dtype": _NAMES[value.dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, value in ordered:
            for piece, buffer, data in _pieces(value.detach().reshape(-1), value.dtype):
                buffer.copy_(piece)
                file.write(data)
    return offset


def _pieces(flat: Tensor, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, memoryview]]:
    """Yield pieces of a tensor; a buffer for each, of this dtype; and the buffer's bytes."""
    if not flat.numel():
        return
    num_elements = min(flat.numel(), _PIECE_BYTES // dtype.itemsize)
    memory = bytearray(num_elements * dtype.itemsize)
    buffer = torch.frombuffer(memory, dtype=dtype)
    for piece in flat.split(num_elements):
        num_bytes = piece.numel() * dtype.itemsize
        yield piece, buffer[: piece.numel()], memoryview(memory)[:num_bytes]


def _place(path: Path, start: int, size: int, key: str, entry: object) -> Place:
    """Return a checked place; offsets are from where the header ends."""
    try:
        dtype = _DTYPES[entry["dtype"]]  # type: ignore[index]
        shape = entry["shape"]  # type: ignore[index]
        begin, end = entry["data_offsets"]  # type: ignore[index]
        if any(type(value) is not int or value < 0 for value in (begin, end, *shape)):
            raise ValueError("a size or an offset is not a number")
    except (ValueError, TypeError, KeyError) as error:
        raise SavedStateError(f"its header has no tensor {key!r} known here: {error}") from None
    if len(shape) > 64 or end - begin != math.prod(shape) * dtype.itemsize or start + end > size:
        raise SavedStateError(
            f"{key!r} is at the bytes {begin} to {end} of {size - start}, which do not fit {dtype} "
            f"{tuple(shape)}"
        )
    return Place(path, start + begin, dtype, tuple(shape))
