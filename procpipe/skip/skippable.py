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

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from types import GeneratorType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from procpipe.skip.namespace import Namespace, SkipKey
from procpipe.skip.tracker import current_tracker

M = TypeVar("M", bound=nn.Module)

_STASHES, _POPS, _NAMESPACES = "_procpipe_stashes", "_procpipe_pops", "_procpipe_namespaces"
_ORIGINAL = "_procpipe_original"

#: Packages with skippables of their own, which a pipeline of procpipe cannot support.
_OTHERS = ("torchgpipe.skip", "torch.distributed.pipeline.sync.skip")


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
        raise TypeError(
            f"skippable got {stash if isinstance(stash, str | type) else pop!r}: names come as "
            "lists, as in @skippable(stash=[...], pop=[...])"
        )
    stashes = dict(stash) if isinstance(stash, Mapping) else dict.fromkeys(stash, 1)
    pops = tuple(pop)
    for name, num_pops in stashes.items():
        if num_pops < 1:
            raise ValueError(f"skip {name!r} is popped by {num_pops} layers: give at least 1")

    def declare(module_class: type[M]) -> type[M]:
        if _STASHES in vars(module_class):
            raise TypeError(
                f"{module_class.__name__} is skippable already: declare other names of a subclass"
            )
        original = getattr(module_class.forward, _ORIGINAL, module_class.forward)

        @wraps(original)
        def forward(self: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
            result = original(self, *inputs, **kwargs)
            to_do = {("stash", name) for name in getattr(self, _STASHES)}
            to_do |= {("pop", name) for name in getattr(self, _POPS)}
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
        setattr(module_class, _STASHES, stashes)
        setattr(module_class, _POPS, pops)
        module_class.isolate = _isolate  # type: ignore[attr-defined]
        return module_class

    return declare


def declared(layer: nn.Module) -> tuple[dict[SkipKey, int], list[SkipKey]]:
    """Return what a layer, modules inside it included, declares: stashes with pops, and pops."""
    stashes: dict[SkipKey, int] = {}
    pops: list[SkipKey] = []
    for module in layer.modules():
        own_stashes, own_pops = _own(module)
        stashes.update(own_stashes)
        pops += own_pops
    return stashes, pops


def _own(module: nn.Module) -> tuple[dict[SkipKey, int], list[SkipKey]]:
    """Return what a module declares, without those inside it."""
    stashes = getattr(module, _STASHES, {})
    return (
        {_key(module, name): num_pops for name, num_pops in stashes.items()},
        [_key(module, name) for name in getattr(module, _POPS, ())],
    )


class _Users(NamedTuple):
    """The layers that use a skip tensor, as numbers in the order in which they run."""

    stashers: list[int]
    poppers: list[int]
    declared: list[int]  # by how many layers each stasher has it popped

    @property
    def match(self) -> bool:
        """Whether one layer stashes it, and as many as declared pop it then."""
        return (
            len(self.stashers) == 1
            and self.declared == [len(self.poppers)]
            and min(self.poppers, default=0) >= self.stashers[0]
        )


def verify_skippables(module: nn.Sequential) -> None:
    """Check that every skip tensor of a model is stashed once and popped as often as declared.

    Looks into nested ``nn.Sequential``s. The order of stashes and pops inside other layers is only
    checked as they run.

    Args:
        module: the full model.

    Raises:
        TypeError: not an ``nn.Sequential``; or lists every skip tensor that does not match, or
            every layer that uses the skippables of another package.

    Source: torchgpipe 0.0.7, ``torchgpipe.skip.verify_skippables``.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"a model of type {type(module).__name__} is not an nn.Sequential")
    others = {
        name: f"layer {name!r} ({type(layer).__name__}) is a skippable of {package}"
        for name, layer in module.named_modules()
        for of in type(layer).__mro__
        for package in _OTHERS
        if of.__module__.startswith(f"{package}.")
    }
    if others:
        raise TypeError(
            f"{'; '.join(others.values())}: a pipeline of procpipe carries the skip tensors of its "
            "own skippables only, so write `from procpipe.skip import skippable, stash, pop` where "
            "these layers are defined"
        )
    names: list[str] = []
    faults: list[str] = []
    users: defaultdict[SkipKey, _Users] = defaultdict(lambda: _Users([], [], []))
    for number, (name, layer) in enumerate(_in_order(module)):
        names.append(name)
        for stashes, pops in map(_own, layer.modules()):
            for key, num_pops in stashes.items():
                users[key].stashers.append(number)
                users[key].declared.append(num_pops)
            for key in pops:
                users[key].poppers.append(number)
                if key in stashes:
                    faults.append(f"\n  - layer {name!r} both stashes and pops {key}")

    def these(numbers: list[int]) -> str:
        return " and ".join(f"layer {names[number]!r}" for number in numbers) or "no layer"

    faults += [
        f"\n  - {key} is stashed by {these(of.stashers)} (pops declared: {sum(of.declared)}), and "
        f"popped by {these(of.poppers)}"
        for key, of in users.items()
        if not of.match
    ]
    if faults:
        raise TypeError(
            f"some skip tensors are not stashed and popped in pairs:{''.join(faults)}\n"
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
        only: names to isolate, or one name; all that the layer declares if left out. The
            latest namespace of a name counts.

    Raises:
        ValueError: a name that the layer does not declare.

    Source: torchgpipe 0.0.7, ``torchgpipe.skip.skippable.Skippable.isolate``.
    """
    names = {*getattr(self, _STASHES), *getattr(self, _POPS)}
    chosen = names if only is None else {only} if isinstance(only, str) else set(only)
    if unknown := chosen - names:
        raise ValueError(
            f"{type(self).__name__} declares the skip names {sorted(names)}, not {sorted(unknown)}"
        )
    self.__dict__.setdefault(_NAMESPACES, {}).update(dict.fromkeys(chosen, namespace))
    return self


def _key(module: nn.Module, name: str) -> SkipKey:
    return SkipKey(module.__dict__.get(_NAMESPACES, {}).get(name), name)


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
                fault = f", which it does not declare: write @skippable({verb}=[{name!r}])"
                if name in getattr(module, _STASHES if verb == "stash" else _POPS):
                    fault = " twice"
                raise RuntimeError(f"the forward of {of} does {verb} {name!r}{fault}")
            to_do.discard((verb, name))
            key = _key(module, name)
            if isinstance(asked, stash):
                tracker.stash(key, asked.tensor, getattr(module, _STASHES)[name])
            else:
                given = tracker.pop(key)
    except StopIteration as end:
        return end.value
