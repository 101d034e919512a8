"""Layers that stash and pop skip tensors, and the check that all of a model's pairs match.

    @skippable(stash=["1to3"])              @skippable(pop=["1to3"])
    class Layer1(nn.Module):                class Layer3(nn.Module):
        def forward(self, x):                   def forward(self, x):
            yield stash("1to3", x)                  skip = yield pop("1to3")
            return F.relu(x)                        return x + skip

A forward that yields is a generator; the decorator makes a plain forward of it, which passes what
is yielded to the tracker of the present context. So the layers work in a plain ``nn.Sequential``
too. torchgpipe wraps the layer in another module instead, which prefixes every name in its
``state_dict``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from types import GeneratorType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from procpipe.skip.tracker import Namespace, SkipKey, current_tracker
from procpipe.words import counted

M = TypeVar("M", bound=nn.Module)

STASHES, POPS, NAMESPACES = "_procpipe_stashes", "_procpipe_pops", "_procpipe_namespaces"
_ORIGINAL = "_procpipe_original"


@dataclass(slots=True)
class stash:  # noqa: N801 - a verb, as torchgpipe has it
    """Yield it from a forward to stash a tensor, or ``None``, under a declared name.

    Source: torchgpipe 0.0.7, ``torchgpipe.skip.stash``.
    """

    name: str
    tensor: Tensor | None

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor | None):
            raise TypeError(
                f"skip {self.name!r} is stashed as {type(self.tensor).__name__}: stash a tensor or "
                "None; several tensors have several names"
            )


class pop(NamedTuple):  # noqa: N801 - a verb, as torchgpipe has it
    """Yield it from a forward to get the tensor stashed under a declared name.

    Source: torchgpipe 0.0.7, ``torchgpipe.skip.pop``.
    """

    name: str


def skippable(
    stash: Iterable[str] | Mapping[str, int] = (), pop: Iterable[str] = ()
) -> Callable[[type[M]], type[M]]:
    """Declare which skip tensors the forward of a module class stashes and pops.

    Instances get ``isolate(namespace, *, only=None)``, which keeps their names (or only those
    given) apart from the same names of other layers, and returns the instance.

    Args:
        stash: names it stashes. A mapping says by how many layers each is popped; otherwise by
            one. Gradients from several are summed.
        pop: names it pops.

    Source: torchgpipe 0.0.7, ``torchgpipe.skip.skippable``; several pops are procpipe's.
    """
    if isinstance(stash, str | type) or isinstance(pop, str):
        raise TypeError("names come as lists: @skippable(stash=[...], pop=[...])")
    stashes = dict(stash) if isinstance(stash, Mapping) else dict.fromkeys(stash, 1)
    pops = tuple(pop)

    def declare(module_class: type[M]) -> type[M]:
        if STASHES in vars(module_class):
            raise TypeError(
                f"{module_class.__name__} is skippable already: declare other names of a subclass"
            )
        original = getattr(module_class.forward, _ORIGINAL, module_class.forward)

        @wraps(original)
        def forward(self: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
            result = original(self, *inputs, **kwargs)
            to_do = {("stash", name) for name in getattr(self, STASHES)}
            to_do |= {("pop", name) for name in getattr(self, POPS)}
            if isinstance(result, GeneratorType):
                result = _run(self, result, to_do)
            if to_do:
                left = ", ".join(f"{verb} {name!r}" for verb, name in sorted(to_do))
                raise RuntimeError(
                    f"the forward of {type(self).__name__} ended without what it declares: {left}; "
                    "yield it, and stash None if there is nothing to stash"
                )
            return result

        setattr(forward, _ORIGINAL, original)  # for a subclass that declares names of its own
        module_class.forward = forward
        setattr(module_class, STASHES, stashes)
        setattr(module_class, POPS, pops)
        module_class.isolate = _isolate  # type: ignore[attr-defined]
        return module_class

    return declare


def declared(layer: nn.Module) -> tuple[list[tuple[SkipKey, int]], list[SkipKey]]:
    """Return what a layer, modules inside it included, declares: stashes with pops, and pops."""
    stashes: list[tuple[SkipKey, int]] = []
    pops: list[SkipKey] = []
    for module in layer.modules():
        own = getattr(module, STASHES, {})
        stashes += [(_key(module, name), num_pops) for name, num_pops in own.items()]
        pops += [_key(module, name) for name in getattr(module, POPS, ())]
    return stashes, pops


def verify_skippables(module: nn.Sequential) -> None:
    """Check that every skip tensor of a model is stashed once and popped as often as declared.

    Looks into nested ``nn.Sequential``s. The order of stashes and pops inside other layers is only
    checked as they run.

    Args:
        module: the full model.

    Raises:
        TypeError: lists every skip tensor that does not match.

    Source: torchgpipe 0.0.7, ``torchgpipe.skip.verify_skippables``.
    """
    stashers: dict[SkipKey, str] = {}  # the layer that stashes each
    num_left: dict[SkipKey, int] = {}  # how many layers are still to pop it
    faults: list[str] = []
    for name, layer in _in_order(module):
        stashes, pops = declared(layer)
        for key, num_pops in stashes:
            if key in stashers:
                faults.append(f"layer {name!r} stashes {key}, as layer {stashers[key]!r} does")
            stashers[key], num_left[key] = name, num_pops
        for key in pops:
            if num_left.get(key, 0) < 1:
                faults.append(f"layer {name!r} pops {key}, which no layer has stashed for it")
            else:
                num_left[key] -= 1
    faults += [
        f"layer {stashers[key]!r} stashes {key} for {counted(left, 'pop')} that no layer does"
        for key, left in num_left.items()
        if left
    ]
    if faults:
        listed = "".join(f"\n  - {fault}" for fault in faults)
        raise TypeError(
            f"some skip tensors are not stashed and popped in pairs:{listed}\n"
            "stash each in one layer, and pop it in one layer after that, or in as many as "
            "stash={name: number of layers} declares; isolate each pair of one name by a Namespace"
        )


def _in_order(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers as they run; a module that is used twice comes twice."""
    for name, layer in module._modules.items():
        if type(layer) is nn.Sequential:
            yield from _in_order(layer, f"{prefix}{name}.")
        elif layer is not None:
            yield prefix + name, layer


def _isolate(  # noqa: D417 - self needs no description
    self: M, namespace: Namespace, *, only: Iterable[str] | None = None
) -> M:
    """Keep this layer's skip names, or only some, apart from the same names of other layers.

    Args:
        namespace: layers that share it, share the names.
        only: names to isolate; all that the layer declares if left out. The latest namespace of a
            name counts.

    Raises:
        ValueError: a name that the layer does not declare.

    Source: torchgpipe 0.0.7, ``torchgpipe.skip.skippable.Skippable.isolate``.
    """
    names = {*getattr(self, STASHES), *getattr(self, POPS)}
    chosen = names if only is None else set(only)
    if unknown := chosen - names:
        raise ValueError(
            f"{type(self).__name__} declares the skip names {sorted(names)}, not {sorted(unknown)}"
        )
    self.__dict__.setdefault(NAMESPACES, {}).update(dict.fromkeys(chosen, namespace))
    return self


def _key(module: nn.Module, name: str) -> SkipKey:
    return SkipKey(module.__dict__.get(NAMESPACES, {}).get(name), name)


def _run(module: nn.Module, steps: Generator[Any, Any, Any], to_do: set[tuple[str, str]]) -> Any:
    """Run a generator forward to its end, stashing and popping what it yields, and is ``to_do``."""
    tracker = current_tracker()
    of = type(module).__name__
    given: Tensor | None = None
    try:
        while True:
            asked = steps.send(given)
            given = None
            if not isinstance(asked, stash | pop):
                raise TypeError(
                    f"the forward of {of} yields {type(asked).__module__}."
                    f"{type(asked).__qualname__}: yield stash(name, tensor) or pop(name) of "
                    "procpipe.skip"
                )
            verb, name = type(asked).__name__, asked.name
            if (verb, name) not in to_do:
                raise RuntimeError(
                    f"the forward of {of} does {verb} {name!r}, which it does not declare (write "
                    f"@skippable({verb}=[{name!r}])) or has done before"
                )
            to_do.discard((verb, name))
            key = _key(module, name)
            if isinstance(asked, stash):
                tracker.stash(key, asked.tensor, getattr(module, STASHES)[name])
            else:
                given = tracker.pop(key)
    except StopIteration as end:
        return end.value
