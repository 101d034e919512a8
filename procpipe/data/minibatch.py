"""A mini-batch on its way into the pipeline and out of it.

    user's inputs ── scatter ──> micro-batches; each, detached, on stage 0's device for its task
                 <── gradients ── of those inputs that require them

    micro-batches' outputs ── gather ──> the user's output, on the last stage
                 <── gradients ── of the loss computed from it

Nothing is communicated here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from procpipe.compute.segment import Enter
from procpipe.data.loss import MeanLoss
from procpipe.data.microbatch import gather, uploaded
from procpipe.tree import TENSOR, Flat, Structure, unflatten

#: Runs the backward pass, given the gradients of each micro-batch's outputs that require one.
RunBackward = Callable[[list[list[Tensor | None]]], None]

#: What the model's first layer is called with: a tuple of positional values; where there are named
#: ones, a dict by position and name.
Inputs = tuple[Any, ...] | dict[int | str, Any]

#: The value of ``target`` where ``step`` was given none.
UNSET: Any = object()


def inputs_of(values: tuple[Any, ...], named: Mapping[str, Any]) -> Inputs:
    """Return what the model's first layer is called with."""
    return dict([*enumerate(values), *named.items()]) if named else values


def inputs_and_target(
    values: tuple[Any, ...], named: dict[str, Any], target: Any, *, is_read: bool
) -> tuple[Inputs, Any]:
    """Return the inputs and the target of a ``step``, from what it was given.

    If ``target`` is ``UNSET``, it is the named value ``labels``, or the second of two positional
    ones. ``is_read``: whether this rank's inputs count; others may give any values.

    Raises:
        TypeError: more than two positional values, of which the last may be an input too.
    """
    if target is UNSET and "labels" in named:
        target = named.pop("labels")
    elif target is UNSET and len(values) == 2:
        target, values = values[1], values[:1]
    elif target is UNSET and len(values) > 2 and is_read:
        raise TypeError(
            f"step() was given {len(values)} positional values, which may all be inputs: name "
            f"the target, as in step({', '.join('abcdefgh'[: min(len(values), 8) - 1])}, "
            "target=y), or target=None where the loss takes none"
        )
    return inputs_of(values, named), None if target is UNSET else target


@dataclass
class MiniBatch:
    """What the programs of one stage work on, and what they leave."""

    #: On the first stage, what ``scatter`` returns of the model's inputs, until a task takes it.
    parts: list[list[Tensor]] = field(default_factory=list)
    structure: Structure = TENSOR
    #: On the first stage, of each micro-batch taken, the tensors that require a gradient, as the
    #: user gave them.
    requiring: dict[int, list[Tensor]] = field(default_factory=dict)
    loss: MeanLoss | None = None  # in a ``step``, on the stage of the last partition
    #: On the stage of the last partition, for a program that begins with backward tasks: each
    #: micro-batch's gradients of the output tensors that require one.
    output_gradients: Sequence[list[Tensor | None]] | None = None

    #: On the stage of the last partition, each micro-batch's output (or loss), detached.
    outputs: dict[int, Flat] = field(default_factory=dict)
    #: On the first stage, each micro-batch's gradients of inputs that require one.
    input_gradients: dict[int, list[Tensor | None]] = field(default_factory=dict)
    #: After a ``step``, on every rank: the loss of the mini-batch, and what it counts.
    mean: Tensor | None = None
    weight: float = 0.0

    def take_input(self, i: int, device: torch.device) -> Flat:
        """Return the input of a micro-batch, detached, on the first stage's device; once."""
        tensors, self.parts[i] = self.parts[i], []
        keeps_gradients = torch.is_grad_enabled()
        wants = tuple([keeps_gradients and tensor.requires_grad for tensor in tensors])
        self.requiring[i] = [t for t, want in zip(tensors, wants, strict=True) if want]
        moved = [tensor.detach() for tensor in tensors]
        if any(tensor.device != device for tensor in moved):
            moved = [uploaded(tensor, device) for tensor in moved]
        return Flat(moved, self.structure, wants)

    def send_back(self) -> None:
        """Run the backward pass of whatever made the inputs, from each micro-batch's gradients."""
        pairs = [
            (tensor, gradient.to(tensor.device))
            for i, of_micro_batch in self.input_gradients.items()
            for tensor, gradient in zip(self.requiring[i], of_micro_batch, strict=True)
            if gradient is not None
        ]
        if pairs:
            tensors, given = zip(*pairs, strict=True)
            torch.autograd.backward(tensors, given)


def join_outputs(outputs: list[Flat], run_backward: RunBackward | None) -> Any:
    """Put the micro-batches' outputs together, on the last stage.

    ``run_backward`` is called when the user runs a loss backward; None if that cannot follow.
    """
    tensors = [tensor for output in outputs for tensor in output.tensors]
    wants = [flag for output in outputs for flag in output.requires_grad]
    wanting = [tensor for tensor, flag in zip(tensors, wants, strict=True) if flag]
    if run_backward is not None and wanting:
        counts = [sum(output.requires_grad) for output in outputs]
        anchor = torch.empty(0, device=wanting[0].device, requires_grad=True)
        attached = iter(_Output.apply((run_backward, counts), anchor, *wanting))  # type: ignore[no-untyped-call]
        tensors = [next(attached) if flag else t for t, flag in zip(tensors, wants, strict=True)]
    rest = iter(tensors)
    return gather([unflatten(islice(rest, len(of.tensors)), of.structure) for of in outputs])


class _Output(Enter):
    """The root of the user's graph on the last stage: its backward is the pipeline's."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        run, counts = ctx.caught
        rest = iter(gradients)
        run([list(islice(rest, count)) for count in counts])
        return (None,) * (2 + len(gradients))
