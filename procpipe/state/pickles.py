"""Reads and writes pickles of plain values and inert records; nothing in a pickle is executed.

    GLOBAL m n            Name(m, n), if it is a name that is allowed; nothing is imported
    REDUCE, NEWOBJ        Made(name, arguments); nothing is called
    BUILD                 the record's state; nothing is set anywhere else
    SETITEM, dict, set    the record's items, as a list; nothing is hashed

No class, function or module is reached from here; the caller makes objects of checked records.
Opcodes that neither an index nor ``torch.save`` needs are refused. Time and memory are proportional
to the length of the pickle. Standard library only: ``pickletools`` decodes the opcodes.
"""

from __future__ import annotations

import io
import itertools
import pickletools
import struct
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from procpipe.errors import SavedStateError


@dataclass(frozen=True)
class Name:
    """Stands for a class, a function or a constant of a module."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Made:
    """Stands for the result of a class or function."""

    of: Name
    args: tuple[Any, ...] = ()
    state: Any = None  # to be set on the result; None for nothing
    items: list[Any] = field(default_factory=list)  # pairs of key and value, or members of a set


#: Stand for what a pickle makes without a name.
DICT, SET, PERSISTENT = Name("", "dict"), Name("", "set"), Name("", "persistent id")

_Step = Callable[["_Machine", Any], None]

#: The longest text from a file in an error.
_SHOWN_CHARACTERS = 200


def read_pickle(data: bytes | memoryview, allowed: Container[Name]) -> Any:
    """Return what a pickle describes, which may use the allowed names.

    Returns:
        None, a bool, int, float, str, bytes, tuple, list, :class:`Name` or :class:`Made`, nested;
        lists may hold themselves.

    Raises:
        SavedStateError: it is damaged, or uses another name or opcode.
    """
    machine = _Machine(allowed)
    try:
        for machine.at, name, argument in _opcodes(data):
            _STEPS[name](machine, argument)
    except SavedStateError:
        raise
    except (IndexError, ValueError) as error:
        raise SavedStateError(f"the pickle is damaged after byte {machine.at}: {error}") from None
    if machine.outer or len(machine.stack) != 1:
        raise SavedStateError(f"the pickle ends with {len(machine.stack)} values instead of one")
    return machine.stack[0]


def shown(record: Any) -> str:
    """Return a short text of a record for an error.

    Not ``repr``: nested and repeated records could make its text too long for time and memory.
    """
    if type(record) is str:
        return repr(record[:_SHOWN_CHARACTERS])
    return str(record)[:_SHOWN_CHARACTERS] if type(record) is Name else f"a {type(record).__name__}"


def _opcodes(data: bytes | memoryview) -> Iterator[tuple[int, str, Any]]:
    """Yield where each opcode is, its name and its argument; that of a refused one is not read."""
    file, name = io.BytesIO(data), ""
    while name != "STOP":
        at, code = file.tell(), file.read(1)
        if code not in _OPCODES:
            raise SavedStateError(
                f"opcode 0x{code.hex()} at byte {at} is not allowed here"
                if code
                else f"the pickle is damaged: it ends at byte {at}"
            )
        name, argument = _OPCODES[code].name, _OPCODES[code].arg
        if name == "GLOBAL":  # pickletools would replace what a backslash begins
            yield at, name, [str(file.readline(), "utf-8").removesuffix("\n") for _ in range(2)]
        else:
            yield at, name, argument.reader(file) if argument else None


class _Machine:
    def __init__(self, allowed: Container[Name]) -> None:
        self.at = 0
        self.allowed = allowed
        self.stack: list[Any] = []  # of what is above the last mark
        self.outer: list[list[Any]] = []  # the stacks below each mark
        self.memo: dict[int, Any] = {}

    def mark(self) -> None:
        self.outer.append(self.stack)
        self.stack = []

    def pop_to_mark(self) -> list[Any]:
        found, self.stack = self.stack, self.outer.pop()
        return found

    def make_tuple(self) -> None:
        found = self.pop_to_mark()
        self.stack.append(tuple(found))

    def pop(self, number: int) -> list[Any]:
        """Take values from the stack, in the order in which they were made."""
        if len(self.stack) < number:
            raise SavedStateError(f"the pickle takes at byte {self.at} what it has not made")
        found = self.stack[-number:]
        del self.stack[-number:]
        return found

    def name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise SavedStateError(f"a name at byte {self.at} is not a text")
        found = Name("builtins" if module == "__builtin__" else module, name)
        if found not in self.allowed:
            raise SavedStateError(f"{shown(found)!r} is not allowed here")
        self.stack.append(found)

    def make(self) -> None:
        of, args = self.pop(2)
        if type(of) is not Name or type(args) is not tuple:
            raise SavedStateError(f"at byte {self.at} something is called that is not a name")
        self.stack.append(Made(of, args))

    def build(self) -> None:
        made, state = self.pop(2)
        if type(made) is not Made or made.of in (DICT, SET, PERSISTENT) or made.state is not None:
            raise SavedStateError(f"at byte {self.at} a value without a state is given one")
        made.state = state
        self.stack.append(made)

    def add(self, items: Iterable[Any], kind: Any) -> None:
        """Add to what is on top: ``list``, SET, or DICT and whatever else is made by a name."""
        top = self.stack[-1]
        its_kind: Any = type(top)
        if its_kind is Made:
            its_kind = top.of if top.of in (SET, PERSISTENT) else DICT
        if its_kind != kind:
            raise SavedStateError(f"at byte {self.at} items are added to a value of another type")
        (top if kind is list else top.items).extend(items)

    def set_items(self, values: list[Any]) -> None:
        self.add(zip(values[::2], values[1::2], strict=True), DICT)

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise SavedStateError(f"the pickle asks at byte {self.at} for what it has not noted")
        self.stack.append(self.memo[index])

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def start(self, protocol: int) -> None:
        if not 2 <= protocol <= 5:
            raise SavedStateError(f"the pickle is of protocol {protocol}, not of 2 to 5")


#: Opcodes whose argument is a value.
_OF_VALUES = (
    *("BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1", "LONG4"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
)

_STEPS: dict[str, _Step] = {
    **dict.fromkeys(("FRAME", "STOP"), lambda m, _: None),
    **dict.fromkeys(_OF_VALUES, lambda m, value: m.stack.append(value)),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    "MEMOIZE": lambda m, _: m.put(len(m.memo)),
    "PROTO": _Machine.start,
    "MARK": lambda m, _: m.mark(),
    "NONE": lambda m, _: m.stack.append(None),
    "NEWTRUE": lambda m, _: m.stack.append(True),
    "NEWFALSE": lambda m, _: m.stack.append(False),
    "EMPTY_TUPLE": lambda m, _: m.stack.append(()),
    "TUPLE1": lambda m, _: m.stack.append(tuple(m.pop(1))),
    "TUPLE2": lambda m, _: m.stack.append(tuple(m.pop(2))),
    "TUPLE3": lambda m, _: m.stack.append(tuple(m.pop(3))),
    "TUPLE": lambda m, _: m.make_tuple(),
    "EMPTY_LIST": lambda m, _: m.stack.append([]),
    "APPEND": lambda m, _: m.add(m.pop(1), list),
    "APPENDS": lambda m, _: m.add(m.pop_to_mark(), list),
    "EMPTY_DICT": lambda m, _: m.stack.append(Made(DICT)),
    "SETITEM": lambda m, _: m.set_items(m.pop(2)),
    "SETITEMS": lambda m, _: m.set_items(m.pop_to_mark()),
    "EMPTY_SET": lambda m, _: m.stack.append(Made(SET)),
    "ADDITEMS": lambda m, _: m.add(m.pop_to_mark(), SET),
    "GLOBAL": lambda m, pair: m.name(*pair),
    "STACK_GLOBAL": lambda m, _: m.name(*m.pop(2)),
    "REDUCE": lambda m, _: m.make(),
    "NEWOBJ": lambda m, _: m.make(),
    "BUILD": lambda m, _: m.build(),
    "BINPERSID": lambda m, _: m.stack.append(Made(PERSISTENT, tuple(m.pop(1)))),
}

_OPCODES = {op.code.encode("latin-1"): op for op in pickletools.opcodes if op.name in _STEPS}


# -- writing -------------------------------------------------------------------------------------


def write_pickle(record: Any) -> bytes:
    """Return a pickle, of protocol 2, that :func:`read_pickle` reads as this record.

    A record with arguments is made by a call of its name, one without by its ``__new__``.
    """
    return b"\x80\x02" + b"".join(_written(record, {})) + b"."


def _written(record: Any, memo: dict[Any, int]) -> Iterator[bytes]:
    """Yield the opcodes that make a record; of a str or Name that was made, what gets it again."""
    if record is None or type(record) is bool:
        yield {None: b"N", True: b"\x88", False: b"\x89"}[record]
    elif type(record) is int:
        data = record.to_bytes(record.bit_length() // 8 + 1, "little", signed=True)
        yield b"\x8a" + bytes([len(data)]) + data
    elif type(record) in (str, Name) and record in memo:
        yield b"j" + struct.pack("<I", memo[record])
    elif type(record) in (str, Name):
        if type(record) is str:
            data = record.encode("utf-8", "surrogatepass")
            yield b"X" + struct.pack("<I", len(data)) + data
        else:
            yield f"c{record.module}\n{record.name}\n".encode()
        memo[record] = len(memo)
        yield b"r" + struct.pack("<I", memo[record])
    elif type(record) in (tuple, list):
        is_tuple = type(record) is tuple
        yield b"(" if is_tuple else b"]("
        for value in record:
            yield from _written(value, memo)
        yield b"t" if is_tuple else b"e"
    else:
        if record.of == DICT:
            yield b"}"
        else:
            yield from _written(record.of, memo)
            yield from _written(record.args, memo)
            yield b"R" if record.args else b"\x81"
        if record.items:
            yield b"("
            for value in itertools.chain.from_iterable(record.items):
                yield from _written(value, memo)
            yield b"u"
        if record.state is not None:
            yield from _written(record.state, memo)
            yield b"b"
