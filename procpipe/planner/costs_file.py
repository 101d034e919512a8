"""The costs of a model's layers as a text, for planning on another machine.

docs/planning.md has an example, and describes each entry. Those of a layer, a skip and a tie are
the fields of ``model.Layer``, ``model.Skip`` and ``model.TiedLayers``. Entries with a default may
be left out, or null. Errors name the faulty entry.
"""

from __future__ import annotations

import json
import math
import operator
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from procpipe.planner.model import Layer, Link, Model, TiedLayers

FORMAT = "procpipe layer costs"
VERSION = 1

#: A limit for seconds and bytes; sums of less stay finite.
_TOO_MANY = 1 << 63

#: The model's entries in the order in which they are written.
_ORDER = (
    *("samples", "input_bytes", "target_bytes", "start_s"),
    *("layers", "loss", "skips", "ties", "shared"),
)


@dataclass(frozen=True)
class Measured:
    """What a file of costs holds."""

    model: Model  # the costs
    batch: int  # samples in a mini-batch
    link: Link  # what carries messages
    device: str = ""  # where it was measured
    replica_link: Link | None = None  # what carries gradients between replicas, if not the link


def to_text(measured: Measured) -> str:
    """Write costs as JSON; ``from_text`` reads it back."""
    rest = asdict(measured)
    device, model = rest.pop("device"), rest.pop("model")
    whole = {FORMAT: VERSION, "device": device, **rest, **{name: model[name] for name in _ORDER}}
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
    if "samples" not in whole:
        raise ValueError("samples is missing")
    samples = _read(tuple[int, ...], whole["samples"], "samples", 0)
    if not samples or list(samples) != sorted(set(samples)):
        raise _fault("samples", samples, "are not sizes in ascending order, at least one")
    _check_count(samples[0], "samples[0]")
    found: _Whole = _read(_Whole, whole, "", len(samples))
    model = Model(**{field.name: getattr(found, field.name) for field in fields(Model)})
    _check_model(model)
    batch = samples[-1] if found.batch is None else found.batch
    _check_count(batch, "batch")
    link = found.link or Link()
    for place, one in (("link", link), ("replica_link", found.replica_link or link)):
        if one.bytes_per_s < 1:
            raise ValueError(
                f"{place}.bytes_per_s: at {one.bytes_per_s:g} bytes a second nothing arrives"
            )
    return Measured(model, batch, link, found.device, found.replica_link)


@dataclass(frozen=True)
class _Whole(Model):
    """All entries of the text, by their names there."""

    device: str = ""
    batch: int | None = None
    link: Link | None = None
    replica_link: Link | None = None


def _read(kind: Any, value: Any, at: str, num_sizes: int) -> Any:
    """Read a value by its type, in which a ``tuple[float, ...]`` has ``num_sizes`` numbers."""
    if is_dataclass(kind):
        return _read_object(kind, value, at, num_sizes)
    args = get_args(kind)
    if get_origin(kind) is not tuple:
        return _read(args[0], value, at, num_sizes) if args else _scalar(kind, value, at)
    is_fixed = args[-1] is not ...
    count = len(args) if is_fixed else num_sizes
    if not isinstance(value, list):
        raise _fault(at, value, "is not a list")
    if (is_fixed or args[0] is float) and len(value) != count:
        raise _fault(at, value, f"is not a list of {count} numbers")
    is_number = args[0] is float  # of which all have the place of the list
    return tuple(
        _read(args[0], entry, at if is_number else f"{at}[{k}]", num_sizes)
        for k, entry in enumerate(value)
    )


def _read_object(kind: Any, value: Any, at: str, num_sizes: int) -> Any:
    """Read a dataclass from a JSON object, which has no other entries."""
    if not isinstance(value, dict):
        raise _fault(at, value, "is not an object in braces")
    entries, kinds = {}, get_type_hints(kind)
    for name, default in ((field.name, field.default) for field in fields(kind)):
        place = f"{at}.{name}" if at else name
        if value.get(name) is None and default is not MISSING:
            continue
        if name not in value:
            raise ValueError(f"{place} is missing")
        entries[name] = _read(kinds[name], value[name], place, num_sizes)
    if others := ", ".join(repr(name) for name in value if name not in kinds):
        raise ValueError(f"{at or 'the top'}: there is no such entry as {others}")
    return kind(**entries)


def _check_model(model: Model) -> None:
    """Raise ValueError if entries that are right by themselves do not go together."""
    num_layers = len(model.layers)
    if not num_layers:
        raise ValueError("layers: there is none")
    for k, layer in enumerate(model.layers):
        _check_layer(layer, f"layers[{k}]")
    if model.loss is not None:
        _check_layer(model.loss, "loss")
    for k, skip in enumerate(model.skips):
        if not skip.destinations:
            raise ValueError(f"skips[{k}].destinations: there is none, so nothing is sent")
        if not all(skip.source < destination < num_layers for destination in skip.destinations):
            raise ValueError(
                f"skips[{k}]: layers {skip.destinations} do not come after layer {skip.source}"
            )
    for k, pair in enumerate(model.shared):
        if not pair[0] < pair[1] < num_layers:
            raise _fault(f"shared[{k}]", pair, f"are not two of {num_layers} layers in order")
    for k, tie in enumerate(model.ties):
        _check_tie(tie, f"ties[{k}]", model.layers)


def _check_layer(layer: Layer, at: str) -> None:
    for part, whole in (("trained_bytes", "parameter_bytes"), ("input_gradient_s", "backward_s")):
        less, more = getattr(layer, part), getattr(layer, whole)
        if any(map(operator.gt, less, more)) if isinstance(less, tuple) else less > more:
            excess = f"is more than {whole}, {_shown(more)}, of which it is a part"
            raise _fault(f"{at}.{part}", less, excess)


def _check_tie(tie: TiedLayers, at: str, layers: tuple[Layer, ...]) -> None:
    users = tie.layers
    if len(users) < 2 or list(users) != sorted(set(users)) or users[-1] >= len(layers):
        raise _fault(f"{at}.layers", users, f"are not several of {len(layers)} layers in order")
    what = "trained_bytes" if tie.is_trained else "parameter_bytes"
    for k in users:
        if (whole := getattr(layers[k], what)) < tie.num_bytes:
            excess = f"is more than {what} of layer {k}, {whole}, of which it is a part"
            raise _fault(f"{at}.num_bytes", tie.num_bytes, excess)


def _check_count(count: int, at: str) -> None:
    if not count:
        raise ValueError(f"{at}: must be at least 1")


#: What a value of another type is not.
_NOT = {
    str: "is not a text",
    bool: "is neither true nor false",
    int: "is not a whole number from 0",
    float: "is not a finite number from 0",
}


def _scalar(kind: Any, value: Any, at: str) -> Any:
    is_number = kind in (int, float)
    is_right = isinstance(value, (int, float) if kind is float else kind)
    if not is_right or (is_number and (isinstance(value, bool) or not 0 <= value < math.inf)):
        raise _fault(at, value, _NOT[kind])
    if is_number and value >= _TOO_MANY:
        raise _fault(at, value, "is too large to be right")
    return kind(value)


def _fault(at: str, value: Any, what: str) -> ValueError:
    return ValueError(f"{at}: {_shown(value)} {what}")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
