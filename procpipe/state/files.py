"""The files of a saved state: the format of ``torch.distributed.checkpoint``, read without torch.

    stage-0/__0_0.distcp  procpipe.json    written by rank 0: its values
    stage-1/__0_0.distcp  procpipe.json    written by rank 1
    procpipe.json                          both together, which rank 0 makes of the two
    .metadata                              the same for torch, to which it is a checkpoint

Each rank writes and reads its own values alone: torch's savers and loaders communicate over a
process group, and unpickle. A value is written by ``torch.save`` and has a CRC-32, which is checked
whenever it is read. Where there is no procpipe.json, as in a checkpoint that torch wrote, .metadata
is read instead, without checksums.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import math
import operator
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from procpipe.errors import SavedStateError
from procpipe.state.archives import read_archive
from procpipe.state.folders import METADATA, sync_folder
from procpipe.state.index import (
    Chunk,
    IndexEntry,
    from_json,
    from_metadata,
    to_json,
    to_metadata,
)

INDEX = "procpipe.json"
_VALUES = "__0_0.distcp"

#: An index is read as a whole; 100 bytes or so are one value.
_MAX_INDEX_BYTES = 1 << 30

#: Errors of a missing file: it or a folder is missing, or a link points nowhere.
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)

_ADVICE = "restore the folder from a copy, or load an older saved state"


# -- writing -------------------------------------------------------------------------------------


def write_part(folder: Path, values: dict[str, Any]) -> None:
    """Write values into a new folder of their own; all is on the disk when its index appears.

    Raises:
        TypeError: a tensor that is not dense.
    """
    folder.mkdir()
    entries: dict[str, IndexEntry] = {}
    with open(folder / _VALUES, "wb") as file:
        for key, value in values.items():
            sink, offset = _Sink(file), file.tell()
            value = _plain(key, value) if isinstance(value, Tensor) else value
            torch.save(value, sink)  # type: ignore[arg-type]
            dtype = value.dtype if isinstance(value, Tensor) else None
            shape = tuple(value.shape) if isinstance(value, Tensor) else ()
            chunk = Chunk((0,) * len(shape), shape, _VALUES, offset, sink.length, sink.crc32)
            entries[key] = IndexEntry(dtype, shape, (chunk,))
        file.flush()
        os.fsync(file.fileno())
    temporary = folder / f"{INDEX}.tmp"
    _write_synced(temporary, to_json(entries))
    os.rename(temporary, folder / INDEX)
    sync_folder(folder)


class _Sink:
    """Passes bytes on to a file; counts them and updates their CRC-32."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.length = self.crc32 = 0

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.length += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        pass


def _plain(key: str, value: Tensor) -> Tensor:
    """Return a tensor on the CPU that holds no more memory than its own elements."""
    value = value.detach()
    if (
        type(value) not in (Tensor, nn.Parameter)
        or value.layout != torch.strided
        or value.is_quantized
    ):
        raise TypeError(
            f"{key} is a {type(value).__name__} of {value.layout}: only ordinary dense tensors can "
            "be saved"
        )
    value = value.cpu().resolve_conj().resolve_neg()
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def merge_parts(folder: Path, names: Iterable[str]) -> None:
    """Join the parts in these sub-folders into one saved state."""
    entries: dict[str, IndexEntry] = {}
    for name in names:
        for key, entry in read_index(folder / name).entries.items():
            [chunk] = entry.chunks
            chunk = dataclasses.replace(chunk, file=f"{name}/{chunk.file}")
            entries[key] = dataclasses.replace(entry, chunks=(chunk,))
    metadata = to_metadata(entries)
    _write_synced(folder / METADATA, metadata)
    _write_synced(folder / INDEX, to_json(entries, zlib.crc32(metadata)))
    sync_folder(folder)


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


# -- reading -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Index:
    """What a saved state holds."""

    folder: Path  # where it is
    entries: dict[str, IndexEntry]  # its values by key

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype | None] | None]:
        """Return by key the shape and dtype of a tensor; None for any other value."""
        return {
            key: None if entry.dtype is None else (entry.shape, entry.dtype)
            for key, entry in self.entries.items()
        }

    def read(self, keys: Iterable[str], into: dict[str, Tensor] | None = None) -> dict[str, Any]:
        """Read values; a tensor into the one that ``into`` has for it, of the same shape.

        Raises:
            SavedStateError: a file is missing, not inside of the folder, damaged, or holds
                something else than the index says. Tensors of ``into`` may then be half read.
        """
        entries = {key: self.entries[key] for key in keys}
        wanted = [(chunk, key) for key in entries for chunk in entries[key].chunks]
        wanted.sort(key=lambda pair: (pair[0].file, pair[0].offset))
        with contextlib.ExitStack() as opened, torch.no_grad():
            # Checked before anything is allocated or changed.
            files = self._open_checked(wanted, opened)
            tensors = {key: entry for key, entry in entries.items() if entry.dtype is not None}
            found: dict[str, Any] = {
                key: self._empty(key) if (made := (into or {}).get(key)) is None else made
                for key in tensors
            }
            scratch = _memory(max((c.length for c, key in wanted if key in tensors), default=0))
            for chunk, key in wanted:
                with naming(self.folder / chunk.file, key):
                    # Values other than tensors may keep their memory.
                    memory = scratch[: chunk.length] if key in tensors else _memory(chunk.length)
                    value = read_archive(_bytes_of(chunk, files[chunk.file], memory))
                    if key in tensors:
                        ends = map(operator.add, chunk.offsets, chunk.sizes)
                        box = tuple(map(slice, chunk.offsets, ends))
                        found[key][box].copy_(_tensor(entries[key], chunk, value))
                    else:
                        found[key] = value
        return found

    def _open_checked(
        self, wanted: Iterable[tuple[Chunk, str]], opened: contextlib.ExitStack
    ) -> dict[str, BufferedReader]:
        """Open the files of chunks, each once, and check that they hold them."""
        files: dict[str, BufferedReader] = {}
        for chunk, key in wanted:
            if chunk.file not in files:
                files[chunk.file] = opened.enter_context(open_inside(self.folder, chunk.file))
            with naming(self.folder / chunk.file, key):
                _check_length(self.entries[key], chunk, files[chunk.file])
        return files

    def _empty(self, key: str) -> Tensor:
        entry = self.entries[key]
        try:
            return torch.empty(entry.shape, dtype=entry.dtype)
        except RuntimeError as error:  # it has no elements, or there is no memory for them
            raise SavedStateError(
                f"{self.folder}: {key}: {entry.dtype} {entry.shape} cannot be made: {error}"
            ) from None


def read_index(folder: Path) -> Index:
    """Read what a saved state holds, also one that plain PyTorch has written.

    Raises:
        SavedStateError: it is missing, damaged, or contradicts itself.
    """
    if not os.path.lexists(folder / INDEX):
        with naming(folder / METADATA):
            return Index(folder, from_metadata(_all_of(folder, METADATA)))
    with naming(folder / INDEX):
        entries, crc32 = from_json(_all_of(folder, INDEX))
    with naming(folder / METADATA):
        if crc32 is not None and zlib.crc32(_all_of(folder, METADATA)) != crc32:
            raise SavedStateError(
                f"it is not the one that was saved with {INDEX}; if you have written it anew with "
                f"torch, remove {INDEX}"
            )
    return Index(folder, entries)


def open_inside(folder: Path, name: str) -> BufferedReader:
    """Open a regular file in the folder that an index names.

    Raises:
        SavedStateError: it is another kind of file, or elsewhere, or missing.
    """
    inside = os.path.realpath(folder)
    try:
        real = os.path.realpath(folder / name)
    except ValueError:  # no file can have this name
        real = "/"
    if ".." in Path(name).parts or not real.startswith(f"{inside.rstrip('/')}/"):
        raise SavedStateError(f"{folder} names the file {name!r}, which is outside of it")
    return open_regular(Path(real))


def open_regular(path: Path) -> BufferedReader:
    """Open a file; neither a FIFO, which might block for ever, nor a device.

    Raises:
        SavedStateError: it is another kind of file, or missing.
    """
    try:
        # Checked before, as opening a device may have effects, and after, as it may be replaced.
        if stat.S_ISREG(os.stat(path).st_mode):
            file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file
            file.close()
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_FILE:
            raise
        raise SavedStateError(f"{path} is missing: was the folder copied as a whole?") from None
    raise SavedStateError(f"{path} is not a regular file")


def _all_of(folder: Path, name: str) -> bytes:
    with open_inside(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MAX_INDEX_BYTES:
            raise SavedStateError(f"it has {size} bytes, but {_MAX_INDEX_BYTES} is the most")
        return bytes(filled(file, memoryview(bytearray(size))))


def _check_length(entry: IndexEntry, chunk: Chunk, file: BufferedReader) -> None:
    size = os.fstat(file.fileno()).st_size
    if chunk.offset + chunk.length > size:
        raise SavedStateError(
            f"the index says bytes {chunk.offset} to {chunk.offset + chunk.length}, but the file "
            f"has {size}: {_ADVICE}"
        )
    if entry.dtype is not None and math.prod(chunk.sizes) * entry.dtype.itemsize > chunk.length:
        raise SavedStateError(
            f"the index says {chunk.sizes} of {entry.dtype}, but {chunk.length} bytes: {_ADVICE}"
        )


def _bytes_of(chunk: Chunk, file: BufferedReader, memory: memoryview) -> memoryview:
    """Return the bytes of a chunk, in this memory, compared with their checksum."""
    file.seek(chunk.offset)
    data = filled(file, memory)
    if chunk.crc32 is not None and zlib.crc32(data) != chunk.crc32:
        raise SavedStateError(
            f"bytes {chunk.offset} to {chunk.offset + chunk.length} of the file are not those that "
            f"were saved (their CRC-32 is {zlib.crc32(data):08x}, it was {chunk.crc32:08x}): "
            + _ADVICE
        )
    return data


def _memory(size: int) -> memoryview:
    try:
        return memoryview(bytearray(size))
    except MemoryError:
        raise SavedStateError(f"there is no memory for a value of {size} bytes") from None


def filled(file: BufferedReader, data: memoryview) -> memoryview:
    """Read from a file until this memory is full, and return it.

    Raises:
        SavedStateError: the file ends before.
    """
    if file.readinto(data) < len(data):
        raise SavedStateError("the file has become shorter while it was read")
    return data


def _tensor(entry: IndexEntry, chunk: Chunk, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise SavedStateError(f"the file holds a {type(value).__name__}, but the index a tensor")
    if value.dtype != entry.dtype or tuple(value.shape) != chunk.sizes:
        raise SavedStateError(
            f"the file holds {value.dtype} {tuple(value.shape)}, but the index says "
            f"{entry.dtype} {chunk.sizes}: {_ADVICE}"
        )
    return value


@contextlib.contextmanager
def naming(path: Path, key: str | None = None) -> Iterator[None]:
    """Name the file, and the key, in an error."""
    try:
        yield
    except SavedStateError as error:
        raise SavedStateError(f"{path}: {'' if key is None else f'{key}: '}{error}") from None
