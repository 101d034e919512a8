"""A mini-batch on its way into the pipeline and out of it, and its loss.

    user's inputs ── scatter ──> Ingoing: micro-batches, detached, on stage 0's device
                 <── gradients ── of those inputs that require them

    micro-batches' outputs ── gather ──> the user's output, on the last stage
                 <── gradients ── of the loss computed from it

Knows the user's values and micro-batches; nothing is communicated here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from procpipe.compute.sharing import shared
from procpipe.data.microbatch import gather, scatter, shares
from procpipe.data.remote import Remote
from procpipe.data.upload import uploaded
from procpipe.errors import NonFiniteLossError
from procpipe.torch_internals import pytree
from procpipe.tree import Flat, flatten, in_words, map_tensors, unflatten

#: Runs the backward pass, given the gradients of each micro-batch's outputs that want one.
RunBackward = Callable[[list[list[Tensor | None]]], None]


def input_and_target(values: tuple[Any, ...], *, is_read: bool) -> tuple[tuple[Any, ...], Any]:
    """Return the inputs and the target of a ``step`` whose target is not named.

    Args:
        values: what ``step`` was given by position.
        is_read: whether this rank's inputs count; others may give any number of values, of which
            more than two hold no target.

    Raises:
        TypeError: more than two values, of which the last may be an input too.
    """
    if len(values) > 2:
        if not is_read:
            return values, None
        raise TypeError(
            f"step() was given {len(values)} positional values, which may all be inputs: name the "
            f"target, as in step({', '.join('abcdefgh'[: min(len(values), 8) - 1])}, target=y), or "
            "target=None where the loss takes none"
        )
    return (values[:-1], values[-1]) if len(values) > 1 else (values, None)


@dataclass(frozen=True)
class Ingoing:
    """The inputs of a mini-batch, split.

    Attributes:
        sizes: samples in each micro-batch.
        inputs: each micro-batch's positional inputs, detached, on stage 0's device.
        requiring: of each micro-batch, the tensors that require a gradient, as the user gave them.
    """

    sizes: tuple[int, ...]
    inputs: list[Flat]
    requiring: list[list[Tensor]]

    @classmethod
    def of(cls, inputs: tuple[Any, ...], chunks: int, device: torch.device) -> Ingoing:
        """Split positional inputs; see ``microbatch.scatter`` for what is raised."""
        parts, sizes = scatter(inputs, chunks)
        flats, requiring = [], []
        keeps_gradients = torch.is_grad_enabled()
        for part in parts:
            tensors, structure = flatten(part)
            wants = tuple(keeps_gradients and tensor.requires_grad for tensor in tensors)
            memories = shared(tensors, "input")
            moved = [uploaded(tensor.detach(), device) for tensor in tensors]
            flats.append(Flat(moved, structure, wants).sharing(memories, ()))
            requiring.append([t for t, want in zip(tensors, wants, strict=True) if want])
        return cls(tuple(sizes), flats, requiring)

    def add_gradients(self, gradients: Mapping[int, Sequence[Tensor | None]]) -> None:
        """Run the backward pass of whatever made the inputs, from each micro-batch's gradients."""
        pairs = [
            (tensor, gradient.to(tensor.device))
            for i, of_micro_batch in gradients.items()
            for tensor, gradient in zip(self.requiring[i], of_micro_batch, strict=True)
            if gradient is not None
        ]
        if pairs:
            tensors, given = zip(*pairs, strict=True)
            torch.autograd.backward(tensors, given)


@dataclass
class Loss:
    """The user's loss function and weight, with their results checked.

    A micro-batch whose share is 0 is left out: its loss may be NaN (a mean over no tokens), and 0
    times NaN is NaN. The loss function is called all the same, as it may count or log.

    Attributes:
        function: ``loss_fn`` of the ``Stage``.
        weight: ``loss_weight`` of the ``Stage``.
        must_be_finite: whether a loss that is NaN or infinite is an error; on a GPU, looking
            waits for the device.
    """

    function: Callable[..., Any] | None
    weight: Callable[[Any], Any] | None
    must_be_finite: bool = False
    _has_warned: bool = field(default=False, init=False)

    def check(self) -> None:
        """Check that there is a loss function."""
        if self.function is None:
            raise ValueError(
                "step() needs a loss: give Stage(…, loss_fn=…), or call stage(input) and run the "
                "loss of its output backward"
            )

    def of(self, output: Any, target: Any, share: float = 1.0) -> Tensor:
        """Return the loss of one micro-batch, 0-dim.

        Args:
            output: the model's.
            target: what ``loss_fn`` gets beside it; None for nothing.
            share: the micro-batch's in the loss of the mini-batch. If it is 0, so is the result,
                and so are the gradients of ``output``.
        """
        assert self.function is not None, "checked before the step"
        if isinstance(target, Remote):
            raise ValueError(
                f"the target of step() is {target!r} on every rank: give it on rank 0 or on the "
                "last stage as a real value"
            )
        # Before the loss function, which may change the output in place.
        zero = _zero_of(output) if share == 0 else None
        loss = self.function(output) if target is None else self.function(output, target)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            form = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss)}"
            raise ValueError(
                f"loss_fn returned {form}, but must return the mean over the micro-batch's "
                "samples, a 0-dim tensor (reduction='mean')"
            )
        if zero is not None:
            return zero.to(loss)
        if self.must_be_finite and not loss.isfinite():
            raise NonFiniteLossError(
                f"the loss is {loss.item()}; the output is {in_words(output)}, "
                f"{_share_not_finite(output)} of it not finite: lower the learning rate, clip "
                "gradients, or look for the layer with torch.autograd.detect_anomaly()"
            )
        return loss

    def shares(self, targets: Sequence[Any] | None, sizes: Sequence[int]) -> tuple[float, ...]:
        """Return each micro-batch's share in the loss; ``targets`` None where there are none."""
        if self.weight is None:
            return tuple(shares(sizes))
        if targets is None:
            raise ValueError(
                "loss_weight needs a target: give one to step() on rank 0 or on the last stage, or "
                "leave loss_weight out"
            )
        found = shares([float(self.weight(target)) for target in targets])
        if not any(found) and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "loss_weight is 0 for every micro-batch of a mini-batch, so its loss and its "
                "gradients are 0; this is told once",
                RuntimeWarning,
                stacklevel=5,  # the line that calls step()
            )
        return tuple(found)


def join_outputs(outputs: list[Flat], run_backward: RunBackward | None) -> Any:
    """Put the micro-batches' outputs together, on the last stage.

    Args:
        outputs: each micro-batch's output.
        run_backward: called with gradients when the user runs a loss backward; None if no
            backward pass can follow.
    """
    if run_backward is None or not any(any(output.requires_grad) for output in outputs):
        return gather([output.value for output in outputs])
    wanting = [
        tensor
        for output in outputs
        for tensor, wants in zip(output.tensors, output.requires_grad, strict=True)
        if wants
    ]
    counts = [sum(output.requires_grad) for output in outputs]
    anchor = torch.empty(0, device=wanting[0].device, requires_grad=True)
    attached = iter(_Output.apply(run_backward, counts, anchor, *wanting))  # type: ignore[no-untyped-call]
    values = []
    for output in outputs:
        chosen = [
            next(attached) if wants else tensor
            for tensor, wants in zip(output.tensors, output.requires_grad, strict=True)
        ]
        values.append(unflatten(chosen, output.structure))
    return gather(values)


def _zero_of(output: Any) -> Tensor:
    """Return a loss of 0, 0-dim, whose gradients of an output's tensors are exactly 0.

    ``masked_fill`` lets no NaN through, neither forward nor backward.
    """
    zero = torch.zeros(())
    for tensor in pytree.tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            everything = torch.ones((), dtype=torch.bool, device=tensor.device)
            zero = zero + tensor.masked_fill(everything, 0).sum().real
    return zero


def _share_not_finite(value: Any) -> str:
    tensors, _ = flatten(value)
    num_elements = sum(tensor.numel() for tensor in tensors)
    num_finite = sum(int(tensor.isfinite().sum()) for tensor in tensors)
    return f"{1 - num_finite / max(1, num_elements):.1%}"


def on_device(value: Any, device: torch.device) -> Any:
    """Return a nested value with its tensors on a device; the host waits for no device."""
    return map_tensors(lambda tensor: uploaded(tensor, device), value)


class _Output(torch.autograd.Function):
    """The root of the user's graph on the last stage: its backward is the pipeline's.

    ``detach`` makes aliases that are no views, so that they may be changed in place; and that share
    their version with what the last layer may have saved, so that autograd notices when they may
    not. (``mark_dirty`` would count as such a change itself.)
    """

    @staticmethod
    def forward(
        ctx: Any, run: RunBackward, counts: list[int], anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run, ctx.counts = run, counts
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        remaining = iter(gradients)
        ctx.run([[next(remaining) for _ in range(count)] for count in ctx.counts])
        return (None,) * (3 + len(gradients))
