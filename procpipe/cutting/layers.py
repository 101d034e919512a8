"""The layers that pieces of a graph become, which hold the model's modules under their names."""

from __future__ import annotations

import copy
import inspect
import operator
import sys
from collections.abc import Callable, Generator
from typing import Any

from torch import Tensor, nn

from procpipe.skip import pop, stash
from procpipe.torch_internals import pytree

_HELD = ("_parameters", "_buffers", "_modules")
_RESET = ("reset_parameters", "_reset_parameters")  # private in nn.Transformer


class Shell(nn.Module):
    """Holds what a layer has of an opened module, under that module's names."""

    def __init__(self, twin: nn.Module) -> None:
        super().__init__()
        self._twin = (twin,)  # in a tuple, so that nn.Module does not register it

    def as_opened(self, initialise: Callable[[Any], object]) -> None:
        """Call a function that initialises parameters with the opened module, as this has them.

        What other layers have is on the meta device here, so that it costs and changes nothing.
        """
        stand_in: Any = copy.copy(self._twin[0])
        for held in _HELD:
            vars(stand_in)[held] = getattr(stand_in, held) | getattr(self, held)
        initialise(stand_in)
        for held in _HELD[:2]:
            own = getattr(self, held)
            own.update({name: vars(stand_in)[held][name] for name in own})


def shell_of(twin: nn.Module, kind: type[Shell] = Shell, **attributes: Any) -> Shell:
    """Return a shell for an opened module; it is initialised as that module is.

    Args:
        twin: a copy of the opened module on the meta device.
        kind: the class that the shell's own class is derived from.
        attributes: of that class.
    """
    resets = [name for name in _RESET if hasattr(twin, name)]
    if _is_of_transformers(twin):
        attributes["reset_parameters"] = _initialise
    elif resets:
        reset = operator.methodcaller(resets[0])
        attributes["reset_parameters"] = lambda shell: shell.as_opened(reset)
    name = type(twin).__name__ if kind is Shell else kind.__name__
    made: Shell = type(name, (kind,), attributes)(twin)
    return made


def _is_of_transformers(model: nn.Module) -> bool:
    models = sys.modules.get("transformers.modeling_utils")
    return models is not None and isinstance(model, models.PreTrainedModel)


def _initialise(module: nn.Module, rule: Any = None) -> None:
    """Initialise inner modules first, each by the rule of the model of transformers around it."""
    model: Any = module._twin[0] if isinstance(module, Shell) else module
    if _is_of_transformers(model):
        rule = model._init_weights
    for child in module.children():
        _initialise(child, rule)
    if isinstance(module, Shell):
        module.as_opened(rule)
    else:
        rule(module)


class Arguments:
    """The arguments of a model's forward, in the form that a sample has.

    Attributes:
        names: of the forward's parameters, in order.
    """

    def __init__(
        self, forward: Callable[..., Any], inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        self._signature = inspect.signature(forward)
        self.names = [*self._signature.parameters]
        self._defaults: dict[str, Any] = {}
        by_name = self.bound(inputs, named)
        leaves, self._tree = pytree.tree_flatten(by_name)
        self._known = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for name, value in by_name.items():
            if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
                self._defaults[name] = value

    def bound(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, in the order of the signature."""
        given = self._defaults | self._signature.bind_partial(*inputs, **named).arguments
        found = {name: given[name] for name in self._signature.parameters if name in given}
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD and name in found:
                found[name] = dict(sorted(found[name].items()))
        return found

    def tensors(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> list[Tensor]:
        """Return the tensors among a micro-batch's arguments.

        Raises:
            TypeError: they are others than the sample's.
        """
        leaves, tree = pytree.tree_flatten(self.bound(inputs, named))
        if tree != self._tree:
            raise TypeError(
                f"the model was recorded for arguments of the form {self._tree}, and is given "
                f"{tree}: give procpipe.sequential such a sample"
            )
        for known, leaf in zip(self._known, leaves, strict=True):
            if known is not None and not isinstance(leaf, Tensor) and leaf != known:
                raise TypeError(
                    f"the model was recorded with {known!r} for an argument that is {leaf!r} now: "
                    "give procpipe.sequential such a sample"
                )
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class Layer(Shell):
    """A piece of a model's forward. What is the same in all copies of one is its class's.

    Its names begin with an underscore, as it has the names of the model's modules, too.
    """

    _run: Callable[..., tuple[Any, ...]]  # from what comes in to what is given, and stashed
    _arguments: Arguments | None  # of the first layer
    _pops: list[str]
    _stashes: list[str]

    def _taken(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> list[Tensor]:
        if self._arguments is not None:
            return self._arguments.tensors(inputs, named)
        (value,) = inputs
        return [value] if isinstance(value, Tensor) else [*value]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the piece."""
        return self._run(*self._taken(inputs, named))[0]


class SkipLayer(Layer):
    """A piece that stashes or pops skip tensors."""

    def forward(self, *inputs: Any, **named: Any) -> Generator[Any, Any, Any]:
        """Run the piece."""
        tensors = self._taken(inputs, named)
        for name in self._pops:
            tensors.append((yield pop(name)))
        given, *stashed = self._run(*tensors)
        for name, value in zip(self._stashes, stashed, strict=True):
            yield stash(name, value)
        return given
