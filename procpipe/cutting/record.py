"""Records one forward of a model as a ``torch.fx.Graph`` over the model's own modules.

    model's code                    graph
    h = self.stem(x)                stem = self.stem(x)                  a module that stays whole
    b, c = h.shape[:2]              size = stem.size(0); …               sizes.py
    h = h.view(b, c, -1)            view = stem.view(size, size_1, -1)   a function of torch

The model's Python runs once. Nodes note what cutting needs to know: the bytes of a tensor
(``bytes``), modules (``module``), lines (``line``), and what must not be left out (``keep``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import operator
import pickle
import random
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from procpipe.cutting.at_run import Autocast, called, check, check_dtype, within
from procpipe.cutting.divide import sized_nodes
from procpipe.cutting.refusal import CannotCutError, line, refusal
from procpipe.cutting.sizes import Number, Ratio, Size
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

_WHOLE = "let the module around it stay whole (whole=(ItsClass,)), or move it into one of its own"


@dataclasses.dataclass(slots=True)
class _Known:
    """A tensor of the sample, and what made it."""

    tensor: Tensor
    node: fx.Node
    needs_grad: bool
    version: int


class Recorder(TorchFunctionMode):
    """Records torch's functions and whole modules as a model calls them.

    Attributes:
        graph: the graph, whose output is the tuple of the leaves of what the model returns. Its
            first inputs are ``device`` and ``training``.
        tree: how these are nested.
        changed: pairs of the node that made memory and one that changes it in place.
        twin: the copy of the model that is recorded.
        is_on_meta: whether it is on the meta device.
    """

    def __init__(self, twin: nn.Module, opened: dict[str, None], device: torch.device) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.tree: Any = None
        self.changed: list[tuple[fx.Node, fx.Node]] = []
        self.twin, self.is_on_meta = twin, device.type == "meta"
        self._device = device
        self._device_node = self.graph.placeholder("device")
        self.graph.placeholder("training")
        self._names = {m: n for n, m in twin.named_modules() if n not in opened}
        self._opened = {twin.get_submodule(name): name for name in opened}
        self._owned: dict[int, str] = {}
        for name, tensor in owned(twin):
            self._owned.setdefault(id(tensor), name)
        self._known: dict[int, _Known] = {}
        self._sizes: dict[tuple[fx.Node, int], Size] = {}
        self._seen_dtypes: set[fx.Node] = set()
        self._is_inside = False
        self._autocasts: list[Autocast] = []
        self._random, self._attributes = _random_states(), _attributes(self._opened)

    # -- a whole forward ----------------------------------------------------------------------

    def run(self, args: tuple[Any, ...], named: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Record the forward; ``tensors`` are those among its arguments, by name."""
        for name, tensor in tensors.items():
            self._define(tensor, self.graph.placeholder(name))
        made_on = self._device if self.is_on_meta else torch.get_default_device()
        with torch.enable_grad(), made_on, _patched(self), self:
            result = self.twin(*args, **named)
        self._check_random()
        self._check_attributes()
        leaves, self.tree = pytree.tree_flatten(result)
        self.graph.output(tuple(map(self._recorded, leaves)))
        self._keep_changed_owned_together()

    def _keep_changed_owned_together(self) -> None:
        """Let one piece have all uses of a parameter or buffer that the forward changes."""
        order = {node: k for k, node in enumerate(self.graph.nodes)}
        changed = {first.target for first, _ in self.changed if first.op == "get_attr"}
        for name in changed:
            uses = [u for n in order if n.op == "get_attr" and n.target == name for u in n.users]
            self.changed.append(
                (min(uses, key=order.__getitem__), max(uses, key=order.__getitem__))
            )

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
                    f"{_WHOLE}; checkpoint with use_reentrant=False",
                )
            return known.node
        if (name := self._owned.get(id(tensor))) is None:
            raise refusal(
                "a tensor is used that no recorded function or module has made (an extension, "
                "NumPy, a torch.autograd.Function, a global variable)",
                f"{_WHOLE}; a constant can be a buffer",
            )
        node = self.graph.get_attr(name)
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
        kind = type(value)
        instead = {"PackedSequence": "pack, run and unpack the sequence in one module"}
        raise refusal(
            f"a value of type {kind.__module__}.{kind.__qualname__} is passed on, which is no "
            "tensor or plain value",
            "give the sample use_cache=False, with which the model makes no cache"
            if "Cache" in kind.__name__
            else instead.get(kind.__name__, _WHOLE),
        )

    # -- sizes --------------------------------------------------------------------------------

    def computed(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Note a computation of sizes."""
        node = self.graph.call_function(function, tuple(map(self._recorded, operands)))
        return self._numbered(function(*map(_plain, operands)), node)

    def decided(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Note a decision, to be checked for each micro-batch."""
        value = function(*map(_plain, operands))
        node = self.graph.call_function(function, tuple(map(self._recorded, operands)))
        self._must_be(node, value)
        return value

    def _numbered(self, value: Any, node: fx.Node) -> Any:
        if type(value) is int:
            return Size(value, node, self)
        return Ratio(value, node, self) if type(value) is float else self._must_be(node, value)

    def _must_be(self, node: fx.Node, value: Any) -> Any:
        """Have each micro-batch checked for a plain value, and return it."""
        same = operator.is_ if value is None or isinstance(value, bool) else operator.eq
        holds = self.graph.call_function(same, (node, self._recorded(value)))
        text = (
            f"the model's forward was recorded for a sample with {value!r} here, which differs "
            f"now: {line()}\n{_WHOLE}"
        )
        self._note(check, (holds, text))
        return value

    def _note(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.graph.call_function(function, args).meta["keep"] = True

    def _size(self, tensor: Tensor, dim: int) -> Any:
        node = self._node_of(tensor)
        if node.op == "get_attr":
            return tensor.shape[dim]
        dim = range(tensor.dim())[dim]
        if (node, dim) not in self._sizes:
            at = self.graph.call_method("size", (node, dim))
            at.meta["size of"] = node
            self._sizes[node, dim] = Size(tensor.shape[dim], at, self)
        return self._sizes[node, dim]

    def _answer_size(self, name: str, tensor: Tensor, dim: int | None = None) -> Any:
        if name == "__len__":
            return int(self._size(tensor, 0))
        if dim is not None:
            return self._size(tensor, dim)
        shape = [self._size(tensor, k) for k in range(tensor.dim())]
        if name in ("shape", "size"):
            return torch.Size(shape)
        total: Any = 1
        for size in shape:
            total = total * size
        return total

    # -- calls --------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record one call of a function of torch."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        is_get = name == "__get__"
        name = func.__self__.__name__ if is_get else name
        if self._is_inside or name in _FIXED:
            return func(*args, **kwargs)
        if name in _REFUSED or func is torch.autograd.grad:
            instead = _REFUSED.get(name, _REFUSED["backward"])
            raise refusal(f"the forward uses {name} of a tensor", instead)
        if name in _SIZES:
            return self._answer_size(name, *args, **kwargs)
        if name == "dtype":
            return self._dtype(args[0])
        if name == "__iter__":
            return iter(args[0].unbind(0))
        if name in _READS:
            return self._read(func, args, kwargs)
        return self._call(func, name, args, kwargs, is_get)

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        node = self._node_of(tensor)
        if node.op != "get_attr" and node not in self._seen_dtypes:
            self._seen_dtypes.add(node)
            text = f"the model's forward was recorded for a tensor of another dtype: {line()}"
            self._note(check_dtype, (node, tensor.dtype, text))
        return tensor.dtype

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Read a value that depends on sizes alone, as of masks; refuse others."""
        node = self._node_of(args[0])
        value = None
        if node in sized_nodes(self.graph, self.changed) and not args[0].is_meta:
            value = func(*_plain(args), **_plain(kwargs))
        if not isinstance(value, bool | int | float):
            raise refusal(
                f"the forward reads values of a tensor ({func.__name__}), which differ for each "
                "micro-batch",
                _WHOLE,
            )
        called_ = self.graph.call_function(func, self._recorded(args), self._recorded(kwargs))
        return self._must_be(called_, value)

    def _call(self, func: Any, name: str, args: Any, kwargs: Any, is_get: bool) -> Any:
        self._check_random()
        given = self._recorded(tuple(args)), self._recorded(dict(kwargs))
        result = func(*_plain(args), **_plain(kwargs))
        if is_get:
            node = self._node("call_function", getattr, (given[0][0], name), {})
        elif getattr(torch.Tensor, name, None) is func:
            node = self._node("call_method", name, *given)
        else:
            node = self._node("call_function", func, *given)
        return self._bind(node, result, args, kwargs)

    def call_module(
        self, module: nn.Module, call: Callable[..., Any], args: Any, named: Any
    ) -> Any:
        """Record the call of a module, if it stays whole."""
        if self._is_inside or module not in self._names:
            return call(module, *args, **named)
        self._is_inside = True
        try:
            self._check_random()
            name = self._names[module]
            node = self._node("call_module", name, self._recorded(args), self._recorded(named))
            node.meta["module"] = name
            result = call(module, *_plain(args), **_plain(named))
            self._random = _random_states()  # a module may draw numbers, as it runs each time
            return self._bind(node, result, args, named)
        finally:
            self._is_inside = False

    def _node(self, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """Add a node; it switches gradients and autocast where the forward has switched them."""
        is_grad = torch.is_grad_enabled()
        if not is_grad or self._autocasts:
            if op == "call_module":
                args, target = (self.graph.get_attr(target), *args), called
            elif op == "call_method":
                target = getattr(torch.Tensor, target)
            op, target = "call_function", within(target, is_grad, tuple(self._autocasts))
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
                self._check_change(known)
                self.changed.append((known.node, node))
                known.version = known.tensor._version
                known.needs_grad = known.tensor.requires_grad
        return True

    def _check_change(self, known: _Known) -> None:
        """Refuse that the forward changes what another layer may hold."""
        if known.node.op == "get_attr":
            owner = str(known.node.target).rpartition(".")[0]
            is_whole = self.twin.get_submodule(owner) in self._names
            if is_whole or isinstance(known.tensor, nn.Parameter):
                raise refusal(f"the forward changes {known.node.target} in place", _WHOLE)

    def _bound(self, value: Any, node: fx.Node) -> Any:
        """Return what a call has returned with its tensors known, and its numbers noted."""
        if isinstance(value, Tensor):
            if id(value) not in self._known:
                self._define(value, node)
        elif isinstance(value, tuple | list):
            self._must_be(self.graph.call_function(len, (node,)), len(value))
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
        elif isinstance(value, _PLAIN):
            return self._numbered(value, node)
        else:
            kind = type(value)
            raise refusal(
                f"{node.target} returns a {kind.__module__}.{kind.__qualname__}, which is no "
                "tensor or plain value",
                _WHOLE,
            )
        return value

    def _item(self, node: fx.Node, key: Any) -> fx.Node:
        return self.graph.call_function(operator.getitem, (node, key))

    # -- what the layers would not repeat -----------------------------------------------------

    def _check_random(self) -> None:
        if _random_states() != self._random:
            raise refusal(
                "the forward draws random numbers of Python or NumPy before this line, which "
                "would be those of the sample for ever",
                "draw them by torch",
            )

    def check_attribute(self, module: nn.Module, name: str) -> None:
        """Refuse that a forward sets an attribute of an opened module."""
        if module in self._opened and not self._is_inside:
            raise refusal(
                f"the forward sets the attribute {name} of a {type(module).__qualname__}, which "
                "the layers do not have",
                _WHOLE,
            )

    def _check_attributes(self) -> None:
        after = _attributes(self._opened)
        for place, value in self._attributes.items():
            if after.get(place, value) != value:
                raise CannotCutError(
                    f"the forward of {place} changes this attribute (a list, a random number "
                    f"generator), which the layers do not have\n{_WHOLE}"
                )

    def enter_autocast(self, context: Any) -> None:
        """Note that the forward switches autocast on or off."""
        if not self._is_inside:
            on = context.device
            state = torch.get_autocast_dtype(on), torch.is_autocast_enabled(on)
            self._autocasts.append((None if on == self._device.type else on, *state))

    def exit_autocast(self) -> None:
        """Note that the forward switches it back."""
        if not self._is_inside:
            self._autocasts.pop()


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
        recorder.check_attribute(module, name)
        set_attribute(module, name, value)

    def entered(context: Any) -> Any:
        result = enter(context)
        recorder.enter_autocast(context)
        return result

    def left(context: Any, *error: Any) -> Any:
        recorder.exit_autocast()
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


def _attributes(modules: dict[nn.Module, str]) -> dict[str, bytes]:
    """Return the values of modules' attributes, of those that can be written."""
    found = {}
    for module in modules:
        for name in vars(module).keys() - vars(nn.Module()).keys():
            with contextlib.suppress(Exception):  # of whatever class the value is
                found[f"{type(module).__qualname__}.{name}"] = pickle.dumps(vars(module)[name])
    return found


def _random_states() -> tuple[Any, ...]:
    """Return the states of Python's generator, and of NumPy's where it is loaded."""
    if "numpy.random" not in sys.modules:
        return (random.getstate(),)
    state = sys.modules["numpy.random"].get_state(legacy=False)["state"]
    return random.getstate(), state["pos"], state["key"].tobytes()
