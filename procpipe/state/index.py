"""The index of a saved state: which values it holds, and where. torch's or ours, checked.

    .metadata      torch's index, a pickle (pickles.py reads it); of any checkpoint of torch
    procpipe.json  the same for a state saved here, with a CRC-32 of every value and of .metadata

An entry is one value: a tensor in chunks that cover it exactly, or the bytes of any other value.
"""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from procpipe.errors import SavedStateError
from procpipe.state.archives import dtypes
from procpipe.state.pickles import DICT, Made, Name, read_pickle, shown, write_pickle

_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = Name("torch.distributed.checkpoint.filesystem", "_StorageInfo")

#: The largest number of dimensions along which a tensor may be cut into chunks.
_MAX_CUT = 8


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, or all of another value, in a file."""

    offsets: tuple[int, ...]  # where the box begins in the tensor
    sizes: tuple[int, ...]
    file: str  # relative to the folder of the saved state
    offset: int  # where its bytes begin in the file
    length: int  # in bytes
    crc32: int | None = None  # None where unknown


@dataclass(frozen=True)
class IndexEntry:
    """One value of a saved state; without a dtype it is not a tensor, and its shape is ()."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


# -- ours ----------------------------------------------------------------------------------------


def to_json(entries: dict[str, IndexEntry], metadata_crc32: int | None = None) -> bytes:
    """Return our index as a file: entries of one chunk each, and a CRC-32 of the file itself."""
    values = {
        key: [
            str(entry.dtype).removeprefix("torch.") if entry.dtype is not None else None,
            entry.shape,
            chunk.file,
            chunk.offset,
            chunk.length,
            chunk.crc32,
        ]
        for key, entry in entries.items()
        for chunk in entry.chunks
    }
    rest = json.dumps({"metadata_crc32": metadata_crc32, "values": values}).encode()
    return _first_line(rest) + rest[1:]


def from_json(data: bytes) -> tuple[dict[str, IndexEntry], int | None]:
    """Return what :func:`to_json` was given.

    Raises:
        SavedStateError: a byte of it was changed, or it is something else.
    """
    end = data.find(b"\n") + 1
    rest = b"{" + data[end:]
    if not end or data[:end] != _first_line(rest):
        raise SavedStateError("its contents do not fit its own checksum")
    try:
        head = json.loads(rest)
        entries = {key: _entry(*value) for key, value in head["values"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SavedStateError(f"it is not an index of a saved state: {error}") from None
    crc32 = head.get("metadata_crc32")
    return entries, crc32 if _is_size(crc32) else None


def _first_line(rest: bytes) -> bytes:
    return b'{"crc32": "%08x",\n' % zlib.crc32(rest)


def _entry(dtype: Any, shape: Any, file: Any, offset: Any, length: Any, crc32: Any) -> IndexEntry:
    if (
        type(file) is not str
        or not all(map(_is_size, (offset, length, crc32, *shape)))
        or len(shape) > 64
    ):
        raise ValueError(f"a value is at {file!r}, {offset!r}, {length!r}")
    shape = tuple(shape)
    chunk = Chunk((0,) * len(shape), shape, file, offset, length, crc32)
    return IndexEntry(None if dtype is None else dtypes()[dtype], shape, (chunk,))


# -- torch's -------------------------------------------------------------------------------------


def to_metadata(entries: dict[str, IndexEntry]) -> bytes:
    """Return torch's index of entries of one chunk each, the same whatever torch runs.

    In the form of torch 2.11 to 2.14, which later ones read too; that of 2.15 has one more field in
    ``TensorProperties``, and they do not read it. Version 1.0.0 is of torch 2.7 and later.
    """
    places: list[tuple[Any, Any]] = []
    values: list[tuple[Any, Any]] = []
    for key, entry in entries.items():
        [chunk] = entry.chunks
        size, start = (Made(_SIZE, (numbers,)) for numbers in (entry.shape, chunk.offsets))
        at = {"fqn": key, "offset": None if entry.dtype is None else start, "index": None}
        place = {"relative_path": chunk.file, "offset": chunk.offset, "length": chunk.length}
        places.append((_made("MetadataIndex", at), Made(_STORAGE_INFO, (), _dict(place))))
        if entry.dtype is None:
            values.append((key, _made("BytesStorageMetadata", {})))
            continue
        box = _made("ChunkStorageMetadata", {"offsets": start, "sizes": size})
        tensor = {"properties": _properties(entry.dtype), "size": size, "chunks": [box]}
        values.append((key, _made("TensorStorageMetadata", tensor)))
    of_nothing: dict[str, Any] = dict.fromkeys(("checkpoint_id", "save_id", "load_id"))
    whole = {
        "state_dict_metadata": Made(DICT, items=values),
        # Paths of keys, of which torch makes nested dictionaries.
        "planner_data": _dict({key: tuple(key.split(".", 1)) for key in entries}),
        "storage_data": Made(DICT, items=places),
        "storage_meta": _made("StorageMeta", of_nothing | {"modules": []}),
        "version": "1.0.0",
    }
    return write_pickle(_made("Metadata", whole))


def _made(name: str, fields: dict[str, Any]) -> Made:
    return Made(Name(_MODULE, name), (), _dict(fields))


def _dict(of: dict[str, Any]) -> Made:
    return Made(DICT, items=list(of.items()))


def _properties(dtype: torch.dtype) -> Made:
    """Return a tensor's properties: dtype, layout, requires_grad, memory format, pin_memory."""
    name = Name("torch", str(dtype).removeprefix("torch."))
    strided, contiguous = Made(_LAYOUT, ("torch.strided",)), Made(_MEMORY_FORMAT, (0,))
    return Made(Name(_MODULE, "TensorProperties"), (), (name, strided, False, contiguous, False))


def from_metadata(data: bytes) -> dict[str, IndexEntry]:
    """Return the entries of torch's index, of any version whose fields are known.

    Raises:
        SavedStateError: it is damaged, contradicts itself, or is not an index of torch.
    """
    root = _fields(read_pickle(data, _ALLOWED), "Metadata", "state_dict_metadata", "storage_data")
    version = root.get("version")
    if version is not None and not (type(version) is str and version.startswith("1.")):
        raise SavedStateError(f"it is of version {shown(version)}, of which nothing is known here")
    places = [_place(pair) for pair in _pairs(root["storage_data"])]
    where = dict(places)
    if len(where) < len(places):
        raise SavedStateError("it says twice where a value is")
    entries: dict[str, IndexEntry] = {}
    for key, record in _pairs(root["state_dict_metadata"]):
        if type(key) is not str or key in entries:
            raise SavedStateError(f"it has a key twice, or one that is not a text: {shown(key)}")
        try:
            entries[key] = _value(key, record, where)
        except SavedStateError as error:
            raise SavedStateError(f"{key}: {error}") from None
    return entries


_Place = tuple[str, int, int]


def _value(key: str, record: Any, where: dict[Any, _Place]) -> IndexEntry:
    if type(record) is Made and record.of.name == "BytesStorageMetadata":
        return IndexEntry(None, (), (_located(key, None, (), where),))
    fields = _fields(record, "TensorStorageMetadata", "properties", "size", "chunks")
    shape = _sizes(fields["size"])
    dtype = _dtype(fields["properties"])
    if type(fields["chunks"]) is not list:
        raise SavedStateError("its chunks are not a list")
    boxes = []
    for chunk in fields["chunks"]:
        box = _fields(chunk, "ChunkStorageMetadata", "offsets", "sizes")
        boxes.append((_sizes(box["offsets"]), _sizes(box["sizes"])))
    _check_tiled(shape, boxes)
    full = [(offsets, sizes) for offsets, sizes in boxes if 0 not in sizes]
    return IndexEntry(dtype, shape, tuple(_located(key, *box, where) for box in full))


def _located(key: str, offsets: Any, sizes: tuple[int, ...], where: dict[Any, _Place]) -> Chunk:
    if (key, offsets) not in where:
        at = "" if offsets is None else f" of its chunk at {offsets}"
        raise SavedStateError(f"the index does not say where the bytes{at} are")
    return Chunk(offsets or (), sizes, *where[key, offsets])


def _place(pair: tuple[Any, Any]) -> tuple[tuple[Any, Any], _Place]:
    of = _fields(pair[0], "MetadataIndex", "fqn")
    info = _fields(pair[1], "_StorageInfo", "relative_path", "offset", "length")
    offset = of.get("offset")
    place = (info["relative_path"], info["offset"], info["length"])
    if type(of["fqn"]) is not str or type(place[0]) is not str or not all(map(_is_size, place[1:])):
        raise SavedStateError(f"it has a wrong place: {shown(of['fqn'])}")
    if info.get("transform_descriptors"):
        raise SavedStateError(
            f"{of['fqn']} was written through an extension of torch: load it with "
            "torch.distributed.checkpoint, and save it again without"
        )
    return (of["fqn"], None if offset is None else _sizes(offset)), place


def _fields(record: Any, name: str, *needed: str) -> dict[str, Any]:
    """Return the fields of a record of one of torch's classes."""
    of = _STORAGE_INFO if name == "_StorageInfo" else Name(_MODULE, name)
    if type(record) is not Made or record.of != of or record.args or record.items:
        raise SavedStateError(f"a value is not a {name}")
    fields = {key: value for key, value in _pairs(record.state) if type(key) is str}
    missing = [key for key in needed if key not in fields]
    if missing:
        raise SavedStateError(f"a {name} has no {missing[0]}: torch has another form of it now")
    return fields


def _pairs(record: Any) -> list[tuple[Any, Any]]:
    if type(record) is not Made or record.of != DICT:
        raise SavedStateError("a value is not a dict")
    return record.items


def _sizes(record: Any) -> tuple[int, ...]:
    values = record.args[0] if type(record) is Made and record.args else None
    if values is None or record.of != _SIZE or type(values) is not tuple or len(record.args) > 1:
        raise SavedStateError("a value is not a torch.Size")
    if not all(map(_is_size, values)) or len(values) > 64:
        raise SavedStateError("a torch.Size has an entry that is not a size")
    return values


def _dtype(record: Any) -> torch.dtype:
    """Return the dtype among a tensor's properties: 5 of them until torch 2.14, then 6."""
    is_known = type(record) is Made and record.of == Name(_MODULE, "TensorProperties")
    state = record.state if is_known else None
    if type(state) is not tuple or len(state) not in (5, 6) or record.args or record.items:
        raise SavedStateError("its TensorProperties have a form that is not known here")
    dtype, layout, *_ = state
    if type(dtype) is not Name or dtype.module != "torch" or dtype.name not in dtypes():
        raise SavedStateError("its dtype is not one of torch's")
    if type(layout) is not Made or layout.of != _LAYOUT or layout.args != ("torch.strided",):
        raise SavedStateError("it is not a dense tensor (torch.strided)")
    return dtypes()[dtype.name]


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


_SIZE, _LAYOUT = Name("torch", "Size"), Name("torch.serialization", "_get_layout")
_MEMORY_FORMAT = Name(_MODULE, "_MEM_FORMAT_ENCODING")
_PATHS = ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")


_RECORDS = (
    *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
)
_ALLOWED = {Name(_MODULE, name) for name in _RECORDS}
_ALLOWED |= {Name(module, name) for module in ("pathlib", "pathlib._local") for name in _PATHS}
_ALLOWED |= {Name("torch", name) for name in dtypes()}
_ALLOWED |= {_STORAGE_INFO, _SIZE, _LAYOUT, _MEMORY_FORMAT, Name("collections", "OrderedDict")}


# -- chunks --------------------------------------------------------------------------------------

_Box = tuple[tuple[int, ...], tuple[int, ...]]


def _check_tiled(shape: tuple[int, ...], boxes: Iterable[_Box]) -> None:
    """Check that boxes cover a tensor exactly once.

    Boxes cover it exactly once if, and only if, their corners are its own: each corner counted
    with a sign, all others cancel out. (The signed corners of a box are the mixed difference of
    the function that is 1 inside of it, and determine it.)

        +---+-------+         + - . - +  -        the upper right corner of the left box and the
        | a |   b   |    =    |       |           upper left one of the right box cancel out
        +---+-------+         + - . - +
    """
    boxes = list(boxes)
    _check_inside(shape, boxes)
    if len(boxes) == 1 and boxes[0][1] == shape:
        return
    full = [box for box in boxes if 0 not in box[1]]
    cut = [d for d, size in enumerate(shape) if any(sizes[d] != size for _, sizes in full)]
    if len(cut) > _MAX_CUT:
        raise SavedStateError(f"it is cut along {len(cut)} dimensions, but {_MAX_CUT} is the most")
    own = [((0,) * len(shape), shape)] if 0 not in shape else []
    if _signed_corners(full, cut) != _signed_corners(own, cut):
        volume, whole = sum(math.prod(sizes) for _, sizes in full), math.prod(shape)
        fault = "overlap" if volume >= whole else "leave some of it out"
        raise SavedStateError(
            f"its {len(boxes)} chunks do not cover a tensor of {shape} exactly: they {fault} "
            f"({volume} of {whole} elements)"
        )


def _check_inside(shape: tuple[int, ...], boxes: Iterable[_Box]) -> None:
    """Check that boxes are inside of a tensor."""
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            raise SavedStateError(f"a chunk of {len(sizes)} dimensions is in one of {len(shape)}")
        if any(at + size > of for at, size, of in zip(offsets, sizes, shape, strict=True)):
            raise SavedStateError(f"the chunk of {sizes} at {offsets} is outside of {shape}")


def _signed_corners(boxes: Iterable[_Box], cut: Iterable[int]) -> Counter[tuple[int, ...]]:
    """Add up the signs of the boxes' corners; in dimensions other than ``cut`` all are alike."""
    signs: Counter[tuple[int, ...]] = Counter()
    for offsets, sizes in boxes:
        ends = [((offsets[d], 1), (offsets[d] + sizes[d], -1)) for d in cut]
        for corner in itertools.product(*ends):
            signs[tuple(at for at, _ in corner)] += math.prod(sign for _, sign in corner)
    return signs
