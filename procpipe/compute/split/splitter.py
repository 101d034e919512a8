"""A backward pass in two tasks: gradients of the inputs now (I), of the weights later (W).

The stage before waits for the inputs' gradients only, so weight gradients can fill idle time. W
computes those of ``nn.Linear``, ``nn.Conv1d/2d/3d`` and ``nn.MultiheadAttention``, which take most
of the time; I computes all others.

    F or R   x ──(1) layer.forward = ours ──> y          (2) node: keeps x and weight
    I        gradient of x <──(2) node.backward── gradient of y
                                   └──(3) x, gradient of y ──> PutOff, all that is kept for W
    W        gradients of weight and bias <──(4) PutOff.run

(1) is in place during a split task only, so an unsplit micro-batch runs the stock layers. It calls
them too where the result might differ: in compiled or transformed code, for tensors of other
classes, for weights that depend on other layers. Layers applied by functions
(``F.linear(x, layer.weight)``) are in I.

(4) starts the engine at the weights, so that hooks run and gradients are added up as always.

A task may itself run a backward pass: a layer that calls ``autograd`` in its forward, or
``torch.utils.checkpoint`` within I, whose repeated forward also runs (1).

``torch.distributed.pipelining`` walks over autograd's graph instead. That keeps the whole graph
until W, runs custom functions twice, and fails under checkpointing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from procpipe.compute.split.attention import attention_with, is_known
from procpipe.compute.split.rules import LINEAR, Convolution, Rule
from procpipe.torch_internals import (
    are_functions_transformed,
    can_split_backward,
    conv_forward_of,
    is_compiled,
    run_backward,
    will_run,
)

_Forward = Callable[..., Any]


class _Call(NamedTuple):
    """One call of a layer."""

    rule: Rule
    weight: Tensor
    bias: Tensor | None


class _Waiting(NamedTuple):
    """What the weight gradients of one call are computed from, as it was at task I."""

    call: _Call
    x: Tensor
    gradient: Tensor
    versions: tuple[int, int]


class PutOff:
    """The weight gradients of one micro-batch that wait for its task W."""

    def __init__(self) -> None:
        #: Distinguishes the task in which a node was made from that in which it runs.
        self.num_tasks = 0
        self._waiting: deque[_Waiting] = deque()

    def add(self, call: _Call, x: Tensor, gradient: Tensor) -> None:
        """Keep what a layer's weight gradients are computed from."""
        self._waiting.append(_Waiting(call, x, gradient, (x._version, gradient._version)))

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept; what several layers share counts once, of larger memory the part."""
        parts: dict[int, dict[int, int]] = {}  # by memory and place in it
        whole: dict[int, int] = {}
        for waiting in self._waiting:
            for tensor in (waiting.x, waiting.gradient):
                memory = tensor.untyped_storage()
                whole[memory.data_ptr()] = memory.nbytes()
                parts.setdefault(memory.data_ptr(), {})[tensor.data_ptr()] = tensor.nbytes
        return sum(min(whole[memory], sum(of.values())) for memory, of in parts.items())

    @torch.no_grad()
    def run(self) -> None:
        """Add the gradients to the parameters, and release what they are computed from.

        Each call of a layer alone, so that one weight's gradient is in memory at a time; but all
        calls that share a parameter in one run, so that its hooks run once, as in plain training.
        """
        waiting = self._waiting
        uses = Counter(id(leaf) for call, *_ in waiting for leaf in _leaves_of(call))
        to_come = uses.copy()
        shared: list[tuple[Tensor, Tensor]] = []
        met: set[int] = set()
        while waiting:
            call, x, gradient, versions = waiting.popleft()
            if versions != (x._version, gradient._version):  # autograd checks the same in I
                raise RuntimeError(
                    "the input, or the gradient of the output, of a layer whose weight is "
                    f"{tuple(call.weight.shape)} was changed in place before its weight gradients "
                    "were computed, which a backward pass in two tasks puts off: let the layer "
                    "have a tensor of its own for each micro-batch, or use a schedule that does "
                    "not split backward"
                )
            pairs = _weight_gradients(call, x, gradient)
            leaves = [id(leaf) for leaf in _leaves_of(call)]
            to_come.subtract(leaves)
            if all(uses[leaf] == 1 for leaf in leaves):
                _add(pairs)
                continue
            shared += pairs
            met.update(leaves)
            if not any(to_come[leaf] for leaf in met):
                _add(shared)
                shared.clear()


class Splitter:
    """Makes a partition's layers put off their weight gradients while a split task runs.

    ``anchor`` is a leaf that requires a gradient and gets none.
    """

    def __init__(self, layers: Iterable[nn.Module], anchor: Tensor) -> None:
        self._layers = tuple(layers)
        self._anchor = anchor
        self._put_off: PutOff | None = None
        self._found: list[tuple[nn.Module, _Forward]] | None = None

    def into(self, put_off: PutOff | None) -> AbstractContextManager[None]:
        """Put off weight gradients within the ``with`` block, one task of a split micro-batch."""
        return _UNSPLIT if put_off is None else self._into(put_off)

    @contextmanager
    def _into(self, put_off: PutOff) -> Iterator[None]:
        if self._found is None:  # once, as compiled code is compiled anew for other functions
            self._found = [(layer, self._forward_of(layer)) for layer in suited(self._layers)]
        put_off.num_tasks += 1
        self._put_off = put_off
        # A user may have put a forward of their own into a layer since.
        ours = [pair for pair in self._found if "forward" not in pair[0].__dict__]
        for layer, forward in ours:
            layer.__dict__["forward"] = forward  # past nn.Module.__setattr__ and its checks
        try:
            yield
        finally:
            self._put_off = None
            for layer, _ in ours:
                layer.__dict__.pop("forward", None)

    def _forward_of(self, layer: nn.Module) -> _Forward:
        if isinstance(layer, nn.MultiheadAttention):
            return self._attention(layer)
        return partial(self._linear if isinstance(layer, nn.Linear) else self._convolution, layer)

    def _linear(self, layer: Any, input: Tensor) -> Tensor:
        """Stand in for ``nn.Linear.forward``."""
        return self._apply_linear(layer, input, layer.weight, layer.bias)

    def _apply_linear(
        self, layer: nn.Module, input: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Stand in for ``F.linear`` with a weight of a layer, or computed from its own."""
        if not _can_be_put_off(layer, weight, bias, input):
            return F.linear(input, weight, bias)
        return self._apply(_Call(LINEAR, weight, bias), input)

    def _attention(self, layer: nn.MultiheadAttention) -> _Forward:
        """Return what stands in for ``nn.MultiheadAttention.forward``."""
        split = attention_with(partial(self._apply_linear, layer))

        def stand_in(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not _projects_alike(layer, query, key, value):
                return type(layer).forward(layer, query, key, value, *args, **kwargs)
            return split(layer, query, key, value, *args, **kwargs)

        return stand_in

    def _convolution(self, layer: Any, input: Tensor) -> Tensor:
        """Stand in for the forward of ``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``."""
        weight, bias = layer.weight, layer.bias
        if not _can_be_put_off(layer, weight, bias, input):
            stock = conv_forward_of(type(layer))
            assert stock is not None, "checked by suited"
            return stock(layer, input, weight, bias)
        rule, x = Convolution.of(layer, input)
        call = _Call(rule, weight, bias)
        if x.dim() == len(rule.stride) + 1:  # one sample
            return self._apply(call, x.unsqueeze(0)).squeeze(0)
        return self._apply(call, x)

    def _apply(self, call: _Call, x: Tensor) -> Tensor:
        device_type = x.device.type
        is_autocast = torch.is_autocast_enabled(device_type)
        if is_autocast and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(device_type))  # in the graph: _Node.forward is not
        output: Tensor = _Node.apply(  # type: ignore[no-untyped-call]
            call, self._put_off, self._anchor, x, is_autocast
        )
        return output


class _Node(torch.autograd.Function):
    """Step (2): the graph's node of one call of a layer, which computes its input's gradient."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, put_off: PutOff, anchor: Tensor, x: Tensor, is_autocast: bool
    ) -> Tensor:
        ctx.call, ctx.put_off, ctx.anchor, ctx.made_in = call, put_off, anchor, put_off.num_tasks
        ctx.set_materialize_grads(False)
        rule, weight, bias = call
        ctx.save_for_backward(x, weight)
        if is_autocast:
            # Autocast caches the cast of a parameter, here without a graph, and would reuse it for
            # unsplit micro-batches: https://github.com/pytorch/pytorch/issues/158232
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        return rule.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * 5
        x, weight = ctx.saved_tensors
        call, put_off = ctx.call, ctx.put_off
        if ctx.made_in != put_off.num_tasks or _adds_up(ctx.anchor):
            # Detached, or x would keep the task's graph alive.
            put_off.add(call, x.detach(), gradient)
        of_x = None
        if ctx.needs_input_grad[3]:
            of_x = call.rule.input_gradient(x, gradient, weight)
        return None, None, None, of_x, None


def _adds_up(anchor: Tensor) -> bool:
    """Return whether a backward pass that a layer runs adds to the parameters' gradients.

    ``backward()`` does and reaches the anchor; ``autograd.grad`` does neither.

    Raises:
        RuntimeError: it does, and asks for a graph of the gradients.
    """
    adds: bool = will_run(get_gradient_edge(anchor).node)
    if adds and torch.is_grad_enabled():
        raise RuntimeError(
            "a layer calls backward(create_graph=True), which a backward pass in two tasks cannot "
            "follow: use torch.autograd.grad, or a schedule that does not split backward"
        )
    return adds


def _weight_gradients(call: _Call, x: Tensor, gradient: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the weight, and a bias that requires one, with their gradients."""
    bias = call.bias if call.bias is not None and call.bias.requires_grad else None
    of_weight, of_bias = call.rule.weight_gradients(x, gradient, call.weight, bias)
    pairs = [(call.weight, of_weight)]
    if bias is not None and of_bias is not None:
        pairs.append((bias, of_bias))
    return pairs


def _add(pairs: list[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        targets, gradients = zip(*pairs, strict=True)
        run_backward(targets, gradients)


_CONVOLUTIONS: tuple[Any, ...] = tuple(filter(conv_forward_of, (nn.Conv1d, nn.Conv2d, nn.Conv3d)))

#: The methods that a rule stands for, as torch made them.
_STOCK = {layer.forward for layer in (nn.Linear, *_CONVOLUTIONS, nn.MultiheadAttention)}
_STOCK_INSIDE = {None} | set(map(conv_forward_of, _CONVOLUTIONS))

#: What an attention projects query, key and value with.
_PACKED = ("in_proj_weight",) * 3
_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")

_PLAIN = (Tensor, nn.Parameter)

_UNSPLIT = nullcontext()


def _can_be_put_off(layer: nn.Module, weight: Tensor, bias: Tensor | None, input: Tensor) -> bool:
    """Return whether this call has a weight gradient that the rules compute as autograd does."""
    if torch.compiler.is_compiling():  # first, since what follows cannot be compiled
        return False
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and type(input) in _PLAIN
        and type(weight) in _PLAIN
        and input.is_floating_point()
        and (weight.is_leaf or _is_own(layer, weight))
        and (bias is None or bias.is_leaf or _is_own(layer, bias))
        and not are_functions_transformed()
    )


def _is_own(layer: nn.Module, computed: Tensor) -> bool:
    """Return whether a weight is computed from its layer's own parameters only.

    As ``torch.nn.utils.parametrize`` does. One that another layer computes needs its gradient in I.
    """
    own = set(map(id, layer.parameters()))
    return all(id(leaf) in own for leaf in _leaves(computed))


def _projects_alike(layer: nn.MultiheadAttention, *inputs: Tensor) -> bool:
    """Return whether an attention's three projections of its inputs are all put off, or none.

    Otherwise the gradient of a parameter that they share would be computed in two parts.
    """
    own = layer._parameters  # holds no computed weights, which an attribute would compute
    names = _PACKED if own.get(_PACKED[0]) is not None else _SEPARATE
    weights = [weight for name in names if (weight := own.get(name)) is not None]
    if len(weights) < len(names) or "in_proj_bias" not in own:
        return False
    put_off = {
        _can_be_put_off(layer, weight, own["in_proj_bias"], input)
        for weight, input in zip(weights, inputs, strict=True)
    }
    return len(put_off) == 1


def _leaves_of(call: _Call) -> list[Tensor]:
    """Return the parameters that get gradients from a call, once for each part."""
    leaves = list(_leaves(call.weight))
    return leaves if call.bias is None else [*leaves, *_leaves(call.bias)]


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the parameters that a tensor is computed from; a parameter itself."""
    if tensor.is_leaf and tensor.requires_grad:
        yield tensor
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        nodes += [following for following, _ in node.next_functions]


def suited(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules with a stock forward that share no parameter with other modules.

    A shared one (of an embedding and the head, say) would get its gradient in two parts. Modules in
    compiled ones are left out, too: another forward would only make torch compile them again.
    """
    modules = dict.fromkeys(module for layer in layers for module in layer.modules())
    inside = {part for module in modules if is_compiled(module) for part in module.modules()}
    suited = [module for module in modules if module not in inside and _is_stock(module)]
    while True:  # sharing with a module that was just left out leaves a module out too
        others = modules.keys() - set(suited)
        elsewhere = {id(p) for module in others for p in _applied_by(module)} - {id(None)}
        still = [m for m in suited if elsewhere.isdisjoint(map(id, _applied_by(m)))]
        if len(still) == len(suited):
            return suited
        suited = still


def _applied_by(module: nn.Module) -> list[nn.Parameter | None]:
    """Return the parameters that a module applies itself; an attention also its out_proj's."""
    parameters = list(module._parameters.values())
    if isinstance(module, nn.MultiheadAttention):
        part = module._modules.get("out_proj")
        parameters += part._parameters.values() if part is not None else ()
    return parameters


def _is_stock(module: nn.Module) -> bool:
    """Return whether calling a module runs a forward that a rule is known for."""
    of: Any = type(module)
    return (
        can_split_backward()
        and of.forward in _STOCK
        and conv_forward_of(of) in _STOCK_INSIDE
        and (of.forward is not nn.MultiheadAttention.forward or is_known())
        and "forward" not in module.__dict__
    )
