"""Records one forward of a model as a ``torch.fx.Graph`` over the model's own modules.

    model's code                    graph
    h = self.stem(x)                stem = self.stem(x)                  a module that stays whole
    b, c = h.shape[:2]              size = stem.size(0); …               sizes.py
    h = h.view(b, c, -1)            view = stem.view(size, size_1, -1)   a function of torch

The model's Python runs once, without values, on the meta device. The graph's first input is the
device; its output is one node, what the model returns. The ``meta`` of a node has what cutting
needs to know:

    tensor      of the sample, which the node makes; its version and history at present
    number      true if it makes a number that is another one for each micro-batch
    weight      elements of the parameters of the module that is called, or of the parameter
    changed     true if it reads memory that is changed in place, of a buffer
    since       the first node whose memory this one changes
    keep        true if it must not be left out
    line        of the model's code
    value       the user's own, of an input
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, is_dataclass
from itertools import chain
from keyword import kwlist
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from procpipe.cutting.changes import (
    PLAIN,
    Key,
    np,
    random_states,
    set_random_states,
    states,
    watched_by_line,
)
from procpipe.cutting.sizes import (
    SAMPLE,
    UNKNOWN,
    WHOLE,
    CannotCutError,
    Number,
    check,
    line,
    number,
)
from procpipe.torch_internals import has_hooks, is_compiled, pytree

META = torch.device("meta")

#: What has effects that the layers would not have. torch itself refuses to read values on meta.
_REFUSED = {"data", "__set__", "grad", "backward", "register_hook", "retain_grad"}

#: What is the same for each micro-batch, or is not noticed, as the docs say.
_FIXED = {
    *("dim", "ndim", "ndimension", "requires_grad", "is_leaf", "grad_fn", "is_inference"),
    "get_device",
    *("__hash__", "__repr__", "__format__", "_set_grad_enabled"),
}
_SIZES = {"shape", "size", "numel", "nelement", "__len__"}
_DEVICES = {f"is_{kind}": kind for kind in ("cpu", "cuda", "meta", "mps", "xpu")}

#: What reads no values of a tensor.
_HARMLESS = _FIXED | _SIZES | {*_DEVICES, "device", "dtype", "layout"}

#: ``(device type, dtype, enabled)``; ``None`` is the type of the layer's device.
Autocast = tuple[str | None, torch.dtype, bool]


class ReachesOutsideError(CannotCutError):
    """A module that stays whole, of a ``name``, uses a tensor that only others have."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} uses a parameter or buffer of a module that it has not")
        self.name = name


class Recorder(TorchFunctionMode):
    """Records torch's functions and whole modules as a model calls them, in its ``graph``.

    Args:
        model: the model, which does not run.
        twin: the copy of it that runs, on the meta device.
        opened: the names of its modules that do not stay whole.
        sample: a call's arguments by name.
        arguments: these on the meta device.
        device: that of the sample, where what cannot run on the meta device runs with the sample's
            values, and with zeros for what modules have made of them.
    """

    def __init__(
        self,
        model: nn.Module,
        twin: nn.Module,
        opened: dict[str, None],
        sample: dict[str, Any],
        arguments: dict[str, Any],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.is_inside = False  # a whole module
        self.autocasts: list[Autocast] = []
        self.names = {m: n for n, m in twin.named_modules() if n not in opened}
        self.device = device
        self._twin, self._opened = twin, {name: twin.get_submodule(name) for name in opened}
        self._device_node = self.graph.placeholder("device")
        self._device_node.meta["value"] = device
        self._hooked = {module for module in self.names if has_hooks(module)}
        self._originals = {*model.modules(), *(tensor for _, tensor in _owned(model))}
        self._owned = {tensor: name for name, tensor in reversed([*_owned(twin)])}
        #: The tensors that modules have; and of the whole one that runs, those it has or is given.
        self._tensors = {module: _tensors_of(module) for module in self.names}
        self._running: tuple[str, set[Tensor]] | None = None
        self._known: dict[int, fx.Node] = {}
        self._sizes: dict[tuple[fx.Node, int], Any] = {}
        values = pytree.tree_leaves(sample)
        named = pytree.tree_flatten_with_path(arguments)[0]
        for (path, leaf), value in zip(named, values, strict=True):
            if isinstance(leaf, Tensor):
                name = re.sub(r"\W+", "_", pytree.keystr(path)).strip("_")
                self._define(leaf, self.graph.placeholder(name))
                self._known[id(leaf)].meta["value"] = value
        if not self._known:
            kind = type(twin).__qualname__
            raise CannotCutError(f"the sample of the {kind} has no tensor", SAMPLE)

    def run(self, args: tuple[Any, ...], named: dict[str, Any], watched: set[Key]) -> set[Key]:
        """Record the forward for the sample, as it is given in a call.

        Returns what it changes that the layers do not have. A second run, of another copy, in which
        this is ``watched``, refuses the line.
        """
        before = states(self._opened)
        watching = watched_by_line(self, self._opened, watched)
        with torch.enable_grad(), META, _patched(self), self, watching:
            result = self._twin(*args, **named)
        if changed := {key for key, _ in before.items() ^ states(self._opened).items()}:
            return changed
        leaves, tree = pytree.tree_flatten(result)
        made = tuple(map(self._source, leaves))
        is_tensor = isinstance(result, Tensor)
        self.graph.output(made[0] if is_tensor else self.graph.call_function(Nested(tree), made))
        self.graph.eliminate_dead_code(
            lambda node: node.op in ("placeholder", "output") or bool(node.meta.get("keep"))
        )
        for node in self.graph.nodes:
            if node.op in ("call_module", "get_attr") and {*node.target.split(".")} & {*kwlist}:
                raise CannotCutError(
                    f"{node.target} has a name that torch.fx cannot write, as it is Python's",
                    "rename it, or let the module around it stay whole (whole=(ItsClass,))",
                    node.meta.get("line", UNKNOWN),
                )
        return set()

    # -- values -------------------------------------------------------------------------------

    def _define(self, tensor: Tensor, node: fx.Node) -> None:
        self._known[id(tensor)] = node
        node.meta.update(tensor=tensor, history=_history(tensor))

    def _node_of(self, tensor: Tensor) -> fx.Node:
        known = self._known.get(id(tensor))
        if known is None and tensor in self._owned:
            known = self.graph.get_attr(self._owned[tensor])
            known.meta["weight"] = tensor.numel() if isinstance(tensor, nn.Parameter) else 0
            known.meta["line"] = line()
            self._define(tensor, known)
        if known is None or known.meta["history"] != _history(tensor):
            raise CannotCutError(
                "a tensor is used which, or whose gradient, no recorded function or module has "
                "made (but a torch.autograd.Function, an extension, NumPy, a global variable)",
                f"{WHOLE}; a constant can be a buffer; checkpoint with use_reentrant=False",
            )
        return known

    def _source(self, value: Any) -> Any:
        """Return what stands in the graph for a tensor, a number, a device or a plain value."""
        if isinstance(value, Tensor):
            return self._node_of(value)
        if isinstance(value, Number):
            return value.source
        if self._is_layers(value):
            return self._device_node
        if np and isinstance(value, np.generic):
            return value.item()
        if isinstance(value, PLAIN):
            return value
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        instead = "give the sample use_cache=False" if kind.endswith("Cache") else WHOLE
        if is_dataclass(value):
            instead = (
                "register it by torch.utils._pytree.register_dataclass(ItsClass, "
                "serialized_type_name='ItsClass')"
            )
        raise CannotCutError(
            f"a value of type {kind} is passed on, which is no tensor or plain value", instead
        )

    def _value(self, value: Any) -> Any:
        """Return what a function is given while it is recorded."""
        if isinstance(value, Number):
            return value.value
        return META if self._is_layers(value) else value

    def _is_layers(self, device: Any) -> bool:
        """Return whether a value names the sample's device, in place of which is the layer's."""
        is_one = isinstance(device, torch.device | str)
        return is_one and str(device) in (str(self.device), self.device.type)

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
            with self.graph.inserting_after(node):  # so that the tensor does not travel for it
                read = self.graph.call_method("size", (node, dim))
            self._sizes[node, dim] = number(tensor.shape[dim], read)
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
        if self._running is not None and name not in _HARMLESS:
            self._check_tensors(*self._running, pytree.tree_leaves((args, kwargs)))
        if self.is_inside or name in _FIXED:
            return func(*args, **kwargs)
        if name == "device":
            return self.device
        if name in _DEVICES:
            return self.device.type == _DEVICES[name]
        if name in _REFUSED:
            raise CannotCutError(f"{name} of a tensor is used, which layers would not repeat")
        if name in _SIZES:
            return self._size(name, *args, **kwargs)
        if is_get:
            func, args = getattr, (args[0], name)
        is_method = getattr(Tensor, name, None) is func
        op, target = ("call_method", name) if is_method else ("call_function", func)
        node, args, kwargs = self._node(op, target, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except NotImplementedError:  # as of nonzero(), whose shape depends on values
            result = self._result_of_values(func, args, kwargs)
            if not all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
                raise
        return self._bind(node, result, args, kwargs)

    def call_module(
        self, module: nn.Module, call: Callable[..., Any], args: Any, named: Any
    ) -> Any:
        """Record the call of a module, if it stays whole."""
        self._check_copied(module)
        if self.is_inside:
            return self._result(module, call, args, named)
        if module not in self.names or self._is_another(module):
            return call(module, *args, **named)  # of which functions are recorded
        self.is_inside = True
        drawn = random_states()  # which it may change, as it runs each time
        try:
            given = filter(torch.is_tensor, pytree.tree_leaves((args, named)))
            self._running = self.names[module], {*given, *(t for _, t in _owned(module))}
            node, args, named = self._node("call_module", self.names[module], args, named)
            node.meta.update(keep=True, weight=sum(p.numel() for p in module.parameters()))
            return self._bind(node, self._result(module, call, args, named), args, named)
        finally:
            self.is_inside, self._running = False, None
            self._tensors[module] = _tensors_of(module)
            set_random_states(drawn)

    def _is_another(self, module: nn.Module) -> bool:
        """Return whether the forward has registered hooks, or other parameters, at a module."""
        is_hooked = any(has_hooks(each) and each not in self._hooked for each in module.modules())
        return is_hooked or self._tensors[module] != _tensors_of(module)

    def _check_tensors(self, name: str, own: set[Tensor], given: list[Any]) -> None:
        """Check that a whole module, of that name, uses no tensor of a module that it has not."""
        for each in given:
            if isinstance(each, Tensor) and each not in own:
                self._check_copied(each)
                if each in self._owned:
                    raise ReachesOutsideError(name)

    def _check_copied(self, used: Any) -> None:
        if used in self._originals:
            raise CannotCutError(
                f"the model's own {type(used).__qualname__} is used, and no copy of it, by a "
                "function or reference that holds the model itself",
                "make it a method of a module's class; compile by module.compile()",
            )

    def _result(self, module: nn.Module, call: Callable[..., Any], args: Any, named: Any) -> Any:
        """Return what a module returns that stays whole, or is inside of one that does."""
        try:
            return call(module, *args, **named)
        except Exception as error:
            if isinstance(error, CannotCutError) or torch.get_default_device() != META:
                raise
            of_copy = functools.partial(call, copied(module, self.device))
            return self._result_of_values(of_copy, args, named)

    def _result_of_values(self, function: Callable[..., Any], args: Any, named: Any) -> Any:
        """Return, on the meta device, what a function returns that cannot run there."""
        values: dict[fx.Node, Any] = {}

        def real_of(given: Any) -> Any:
            if isinstance(given, Tensor):
                with contextlib.suppress(Exception):
                    value: Tensor = self._computed(self._known[id(given)], values).clone()
                    if not value.is_meta:
                        return value
            return copied(given, self.device)

        with torch.no_grad(), self.device:
            real = pytree.tree_map(real_of, (args, named))
            result = function(*real[0], **real[1])
            pairs = zip(*map(pytree.tree_leaves, ((args, named), real)), strict=True)
            for ours, theirs in pairs:
                if isinstance(ours, Tensor) and theirs._version:
                    ours.zero_()  # is changed in place, too
        return copied(result)

    def _computed(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        """Return what functions make of the sample's values; an error where there are none."""
        if node not in values and node.op == "placeholder":
            values[node] = copy.deepcopy(node.meta["value"])
        elif node not in values:
            of_sources = functools.partial(self._computed, values=values)
            args, kwargs = fx.map_arg((node.args, node.kwargs), of_sources)
            if node.op not in ("call_function", "call_method"):
                raise LookupError("a module's values are not computed")
            is_method = node.op == "call_method"
            function: Any = getattr(Tensor, str(node.target)) if is_method else node.target
            values[node] = function(*args, **kwargs)
        return values[node]

    def _node(self, op: str, target: Any, args: Any, kwargs: Any) -> tuple[fx.Node, Any, Any]:
        """Add a node, and return it and the arguments' values.

        It switches gradients and autocast where the forward has switched them.
        """
        values = map_aggregate((tuple(args), dict(kwargs)), self._value)
        args, kwargs = map_aggregate((tuple(args), dict(kwargs)), self._source)
        if self.autocasts or not torch.is_grad_enabled():
            if op == "call_module":
                args, target = (self.graph.get_attr(target), *args), operator.call
            elif op == "call_method":
                target = getattr(Tensor, target)
            target = Within(target, torch.is_grad_enabled(), tuple(self.autocasts))
            op, args = "call_function", (self._device_node, *args)
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta["line"] = line()
        return node, *values

    def _bind(self, node: fx.Node, result: Any, args: Any, kwargs: Any) -> Any:
        """Let what a call has returned, or changed in place, be values of its node."""
        changed = self._note_changes(node, args, kwargs)
        leaves, tree = pytree.tree_flatten(result)
        is_leaf = len(leaves) == 1 and leaves[0] is result
        if not is_leaf:
            is_flat = type(result) is tuple and [*map(id, leaves)] == [*map(id, result)]
            types = [*map(type, leaves)] if is_flat else None
            node = self.graph.call_function(Leaves(tree, line(), types), (node,))
            node.meta["keep"] = True
        for k, leaf in enumerate(leaves):
            part = node if is_leaf else self.graph.call_function(operator.getitem, (node, k))
            if not isinstance(leaf, Tensor):
                leaves[k] = number(self._source(leaf), part)
            else:
                known: Any = self._known.get(id(leaf))
                if known is not None and known not in changed:
                    leaves[k] = leaf.view_as(leaf)  # as of dropout in eval mode: a value of its own
                if known not in changed or known.op != "get_attr":
                    self._define(leaves[k], part)  # whose sizes may be others, too
        return pytree.tree_unflatten(leaves, tree)

    def _note_changes(self, node: fx.Node, args: Any, kwargs: Any) -> set[Any]:
        """Note which tensors a call has changed in place, and return their nodes."""
        given = (v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor))
        if not any(_is_changed(self._known[id(tensor)]) for tensor in given):
            return set()
        node.meta["keep"] = True
        changed = {*filter(_is_changed, self._known.values())}  # also those that share memory
        for known in changed:
            if known.op == "get_attr":
                owner = self._twin.get_submodule(str(known.target).rpartition(".")[0])
                if known.meta["weight"] or owner in self.names:  # which other layers may hold
                    raise CannotCutError(f"the forward changes {known.target} in place")
                known.meta["changed"] = True
            else:
                node.meta["since"] = min(known, node.meta.get("since", known))
            self._define(known.meta["tensor"], known)
        return changed


@contextlib.contextmanager
def _patched(recorder: Recorder) -> Iterator[None]:
    """Have modules, and autocast, call a recorder, and check which attributes are set."""
    call = nn.Module.__call__
    set_attribute = nn.Module.__setattr__
    apply: Any = vars(torch.autograd.Function)["apply"]  # a class method, of C in torch 2.15
    enter: Any = torch.autocast.__enter__
    leave: Any = torch.autocast.__exit__

    @functools.wraps(call)
    def recorded(module: nn.Module, *args: Any, **named: Any) -> Any:
        return recorder.call_module(module, call, args, named)

    def checked(module: nn.Module, name: str, value: Any) -> None:
        of_whole = not recorder.is_inside and module in recorder.names
        if of_whole and getattr(module, name, None) is not value:
            kind = type(module).__qualname__
            raise CannotCutError(f"the forward sets {name} of a {kind} that stays whole")
        set_attribute(module, name, value)

    def applied(function: Any, *args: Any, **named: Any) -> Any:
        # Those of torch are called by its own functions, such as checkpoint().
        if not (recorder.is_inside or function.__module__.startswith("torch.")):
            raise CannotCutError(f"{function.__qualname__} is a torch.autograd.Function")
        return apply.__get__(None, function)(*args, **named)

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
        patch.object(nn.Module, "__setattr__", checked),
        patch.object(torch.autograd.Function, "apply", classmethod(applied)),
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
class Leaves:
    """Takes what a module or function returns apart, which must be nested as in the sample.

    ``types`` are those of the values, if it was a plain tuple of tensors and plain values.
    """

    tree: Any = field(hash=False)
    where: str
    types: list[type] | None = field(compare=False)
    __name__ = "leaves"

    def __call__(self, result: Any) -> Any:
        """Return the tensors and plain values, from left to right."""
        if type(result) is tuple and [*map(type, result)] == self.types:
            return result  # which takes less time
        leaves, tree = pytree.tree_flatten(result)
        check(len(leaves), self.tree.num_leaves, self.where)
        check(tree, self.tree, self.where)
        return leaves


@dataclass(frozen=True)
class Within:
    """A function as it runs where the forward has switched gradients or autocast."""

    function: Callable[..., Any]
    is_grad: bool
    autocasts: tuple[Autocast, ...]

    @property
    def __name__(self) -> str:
        return f"{self.function.__name__}_within"

    def __call__(self, device: torch.device, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function on the layer's device."""
        with contextlib.ExitStack() as stack:
            if not self.is_grad:
                stack.enter_context(torch.no_grad())
            for on, dtype, enabled in self.autocasts:
                stack.enter_context(torch.autocast(on or device.type, dtype, enabled))
            return self.function(*args, **kwargs)


# -- copies ----------------------------------------------------------------------------------------


def copied(value: Any, device: torch.device = META) -> Any:
    """Copy a module, or nested values, with zeros for tensors: on meta they need no memory."""

    def copy_of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        made = torch.zeros_like(leaf, device=device).requires_grad_(leaf.requires_grad)
        return nn.Parameter(made, made.requires_grad) if isinstance(leaf, nn.Parameter) else made

    if not isinstance(value, nn.Module):
        return pytree.tree_map(copy_of, value)
    held = pytree.tree_leaves([vars(module) for module in value.modules()])
    try:
        made = copy.deepcopy(value, {id(t): copy_of(t) for t in held if isinstance(t, Tensor)})
    except Exception as error:  # of any kind, as classes may have their own __deepcopy__
        raise CannotCutError(
            f"the {type(value).__qualname__} cannot be copied: {type(error).__name__}: {error}",
            "hold what has no copies outside of the model, or define __deepcopy__ or __getstate__",
            "its attributes",
        ) from error
    for theirs, ours in zip(value.modules(), made.modules(), strict=False):
        forward = vars(ours).get("forward")
        if forward is not None and forward is theirs.forward and is_compiled(ours):
            del ours.forward  # which would call the original
    return made


def _owned(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, buffers and plain tensors that a model's modules have, by name."""
    for name, module in model.named_modules(remove_duplicate=False):
        held = (module._parameters, module._buffers, vars(module))
        for key, tensor in chain.from_iterable(each.items() for each in held):
            if isinstance(tensor, Tensor):
                yield f"{name}.{key}".lstrip("."), tensor


def _tensors_of(module: nn.Module) -> set[Tensor]:
    return {*module.parameters(), *module.buffers()}


def _history(tensor: Tensor) -> tuple[int, bool, Any]:
    return tensor._version, tensor.requires_grad, tensor.grad_fn


def _is_changed(node: fx.Node) -> bool:
    return bool(node.meta["tensor"]._version != node.meta["history"][0])
