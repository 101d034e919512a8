"""The interface to other replicas of a pipeline: what they get of a mini-batch, what is added up.

    rank 0                     the first rank of each replica
    scatter ── take, share ──> its micro-batches
    each stage                 the same stage of the others
    begin … during … end       gradients, added up
    total                      the loss
    end_forward                buffers
    replica 0's last stage     the last stage of the others
    gather_outputs <────────── outputs
    divide_gradients ────────> their gradients

``Replicas`` is that of a pipeline without others, which exchanges nothing. That of several is in
``procpipe/replicas/``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.compute.partition import Partition
from procpipe.data.mean_loss import LossPart
from procpipe.data.microbatch import scatter
from procpipe.data.minibatch import Ingoing, Inputs, MiniBatch
from procpipe.plan.program import Program
from procpipe.plan.task import Task
from procpipe.run.messages import Order
from procpipe.run.observer import Observers
from procpipe.tree import Flat

_NOTHING = nullcontext()

#: The inputs of some micro-batches, and their sizes.
Scattered = tuple[Sequence[Inputs], Sequence[int]]


class Replicas:
    """What a pipeline exchanges with other replicas: nothing, as there are none.

    Attributes:
        overlaps: whether gradients may be added up before a call's end.
    """

    overlaps = True

    def observe(self, observers: Observers) -> None:
        """Call these observers for each sum over replicas from now on."""

    # -- the mini-batch -------------------------------------------------------------------------

    def scatter(self, inputs: Inputs, chunks: int) -> list[Scattered]:
        """Scatter a mini-batch, on rank 0; return the micro-batches of each replica."""
        return [scatter(inputs, chunks)]

    def share(
        self,
        order: Order,
        parts: Sequence[Scattered],
        targets: Sequence[Any] | None,
        device: torch.device,
    ) -> tuple[Ingoing, Sequence[Any] | None]:
        """Return what rank 0's replica gets of inputs and targets, and send the rest.

        Args:
            order: the order of the mini-batch.
            parts: what :meth:`scatter` returned.
            targets: those of all micro-batches, if rank 0 has them.
            device: rank 0's.
        """
        return Ingoing.of_parts(*parts[0], device), targets

    def take(
        self, order: Order, device: torch.device
    ) -> tuple[Ingoing | None, Sequence[Any] | None]:
        """Return what this rank gets of inputs and targets, on ranks other than 0."""
        return None, None

    def gather_offers(self, ours: Any) -> list[Any]:
        """Bring a plain value of each replica's first rank to rank 0; returned there only."""
        return [ours]

    def gather_outputs(self, order: Order, outputs: Mapping[int, Flat]) -> list[Flat]:
        """Return the outputs of all micro-batches on the last stage of replica 0."""
        return [outputs[i] for i in sorted(outputs)]

    def divide_gradients(
        self, order: Order, gradients: Sequence[list[Tensor | None]] | None
    ) -> Sequence[list[Tensor | None]] | None:
        """Return the gradients of this replica's outputs, on its last stage, given those of all."""
        return gradients

    def gather_input_gradients(
        self, order: Order, ingoing: Ingoing | None, gradients: Mapping[int, list[Tensor | None]]
    ) -> Mapping[int, list[Tensor | None]]:
        """Return the gradients of the inputs of all micro-batches on rank 0."""
        return gradients

    def make_equal(self, layers: Iterable[nn.Module]) -> None:
        """Give the layers of all replicas the values of replica 0."""

    # -- what is added up -----------------------------------------------------------------------

    def settle(self) -> None:
        """Bring the layers to the state that they have between calls."""

    def begin(
        self, batch: MiniBatch, parameters: Iterable[nn.Parameter], tied: Iterable[nn.Parameter]
    ) -> Iterable[nn.Parameter]:
        """Begin a call with a backward pass, before the first backward task.

        Returns the parameters whose gradients may be corrected before :meth:`end`.

        Args:
            batch: the call's mini-batch.
            parameters: of this stage's layers, in the order of the model.
            tied: those of them that other stages have, too.
        """
        return parameters

    def start(self, program: Program, partitions: Mapping[int, Partition]) -> None:
        """Start a program of this stage."""

    def during(self, task: Task) -> AbstractContextManager[None]:
        """Surround a task; after the last that adds to a gradient, that can be added up."""
        return _NOTHING

    def end(self, factor: Tensor | None = None) -> None:
        """Wait until all gradients are added up.

        ``factor`` is what those must still be multiplied by that ``begin`` did not return; 0-dim.
        """

    def total(self, part: LossPart | None, batch: MiniBatch) -> LossPart | None:
        """Return what all replicas know of the loss."""
        return part

    def check_added_up(self, call: str) -> None:
        """Check before a call that uses gradients that none is still to be added up."""

    def end_forward(self, layers: Iterable[nn.Module]) -> None:
        """Join what layers have noted of a mini-batch, such as running statistics."""

    def close(self) -> None:
        """Drop the connections."""
