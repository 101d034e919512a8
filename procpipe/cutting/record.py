"""Records one forward of a model as a ``torch.fx.Graph`` over the model's own modules.

    model's code                    graph
    h = self.stem(x)                stem = self.stem(x)                  a module that stays whole
    b, c = h.shape[:2]              size = stem.size(0); …               sizes.py
    h = h.view(b, c, -1)            view = stem.view(size, size_1, -1)   a function of torch

The model's Python runs once. The graph's first input is the device; its output is one node, what
the model returns. The ``meta`` of a node has what cutting needs to know:

    tensor      of the sample, which the node makes; its version and needs_grad at present
    number      true if it reads an int that each micro-batch has anew
    weight      elements of the parameters of the module that is called, or of the parameter
    changed     true if it makes, reads or changes memory that is changed in place
    since       the first node whose memory this one changes
    keep        true if it must not be left out
    line        of the model's code
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
import operator
import pickle
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from procpipe.cutting.refusal import WHOLE, CannotCutError, check, line, must_be, refusal
from procpipe.cutting.sizes import Number, Size
from procpipe.cutting.twin import owned
from procpipe.torch_internals import pytree

#: What returns values of a tensor to Python, or has effects that the layers would not have.
_REFUSED = {
    *("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"),
    *("__complex__", "equal", "allclose", "is_nonzero", "__contains__"),
    *("data", "__set__", "grad", "backward", "register_hook", "retain_grad"),
}

#: What is the same for each micro-batch, or is not noticed, as the docs say.
_FIXED = {
    *("dim", "ndim", "ndimension", "requires_grad", "is_leaf", "grad_fn", "is_inference"),
    *("device", "get_device", "is_cpu", "is_cuda", "is_meta", "is_mps"),
    *("__hash__", "__repr__", "__format__", "_set_grad_enabled"),
}
_SIZES = {"shape", "size", "numel", "nelement", "__len__"}

_PLAIN = (
    *(type(None), bool, int, float, complex, str, type(Ellipsis), enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)

#: ``(device type, dtype, enabled)``; of the sample's device, and otherwise of the present one.
Autocast = tuple[str | None, torch.dtype, bool]


class Recorder(TorchFunctionMode):
    """Records torch's functions and whole modules as a model calls them, in its ``graph``.

    Args:
        twin: the copy of the model that runs.
        opened: the names of its modules that do not stay whole.
        arguments: the sample, by name.
    """

    def __init__(self, twin: nn.Module, opened: dict[str, None], arguments: dict[str, Any]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.opened = {twin.get_submodule(name) for name in opened}
        self.is_inside = False  # a whole module
        self.autocasts: list[Autocast] = []
        self._twin = twin
        self._device_node = self.graph.placeholder("device")
        self._names = {m: n for n, m in twin.named_modules() if n not in opened}
        self._owned: dict[int, str] = {}
        for name, tensor in owned(twin):
            self._owned.setdefault(id(tensor), name)
        self._known: dict[int, fx.Node] = {}
        self._sizes: dict[tuple[fx.Node, int], Size] = {}
        for path, leaf in pytree.tree_flatten_with_path(arguments)[0]:
            if isinstance(leaf, Tensor):
                name = re.sub(r"\W+", "_", pytree.keystr(path)).strip("_")
                self._define(leaf, self.graph.placeholder(name))
        if not self._known:
            raise CannotCutError(f"the sample of the {type(twin).__qualname__} has no tensor")
        self.device = next(iter(self._known.values())).meta["tensor"].device

    def run(self, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Record the forward for the sample, as it is given in a call."""
        made_on = self.device if self.device.type == "meta" else torch.get_default_device()
        before = _states(self.opened)
        with torch.enable_grad(), made_on, _patched(self), self:
            result = self._twin(*args, **named)
        for key, state in _states(self.opened).items():
            if before.get(key, state) != state:
                raise CannotCutError(
                    f"the forward changes {key[1]}, which the layers do not have: draw random "
                    f"numbers by torch, or {WHOLE}"
                )
        leaves, tree = pytree.tree_flatten(result)
        made = tuple(map(self._source, leaves))
        is_tensor = isinstance(result, Tensor)
        self.graph.output(made[0] if is_tensor else self.graph.call_function(Nested(tree), made))

    # -- values -------------------------------------------------------------------------------

    def _define(self, tensor: Tensor, node: fx.Node) -> None:
        self._known[id(tensor)] = node
        state = {"version": tensor._version, "needs_grad": tensor.requires_grad}
        node.meta.update(state, tensor=tensor)

    def _node_of(self, tensor: Tensor) -> fx.Node:
        if (known := self._known.get(id(tensor))) is not None:
            if known.meta["needs_grad"] != tensor.requires_grad:
                raise refusal(
                    "a tensor got its gradient without a function of torch, as by a "
                    "torch.autograd.Function or reentrant checkpointing",
                    f"{WHOLE}; checkpoint with use_reentrant=False",
                )
            return known
        if (name := self._owned.get(id(tensor))) is None:
            raise refusal(
                "a tensor is used that no recorded function or module has made (an extension, "
                "NumPy, a torch.autograd.Function, a global variable)",
                f"{WHOLE}; a constant can be a buffer",
            )
        node = self.graph.get_attr(name)
        node.meta["weight"] = tensor.numel() if isinstance(tensor, nn.Parameter) else 0
        self._define(tensor, node)
        return node

    def _source(self, value: Any) -> Any:
        """Return what stands in the graph for a tensor, a number, the device or a plain value."""
        if isinstance(value, Tensor):
            return self._node_of(value)
        if isinstance(value, Number):
            return value.source
        if isinstance(value, torch.device | str) and str(value) == str(self.device):
            return self._device_node
        if isinstance(value, _PLAIN):
            return value
        raise _not_plain(value, "is passed on")

    def _size(self, name: str, tensor: Tensor, dim: int | None = None) -> Any:
        if dim is not None:
            return self._size_of(tensor, range(tensor.dim())[dim])
        sizes = [self._size_of(tensor, k) for k in range(tensor.dim())]
        if name == "__len__":
            return int(sizes[0])
        return torch.Size(sizes) if name in ("shape", "size") else math.prod(sizes)

    def _size_of(self, tensor: Tensor, dim: int) -> Any:
        node = self._node_of(tensor)
        if node.op == "get_attr":
            return tensor.shape[dim]
        if (node, dim) not in self._sizes:
            read = self.graph.call_method("size", (node, dim))
            self._sizes[node, dim] = _number(tensor.shape[dim], read)
        return self._sizes[node, dim]

    # -- calls --------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record one call of a function of torch."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        is_get = name == "__get__"
        name = func.__self__.__name__ if is_get else name
        if self.is_inside or name in _FIXED:
            return func(*args, **kwargs)
        if name in _REFUSED:
            raise refusal(
                "the forward reads values of a tensor, which differ for each micro-batch, or has "
                f"other effects ({name})"
            )
        if name in _SIZES:
            return self._size(name, *args, **kwargs)
        if is_get:
            node = self._node("call_function", getattr, (args[0], name), {})
        elif getattr(Tensor, name, None) is func:
            node = self._node("call_method", name, args, kwargs)
        else:
            node = self._node("call_function", func, args, kwargs)
        return self._bind(node, func(*_plain(args), **_plain(kwargs)), args, kwargs)

    def call_module(
        self, module: nn.Module, call: Callable[..., Any], args: Any, named: Any
    ) -> Any:
        """Record the call of a module, if it stays whole."""
        if self.is_inside or module not in self._names:
            return call(module, *args, **named)
        self.is_inside = True
        try:
            node = self._node("call_module", self._names[module], args, named)
            node.meta.update(keep=True, weight=sum(p.numel() for p in module.parameters()))
            states = _random_states()  # which it may change, as it runs each time
            result = call(module, *_plain(args), **_plain(named))
            _set_random_states(states)
            return self._bind(node, result, args, named)
        finally:
            self.is_inside = False

    def _node(self, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """Add a node; it switches gradients and autocast where the forward has switched them."""
        args, kwargs = _mapped(self._source, (tuple(args), dict(kwargs)))
        if self.autocasts or not torch.is_grad_enabled():
            if op == "call_module":
                args, target = (self.graph.get_attr(target), *args), operator.call
            elif op == "call_method":
                target = getattr(Tensor, target)
            target = Within(target, torch.is_grad_enabled(), tuple(self.autocasts))
            op = "call_function"
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta["line"] = line()
        return node

    def _bind(self, node: fx.Node, result: Any, args: Any, kwargs: Any) -> Any:
        """Let what a call has returned, or changed in place, be values of its node."""
        is_changed = self._note_changes(node, args, kwargs)
        if isinstance(result, Tensor) and id(result) in self._known and not is_changed:
            result = result.view_as(result)  # as of dropout in eval mode: a value of its own
        leaves, tree = pytree.tree_flatten(result)
        is_leaf = len(leaves) == 1 and leaves[0] is result
        if not is_leaf:
            node = self.graph.call_function(Leaves(tree, line()), (node,))
        for k, leaf in enumerate(leaves):
            part = node if is_leaf else self.graph.call_function(operator.getitem, (node, k))
            if isinstance(leaf, Tensor):
                if id(leaf) not in self._known:
                    self._define(leaf, part)
            elif type(leaf) is int:
                leaves[k] = _number(leaf, part)
            elif isinstance(leaf, _PLAIN):
                must_be(part, leaf)
            else:
                raise _not_plain(leaf, f"is returned by {node.target}")
        return pytree.tree_unflatten(leaves, tree)

    def _note_changes(self, node: fx.Node, args: Any, kwargs: Any) -> bool:
        """Note which tensors a call has changed in place; return whether it has any."""
        given = (v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor))
        if not any(_is_changed(self._known[id(tensor)]) for tensor in given):
            return False
        node.meta.update(changed=True, keep=True)
        for known in filter(_is_changed, [*self._known.values()]):  # also those that share memory
            if known.op == "get_attr":
                owner = self._twin.get_submodule(str(known.target).rpartition(".")[0])
                if known.meta["weight"] or owner in self._names:  # which other layers may hold
                    raise refusal(f"the forward changes {known.target} in place")
            else:
                node.meta["since"] = min(known, node.meta.get("since", known))
            known.meta["changed"] = True
            self._define(known.meta["tensor"], known)
        return True


@contextlib.contextmanager
def _patched(recorder: Recorder) -> Iterator[None]:
    """Have modules, and autocast, call a recorder."""
    call, set_attribute = nn.Module.__call__, nn.Module.__setattr__
    enter: Any = torch.autocast.__enter__
    leave: Any = torch.autocast.__exit__

    @functools.wraps(call)
    def recorded(module: nn.Module, *args: Any, **named: Any) -> Any:
        return recorder.call_module(module, call, args, named)

    def set_checked(module: nn.Module, name: str, value: Any) -> None:
        if module in recorder.opened and not recorder.is_inside:
            kind = type(module).__qualname__
            raise refusal(f"the forward sets the attribute {name} of a {kind}")
        set_attribute(module, name, value)

    def entered(context: Any) -> Any:
        result = enter(context)
        if not recorder.is_inside:
            on = context.device
            state = torch.get_autocast_dtype(on), torch.is_autocast_enabled(on)
            recorder.autocasts.append((None if on == recorder.device.type else on, *state))
        return result

    def left(context: Any, *error: Any) -> Any:
        if not recorder.is_inside:
            recorder.autocasts.pop()
        return leave(context, *error)

    with (
        patch.object(nn.Module, "__call__", recorded),
        patch.object(nn.Module, "__setattr__", set_checked),
        patch.object(torch.autocast, "__enter__", entered),
        patch.object(torch.autocast, "__exit__", left),
    ):
        yield


# -- what the graph calls -------------------------------------------------------------------------


@dataclass(frozen=True)
class Nested:
    """Makes what the model returns of its tensors and plain values."""

    tree: Any = field(hash=False)
    __name__ = "nested"

    def __call__(self, *leaves: Any) -> Any:
        """Return the leaves as they were nested in the sample's result."""
        return pytree.tree_unflatten(leaves, self.tree)


@dataclass(frozen=True)
class Within:
    """A function as it runs where the forward has switched gradients or autocast."""

    function: Callable[..., Any]
    is_grad: bool
    autocasts: tuple[Autocast, ...]

    @property
    def __name__(self) -> str:
        return f"{self.function.__name__}_within"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        with contextlib.ExitStack() as stack:
            if not self.is_grad:
                stack.enter_context(torch.no_grad())
            for device, dtype, enabled in self.autocasts:
                on = device or next(t.device.type for t in args if isinstance(t, Tensor))
                stack.enter_context(torch.autocast(on, dtype=dtype, enabled=enabled))
            return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Leaves(Nested):
    """Takes apart what a function returns, which has to be nested as for the sample."""

    where: str
    __name__ = "leaves"

    def __call__(self, result: Any) -> list[Any]:
        """Return the tensors and plain values."""
        leaves, tree = pytree.tree_flatten(result)
        check(len(leaves), self.tree.num_leaves, self.where)
        check(tree, self.tree, self.where)
        return leaves


# -- small ----------------------------------------------------------------------------------------


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return an argument of torch or of a module with a function of each value nested in it."""
    if type(value) in (tuple, list, torch.Size):
        made = [_mapped(function, each) for each in value]
        return made if type(value) is list else tuple(made)
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {key: _mapped(function, each) for key, each in value.items()}
    if isinstance(value, slice):
        return slice(*_mapped(function, (value.start, value.stop, value.step)))
    return function(value)


def _plain(value: Any) -> Any:
    """Return an argument with the sample's numbers in place of sizes."""
    return _mapped(lambda each: each.value if isinstance(each, Number) else each, value)


def _number(value: int, node: fx.Node) -> Size:
    node.meta["number"] = True
    return Size(value, node)


def _not_plain(value: object, what: str) -> CannotCutError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    instead = WHOLE
    if kind.endswith("Cache"):
        instead = "give the sample use_cache=False, with which the model makes no cache"
    elif kind.endswith("PackedSequence"):
        instead = "pack, run and unpack the sequence in one module"
    return refusal(f"a value of type {kind} {what}, which is no tensor or plain value", instead)


def _is_changed(node: fx.Node) -> bool:
    return bool(node.meta["tensor"]._version != node.meta["version"])


def _states(modules: set[nn.Module]) -> dict[tuple[Any, str], bytes]:
    """Return the states of random number generators, and of modules' attributes, by their names."""
    found: dict[tuple[Any, str], bytes] = {}
    found[None, "the random numbers of Python or NumPy"] = pickle.dumps(_random_states())
    for module in modules:
        for name in vars(module).keys() - vars(nn.Module()).keys():
            with contextlib.suppress(Exception):  # those that cannot be written
                key = module, f"{type(module).__qualname__}.{name}"
                found[key] = pickle.dumps(vars(module)[name])
    return found


def _random_states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), numpy and numpy.get_state()


def _set_random_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1]:
        sys.modules["numpy.random"].set_state(states[1])
