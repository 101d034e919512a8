"""Reads files of ``torch.save`` without torch's unpickler: nothing is imported or called.

    zip archive, not compressed
      archive/data.pkl       records (pickles.py), from which values are made here
      archive/data/0, 1, …   the bytes of tensors, which stay where they are in memory
      archive/byteorder

torch's own restricted unpickler (``weights_only=True``) calls functions and sets attributes that a
file names, and a short file can take it any time and memory: both seen with torch 2.13. The values
that it accepts by default are read here too, except for sparse, quantized and nested tensors;
attributes that were set on a tensor are ignored.
"""

from __future__ import annotations

import functools
import io
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.errors import SavedStateError
from procpipe.state.pickles import DICT, PERSISTENT, SET, Made, Name, read_pickle, shown

#: How deep values may be nested, and how many there may be; a value counts at each use.
_MAX_DEPTH, _MAX_VALUES = 200, 10_000_000


@functools.cache
def dtypes() -> dict[str, torch.dtype]:
    """Return torch's dtypes by name."""
    return {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def read_archive(data: memoryview) -> Any:
    """Return what ``torch.save`` has written, with tensors in the memory of ``data``.

    Returns:
        None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, OrderedDict,
        Counter, set, ``torch.Size``, dtype, device, layout, tensor or parameter, nested.

    Raises:
        SavedStateError: it is damaged, or holds something else.
    """
    records = _records(data)
    roots = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) != 1:
        raise SavedStateError("it is not a file of torch.save: it has no data.pkl, or several")
    prefix = roots[0].removesuffix("data.pkl")
    order = bytes(records.get(f"{prefix}byteorder", b"little"))
    if order != sys.byteorder.encode():
        raise SavedStateError(f"its byte order is {order!r}, but here it is {sys.byteorder}")
    root = read_pickle(records[f"{prefix}data.pkl"], _ALLOWED)
    return _Maker(lambda key: records[f"{prefix}data/{key}"]).make(root)


def saved_copy(name: str, value: Any) -> Any:
    """Return what would be loaded of a value.

    Raises:
        TypeError: it cannot be saved so that it can be loaded again.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file)
        return read_archive(memoryview(bytearray(file.getbuffer())))
    except Exception as error:
        raise TypeError(
            f"{name} cannot be saved so that it can be loaded again: {error}\n"
            "What can: numbers, text, bytes, dense tensors, lists, tuples, sets, dicts of these; "
            "and objects whose state_dict() is made of them"
        ) from error


def _records(data: memoryview) -> dict[str, memoryview]:
    """Return the files in an archive by name."""
    try:
        with zipfile.ZipFile(_View(data)) as archive:
            infos = archive.infolist()
    except Exception as error:  # of many kinds, where bytes are damaged
        raise SavedStateError(f"it is not an archive of torch.save: {error}") from None
    found: dict[str, memoryview] = {}
    for info in infos:
        header = bytes(data[info.header_offset : info.header_offset + 30])
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise SavedStateError(f"{info.filename} in the archive is damaged")
        extra = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start = info.header_offset + 30 + extra
        is_stored = info.compress_type == 0 and info.compress_size == info.file_size
        if not is_stored or start + info.file_size > len(data) or info.filename in found:
            raise SavedStateError(f"{info.filename} in the archive is damaged, or compressed")
        found[info.filename] = data[start : start + info.file_size]
    return found


class _View(io.RawIOBase):
    """A file over memory, which it does not copy."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        at = (0, self._at, len(self._data))[whence] + offset
        if at < 0:
            raise ValueError("seeking to before the start")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        part = self._data[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


class _Maker:
    """Makes values of records, with the bytes of tensors by their keys in the archive."""

    def __init__(self, storage: Callable[[str], memoryview]) -> None:
        self._storage = storage
        self._made: dict[int, tuple[Any, int]] = {}
        self._num_values = 0

    def make(self, record: Any, depth: int = 0) -> Any:
        """Return the value of a record, the same one each time."""
        if type(record) in (type(None), bool, int, float, str, bytes):
            self._num_values += 1
            return record
        if type(record) is Name:
            return _constant(record)
        if depth > _MAX_DEPTH:
            raise SavedStateError(f"values are nested in more than {_MAX_DEPTH} others")
        before = self._num_values
        if id(record) in self._made:
            value, num_values = self._made[id(record)]
            self._num_values += num_values
        else:
            value = self._of_any(record, depth + 1)
            self._num_values += 1
            self._made[id(record)] = value, self._num_values - before
        if self._num_values > _MAX_VALUES:
            raise SavedStateError(f"it holds more than {_MAX_VALUES} values")
        return value

    def _of_any(self, record: Any, depth: int) -> Any:
        if type(record) is list:
            return [self.make(item, depth) for item in record]
        if type(record) is tuple:
            return tuple(self.make(item, depth) for item in record)
        if record.of in _TENSORS or record.of == PERSISTENT:
            return self._tensor(record, depth)
        if record.state is not None and record.of != _ORDERED:
            raise SavedStateError(f"a {record.of} has a state of its own")
        if record.items and record.of not in (DICT, SET, _ORDERED):
            raise SavedStateError(f"a {record.of} has items")
        items = [self.make(item, depth) for item in record.items]
        args = self.make(record.args, depth) if record.args else ()
        try:
            value = _MAKERS[record.of](*args)
            if items:
                value.update(items)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise SavedStateError(f"a {record.of} is made of what does not fit: {error}") from None
        if record.state is not None:  # versions that nn.Module.state_dict adds
            state = self.make(record.state, depth)
            if type(state) is not dict or state.keys() - {"_metadata"}:
                raise SavedStateError("an OrderedDict has attributes")
            vars(value).update(state)
        return value

    # -- tensors --------------------------------------------------------------------------------

    def _tensor(self, record: Made, depth: int) -> Tensor:
        args, name = record.args, record.of.name
        if record.items or record.of == PERSISTENT:
            raise SavedStateError("the bytes of a tensor are used as a value")
        match name, len(args):
            case "_rebuild_tensor_v2", 6 | 7:
                return self._strided(args[:6], None, args[6:])
            case "_rebuild_tensor_v3", 7 | 8:
                return self._strided(args[:6], args[6], args[7:])
            case "_rebuild_parameter" | "_rebuild_parameter_with_state", 3 | 4:
                return self._parameter(args[0], args[1], depth)
            case "_rebuild_from_type_v2", 4:
                return self._typed(args[0], args[1], args[2], depth)
        raise SavedStateError(f"a tensor is made by {record.of} of {len(args)} values")

    def _typed(self, function: Any, of_type: Any, args: Any, depth: int) -> Tensor:
        if of_type not in (_TENSOR, _PARAMETER) or type(args) is not tuple:
            raise SavedStateError(f"there is a tensor of the type {shown(of_type)}")
        if type(function) is not Name or function not in _TENSORS or depth > _MAX_DEPTH:
            raise SavedStateError(f"there is a tensor made by {shown(function)}")
        return self._tensor(Made(function, args), depth + 1)

    def _parameter(self, record: Any, requires_grad: Any, depth: int) -> Tensor:
        data = self.make(record, depth)
        if type(data) is not Tensor or type(requires_grad) is not bool:
            raise SavedStateError("a parameter is not made of a tensor")
        return nn.Parameter(data, requires_grad and _can_have_gradient(data))

    def _strided(self, args: tuple[Any, ...], dtype: Any, metadata: tuple[Any, ...]) -> Tensor:
        storage, offset, size, stride, requires_grad, _ = args
        tensor = _view(self._flat(storage, dtype), offset, size, stride)
        bits = self.make(metadata[0]) if metadata else None
        if bits and (type(bits) is not dict or bits.keys() - {"conj", "neg"}):
            raise SavedStateError("a tensor has attributes that are not known here")
        if bits and bits.get("conj"):
            tensor = tensor.conj().resolve_conj()
        if bits and bits.get("neg"):
            tensor = -tensor
        if requires_grad is True and _can_have_gradient(tensor):
            tensor.requires_grad_()
        return tensor

    def _flat(self, storage: Any, dtype: Any) -> Tensor:
        """Return a tensor's storage as a one-dimensional tensor."""
        if id(storage) in self._made:
            found: Tensor = self._made[id(storage)][0]
            return found
        key, of_dtype = _key_and_dtype(storage, dtype)
        try:
            data = self._storage(key)
        except KeyError:
            raise SavedStateError(f"the bytes {shown(key)} of a tensor are not there") from None
        itemsize = of_dtype.itemsize
        if len(data) % itemsize:
            raise SavedStateError(
                f"the bytes {shown(key)} of a tensor are not a whole number of {of_dtype}"
            )
        if not len(data):
            return torch.empty(0, dtype=of_dtype)
        flat = torch.frombuffer(data, dtype=torch.uint8)
        if flat.data_ptr() % itemsize:
            flat = flat.clone()
        flat = flat.view(of_dtype)
        self._made[id(storage)] = flat, 1
        return flat


def _key_and_dtype(storage: Any, dtype: Any) -> tuple[str, torch.dtype]:
    """Return the key of a storage's bytes and their dtype; ``dtype`` is that of an untyped one."""
    named = storage.args[0] if type(storage) is Made and storage.of == PERSISTENT else None
    if type(named) is not tuple or len(named) != 5 or named[0] != "storage":
        raise SavedStateError("a tensor has no bytes")
    _, of, key, _, _ = named
    of_dtype = _STORAGES.get(of) if type(of) is Name else None
    if dtype is not None and of in (_UNTYPED, _OLD_UNTYPED) and type(dtype) is Name:
        of_dtype = _constant(dtype)
    if type(of_dtype) is not torch.dtype or type(key) is not str:
        raise SavedStateError(f"a tensor is of the kind {shown(of)}")
    return key, of_dtype


def _constant(name: Name) -> Any:
    if name.module == "torch" and name.name in dtypes():
        return dtypes()[name.name]
    raise SavedStateError(f"{name} is used as a value")


def _view(flat: Tensor, offset: Any, size: Any, stride: Any) -> Tensor:
    """Return a tensor in a one-dimensional one, which may be too short for it."""
    if not (_are_sizes((offset,)) and _are_sizes(size) and _are_sizes(stride)):
        raise SavedStateError("the size or the strides of a tensor are not numbers")
    is_empty = 0 in size
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=False))
    if len(size) != len(stride) or len(size) > 64 or (not is_empty and last >= len(flat)):
        raise SavedStateError("a tensor is larger than the bytes that there are for it")
    try:
        return flat.new_empty(size) if is_empty else flat.as_strided(size, stride, offset)
    except RuntimeError as error:
        raise SavedStateError(f"a tensor's size is impossible: {error}") from None


def _are_sizes(values: Any) -> bool:
    return type(values) is tuple and all(type(v) is int and 0 <= v < 1 << 62 for v in values)


def _can_have_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _layout(name: Any) -> torch.layout:
    if name != "torch.strided":
        raise ValueError("it is not torch.strided")
    return torch.strided


def _encoded(text: Any = b"", encoding: Any = None) -> bytes:
    if type(text) is bytes:
        return text
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"{shown(encoding)} is not Latin-1")
    return bytes(text, "latin-1")


def _size(values: Any) -> torch.Size:
    if not _are_sizes(tuple(values)):
        raise ValueError("it has no sizes")
    return torch.Size(values)


def _device(name: Any, *index: Any) -> torch.device:
    if type(name) is not str or any(type(number) is not int for number in index):
        raise ValueError("it has no name")
    return torch.device(name, *index)


def _counter(counts: Any = None) -> Counter[Any]:
    if type(counts) not in (dict, type(None)):
        raise TypeError("it has no counts")
    return Counter(counts)


_ORDERED = Name("collections", "OrderedDict")
_TENSOR, _PARAMETER = Name("torch", "Tensor"), Name("torch.nn.parameter", "Parameter")
_UNTYPED, _OLD_UNTYPED = Name("torch.storage", "UntypedStorage"), Name("torch", "UntypedStorage")

#: What is called with a record's arguments; wrong ones raise an exception.
_MAKERS: dict[Name, Callable[..., Any]] = {
    DICT: dict,
    SET: set,
    _ORDERED: OrderedDict,
    Name("collections", "Counter"): _counter,
    Name("builtins", "set"): set,
    Name("builtins", "complex"): complex,
    Name("builtins", "bytearray"): lambda *args: bytearray(_encoded(*args)),
    Name("builtins", "bytes"): _encoded,
    Name("_codecs", "encode"): _encoded,
    Name("torch", "Size"): _size,
    Name("torch", "device"): _device,
    Name("torch.serialization", "_get_layout"): _layout,
}

_TENSORS = {
    Name("torch._utils", name)
    for name in (
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
        "_rebuild_parameter",
        "_rebuild_parameter_with_state",
    )
} | {Name("torch._tensor", "_rebuild_from_type_v2")}

_STORAGES = {
    Name("torch", f"{name}Storage"): dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "ComplexFloat": torch.complex64,
        "ComplexDouble": torch.complex128,
    }.items()
}

_ALLOWED = (
    _TENSORS
    | {name for name in _MAKERS if name.module}
    | _STORAGES.keys()
    | {_TENSOR, _PARAMETER, _UNTYPED, _OLD_UNTYPED}
    | {Name("torch", name) for name in dtypes()}
)
