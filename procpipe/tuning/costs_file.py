"""The costs of a model's layers as a text, for planning on another machine.

    {
      "procpipe layer costs": 1,                     the version of the format
      "device": "NVIDIA H100",                       where they were measured
      "batch": 64,                                   samples in a mini-batch
      "samples": [2, 16],                            sizes of the measured micro-batches
      "link": {"latency_s": 2e-05, "bytes_per_s": 2e10},
      "replica_link": {"bytes_per_s": 1e9},          between replicas; if left out, as link
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
      "ties": [{"name": "0.weight", "layers": [0, 5], "num_bytes": 1048576, "is_trained": true}],
      "shared": [[0, 5]]                             layers to keep together, first and last
    }

The entries of a layer, a skip and a tie are the fields of ``model.Layer``, ``model.Skip`` and
``model.TiedLayers``. Entries with a default may be left out, or null. Errors name the faulty entry.
Earlier versions wrote ``shared`` for layers that share a parameter, without its size.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from typing import Any, TypeVar

from procpipe.tuning.model import Layer, Link, Model, Skip, TiedLayers

FORMAT = "procpipe layer costs"
VERSION = 1

T = TypeVar("T")
N = TypeVar("N", int, float)

#: Reads a JSON value; the second argument is its place, for errors.
Reader = Callable[[Any, str], T]

#: A limit for seconds and bytes; sums of less stay finite.
_TOO_MANY = 1 << 63

#: The model's entries in the order in which they are written.
_ORDER = (
    *("samples", "input_bytes", "target_bytes", "start_s"),
    *("layers", "loss", "skips", "ties", "shared"),
)


@dataclass(frozen=True)
class Measured:
    """What a file of costs holds.

    Attributes:
        model: the costs.
        batch: samples in a mini-batch.
        link: what carries messages.
        device: where it was measured.
        replica_link: what carries gradients between replicas, if not the link.
    """

    model: Model
    batch: int
    link: Link
    device: str = ""
    replica_link: Link | None = None


def to_text(measured: Measured) -> str:
    """Write costs as JSON; ``from_text`` reads it back."""
    model = asdict(measured.model)
    whole = {
        FORMAT: VERSION,
        "device": measured.device,
        "batch": measured.batch,
        "link": asdict(measured.link),
        "replica_link": asdict(measured.replica_link) if measured.replica_link else None,
        **{name: model[name] for name in _ORDER},
    }
    return json.dumps(_without_empty(whole), indent=1) + "\n"


def _without_empty(value: Any) -> Any:
    """Leave out empty entries, which read as their defaults; an infinite bandwidth likewise."""
    if isinstance(value, dict):
        empty: tuple[Any, ...] = ((), [], None, "", math.inf)
        return {name: _without_empty(part) for name, part in value.items() if part not in empty}
    return [_without_empty(part) for part in value] if isinstance(value, (list, tuple)) else value


def from_text(text: str) -> Measured:
    """Read costs from JSON.

    Raises:
        ValueError: the text does not have this format; names the place and the reason.
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
    numbers = partial(_numbers, count=len(samples))
    readers: dict[str, Reader[Any]] = {**_READERS, "tuple[float, ...]": numbers}
    read_layer = partial(_layer, readers=readers)
    layers = found.take("layers", _list_of(read_layer))
    if not layers:
        raise ValueError("layers: there is none")
    num_layers = len(layers)
    model = Model(
        samples,
        layers,
        found.take("loss", read_layer, None),
        found.take("skips", _list_of(partial(_skip, readers=readers, num_layers=num_layers)), ()),
        found.take("input_bytes", numbers, ()),
        found.take("target_bytes", numbers, ()),
        found.take("start_s", _pair, (0.0, 0.0)),
        found.take("shared", _list_of(partial(_shared, num_layers=num_layers)), ()),
        found.take("ties", _list_of(partial(_tie, layers=layers)), ()),
    )
    link = found.take("link", _link, Link())
    replica_link = found.take("replica_link", _link, None)
    batch = found.take("batch", _count, samples[-1])
    device = found.take("device", _text, "")
    found.close()
    return Measured(model, batch, link, device, replica_link)


class _Object:
    """Reads the entries of a JSON object one by one; none may be left over."""

    def __init__(self, value: Any, at: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{at}: {_shown(value)} is not an object in braces")
        self._left = dict(value)
        self._at = at

    def take(self, name: str, read: Reader[T], *default: T) -> T:
        """Read an entry; without a default it is required."""
        at = f"{self._at}.{name}" if self._at else name
        if default and self._left.get(name) is None:
            self._left.pop(name, None)
            return default[0]
        if name not in self._left:
            raise ValueError(f"{at} is missing")
        return read(self._left.pop(name), at)

    def close(self) -> None:
        """Refuse entries that were not read."""
        if self._left:
            names = ", ".join(map(repr, self._left))
            raise ValueError(f"{self._at or 'the top'}: there is no such entry as {names}")


def _record(kind: type[T], value: Any, at: str, readers: Mapping[str, Reader[Any]]) -> T:
    """Read an object whose entries are the fields of a dataclass, each by its type."""
    found = _Object(value, at)
    entries = {
        field.name: found.take(
            field.name,
            readers[str(field.type)],
            *([] if field.default is MISSING else [field.default]),
        )
        for field in fields(kind)  # type: ignore[arg-type]
    }
    found.close()
    return kind(**entries)


def _layer(value: Any, at: str, readers: Mapping[str, Reader[Any]]) -> Layer:
    layer = _record(Layer, value, at, readers)
    for part, whole in (("trained_bytes", "parameter_bytes"), ("input_gradient_s", "backward_s")):
        less, more = getattr(layer, part), getattr(layer, whole)
        if any(map(operator.gt, less, more)) if isinstance(less, tuple) else less > more:
            raise ValueError(
                f"{at}.{part}: {_shown(less)} is more than {whole}, {_shown(more)}, of which it is "
                "a part"
            )
    return layer


def _skip(value: Any, at: str, readers: Mapping[str, Reader[Any]], num_layers: int) -> Skip:
    skip = _record(Skip, value, at, readers)
    if not skip.destinations:
        raise ValueError(f"{at}.destinations: there is none, so nothing is sent")
    if not all(skip.source < destination < num_layers for destination in skip.destinations):
        raise ValueError(f"{at}: layers {skip.destinations} do not come after layer {skip.source}")
    return skip


def _tie(value: Any, at: str, layers: Sequence[Layer]) -> TiedLayers:
    tie = _record(TiedLayers, value, at, _READERS)
    users = tie.layers
    if len(users) < 2 or list(users) != sorted(set(users)) or users[-1] >= len(layers):
        raise ValueError(
            f"{at}.layers: {_shown(users)} are not several of {len(layers)} layers in order"
        )
    what = "trained_bytes" if tie.is_trained else "parameter_bytes"
    for k in users:
        if (whole := getattr(layers[k], what)) < tie.num_bytes:
            raise ValueError(
                f"{at}.num_bytes: {tie.num_bytes} is more than {what} of layer {k}, {whole}, of "
                "which it is a part"
            )
    return tie


def _link(value: Any, at: str) -> Link:
    link = _record(Link, value, at, _READERS)
    if link.bytes_per_s < 1:
        raise ValueError(
            f"{at}.bytes_per_s: at {link.bytes_per_s:g} bytes a second nothing arrives"
        )
    return link


def _shared(value: Any, at: str, num_layers: int) -> tuple[int, int]:
    found = _list_of(_natural)(value, at)
    if len(found) != 2 or not found[0] < found[1] < num_layers:
        raise ValueError(f"{at}: {_shown(value)} are not two of {num_layers} layers in order")
    return found[0], found[1]


def _numbers(value: Any, at: str, count: int) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != count:
        raise ValueError(f"{at}: {_shown(value)} is not a list of {count} numbers")
    return tuple(_number(number, at) for number in value)


def _pair(value: Any, at: str) -> tuple[float, float]:
    first, second = _numbers(value, at, 2)
    return first, second


def _list_of(read: Reader[T]) -> Reader[tuple[T, ...]]:
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


#: How fields of dataclasses are read, by their types.
_READERS: Mapping[str, Reader[Any]] = {
    "str": _text,
    "bool": _truth,
    "int": _natural,
    "float": _number,
    "tuple[int, ...]": _list_of(_natural),
}
