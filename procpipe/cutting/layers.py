"""The layers that pieces of a graph become, which hold the model's modules under their names.

value of the layer before ─┐
popped skip tensors ───────┼─> sizes(shapes) ─> run(tensors, sizes) ─┬─> value of the next layer
                               once a mini-batch                     └─> stashed skip tensors
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.skip import Namespace, pop, skippable, stash
from procpipe.torch_internals import hold_as, pytree

_HELD, _RESET = ("_parameters", "_buffers", "_modules"), "reset_parameters"


class Shell(nn.Module):
    """Holds what a layer has of an opened module, under that module's names."""

    def __init__(self, twin: nn.Module | None) -> None:
        super().__init__()
        self._twin = (twin,)  # in a tuple, so that nn.Module does not register it


def shell_of(opened: nn.Module, twin: nn.Module | None) -> Shell:
    """Return a shell for an opened module; with a twin on the meta device it can be initialised."""
    methods: dict[str, Any] = {}
    if twin is not None and _is_of_transformers(opened):
        methods = {"reset_parameters": _initialise}
    elif twin is not None and (hasattr(opened, _RESET) or hasattr(opened, f"_{_RESET}")):
        methods = {"reset_parameters": _reset}
    kind: type[Shell] = type(type(opened).__name__, (Shell,), methods)
    return kind(twin)


def _is_of_transformers(model: nn.Module) -> bool:
    models = sys.modules.get("transformers.modeling_utils")
    return models is not None and isinstance(model, models.PreTrainedModel)


def _reset(self: Shell) -> None:
    """Initialise parameters by the opened module's own method, private in nn.Transformer."""

    def reset(opened: Any) -> None:
        private: Any = getattr(opened, f"_{_RESET}", None)
        getattr(opened, _RESET, private)()

    _as_opened(self, reset)


def _initialise(self: Shell) -> None:
    """Initialise all that is in an opened model of transformers as it does."""
    _initialise_all(self, None)


def _initialise_all(module: nn.Module, initialise: Any) -> None:
    """Initialise inner modules first, and a model of transformers by its own function."""
    model: Any = module._twin[0] if isinstance(module, Shell) else module
    if _is_of_transformers(model):
        initialise = model._init_weights
    for child in module.children():
        _initialise_all(child, initialise)
    if isinstance(module, Shell):
        _as_opened(module, initialise)
    else:
        initialise(module)


def _as_opened(shell: Shell, initialise: Callable[[Any], object]) -> None:
    """Call a function that initialises parameters with an opened module, as a shell has them.

    What other layers have is on the meta device here, so that it costs and changes nothing.
    """
    (twin,) = shell._twin
    stand_in: Any = copy.copy(twin)
    for held in _HELD:
        vars(stand_in)[held] = {**getattr(twin, held), **getattr(shell, held)}
    initialise(stand_in)
    for held in _HELD[:2]:
        own = getattr(shell, held)
        own.update({name: vars(stand_in)[held][name] for name in own})


def arguments_of(
    signature: inspect.Signature,
    inputs: tuple[Any, ...],
    named: dict[str, Any],
    defaults: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the arguments of a call by name, in the order of the signature."""
    given = {**(defaults or {}), **signature.bind_partial(*inputs, **named).arguments}
    found = {}
    for name, parameter in signature.parameters.items():
        if name in given:
            is_rest = parameter.kind is inspect.Parameter.VAR_KEYWORD
            found[name] = dict(sorted(given[name].items())) if is_rest else given[name]
    return found


@dataclass(frozen=True)
class Inputs:
    """What the first layer takes: the arguments of the model's forward."""

    signature: inspect.Signature
    tree: Any  # how the sample's arguments are nested
    plain: list[Any]  # its leaves; None for a tensor
    defaults: dict[str, Any]  # its arguments without tensors, by name

    @classmethod
    def of(cls, signature: inspect.Signature, arguments: dict[str, Any]) -> Inputs:
        """Return what a first layer takes, from the arguments of a sample."""
        leaves, tree = pytree.tree_flatten(arguments)
        plain = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        defaults = {
            name: value
            for name, value in arguments.items()
            if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
        }
        return cls(signature, tree, plain, defaults)

    def tensors(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> list[Tensor]:
        """Return the tensors among a micro-batch's arguments.

        Raises:
            TypeError: they are others than the sample's.
        """
        given = arguments_of(self.signature, inputs, named, self.defaults)
        leaves, tree = pytree.tree_flatten(given)
        if tree != self.tree:
            raise TypeError(
                f"the model was recorded for arguments of the form {self.tree}, and is given "
                f"{tree}: give procpipe.sequential such a sample"
            )
        for known, leaf in zip(self.plain, leaves, strict=True):
            if known is not None and not isinstance(leaf, Tensor) and leaf != known:
                raise TypeError(
                    f"the model was recorded with {known!r} for an argument that is {leaf!r} now: "
                    "give procpipe.sequential such a sample"
                )
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Ports:
    """What a layer takes and returns, by the names of the nodes.

    Attributes:
        takes: tensors of the layer before; for the first layer of the model's inputs.
        pops: skip tensors.
        gives: tensors for the next layer; for the last layer what the model returns.
        stashes: skip tensors, and how many layers pop each.
        measured: of which of the tensors that come in the shapes matter, as indices.
        texts: lines for ``describe()``.
        code: the source of ``run``, and of ``sizes``.
    """

    takes: list[str]
    pops: list[str]
    gives: list[str]
    stashes: dict[str, int]
    measured: list[int]
    texts: list[str]
    code: str


class Layer(nn.Module):
    """A piece of a model's forward. What is the same in all copies of one is its class's.

    Attributes:
        ports: what comes in and goes out.
        run: ``run(shell, device, training, *tensors, *sizes)``.
        sizes: ``sizes(shell, device, *tensors)``, if anything depends on sizes alone.
        inputs: what the first layer takes.
        tree: how the last layer nests what it returns.
    """

    ports: Ports
    run: Callable[..., tuple[Any, ...]]
    sizes: Callable[..., tuple[Any, ...]] | None
    inputs: Inputs | None
    tree: Any

    def __init__(self, shell: Shell) -> None:
        super().__init__()
        hold_as(self, shell)
        self._shell = (shell,)
        self._key: Any = None
        self._known: tuple[Any, ...] = ()  # the sizes of that key
        self._versions: list[int] = []

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the piece."""
        return self._left(self._ran(self._entered(inputs, named)))

    def _entered(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> list[Tensor]:
        if self.inputs is not None:
            return self.inputs.tensors(inputs, named)
        (value,) = inputs
        return [value] if isinstance(value, Tensor) else [*value]

    def _ran(self, tensors: list[Tensor]) -> tuple[Any, ...]:
        device = tensors[0].device
        sizes = self._sizes_of(tensors, device) if self.sizes is not None else ()
        return self.run(self._shell[0], device, self.training, *tensors, *sizes)

    def _sizes_of(self, tensors: list[Tensor], device: torch.device) -> tuple[Any, ...]:
        """Return what depends on sizes alone; of the last micro-batch, if those are the same."""
        key = (
            device,
            type(tensors[0]),
            torch.is_inference_mode_enabled(),
            device.type != "meta" and torch.is_autocast_enabled(device.type),
            [tensors[k].shape for k in self.ports.measured],
        )
        versions = [value._version for value in self._known if isinstance(value, Tensor)]
        if key != self._key or versions != self._versions:
            assert self.sizes is not None
            measured = [tensors[k] for k in self.ports.measured]
            self._key, self._known = key, self.sizes(self._shell[0], device, *measured)
            self._versions = [v._version for v in self._known if isinstance(v, Tensor)]
        return self._known

    def _left(self, made: tuple[Any, ...]) -> Any:
        given = made[: len(self.ports.gives)]
        if self.tree is not None:
            return pytree.tree_unflatten(given, self.tree)
        return given[0] if len(given) == 1 else given


class SkipLayer(Layer):
    """A piece that stashes or pops skip tensors."""

    def forward(self, *inputs: Any, **named: Any) -> Generator[Any, Any, Any]:
        """Run the piece."""
        tensors = self._entered(inputs, named)
        for name in self.ports.pops:
            tensors.append((yield pop(name)))
        made = self._ran(tensors)
        for name, value in zip(self.ports.stashes, made[len(self.ports.gives) :], strict=True):
            yield stash(name, value)
        return self._left(made)


def layer_of(
    shell: Shell,
    namespace: Namespace,
    run: Callable[..., Any],
    sizes: Callable[..., Any] | None,
    **attributes: Any,
) -> Layer:
    """Return a layer of a class of its own, with the attributes that ``Layer`` names."""
    attributes |= {"run": staticmethod(run), "sizes": sizes and staticmethod(sizes)}
    if hasattr(shell, "reset_parameters"):
        attributes["reset_parameters"] = lambda self: self._shell[0].reset_parameters()
    ports: Ports = attributes["ports"]
    if not (ports.stashes or ports.pops):
        plain: type[Layer] = type("Layer", (Layer,), attributes)
        return plain(shell)
    kind: type[SkipLayer] = type("Layer", (SkipLayer,), attributes)
    made: Any = skippable(stash=ports.stashes, pop=ports.pops)(kind)(shell)
    layer: Layer = made.isolate(namespace)
    return layer
