"""A backward pass in two tasks: gradients of the inputs now (I), of the weights later (W).

The stage before waits for the inputs' gradients only, so weight gradients can fill idle time. W
computes those of ``nn.Linear`` and ``nn.Conv1d/2d/3d``, which take most of the time; I computes all
others.

    F or R   x ──(1) layer.forward = ours ──> y          (2) node: keeps x and weight
    I        gradient of x <──(2) node.backward── gradient of y
                                   └──(3) x, gradient of y ──> PutOff, all that is kept for W
    W        gradients of weight and bias <──(4) PutOff.run

(1) calls the stock forward outside of split tasks and where the result might differ: in compiled or
transformed code, for tensors of other classes, for weights that are computed. Layers applied by
functions (``F.linear(x, layer.weight)``, and so attention's projections) are in I.

(4) starts the engine at the weights, so that hooks run and gradients are added up as always.

I may itself run (1) and a backward pass, as ``torch.utils.checkpoint`` does. F and R may not.

``torch.distributed.pipelining`` walks over autograd's graph instead. That keeps the whole graph
until W, runs custom functions twice, and fails under checkpointing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from procpipe.torch_internals import are_functions_transformed, is_compiled, run_backward


class _Waiting(NamedTuple):
    """What the weight gradients of one call of a layer are computed from, as it was at task I."""

    leaves: tuple[Tensor, ...]  # the weight and, if it requires a gradient, the bias
    x: Tensor
    gradient: Tensor  # of the layer's output
    versions: tuple[int, int]


class PutOff:
    """The weight gradients of one micro-batch that wait for its task W."""

    def __init__(self) -> None:
        self.is_in_backward = False  # whether task I has begun
        self.waiting: dict[nn.Module, list[_Waiting]] = {}  # by layer, of its calls

    @torch.no_grad()
    def run(self) -> None:
        """Add the gradients to the parameters, and release what they are computed from.

        Each layer alone, in the order of the backward pass, so that one weight's gradient is in
        memory at a time. Those of several calls of it are added up first, so that hooks run once.
        """
        while self.waiting:
            layer = next(iter(self.waiting))
            calls = self.waiting.pop(layer)
            totals: dict[Tensor, Tensor] = {}
            for call in calls:
                if call.versions != (call.x._version, call.gradient._version):
                    raise RuntimeError(
                        "the input, or the gradient of the output, of a layer whose weight is "
                        f"{tuple(call.leaves[0].shape)} was changed in place before its weight "
                        "gradients were computed, which a backward pass in two tasks puts off: "
                        "let the layer have a tensor of its own for each micro-batch, or use a "
                        "schedule that does not split backward"
                    )
                of_leaves = _weight_gradients(layer, call.x, call.gradient, *call.leaves)
                for leaf, of_leaf in zip(call.leaves, of_leaves, strict=True):
                    made = of_leaf.to(leaf.dtype)
                    totals[leaf] = totals[leaf] + made if leaf in totals else made
            run_backward(tuple(totals), tuple(totals.values()))


class Splitter:
    """Makes a partition's layers put off their weight gradients while a split task runs.

    Building it replaces their forward.

    Attributes:
        anchor: a leaf that requires a gradient and gets none.
        put_off: where layers put their weight gradients off to; None for nowhere.
    """

    def __init__(self, layers: Iterable[nn.Module], anchor: Tensor) -> None:
        self.anchor = anchor
        self.put_off: PutOff | None = None
        for layer in suited(layers):
            # Past nn.Module.__setattr__ and its checks.
            layer.__dict__["forward"] = partial(_forward, self, layer)

    @contextmanager
    def into(self, put_off: PutOff) -> Iterator[None]:
        """Put off weight gradients within the ``with`` block, one task of a split micro-batch."""
        self.put_off = put_off
        try:
            yield
        finally:
            self.put_off = None


def suited(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules with a rule that share no parameter with other modules.

    A shared one (of an embedding and the head, say) could get its gradient in two parts. Modules in
    compiled ones are left out, too: another forward would only make torch compile them again.
    """
    modules = dict.fromkeys(module for layer in layers for module in layer.modules())
    inside = {part for module in modules if is_compiled(module) for part in module.modules()}
    uses = Counter(p for module in modules for p in module.parameters(recurse=False))
    return [
        module
        for module in modules
        if module not in inside
        and are_functions_transformed is not None
        and _has_rule(module)
        and "weight" in module._parameters  # not computed from others, as by weight_norm
        and all(uses[parameter] == 1 for parameter in module.parameters(recurse=False))
    ]


def _forward(splitter: Splitter, layer: Any, input: Tensor) -> Tensor:
    """Stand in for a layer's forward: step (1)."""
    # Compiling first, as what follows would be guarded by compiled code.
    is_split = not torch.compiler.is_compiling() and splitter.put_off is not None
    if not is_split or not _can_be_put_off(layer, input):
        stock: Tensor = type(layer).forward(layer, input)
        return stock
    x, device_type = input, input.device.type
    if torch.is_autocast_enabled(device_type) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device_type))  # in the graph: _Node.forward is not
    output: Tensor = _Node.apply(  # type: ignore[no-untyped-call]
        layer, splitter.put_off, splitter.anchor, x
    )
    return output


_PLAIN = (Tensor, nn.Parameter)


def _can_be_put_off(layer: Any, input: Tensor) -> bool:
    """Return whether this call has a weight gradient that the rules compute as autograd does."""
    weight, bias = layer.weight, layer.bias
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and type(input) in _PLAIN
        and type(weight) in _PLAIN
        and input.is_floating_point()
        and weight.is_leaf
        and (bias is None or bias.is_leaf)
        and (isinstance(layer, nn.Linear) or input.dim() == weight.dim())  # not of one sample
        and not are_functions_transformed()
    )


class _Node(torch.autograd.Function):
    """Step (2): the graph's node of one call of a layer, which computes its input's gradient."""

    @staticmethod
    def forward(ctx: Any, layer: Any, put_off: PutOff, anchor: Tensor, x: Tensor) -> Tensor:
        is_trained = layer.bias is not None and layer.bias.requires_grad
        ctx.leaves = (layer.weight, layer.bias) if is_trained else (layer.weight,)
        ctx.layer, ctx.put_off = layer, put_off
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, layer.weight)
        output: Tensor = type(layer).forward(layer, x)
        return output.detach()  # no view, so that it may be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * 4
        if not ctx.put_off.is_in_backward:
            raise RuntimeError(
                "a layer or loss_fn runs a backward pass in its forward (autograd.grad(), "
                "backward()), which a backward pass in two tasks cannot follow: use a schedule "
                "that does not split backward"
            )
        x, weight = ctx.saved_tensors  # aliases, where a layer checkpoints itself
        # Detached, or x would keep the task's graph alive.
        call = _Waiting(ctx.leaves, x.detach(), gradient, (x._version, gradient._version))
        ctx.put_off.waiting.setdefault(ctx.layer, []).append(call)
        of_x = None
        if ctx.needs_input_grad[3]:
            of_x = _input_gradient(ctx.layer, x, gradient, weight)
        return None, None, None, of_x


# -- rules ---------------------------------------------------------------------------------------
#
# ``x`` is the layer's input, and ``gradient`` that of its output; under autocast both have a
# shorter dtype than ``weight``. The results are bit by bit those of autograd, since the same
# kernels are called.


def _has_rule(module: nn.Module) -> bool:
    """Return whether a module runs a stock forward that the functions below know."""
    of: Any = module
    own = module.__dict__.get("forward")
    if own is not None and getattr(own, "func", None) is not _forward:  # a user's
        return False
    if type(module) in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return of.padding_mode == "zeros" and not isinstance(of.padding, str)
    return type(module).forward is nn.Linear.forward


def _input_gradient(layer: nn.Module, x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of ``x``, whose values do not matter."""
    weight = weight.to(gradient.dtype)
    if isinstance(layer, nn.Linear):
        rows = _rows(gradient)
        of_rows = weight.t().mm(rows.t()).t() if _is_by_columns(_rows(x)) else rows.mm(weight)
        return of_rows.reshape(x.shape)
    of_x: Tensor = _of_convolution(layer, x, gradient, weight, (True, False, False))[0]
    return of_x


def _weight_gradients(
    layer: nn.Module, x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None = None
) -> list[Tensor]:
    """Return the gradient of the weight and, if it is given, of the bias."""
    if not isinstance(layer, nn.Linear):
        mask = (False, True, bias is not None)
        found = _of_convolution(layer, x, gradient, weight.to(gradient.dtype), mask)
        return [each for each in found[1:] if each is not None]
    rows_in, rows = _rows(x), _rows(gradient)
    is_usual = _is_by_columns(weight.t())
    of_weight = rows.t().mm(rows_in) if is_usual else rows_in.t().mm(rows).t()
    if bias is None:
        return [of_weight]
    # Autograd adds the bias to the rows, or else to a product of the output's shape.
    is_of_rows = x.is_contiguous() or x.dim() <= 2
    return [of_weight, rows.sum(0) if is_of_rows else gradient.sum(list(range(x.dim() - 1)))]


def _of_convolution(
    layer: Any, x: Tensor, gradient: Tensor, weight: Tensor, mask: tuple[bool, bool, bool]
) -> Any:
    # What torch.nn.grad computes convolutions' gradients with.
    return torch.ops.aten.convolution_backward.default(
        gradient,
        x,
        weight,
        [layer.out_channels],
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.transposed,
        layer.output_padding,
        layer.groups,
        mask,
    )


def _rows(tensor: Tensor) -> Tensor:
    """Return a tensor as a matrix whose columns are its last dimension."""
    matrix: Tensor = torch.atleast_2d(tensor).flatten(0, -2)
    return matrix


def _is_by_columns(matrix: Tensor) -> bool:
    """Return whether autograd computes the gradient of a matrix by columns."""
    of_row, of_column = matrix.stride()
    return of_row == 1 and of_column == len(matrix)
