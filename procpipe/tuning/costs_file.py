"""The costs of a model's layers as a text, so that a plan can be made where they were not measured.

    {
      "procpipe layer costs": 1,                     the version of the format
      "device": "NVIDIA H100",                       where they were measured, for people
      "batch": 64,                                   samples in a mini-batch
      "samples": [2, 16],                            the sizes that were measured
      "link": {"latency_s": 2e-05, "bytes_per_s": 2e10},
      "input_bytes": [8192, 65536],                  a number for each size, here and below
      "target_bytes": [16, 128],
      "start_s": [1e-05, 5e-05],                     of any forward and any backward task
      "layers": [
        {"name": "0", "type": "Linear",
         "forward_s": [0.001, 0.004], "backward_s": [0.002, 0.008], "output_bytes": [4096, 32768],
         "parameter_bytes": 1048576, "trained_bytes": 1048576},
        …
      ],
      "loss": {"name": "loss_fn", …},                as a layer
      "skips": [{"source": 0, "destinations": [5], "tensor_bytes": [4096, 32768]}],
      "shared": [[0, 5]]                             layers that share a parameter, first and last
    }

A layer needs a name, ``forward_s``, ``backward_s`` and ``output_bytes``; of the rest, what
``layers.py`` says of each holds if it is left out, or null. A text written by hand will do:
whatever is wrong is told with its place.

Knows only the form of the numbers.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from procpipe.tuning.model import Layer, Link, Model, Skip

FORMAT = "procpipe layer costs"
VERSION = 1

T = TypeVar("T")
N = TypeVar("N", int, float)

#: More seconds or bytes than anything has; sums of less stay finite.
_TOO_MANY = 1 << 63

_NEEDED = ("forward_s", "backward_s", "output_bytes")
_NO_NUMBERS: tuple[float, ...] = ()
_COUNTS = ("parameter_bytes", "trained_bytes")
_OPTIONAL = tuple(
    field.name
    for field in fields(Layer)
    if field.type == "tuple[float, ...]" and field.name not in _NEEDED
)


@dataclass(frozen=True)
class Measured:
    """What a file of costs holds.

    Attributes:
        model: the costs.
        batch: samples in a mini-batch.
        link: what carries messages.
        device: where it was measured.
    """

    model: Model
    batch: int
    link: Link
    device: str = ""


def to_text(measured: Measured) -> str:
    """Write costs as JSON; ``from_text`` reads it back."""
    model = asdict(measured.model)
    link = {"latency_s": measured.link.latency_s}
    if math.isfinite(measured.link.bytes_per_s):  # JSON has no infinity
        link["bytes_per_s"] = measured.link.bytes_per_s
    whole = {
        FORMAT: VERSION,
        "device": measured.device,
        "batch": measured.batch,
        "samples": model["samples"],
        "link": link,
        "input_bytes": model["input_bytes"],
        "target_bytes": model["target_bytes"],
        "start_s": model["start_s"],
        "layers": [_without_nothing(layer) for layer in model["layers"]],
        "loss": _without_nothing(model["loss"]) if model["loss"] else None,
        "skips": [_without_nothing(skip) for skip in model["skips"]],
        "shared": model["shared"],
    }
    return json.dumps(_without_nothing(whole), indent=1) + "\n"


def from_text(text: str) -> Measured:
    """Read costs from JSON.

    Raises:
        ValueError: the text is not of this format; says where and why.
    """
    try:
        whole = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("it is not of this format: it is nested too deeply") from None
    if not isinstance(whole, dict) or FORMAT not in whole:
        raise ValueError(f'it has no "{FORMAT}": {VERSION} at its top')
    version = whole.pop(FORMAT)
    if version != VERSION or isinstance(version, bool):
        raise ValueError(f"it is of another version than {VERSION}, which this procpipe reads")
    found = _Object(whole, "")
    samples = found.take("samples", _sizes)
    numbers = _Numbers(len(samples))
    layers = found.take("layers", _list_of(lambda value, at: _layer(value, at, numbers)))
    if not layers:
        raise ValueError("layers: there is none")
    model = Model(
        samples,
        layers,
        found.take("loss", lambda value, at: _layer(value, at, numbers), None),
        found.take("skips", _list_of(lambda v, at: _skip(v, at, numbers, len(layers))), ()),
        found.take("input_bytes", numbers, _NO_NUMBERS),
        found.take("target_bytes", numbers, _NO_NUMBERS),
        found.take("start_s", _pair, (0.0, 0.0)),
        found.take("shared", _list_of(lambda value, at: _shared(value, at, len(layers))), ()),
    )
    link = found.take("link", _link, Link())
    batch = found.take("batch", _count, samples[-1])
    device = found.take("device", _text, "")
    found.close()
    return Measured(model, batch, link, device)


class _Object:
    """Reads the entries of a JSON object one by one; none may be left over."""

    def __init__(self, value: Any, at: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{at}: {_shown(value)} is not an object in braces")
        self._left = dict(value)
        self._at = at

    def take(self, name: str, read: Callable[[Any, str], T], *default: T) -> T:
        """Read an entry; it must be there, and not null, unless there is a default."""
        at = f"{self._at}.{name}" if self._at else name
        if default and self._left.get(name) is None:
            self._left.pop(name, None)
            return default[0]
        if name not in self._left:
            raise ValueError(f"{at} is missing")
        return read(self._left.pop(name), at)

    def close(self) -> None:
        """Refuse what was not read."""
        if self._left:
            names = ", ".join(map(repr, self._left))
            raise ValueError(f"{self._at or 'the top'}: there is no such entry as {names}")


class _Numbers:
    """Reads a list with a number from 0 for each size that was measured."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __call__(self, value: Any, at: str) -> tuple[float, ...]:
        if not isinstance(value, list) or len(value) != self._count:
            raise ValueError(f"{at}: {_shown(value)} is not a list of {self._count} numbers")
        return tuple(_number(number, at) for number in value)


def _layer(value: Any, at: str, numbers: _Numbers) -> Layer:
    found = _Object(value, at)
    entries: dict[str, Any] = {
        "name": found.take("name", _text),
        "type": found.take("type", _text, ""),
        "is_in_place": found.take("is_in_place", _truth, False),
    }
    entries |= {name: found.take(name, numbers) for name in _NEEDED}
    entries |= {name: found.take(name, numbers, _NO_NUMBERS) for name in _OPTIONAL}
    entries |= {name: found.take(name, _natural, 0) for name in _COUNTS}
    found.close()
    for part, whole in (("trained_bytes", "parameter_bytes"), ("input_gradient_s", "backward_s")):
        if _exceeds(entries[part], entries[whole]):
            raise ValueError(
                f"{at}.{part}: {_shown(entries[part])} is more than {whole}, "
                f"{_shown(entries[whole])}, of which it is a part"
            )
    return Layer(**entries)


def _exceeds(part: Any, whole: Any) -> bool:
    if isinstance(part, tuple):
        return any(map(operator.gt, part, whole))
    return bool(part > whole)


def _shared(value: Any, at: str, num_layers: int) -> tuple[int, int]:
    found = _list_of(_natural)(value, at)
    if len(found) != 2 or not found[0] < found[1] < num_layers:
        raise ValueError(f"{at}: {_shown(value)} are not two of {num_layers} layers in order")
    return found[0], found[1]


def _skip(value: Any, at: str, numbers: _Numbers, num_layers: int) -> Skip:
    found = _Object(value, at)
    source = found.take("source", _natural)
    destinations = found.take("destinations", _list_of(_natural))
    skip = Skip(
        source,
        destinations,
        found.take("tensor_bytes", numbers),
        found.take("kept_bytes", numbers, _NO_NUMBERS),
    )
    found.close()
    if not destinations:
        raise ValueError(f"{at}.destinations: there is none, so nothing is sent")
    if not all(source < destination < num_layers for destination in destinations):
        raise ValueError(f"{at}: layers {destinations} do not come after layer {source}")
    return skip


def _link(value: Any, at: str) -> Link:
    found = _Object(value, at)
    link = Link(found.take("latency_s", _number, 0.0), found.take("bytes_per_s", _number, math.inf))
    found.close()
    if link.bytes_per_s < 1:
        raise ValueError(
            f"{at}.bytes_per_s: at {link.bytes_per_s:g} bytes a second nothing arrives"
        )
    return link


def _pair(value: Any, at: str) -> tuple[float, float]:
    first, second = _Numbers(2)(value, at)
    return first, second


def _list_of(read: Callable[[Any, str], T]) -> Callable[[Any, str], tuple[T, ...]]:
    def read_all(value: Any, at: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise ValueError(f"{at}: {_shown(value)} is not a list")
        return tuple(read(entry, f"{at}[{k}]") for k, entry in enumerate(value))

    return read_all


def _sizes(value: Any, at: str) -> tuple[int, ...]:
    sizes = _list_of(_count)(value, at)
    if not sizes or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"{at}: {_shown(value)} are not sizes in ascending order, at least one")
    return sizes


def _number(value: Any, at: str) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        raise ValueError(f"{at}: {_shown(value)} is not a finite number from 0")
    return float(_not_too_many(value, at))


def _natural(value: Any, at: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{at}: {_shown(value)} is not a whole number from 0")
    return _not_too_many(value, at)


def _not_too_many(value: N, at: str) -> N:
    if value >= _TOO_MANY:
        raise ValueError(f"{at}: {_shown(value)} is too large to be right")
    return value


def _count(value: Any, at: str) -> int:
    if not (count := _natural(value, at)):
        raise ValueError(f"{at}: must be at least 1")
    return count


def _text(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{at}: {_shown(value)} is not a text")
    return value


def _truth(value: Any, at: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{at}: {_shown(value)} is neither true nor false")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _without_nothing(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is empty: reading it gives the same."""
    return {name: value for name, value in entries.items() if value not in ((), [], None, "")}
