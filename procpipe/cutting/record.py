"""Records one forward of a model as a ``torch.fx.Graph`` over the model's own modules.

    model's code                    graph
    h = self.stem(x)                stem = self.stem(x)                  a module that stays whole
    b, c = h.shape[:2]              size = stem.size(0); …               sizes.py
    h = h.view(b, c, -1)            view = stem.view(size, size_1, -1)   a function of torch

The model's Python runs once. The graph's first input is the device; its output is what the model
returns. The ``meta`` of a node has what cutting needs to know:

    bytes, shape   of a tensor
    size of        the tensor that a size is read of
    module         the name of the module that is called
    elements       of that module's parameters, or of the parameter that is read
    changed        true if it makes, reads or changes memory that is changed in place
    since          the first node whose memory this one changes
    keep           true if it must not be left out
    line           of the model's code
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import math
import operator
import pickle
import random
import re
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from procpipe.cutting.at_run import Autocast, Nested, Within, carrier
from procpipe.cutting.divide import mark_sized
from procpipe.cutting.refusal import WHOLE, CannotCutError, line, not_plain, refusal
from procpipe.cutting.sizes import Number, Size, must_be
from procpipe.cutting.twin import owned
from procpipe.torch_internals import pytree

#: What returns values of a tensor to Python.
_READS = {
    *("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"),
    *("__complex__", "equal", "allclose", "is_nonzero", "__contains__"),
}
_SIZES = {"shape", "size", "numel", "nelement", "__len__"}

#: What is the same for each micro-batch.
_FIXED = {
    *("dim", "ndim", "ndimension", "device", "layout", "requires_grad", "is_leaf", "grad_fn"),
    *("is_floating_point", "is_complex", "is_signed", "is_sparse", "is_quantized", "is_nested"),
    *("is_cuda", "is_meta", "names", "has_names", "element_size", "itemsize", "__hash__"),
    *("__repr__", "__format__", "is_inference", "is_conj", "is_neg", "is_mps"),
    "_set_grad_enabled",
}

#: What has effects that the layers would not have.
_REFUSED = {
    **dict.fromkeys(("data", "__set__", "grad"), "leave it out, or use detach()"),
    **dict.fromkeys(("backward", "register_hook", "retain_grad"), "do it in a module of its own"),
}

_PLAIN = (
    *(type(None), bool, int, float, complex, str, type(Ellipsis), enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclasses.dataclass(slots=True)
class _Known:
    """A tensor of the sample, and what made it."""

    tensor: Tensor
    node: fx.Node
    needs_grad: bool
    version: int


class Recorder(TorchFunctionMode):
    """Records torch's functions and whole modules as a model calls them.

    Args:
        twin: the copy of the model that runs.
        opened: the names of its modules that do not stay whole.
        arguments: the sample, by name.

    Attributes:
        graph: what is recorded.
        opened: the modules that do not stay whole.
        is_inside: whether a whole module runs.
        autocasts: how the forward has switched autocast at present.
    """

    def __init__(self, twin: nn.Module, opened: dict[str, None], arguments: dict[str, Any]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.opened = {twin.get_submodule(name) for name in opened}
        self.is_inside = False
        self.autocasts: list[Autocast] = []
        self._twin = twin
        self._device_node = self.graph.placeholder("device")
        self._names = {m: n for n, m in twin.named_modules() if n not in opened}
        self._owned: dict[int, str] = {}
        for name, tensor in owned(twin):
            self._owned.setdefault(id(tensor), name)
        self._known: dict[int, _Known] = {}
        self._asked: dict[tuple[fx.Node, int | str], Any] = {}  # sizes and dtypes
        self._random = _random_states()
        for path, leaf in pytree.tree_flatten_with_path(arguments)[0]:
            if isinstance(leaf, Tensor):
                name = re.sub(r"\W+", "_", pytree.keystr(path)).strip("_")
                self._define(leaf, self.graph.placeholder(name))
        if not self._known:
            raise CannotCutError(f"the sample of the {type(twin).__qualname__} has no tensor")
        self._device = next(iter(self._known.values())).tensor.device

    def run(self, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Record the forward for the sample, as it is given in a call."""
        made_on = self._device if self._device.type == "meta" else torch.get_default_device()
        before = _attributes(self.opened)
        with torch.enable_grad(), made_on, _patched(self), self:
            result = self._twin(*args, **named)
        self._check_random()
        for (module, name), value in _attributes(self.opened).items():
            if before.get((module, name), value) != value:
                raise CannotCutError(
                    f"the forward of {type(module).__qualname__}.{name} changes this attribute (a "
                    f"list, a random number generator), which the layers do not have\n{WHOLE}"
                )
        leaves, tree = pytree.tree_flatten(result)
        made = tuple(map(self._recorded, leaves))
        is_tensor = isinstance(result, Tensor)
        self.graph.output(made[0] if is_tensor else self.graph.call_function(Nested(tree), made))

    # -- values -------------------------------------------------------------------------------

    def _define(self, tensor: Tensor, node: fx.Node) -> None:
        node.meta["bytes"] = tensor.numel() * tensor.element_size()
        node.meta["shape"] = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        known = _Known(tensor, node, tensor.requires_grad, tensor._version)
        self._known[id(tensor)] = known

    def _node_of(self, tensor: Tensor) -> fx.Node:
        if (known := self._known.get(id(tensor))) is not None:
            if known.needs_grad != tensor.requires_grad:
                raise refusal(
                    "a tensor got its gradient without a function of torch, as by a "
                    "torch.autograd.Function or reentrant checkpointing",
                    f"{WHOLE}; checkpoint with use_reentrant=False",
                )
            return known.node
        if (name := self._owned.get(id(tensor))) is None:
            raise refusal(
                "a tensor is used that no recorded function or module has made (an extension, "
                "NumPy, a torch.autograd.Function, a global variable)",
                f"{WHOLE}; a constant can be a buffer",
            )
        node = self.graph.get_attr(name)
        node.meta["elements"] = tensor.numel() if isinstance(tensor, nn.Parameter) else 0
        self._define(tensor, node)
        return node

    def _recorded(self, value: Any) -> Any:
        """Return an argument with nodes in place of tensors, sizes, modules and the device."""
        if isinstance(value, Tensor):
            return self._node_of(value)
        if isinstance(value, Number):
            return value.source
        if type(value) in (tuple, list, torch.Size):
            made = [self._recorded(each) for each in value]
            return made if type(value) is list else tuple(made)
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return {key: self._recorded(each) for key, each in value.items()}
        if isinstance(value, slice):
            return slice(*map(self._recorded, (value.start, value.stop, value.step)))
        if isinstance(value, nn.Module) and value in self._names:
            return self.graph.get_attr(self._names[value])
        if isinstance(value, torch.device | str) and str(value) == str(self._device):
            return self._device_node
        if isinstance(value, _PLAIN):
            return value
        instead = {"PackedSequence": "pack, run and unpack the sequence in one module"}
        name = type(value).__name__
        if "Cache" in name:
            instead[name] = "give the sample use_cache=False, with which the model makes no cache"
        raise not_plain(value, "is passed on", instead.get(name, WHOLE))

    # -- sizes --------------------------------------------------------------------------------

    def _answer_size(self, name: str, tensor: Tensor, dim: int | None = None) -> Any:
        if name == "__len__":
            return int(self._size(tensor, 0))
        if dim is not None:
            return self._size(tensor, range(tensor.dim())[dim])
        shape = [self._size(tensor, k) for k in range(tensor.dim())]
        return torch.Size(shape) if name in ("shape", "size") else math.prod(shape)

    def _size(self, tensor: Tensor, dim: int) -> Any:
        node = self._node_of(tensor)
        if node.op == "get_attr":
            return tensor.shape[dim]
        if (node, dim) not in self._asked:
            self._asked[node, dim] = self._size_of(node, dim, tensor.shape[dim])
        return self._asked[node, dim]

    def _size_of(self, tensor: fx.Node, dim: int, value: int) -> Size:
        node = self.graph.call_method("size", (tensor, dim))
        node.meta["size of"] = tensor
        return Size(value, node)

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
        if name in _REFUSED or func is torch.autograd.grad:
            instead = _REFUSED.get(name, _REFUSED["backward"])
            raise refusal(f"the forward uses {name} of a tensor", instead)
        if name in _SIZES:
            return self._answer_size(name, *args, **kwargs)
        if name == "dtype":
            return self._dtype(args[0])
        if name in _READS:
            return self._read(func, args, kwargs)
        given, named = self._recorded(tuple(args)), self._recorded(dict(kwargs))
        result = func(*_plain(args), **_plain(kwargs))
        if is_get:
            node = self._node("call_function", getattr, (given[0], name), {})
        elif getattr(Tensor, name, None) is func:
            node = self._node("call_method", name, given, named)
        else:
            node = self._node("call_function", func, given, named)
        return self._bind(node, result, args, kwargs)

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        node = self._node_of(tensor)
        if node.op != "get_attr" and (node, "dtype") not in self._asked:
            found = self.graph.call_function(getattr, (node, "dtype"))
            self._asked[node, "dtype"] = must_be(found, tensor.dtype)
        return tensor.dtype

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Read a value that depends on sizes alone, as of masks; refuse others."""
        node = self._node_of(args[0])
        mark_sized(self.graph)
        value = None
        if node.meta["sized"] and not args[0].is_meta:
            value = func(*_plain(args), **_plain(kwargs))
        if not isinstance(value, bool | int | float):
            raise refusal(
                f"the forward reads values of a tensor ({func.__name__}), which differ for each "
                "micro-batch"
            )
        arguments = self._recorded(args), self._recorded(kwargs)
        return must_be(self.graph.call_function(func, *arguments), value)

    def call_module(
        self, module: nn.Module, call: Callable[..., Any], args: Any, named: Any
    ) -> Any:
        """Record the call of a module, if it stays whole."""
        if self.is_inside or module not in self._names:
            return call(module, *args, **named)
        self.is_inside = True
        try:
            name = self._names[module]
            node = self._node("call_module", name, self._recorded(args), self._recorded(named))
            node.meta["module"] = name
            node.meta["elements"] = sum(p.numel() for p in module.parameters())
            result = call(module, *_plain(args), **_plain(named))
            self._random = _random_states()  # a module may draw numbers, as it runs each time
            return self._bind(node, result, args, named)
        finally:
            self.is_inside = False

    def _node(self, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """Add a node; it switches gradients and autocast where the forward has switched them."""
        self._check_random()
        is_grad = torch.is_grad_enabled()
        if not is_grad or self.autocasts:
            if op == "call_module":
                args, target = (self.graph.get_attr(target), *args), operator.call
            elif op == "call_method":
                target = getattr(Tensor, target)
            op, target = "call_function", Within(target, is_grad, tuple(self.autocasts))
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta["line"] = line()
        return node

    def _bind(self, node: fx.Node, result: Any, args: Any, kwargs: Any) -> Any:
        """Let what a call has returned, or changed in place, be values of its node."""
        is_changed = self._note_changes(node, args, kwargs)
        node.meta["keep"] = is_changed or "module" in node.meta
        if isinstance(result, Tensor) and id(result) in self._known and not is_changed:
            result = result.view_as(result)  # as of dropout in eval mode: a value of its own
        return None if is_changed and result is None else self._bound(result, node)

    def _note_changes(self, node: fx.Node, args: Any, kwargs: Any) -> bool:
        """Note which tensors a call has changed in place; return whether it has any."""
        given = (v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor))
        if all(tensor._version == self._known[id(tensor)].version for tensor in given):
            return False
        for known in self._known.values():  # those that share memory have changed, too
            if known.tensor._version != known.version:
                if known.node.op == "get_attr":
                    self._check_change(known)
                else:
                    node.meta["since"] = min(known.node, node.meta.get("since", known.node))
                known.node.meta["changed"] = node.meta["changed"] = True
                known.version = known.tensor._version
                known.needs_grad = known.tensor.requires_grad
        return True

    def _check_change(self, known: _Known) -> None:
        """Refuse that the forward changes what another layer may hold."""
        owner = str(known.node.target).rpartition(".")[0]
        is_whole = self._twin.get_submodule(owner) in self._names
        if is_whole or isinstance(known.tensor, nn.Parameter):
            raise refusal(f"the forward changes {known.node.target} in place")

    def _bound(self, value: Any, node: fx.Node) -> Any:
        """Return what a call has returned with its tensors known, and its numbers noted."""
        if isinstance(value, Tensor):
            if id(value) not in self._known:
                self._define(value, node)
        elif isinstance(value, tuple | list):
            must_be(self.graph.call_function(len, (node,)), len(value))
            made = [self._bound(each, self._item(node, k)) for k, each in enumerate(value)]
            return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
        elif isinstance(value, MutableMapping):
            for key in value:
                value[key] = self._bound(value[key], self._item(node, key))
        elif dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                part = self.graph.call_function(getattr, (node, field.name))
                made = self._bound(getattr(value, field.name), part)
                object.__setattr__(value, field.name, made)
        elif type(value) is int and value >= 0:
            carried = self.graph.call_function(carrier, (self._device_node, node))
            carried.meta.update(bytes=0, shape="a size")
            return self._size_of(carried, 0, value)
        elif isinstance(value, _PLAIN):
            return must_be(node, value)
        else:
            raise not_plain(value, f"is returned by {node.target}")
        return value

    def _item(self, node: fx.Node, key: Any) -> fx.Node:
        return self.graph.call_function(operator.getitem, (node, key))

    def _check_random(self) -> None:
        if _random_states() != self._random:
            raise refusal(
                "the forward draws random numbers of Python or NumPy before this line, which "
                "would be those of the sample for ever",
                "draw them by torch",
            )


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
            raise refusal(
                f"the forward sets the attribute {name} of a {type(module).__qualname__}, which "
                "the layers do not have"
            )
        set_attribute(module, name, value)

    def entered(context: Any) -> Any:
        result = enter(context)
        if not recorder.is_inside:
            on = context.device
            state = torch.get_autocast_dtype(on), torch.is_autocast_enabled(on)
            recorder.autocasts.append((None if on == recorder._device.type else on, *state))
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


def _plain(value: Any) -> Any:
    """Return an argument with the sample's numbers in place of sizes."""
    if isinstance(value, Number):
        return value.value
    if type(value) in (tuple, list, torch.Size):
        return type(value)(map(_plain, value))
    if isinstance(value, slice):
        return slice(*map(_plain, (value.start, value.stop, value.step)))
    return {k: _plain(v) for k, v in value.items()} if type(value) is dict else value


def _attributes(modules: set[nn.Module]) -> dict[tuple[nn.Module, str], bytes]:
    """Return the values of modules' attributes, of those that can be written."""
    found = {}
    for module in modules:
        for name in vars(module).keys() - vars(nn.Module()).keys():
            with contextlib.suppress(Exception):  # of whatever class the value is
                found[module, name] = pickle.dumps(vars(module)[name])
    return found


def _random_states() -> tuple[Any, ...]:
    """Return the states of Python's generator, and of NumPy's where it is loaded."""
    if "numpy.random" not in sys.modules:
        return (random.getstate(),)
    state = sys.modules["numpy.random"].get_state(legacy=False)["state"]
    return random.getstate(), state["pos"], state["key"].tobytes()
