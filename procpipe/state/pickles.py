"""Reads and writes pickles of plain values and inert records; nothing in a pickle is executed.

    GLOBAL m n            Name(m, n), if it is a name that is allowed; nothing is imported
    REDUCE, NEWOBJ        Made(name, arguments); nothing is called
    BUILD                 the record's state; nothing is set anywhere else
    SETITEM, dict, set    the record's items, as a list; nothing is hashed

No class, function or module is reached from here; the caller makes objects of checked records.
Opcodes that neither an index nor ``torch.save`` needs are refused. Time and memory are proportional
to the length of the pickle. Standard library only.

Source: ``pickletools`` describes the opcodes.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Container, Iterable
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

_Step = Callable[["_Machine"], None]

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
    machine = _Machine(memoryview(data), allowed)
    try:
        while not machine.is_done:
            opcode = machine.byte()
            step = _STEPS.get(opcode)
            if step is None:
                raise SavedStateError(
                    f"opcode {opcode:#04x} at byte {machine.at - 1} has no use here"
                )
            step(machine)
    except (IndexError, struct.error):
        raise SavedStateError(f"the pickle is damaged at byte {machine.at}") from None
    except UnicodeDecodeError as error:
        raise SavedStateError(f"a text before byte {machine.at} is damaged: {error}") from None
    if machine.marks or len(machine.stack) != 1:
        raise SavedStateError(f"the pickle ends with {len(machine.stack)} values instead of one")
    return machine.stack[0]


def shown(record: Any) -> str:
    """Return a short text of a record for an error.

    Not ``repr``: nested and repeated records could make its text too long for time and memory.
    """
    if type(record) is str:
        return repr(record[:_SHOWN_CHARACTERS])
    return str(record)[:_SHOWN_CHARACTERS] if type(record) is Name else f"a {type(record).__name__}"


class _Machine:
    def __init__(self, data: memoryview, allowed: Container[Name]) -> None:
        self.data = data
        self.at = 0
        self.allowed = allowed
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.is_done = False

    # -- reading --------------------------------------------------------------------------------

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.at:
            raise SavedStateError(f"the pickle ends within a value of {size} bytes")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def line(self) -> str:
        start = self.at
        while self.byte() != ord("\n"):
            pass
        return str(self.data[start : self.at - 1], "utf-8")

    # -- the stack ------------------------------------------------------------------------------

    def pop(self) -> Any:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise SavedStateError(f"the pickle takes at byte {self.at} what it has not made")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def make_tuple(self, size: int) -> None:
        found = [self.pop() for _ in range(size)]
        self.stack.append(tuple(reversed(found)))

    def name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise SavedStateError(f"a name at byte {self.at} is no text")
        found = Name("builtins" if module == "__builtin__" else module, name)
        if found not in self.allowed:
            raise SavedStateError(f"there is no use for {shown(found)!r} here")
        self.stack.append(found)

    def make(self) -> None:
        args, of = self.pop(), self.pop()
        if type(of) is not Name or type(args) is not tuple:
            raise SavedStateError(f"at byte {self.at} something is called that is no name")
        self.stack.append(Made(of, args))

    def make_persistent(self) -> None:
        self.stack.append(Made(PERSISTENT, (self.pop(),)))

    def build(self) -> None:
        state, made = self.pop(), self.top()
        if type(made) is not Made or made.of in (DICT, SET, PERSISTENT) or made.state is not None:
            raise SavedStateError(f"at byte {self.at} a state is set where none belongs")
        made.state = state

    def top(self) -> Any:
        self.stack.append(self.pop())
        return self.stack[-1]

    def append(self, values: list[Any]) -> None:
        target = self.top()
        if type(target) is not list:
            raise SavedStateError(f"at byte {self.at} something is appended to what is no list")
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.top()
        if type(target) is not Made or target.of in (SET, PERSISTENT) or len(values) % 2:
            raise SavedStateError(f"at byte {self.at} items are set where none belong")
        target.items += zip(values[::2], values[1::2], strict=True)

    def add(self, values: list[Any]) -> None:
        target = self.top()
        if type(target) is not Made or target.of != SET:
            raise SavedStateError(f"at byte {self.at} something is added to what is no set")
        target.items += values

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise SavedStateError(f"the pickle asks at byte {self.at} for what it has not noted")
        self.stack.append(self.memo[index])

    def put(self, index: int) -> None:
        self.memo[index] = self.top()

    def start(self) -> None:
        protocol = self.byte()
        if not 2 <= protocol <= 5:
            raise SavedStateError(f"the pickle is of protocol {protocol}, not of 2 to 5")

    def end(self) -> None:
        self.is_done = True


def _push(value: Callable[[_Machine], Any]) -> _Step:
    return lambda m: m.stack.append(value(m))


def _text(size: Callable[[_Machine], int]) -> _Step:
    return lambda m: m.stack.append(str(m.take(size(m)), "utf-8", "surrogatepass"))


def _bytes(size: Callable[[_Machine], int]) -> _Step:
    return lambda m: m.stack.append(bytes(m.take(size(m))))


def _integer(size: Callable[[_Machine], int]) -> _Step:
    return lambda m: m.stack.append(int.from_bytes(m.take(size(m)), "little", signed=True))


_STEPS: dict[int, _Step] = {
    ord(code): step
    for code, step in {
        "\x80": _Machine.start,
        "\x95": lambda m: m.take(8),  # a frame: only says how far to read ahead
        ".": _Machine.end,
        "(": lambda m: m.marks.append(len(m.stack)),
        "N": _push(lambda m: None),
        "\x88": _push(lambda m: True),
        "\x89": _push(lambda m: False),
        "J": _push(lambda m: m.number("<i")),
        "K": _push(_Machine.byte),
        "M": _push(lambda m: m.number("<H")),
        "G": _push(lambda m: m.number(">d")),
        "\x8a": _integer(_Machine.byte),
        "\x8b": _integer(_Machine.u32),
        "X": _text(_Machine.u32),
        "\x8c": _text(_Machine.byte),
        "\x8d": _text(_Machine.u64),
        "B": _bytes(_Machine.u32),
        "C": _bytes(_Machine.byte),
        "\x8e": _bytes(_Machine.u64),
        ")": _push(lambda m: ()),
        "\x85": lambda m: m.make_tuple(1),
        "\x86": lambda m: m.make_tuple(2),
        "\x87": lambda m: m.make_tuple(3),
        "t": lambda m: m.stack.append(tuple(m.pop_to_mark())),
        "]": _push(lambda m: []),
        "a": lambda m: m.append([m.pop()]),
        "e": lambda m: m.append(m.pop_to_mark()),
        "}": _push(lambda m: Made(DICT)),
        "s": lambda m: m.set_items([m.pop(), m.pop()][::-1]),
        "u": lambda m: m.set_items(m.pop_to_mark()),
        "\x8f": _push(lambda m: Made(SET)),
        "\x90": lambda m: m.add(m.pop_to_mark()),
        "c": lambda m: m.name(m.line(), m.line()),
        "\x93": lambda m: m.name(*[m.pop(), m.pop()][::-1]),
        "R": _Machine.make,
        "\x81": _Machine.make,
        "b": _Machine.build,
        "Q": _Machine.make_persistent,
        "q": lambda m: m.put(m.byte()),
        "r": lambda m: m.put(m.u32()),
        "\x94": lambda m: m.put(len(m.memo)),
        "h": lambda m: m.get(m.byte()),
        "j": lambda m: m.get(m.u32()),
    }.items()
}


# -- writing -------------------------------------------------------------------------------------


def write_pickle(record: Any) -> bytes:
    """Return a pickle, of protocol 2, that :func:`read_pickle` reads as this record.

    A record with arguments is made by a call of its name, one without by its ``__new__``.
    """
    writer = _Writer()
    writer.write(record)
    return b"\x80\x02" + b"".join(writer.parts) + b"."


class _Writer:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._memo: dict[str | Name, int] = {}

    def write(self, record: Any) -> None:
        if record is None or type(record) is bool:
            self.parts.append({None: b"N", True: b"\x88", False: b"\x89"}[record])
        elif type(record) is int:
            data = record.to_bytes(record.bit_length() // 8 + 1, "little", signed=True)
            self.parts += [b"\x8a", bytes([len(data)]), data]
        elif type(record) is str or type(record) is Name:
            self._write_once(record)
        elif type(record) is tuple or type(record) is list:
            is_tuple = type(record) is tuple
            self._write_all(b"(" if is_tuple else b"](", record, b"t" if is_tuple else b"e")
        else:
            self._write_made(record)

    def _write_once(self, record: str | Name) -> None:
        if record in self._memo:
            self.parts.append(b"j" + struct.pack("<I", self._memo[record]))
            return
        if isinstance(record, str):
            data = record.encode("utf-8", "surrogatepass")
            self.parts += [b"X", struct.pack("<I", len(data)), data]
        else:
            self.parts.append(f"c{record.module}\n{record.name}\n".encode())
        self.parts.append(b"r" + struct.pack("<I", len(self._memo)))
        self._memo[record] = len(self._memo)

    def _write_made(self, record: Made) -> None:
        if record.of == DICT:
            self.parts.append(b"}")
        else:
            self.write(record.of)
            self.write(record.args)
            self.parts.append(b"R" if record.args else b"\x81")
        if record.items:
            self._write_all(b"(", itertools.chain.from_iterable(record.items), b"u")
        if record.state is not None:
            self.write(record.state)
            self.parts.append(b"b")

    def _write_all(self, start: bytes, records: Iterable[Any], end: bytes) -> None:
        self.parts.append(start)
        for record in records:
            self.write(record)
        self.parts.append(end)
