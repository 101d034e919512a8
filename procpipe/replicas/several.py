"""What the replicas of a pipeline exchange.

    rank 0                     ── inputs and targets ──>      the first rank of each replica
                               <── gradients of inputs ──     (if any input requires one)
    each stage                 <── gradients, loss, … ──>     the same stage of the others
    replica 0's last stage     <── outputs ──                 the last stage of the others
                               ── their gradients ──>         (for ``stage(input)`` only)

Gradients are added up by the process group of each stage, everything else travels beside the plan,
through the memory of the hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.compute.partition import Partition
from procpipe.data.mean_loss import LossPart
from procpipe.data.microbatch import scatter_twice
from procpipe.data.minibatch import Ingoing, Inputs, MiniBatch
from procpipe.job.grid import Grid
from procpipe.plan.all_reduce import last_additions
from procpipe.plan.program import Program, Run
from procpipe.plan.task import Task
from procpipe.replicas.buffers import ReplicaBuffers
from procpipe.replicas.group import Group
from procpipe.replicas.reduction import Reduction
from procpipe.run.messages import Order
from procpipe.run.observer import Observers
from procpipe.run.replicas import Replicas, Scattered
from procpipe.tree import Flat


class Several(Replicas):
    """One rank's connection to the other replicas.

    Args:
        grid: this rank's stage and replica.
        output_stage: the stage of the last partition.
        group: the processes that run this stage.
        device: this stage's device.
        send: sends a nested value to a rank.
        take: waits for a value of a rank.
    """

    def __init__(
        self,
        grid: Grid,
        output_stage: int,
        group: Group,
        device: torch.device,
        send: Callable[[int, Any], None],
        take: Callable[[int], Any],
    ) -> None:
        self._grid = grid
        self._output_stage = output_stage
        self._group = group
        self._reduction = Reduction(group, device)
        self._buffers = ReplicaBuffers(group)
        self._final: dict[Task, set[nn.Parameter]] = {}
        self._send = send
        self._take = take

    @property
    def overlaps(self) -> bool:  # type: ignore[override]
        """Whether gradients may be added up before a call's end."""
        return self._reduction.overlaps

    def observe(self, observers: Observers) -> None:
        """Call these observers for each sum from now on."""
        self._reduction.observers = observers

    # -- the mini-batch -------------------------------------------------------------------------

    def scatter(self, inputs: Inputs, chunks: int) -> list[Scattered]:
        """Divide a mini-batch over the replicas, as evenly as micro-batches, and scatter each."""
        return [*scatter_twice(inputs, self._grid.num_replicas, chunks)]

    def share(
        self,
        order: Order,
        parts: Sequence[Scattered],
        targets: Sequence[Any] | None,
        device: torch.device,
    ) -> tuple[Ingoing, Sequence[Any] | None]:
        """Send each other replica its inputs and targets."""
        ingoing = Ingoing.of_parts(*parts[0], device)
        first = len(ingoing.sizes)
        own = None if targets is None else targets[:first]
        for replica, (inputs, sizes) in enumerate(parts[1:], 1):
            if not sizes:
                continue
            last = first + len(sizes)
            of_replica = Ingoing.of_parts(inputs, sizes, torch.device("cpu"))
            ingoing.requiring.extend(of_replica.requiring)
            wants = [flat.requires_grad for flat in of_replica.inputs]
            theirs = None if targets is None else list(targets[first:last])
            self._send(self._grid.rank_of(0, replica), (list(inputs), wants, theirs))
            first = last
        return ingoing, own

    def take(
        self, order: Order, device: torch.device
    ) -> tuple[Ingoing | None, Sequence[Any] | None]:
        """Take this replica's inputs and targets, on its first rank."""
        if self._grid.stage != 0 or not order.sizes:
            return None, None
        inputs, wants, targets = self._take(0)
        ingoing = Ingoing.of_parts(inputs, order.sizes, device)
        flats = [
            Flat(flat.tensors, flat.structure, tuple(of_flat))
            for flat, of_flat in zip(ingoing.inputs, wants, strict=True)
        ]
        return Ingoing(ingoing.sizes, flats, ingoing.requiring), targets

    def gather_offers(self, ours: Any) -> list[Any]:
        """Bring a plain value of each replica's first rank to rank 0; returned there only."""
        if self._grid.stage != 0:
            return []
        if self._grid.rank != 0:
            self._send(0, ours)
            return []
        firsts = (self._grid.rank_of(0, replica) for replica in range(1, self._grid.num_replicas))
        return [ours, *map(self._take, firsts)]

    def gather_input_gradients(
        self, order: Order, ingoing: Ingoing | None, gradients: Mapping[int, list[Tensor | None]]
    ) -> Mapping[int, list[Tensor | None]]:
        """Bring the gradients of inputs to rank 0, whose user's graph goes on from there."""
        if ingoing is None or order.is_sharded:
            return gradients
        if self._grid.rank != 0:
            if any(any(flat.requires_grad) for flat in ingoing.inputs):
                self._send(0, [gradients.get(i) for i in range(len(order.sizes))])
            return {}
        gathered = dict(gradients)
        first = len(order.sizes)
        for replica, (sizes, _) in enumerate(order.shares[1:], 1):
            if any(ingoing.requiring[first : first + len(sizes)]):
                for i, of_micro_batch in enumerate(self._take(self._grid.rank_of(0, replica))):
                    if of_micro_batch is not None:
                        gathered[first + i] = of_micro_batch
            first += len(sizes)
        return gathered

    def gather_outputs(self, order: Order, outputs: Mapping[int, Flat]) -> list[Flat]:
        """Bring the outputs of all replicas to the last stage of replica 0."""
        found = [outputs[i] for i in sorted(outputs)]
        if self._grid.stage != self._output_stage:
            return found
        if self._grid.replica > 0:
            if found:
                gathered = [[flat.value, list(flat.requires_grad)] for flat in found]
                self._send(self._output_rank(0), gathered)
            return found
        for replica, (sizes, _) in enumerate(order.shares[1:], 1):
            if sizes:
                for value, wants in self._take(self._output_rank(replica)):
                    flat = Flat.of(value)
                    found.append(Flat(flat.tensors, flat.structure, tuple(wants)))
        return found

    def divide_gradients(
        self, order: Order, gradients: Sequence[list[Tensor | None]] | None
    ) -> Sequence[list[Tensor | None]] | None:
        """Send each replica's last stage the gradients of its outputs."""
        if self._grid.stage != self._output_stage:
            return gradients
        if self._grid.replica > 0:
            return list(self._take(self._output_rank(0))) if order.sizes else None
        assert gradients is not None, "autograd gives them where the output is"
        first = len(order.sizes)
        for replica, (sizes, _) in enumerate(order.shares[1:], 1):
            if sizes:
                theirs = list(gradients[first : first + len(sizes)])
                self._send(self._output_rank(replica), theirs)
                first += len(sizes)
        return gradients[: len(order.sizes)]

    def _output_rank(self, replica: int) -> int:
        return self._grid.rank_of(self._output_stage, replica)

    def make_equal(self, layers: Iterable[nn.Module]) -> None:
        """Give the layers of this replica the values of replica 0."""
        for layer in layers:
            self._group.copy_first((*layer.parameters(), *layer.buffers()))
            self._buffers.note(layer)

    # -- what is added up -----------------------------------------------------------------------

    def begin(
        self, batch: MiniBatch, parameters: Iterable[nn.Parameter], tied: Iterable[nn.Parameter]
    ) -> Iterable[nn.Parameter]:
        """Begin a call with a backward pass."""
        found = list(parameters)
        self._reduction.begin(batch, found, tied)
        return found

    def start(self, program: Program, partitions: Mapping[int, Partition]) -> None:
        """Find the last task that adds to the gradients of each partition."""
        found = last_additions([step.task for step in program if isinstance(step, Run)])
        later: set[nn.Parameter] = set()
        self._final = {}
        for j, task in found.items():  # from the last: two partitions may share a parameter
            self._final[task] = set(partitions[j].parameters()) - later
            later |= self._final[task]

    def during(self, task: Task) -> AbstractContextManager[None]:
        """Add up gradients to which no later task adds, as they become final."""
        parameters = self._final.get(task)
        self._reduction.look()
        return nullcontext() if parameters is None else self._reduction.during(parameters)

    def end(self, factor: Tensor | None = None) -> None:
        """Wait until all gradients are added up."""
        self._reduction.end()

    def total(self, part: LossPart | None, batch: MiniBatch) -> LossPart | None:
        """Add up what the replicas know of a step's loss."""
        if not batch.is_step:
            return part
        found = self._reduction.total(part, batch)
        if batch.loss is not None and self._grid.replica == 0:
            batch.loss.warn_of_sum(found.weight)
        return found

    def check_added_up(self, call: str) -> None:
        """Raise ``RuntimeError`` if calls in ``no_sync()`` have left gradients to be added up."""
        if self._reduction.holds_own:
            raise RuntimeError(
                f"{call} after calls in no_sync(): gradients are still to be added up over "
                "replicas; run the last step of an accumulation outside of it"
            )

    def end_forward(self, layers: Iterable[nn.Module]) -> None:
        """Join the replicas' statistics of batch normalisation, and make other buffers equal."""
        self._buffers.end_forward(layers)

    def close(self) -> None:
        """Drop the connections."""
        self._reduction.abandon()
        self._group.close()
