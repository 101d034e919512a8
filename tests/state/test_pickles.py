"""Pickles are described, not executed: whatever is in one, nothing outside of the reader changes.

The programs are drawn by a grammar of all opcodes, with real classes among the names, and from the
bytes of real indices and archives. While they are read, every import is an error.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import io
import pathlib
import pickle
import random
import struct
import sys
import types
import zipfile
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.filesystem
import torch.distributed.checkpoint.metadata

from procpipe import SavedStateError
from procpipe.state.archives import read_archive
from procpipe.state.index import Chunk, IndexEntry, from_metadata, to_metadata
from procpipe.state.pickles import DICT, Made, Name, read_pickle, write_pickle
from tests.cases import for_each

METADATA = "torch.distributed.checkpoint.metadata"


def text(value):
    data = value.encode()
    return b"\x8c" + bytes([len(data)]) + data


def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


def slots(**values):
    """Return a state that sets attributes: None, and a dict."""
    items = b"".join(text(key) + value for key, value in values.items())
    return b"(N}(" + items + b"ut"


#: These worked on an earlier reader: they import any module, or change a class of Python's.
EXPLOITS = {
    "a module that an attribute names": b"\x80\x04"
    + name(METADATA, "MetadataIndex")
    + slots(__module__=text("this"))
    + b"b0"
    + name("this", "Metadata")
    + b".",
    "an attribute of a class of Python's": b"\x80\x04"
    + name("pathlib", "PosixPath")
    + slots(is_dir=name("torch", "Size"))
    + b"b.",
    "an attribute of a function of torch's": b"\x80\x04"
    + name("torch.serialization", "_get_layout")
    + slots(__code__=b"N")
    + b"b.",
    "an attribute of what is made": b"\x80\x04"
    + name(METADATA, "MetadataIndex")
    + b")\x81"
    + slots(__class__=name(METADATA, "Metadata"))
    + b"b.",
    "a call": b"\x80\x04" + name("os", "mkdir") + text("pwned") + b"\x85R.",
    "a call by way of a module": b"\x80\x04" + name("pathlib", "os.mkdir") + text("p") + b"\x85R.",
    "a call of an extension": b"\x80\x04\x82\x01.",
    "a persistent id": b"\x80\x04Px\n.",
    "old classes": b"\x80\x04(ios\nmkdir\n.",
}

#: What a program might change.
SUBJECTS = [
    *(
        value
        for value in vars(torch.distributed.checkpoint.metadata).values()
        if isinstance(value, type)
    ),
    torch.distributed.checkpoint.filesystem._StorageInfo,
    *(pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.WindowsPath),
    *(torch.Size, torch.Tensor, torch.nn.Parameter, torch.device, collections.OrderedDict),
    *(torch.serialization._get_layout, torch._utils._rebuild_tensor_v2, collections.Counter),
    *(Made, Name, Chunk, IndexEntry, SavedStateError),
]


def snapshot():
    found = {}
    for subject in SUBJECTS:
        found[subject] = dict(vars(subject))
        if isinstance(subject, types.FunctionType):
            found[subject] |= {"code": subject.__code__, "defaults": subject.__defaults__}
    return found, set(sys.modules), dict(vars(builtins))


@contextlib.contextmanager
def watched():
    """Raise on any import, and if anything that pickles can name is changed."""

    def refuse(*args, **_):
        raise AssertionError(f"an import of {args[0]}")

    read_archive(memoryview(bytearray(saved(torch.ones(1)))))  # imports what the first use needs
    before, original = snapshot(), builtins.__import__
    builtins.__import__ = refuse
    try:
        yield
    finally:
        builtins.__import__ = original
    assert snapshot() == before


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def an_index():
    whole = {"a.b": (torch.float32, (3, 4)), "a.c": (torch.bfloat16, ()), "d": (None, ())}
    entries = {
        key: IndexEntry(dtype, shape, (Chunk((0,) * len(shape), shape, "stage-0/x", 10 * k, 7),))
        for k, (key, (dtype, shape)) in enumerate(whole.items())
    }
    return entries, to_metadata(entries)


def test_an_index_of_torch_is_read():
    entries, data = an_index()

    assert from_metadata(data) == entries
    of_torch = pickle.loads(data)
    assert isinstance(of_torch, torch.distributed.checkpoint.metadata.Metadata)
    assert from_metadata(pickle.dumps(of_torch)) == entries


def test_an_index_is_written_with_the_values_that_torch_writes():
    """Every field of torch's classes has the value that torch would give it."""
    of_torch = torch.distributed.checkpoint.metadata
    found = pickle.loads(an_index()[1])

    properties = of_torch.TensorProperties.create_from_tensor(torch.empty(3, 4))
    if hasattr(properties, "strides"):
        properties.strides = None  # from torch 2.15 on, where it may be unknown
    chunk = of_torch.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([3, 4]))
    assert found.state_dict_metadata["a.b"] == of_torch.TensorStorageMetadata(
        properties, torch.Size([3, 4]), [chunk]
    )
    assert found.state_dict_metadata["d"] == of_torch.BytesStorageMetadata()
    assert found.storage_meta == of_torch.StorageMeta()
    filesystem = torch.distributed.checkpoint.filesystem
    assert found.version == filesystem.CURRENT_DCP_VERSION
    places = {("a.b", (0, 0)): 0, ("a.c", ()): 10, ("d", None): 20}
    assert found.storage_data == {
        of_torch.MetadataIndex(*index): filesystem._StorageInfo("stage-0/x", offset, 7)
        for index, offset in places.items()
    }
    assert found.planner_data == {"a.b": ("a", "b"), "a.c": ("a", "c"), "d": ("d",)}


def test_python_reads_what_is_written():
    value: list[Any] = [None, True, -1, 0, 255, 1 << 40, -(1 << 70), "é" * 300, ("a", []), "a", ()]
    data = write_pickle(Made(DICT, items=[("key", value), ("a", Made(DICT))]))

    assert pickle.loads(data) == {"key": value, "a": {}}


@pytest.mark.parametrize(("more", "is_known"), [((), True), (((4, 1),), True), ((1, 2), False)])
def test_the_properties_of_a_tensor_in_several_versions_of_torch(monkeypatch, more, is_known):
    """From 2.15 on there is a sixth, its strides; other forms are refused."""
    kind = torch.distributed.checkpoint.metadata.TensorProperties
    original = kind.__getstate__
    monkeypatch.setattr(kind, "__getstate__", lambda self: (*original(self)[:5], *more))
    entries, data = an_index()
    data = pickle.dumps(pickle.loads(data))
    if is_known:
        assert from_metadata(data) == entries
    else:
        with pytest.raises(
            SavedStateError, match=r"a\.b: its TensorProperties have a form that is"
        ):
            from_metadata(data)


@pytest.mark.parametrize("program", EXPLOITS.values(), ids=EXPLOITS)
def test_known_exploits_do_nothing(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    archive = zipped(program)
    with watched():
        assert read_and_count(from_metadata, program) == 0
        assert read_and_count(read_archive, memoryview(bytearray(archive))) == 0
    assert list(tmp_path.iterdir()) == []


def zipped(data):
    """Return an archive with this data.pkl, and the bytes of a tensor."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/data/0", bytes(64))
    return file.getvalue()


# -- random programs -----------------------------------------------------------------------------

NAMES = [
    *(
        (METADATA, kind)
        for kind in ("Metadata", "MetadataIndex", "TensorProperties", "StorageMeta")
    ),
    *((METADATA, kind) for kind in ("TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("torch", kind) for kind in ("Size", "float32", "FloatStorage", "device", "Tensor")),
    *(("torch._utils", f"_rebuild_{kind}") for kind in ("tensor_v2", "tensor_v3", "parameter")),
    ("torch._tensor", "_rebuild_from_type_v2"),
    *(("collections", kind) for kind in ("OrderedDict", "Counter")),
    *(("builtins", kind) for kind in ("set", "complex", "bytearray", "eval", "getattr")),
    *(("pathlib", kind) for kind in ("PosixPath", "os.system")),
    *(
        ("os", "system"),
        ("this", "s"),
        ("_codecs", "encode"),
        ("torch.serialization", "_get_layout"),
    ),
]
WORDS = [
    "__module__", "__class__", "__dict__", "__setstate__", "__code__", "is_dir", "version",
    "state_dict_metadata", "storage_data", "storage", "0", "cpu", "torch.strided", "latin1",
    "this", "fqn",
]  # fmt: skip


def program(draw):
    """Return a random program: mostly one that a pickler might have written."""

    def value(depth):
        kind = draw.randrange(17) if depth < 4 else draw.randrange(8)
        inner = [value(depth + 1) for _ in range(draw.randrange(4))] if kind > 8 else []
        match kind:
            case 0:
                return draw.choice([b"N", b"\x88", b"\x89", b")", b"]", b"}", b"\x8f"])
            case 1:
                return b"K" + bytes([draw.randrange(4)])
            case 2:
                return b"J" + struct.pack("<i", draw.randrange(-(1 << 31), 1 << 31))
            case 3 | 4:
                return text(draw.choice(WORDS))
            case 5 | 6:
                return name(*draw.choice(NAMES))
            case 7:
                return b"h" + bytes([draw.randrange(5)])
            case 8:
                return b"\x8a\x09" + draw.randbytes(9)
            case 9:
                return b"(" + b"".join(inner) + b"t"
            case 10:
                return b"](" + b"".join(inner) + b"e"
            case 11:
                return b"}(" + b"".join(inner + inner[: len(inner) % 2]) + b"u"
            case 12:
                return value(depth + 1) + b"\x94"
            case 13:
                return name(*draw.choice(NAMES)) + b"(" + b"".join(inner) + b"tR"
            case 14:
                return name(*draw.choice(NAMES)) + b")\x81" + value(depth + 1) + b"b"
            case 15:
                state = slots(**{draw.choice(WORDS): value(depth + 1)})
                return draw.choice([name(*draw.choice(NAMES)), value(depth + 1)]) + state + b"b"
            case _:
                return value(depth + 1) + b"Q"

    data = bytearray(b"\x80\x04" + value(0) + b".")
    for _ in range(draw.choice([0, 0, 1, 3])):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


def mutated(draw, data):
    data = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5])):
        at = draw.randrange(len(data))
        match draw.randrange(4):
            case 0:
                data[at] = draw.randrange(256)
            case 1:
                data[at] ^= 1 << draw.randrange(8)
            case 2:
                del data[at : at + draw.randrange(1, 9)]
            case _:
                data[at:at] = draw.choice([*EXPLOITS.values()])[2:-1]
        if not data:
            break
    return bytes(data)


def read_and_count(read, data):
    try:
        read(data)
    except SavedStateError:
        return 0
    return 1


def test_random_programs_change_nothing_outside():
    draw = random.Random(4)
    allowed = {Name(*names) for names in NAMES}
    num_read = 0
    programs = [program(draw) for _ in range(6000)]
    archives = [memoryview(bytearray(zipped(data))) for data in programs[::3]]
    with watched():
        for data in programs:
            num_read += read_and_count(lambda data: read_pickle(data, allowed), data)
            read_and_count(from_metadata, data)
        for archive in archives:
            num_read += read_and_count(read_archive, archive)
    assert num_read > 1000  # not all are refused


def test_changed_indices_and_archives_change_nothing_outside():
    draw = random.Random(5)
    _, index = an_index()
    values = {"a": [torch.ones(3), (1, None)], "b": torch.nn.Linear(2, 2).state_dict(), 3: b"x"}
    archive = saved(values)
    with watched():
        for _ in range(3000):
            read_and_count(from_metadata, mutated(draw, index))
            read_and_count(read_archive, memoryview(bytearray(mutated(draw, archive))))


# -- limits --------------------------------------------------------------------------------------


def test_pickles_that_grow_without_end_are_refused():
    doubled = b"\x80\x04)" + b"".join(b"\x94h" + bytes([k]) + b"\x86" for k in range(100)) + b"."
    with pytest.raises(SavedStateError, match="holds more than 10000000 values"):
        read_archive(memoryview(bytearray(zipped(doubled))))
    nested = b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b"."
    with pytest.raises(SavedStateError, match="nested in more than 200"):
        read_archive(memoryview(bytearray(zipped(nested))))
    of_itself = b"\x80\x04]\x94h\x00a."
    with pytest.raises(SavedStateError, match="nested in more than 200"):
        read_archive(memoryview(bytearray(zipped(of_itself))))
    with pytest.raises(SavedStateError, match="expected 1099511627776 bytes"):
        read_pickle(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".", ())


def test_errors_do_not_show_large_values():
    """The whole text of such a value would need too much time and memory."""
    doubled = b")" + b"".join(b"\x94h" + bytes([k]) + b"\x86" for k in range(100))
    nested = b")" + b"\x85" * 100_000
    number = b"\x8b" + struct.pack("<I", 10_000) + b"\x7f" * 10_000
    kind = b"ctorch.distributed.checkpoint.metadata\n"
    for large in (doubled, nested, number):
        key = b"}" + text("state_dict_metadata") + b"}" + large + b"Ns" + b"s"
        key += text("storage_data") + b"}s"
        with pytest.raises(SavedStateError, match=r"one that is not a text: a (tuple|int)"):
            from_metadata(b"\x80\x04" + kind + b"Metadata\n)\x81" + key + b"b.")
        tensor = b"ctorch._tensor\n_rebuild_from_type_v2\n(" + large + b"NNNtR."
        with pytest.raises(SavedStateError, match="a tensor of the type a NoneType"):
            read_archive(memoryview(bytearray(zipped(b"\x80\x04" + tensor))))


def test_a_name_is_compared_as_it_is():
    """What a backslash begins is not replaced, as pickletools would do."""
    allowed = {Name("torch", "Size")}
    assert read_pickle(b"\x80\x02ctorch\nSize\n.", allowed) == Name("torch", "Size")
    with pytest.raises(SavedStateError, match=r"x63h\.Size' is not allowed here"):
        read_pickle(b"\x80\x02ctor\\x63h\nSize\n.", allowed)


def test_a_pickle_is_described_by_its_types_and_items():
    data = pickle.dumps({"a": [1, (2.5, "x")], "b": {3}}, protocol=4)
    found = read_pickle(data, ())
    assert found.of == DICT
    assert found.items[0] == ("a", [1, (2.5, "x")])
    assert found.items[1][1].items == [3]


# -- archives ------------------------------------------------------------------------------------

VALUES = [
    *(None, True, -5, 2**80, 1.5, 1j, "\u00e9\ud800", "x" * 300, b"\x00\xff", b""),
    *(bytearray(b"a\xff"), [1, (2, [])], {1: 2, (1, "a"): None}, {1, 2}, set()),
    *(collections.Counter("hello"), torch.Size([1, 2]), torch.device("cuda", 1)),
    *(torch.float8_e4m3fn, collections.OrderedDict(a=1)),
    *(torch.randn(3, 4).t(), torch.ones(()), torch.empty(0, 3), torch.arange(10)[::3]),
    *(torch.zeros(1).expand(5), torch.nn.Parameter(torch.ones(3), False), torch.ones(2).bool()),
    *(torch.ones(2, requires_grad=True), torch.tensor([1 + 2j]).conj(), torch.ones(3).bfloat16()),
    *(torch.tensor([1 + 2j]).conj().imag, torch.ones(3, dtype=torch.uint16), tuple(range(625))),
    torch.empty(0, 3, requires_grad=True),
    torch.nn.BatchNorm1d(2).state_dict(),
]  # fmt: skip


def assert_equal(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.requires_grad) == (theirs.dtype, theirs.requires_grad)
        assert ours.tolist() == theirs.tolist()
        assert ours.shape == theirs.shape
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            assert_equal(ours[key], theirs[key])
    elif isinstance(ours, (list, tuple)):
        for our, their in zip(ours, theirs, strict=True):
            assert_equal(our, their)
    else:
        assert ours == theirs


@for_each("value", VALUES, ids=[f"{k}" for k in range(len(VALUES))])
def test_what_torch_saves_is_read(value):
    assert_equal(read_archive(memoryview(bytearray(saved(value)))), value)


def test_other_types_are_refused():
    for value in (torch.ones(2).to_sparse(), print, frozenset([1]), pathlib.Path("x")):
        with pytest.raises(SavedStateError, match="is not allowed here"):
            read_archive(memoryview(bytearray(saved(value))))
    state_dict = read_archive(memoryview(bytearray(saved(torch.nn.BatchNorm1d(2).state_dict()))))
    assert state_dict._metadata[""] == {"version": 2}
    with pytest.raises(SavedStateError, match="not an archive of torch"):
        read_archive(memoryview(bytearray(pickle.dumps(1))))
