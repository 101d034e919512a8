"""What replicas of a pipeline send one another of a mini-batch, beside the plan.

    rank 0                     ── inputs and targets ──>      the first rank of each replica
                               <── sizes of own shares ──     (in a loop over sharded batches)
                               <── gradients of inputs ──     (if any input requires one)
    replica 0's last stage     <── outputs ──                 the last stage of the others
                               ── their gradients ──>         (for ``stage(input)`` only)

A pipeline without others sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from procpipe.data.microbatch import scatter, scatter_twice
from procpipe.data.minibatch import Ingoing, Inputs
from procpipe.job.grid import Grid
from procpipe.run.messages import Order
from procpipe.run.wiring import Wires
from procpipe.tree import Flat

#: The inputs of some micro-batches, and their sizes.
Scattered = tuple[Sequence[Inputs], Sequence[int]]

#: Of each micro-batch, the gradients of tensors that require one.
_Gradients = Sequence[list[Tensor | None]]


class Exchange:
    """One rank's connection to the other replicas; ``output_stage`` is that of the last partition.

    Values wait for their receiver as :meth:`Wires.send_value` says.
    """

    def __init__(self, grid: Grid, output_stage: int, wires: Wires) -> None:
        self._grid = grid
        self._output_stage = output_stage
        self._wires = wires

    def scatter(self, inputs: Inputs, chunks: int) -> list[Scattered]:
        """Divide a mini-batch over the replicas, on rank 0; return the micro-batches of each."""
        if self._grid.num_replicas == 1:
            return [scatter(inputs, chunks)]
        return [*scatter_twice(inputs, self._grid.num_replicas, chunks)]

    def share(
        self,
        order: Order,
        parts: Sequence[Scattered],
        targets: Sequence[Any] | None,
        device: torch.device,
    ) -> tuple[Ingoing, Sequence[Any] | None]:
        """Return what rank 0's replica gets of inputs and targets, and send the others theirs.

        ``parts`` is what :meth:`scatter` returned, ``targets`` those of all micro-batches, if rank
        0 has them, ``device`` rank 0's.
        """
        ingoing = Ingoing.of_parts(*parts[0], device)
        for replica, span in _spans(order):
            inputs, sizes = parts[replica]
            of_replica = Ingoing.of_parts(inputs, sizes, torch.device("cpu"))
            ingoing.requiring.extend(of_replica.requiring)
            wants = [flat.requires_grad for flat in of_replica.inputs]
            theirs = None if targets is None else list(targets[span])
            self._send(0, replica, (list(inputs), wants, theirs))
        return ingoing, None if targets is None else targets[: len(ingoing.sizes)]

    def take(
        self, order: Order, device: torch.device
    ) -> tuple[Ingoing | None, Sequence[Any] | None]:
        """Return what this rank gets of inputs and targets, on ranks other than 0."""
        if self._grid.stage != 0 or not order.sizes:
            return None, None
        inputs, wants, targets = self._take(0, 0)
        ingoing = Ingoing.of_parts(inputs, order.sizes, device)
        flats = [*map(_wanting, ingoing.inputs, wants)]
        return Ingoing(ingoing.sizes, flats, ingoing.requiring), targets

    def gather_offers(self, ours: Any) -> list[Any]:
        """Bring a plain value of each replica's first rank to rank 0; returned there only."""
        if self._grid.stage != 0:
            return []
        if self._grid.replica > 0:
            self._send(0, 0, ours)
            return []
        others = range(1, self._grid.num_replicas)
        return [ours, *(self._take(0, replica) for replica in others)]

    def gather_input_gradients(
        self, order: Order, ingoing: Ingoing | None, gradients: Mapping[int, list[Tensor | None]]
    ) -> Mapping[int, list[Tensor | None]]:
        """Return the gradients of the inputs of all micro-batches on rank 0.

        There the user's graph goes on, unless each replica has read its own.
        """
        if ingoing is None or order.is_sharded:
            return gradients
        if self._grid.replica > 0:
            if any(any(flat.requires_grad) for flat in ingoing.inputs):
                self._send(0, 0, [gradients.get(i) for i in range(len(order.sizes))])
            return {}
        gathered = dict(gradients)
        for replica, span in _spans(order):
            if any(ingoing.requiring[span]):
                theirs = enumerate(self._take(0, replica), span.start)
                gathered |= {i: found for i, found in theirs if found is not None}
        return gathered

    def gather_outputs(self, order: Order, outputs: Mapping[int, Flat]) -> list[Flat]:
        """Return the outputs of all micro-batches on the last stage of replica 0."""
        found = [outputs[i] for i in sorted(outputs)]
        if self._grid.stage != self._output_stage:
            return found
        if self._grid.replica == 0:
            for replica, _ in _spans(order):
                for value, wants in self._take(self._output_stage, replica):
                    found.append(_wanting(Flat.of(value), wants))
        elif found:
            ours = [[flat.value, list(flat.requires_grad)] for flat in found]
            self._send(self._output_stage, 0, ours)
        return found

    def divide_gradients(self, order: Order, gradients: _Gradients | None) -> _Gradients | None:
        """Return the gradients of this replica's outputs, on its last stage, given those of all."""
        if self._grid.stage != self._output_stage:
            return gradients
        if self._grid.replica > 0:
            return list(self._take(self._output_stage, 0)) if order.sizes else None
        assert gradients is not None, "autograd gives them where the output is"
        for replica, span in _spans(order):
            self._send(self._output_stage, replica, list(gradients[span]))
        return gradients[: len(order.sizes)]

    def _send(self, stage: int, replica: int, value: Any) -> None:
        self._wires.send_value(self._grid.rank_of(stage, replica), value)

    def _take(self, stage: int, replica: int) -> Any:
        return self._wires.take_value(self._grid.rank_of(stage, replica))


def _spans(order: Order) -> Iterator[tuple[int, slice]]:
    """Yield each replica but the first that has micro-batches, and which of all they are."""
    first = len(order.sizes)
    for replica, (sizes, _) in enumerate(order.shares[1:], 1):
        if sizes:
            yield replica, slice(first, first + len(sizes))
            first += len(sizes)


def _wanting(flat: Flat, wants: Sequence[bool]) -> Flat:
    """Return a value that has travelled, with the flags that its tensors had."""
    return Flat(flat.tensors, flat.structure, tuple(wants))
