"""Runs one stage's program: take what a task needs, run it, send what it made.

    program step        what happens here
    Receive(transfer)   the channel may post a buffer for it
    Run(F i)            take activation, skips, target ─> partition.forward  ─> made[…]
    Run(R i)            partition.recompute
    Run(B i)            take gradients                 ─> partition.backward ─> made[…]
    Run(I i), Run(W i)  the same in two                ─> partition.backward_input, …_weight
    Send(transfer)      made[…] ─> channel

What one partition makes for another of the same stage stays in ``made`` until that one takes it.
A gradient that nothing requires is not sent: both ends know from the activation's metadata, and
each leaves out its part of the transfer.

Knows nothing of the user's call: ``stage.py`` fills in a ``MiniBatch`` and reads it afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from procpipe.compute.ledger import Ledger, num_bytes
from procpipe.compute.partition import Partition
from procpipe.compute.sharing import check_fresh
from procpipe.errors import RemoteStageError
from procpipe.job.board import Board
from procpipe.plan.program import Program, Receive, Run, Send
from procpipe.plan.routes import (
    ACTIVATION,
    GRADIENT,
    LOSS,
    SKIP_GRADIENT,
    TARGET,
    Transfer,
)
from procpipe.plan.task import BACKWARD, FORWARD, INPUT_GRADIENT, RECOMPUTE, Task
from procpipe.run.faults import note_where
from procpipe.run.ports import Channels, Key, Ports, key_of, message_of
from procpipe.run.trace import Trace
from procpipe.tree import Flat, cut, joined, parted


@dataclass
class MiniBatch:
    """What one run of a program works on, and what it leaves.

    Attributes:
        inputs: on stage 0, each micro-batch's positional inputs.
        targets: each micro-batch's target, where the user gave it: on stage 0 if it is routed,
            else on the stage of the last partition.
        loss_of: on that stage, in a ``step``: ``(output, target, share) -> 0-dim loss``.
        shares: each micro-batch's share in the loss of the mini-batch; one of share 0 is left out.
        keep: whether backward tasks follow, in this program or a later one.
        recompute: the micro-batches that a later program recomputes. A program that holds the
            backward tasks says itself what is recomputed.
        output_gradients: on that stage, for a program that begins with backward tasks: each
            micro-batch's gradients of the output tensors that want one.
        outputs: on that stage, each micro-batch's output (or loss), detached.
        loss: the loss of the mini-batch, on every rank whose program has a loss in it.
        input_gradients: on stage 0, each micro-batch's gradients of the inputs that want one.
    """

    inputs: Sequence[Flat] | None = None
    targets: Sequence[Any] | None = None
    loss_of: Callable[[Any, Any, float], Tensor] | None = None
    shares: Sequence[float] = ()
    keep: bool = False
    recompute: frozenset[int] = frozenset()
    output_gradients: Sequence[list[Tensor | None]] | None = None
    outputs: dict[int, Flat] = field(default_factory=dict)
    loss: Tensor | None = None
    input_gradients: dict[int, list[Tensor | None]] = field(default_factory=dict)


class Executor:
    """One stage's runner of programs.

    Args:
        stage: this stage's index.
        placement: the stage of each partition.
        partitions: the local layers, by the indices of this stage's partitions.
        channels: this stage's ends of all channels.
        board: where to say which task and layer is running.
        trace: times the tasks.

    Attributes:
        around: makes a context for each task to run in, where one is to be looked at.
    """

    def __init__(
        self,
        stage: int,
        placement: Sequence[int],
        partitions: Mapping[int, Partition],
        channels: Channels,
        board: Board,
        trace: Trace | None = None,
    ) -> None:
        self.partitions = dict(partitions)
        self._board = board
        self.ledger = Ledger()
        self.trace = trace or Trace()
        self.around: Callable[[Task], AbstractContextManager[None]] | None = None
        self.current_task: Task | None = None
        self._stage = stage
        self._placement = tuple(placement)
        self._last = len(placement) - 1
        self._channels = channels
        self._ports = {j: Ports.of(j, part, self._last) for j, part in partitions.items()}
        num_before = 0
        for partition in partitions.values():
            tell = _counted_from(num_before, board.enter_layer)
            partition.on_layer = self.trace.on_layer(tell)
            num_before += len(partition.places)
        self._made: dict[Key, Flat] = {}
        self._wants: dict[tuple[int, int], list[tuple[bool, ...]]] = {}
        self._num_wanted: dict[tuple[int, int], list[int]] = {}
        self._has_target_route = False
        self._recomputed: Collection[tuple[int, int]] = ()
        self._in_two: Collection[tuple[int, int]] = ()

    def begin(self) -> None:
        """Start a mini-batch; whatever an unfinished one left is let go."""
        for partition in self.partitions.values():
            partition.begin()
        self.ledger.clear()
        self._made.clear()
        self._wants.clear()
        self._num_wanted.clear()

    def run(self, program: Program, batch: MiniBatch) -> None:
        """Run a program to its end; what it leaves is in ``batch``.

        Raises:
            RemoteStageError: another rank failed.
            Exception: whatever a layer raised, with a note that says where in the pipeline.
        """
        self._look_ahead(program, batch)
        loss: Transfer | None = None
        self.trace.begin()
        try:
            for step in program:
                if isinstance(step, Run):
                    self._channels.poll()
                    if self.around is None:
                        self._run(step.task, batch)
                    else:
                        with self.around(step.task):
                            self._run(step.task, batch)
                elif isinstance(step, Send):
                    self._send(step.transfer, batch)
                else:
                    if step.transfer.kind == LOSS:
                        loss = step.transfer
                    self._expect(step.transfer)
            if loss is not None:
                key = key_of(loss)
                (batch.loss,) = self._take(key).tensors
                self.ledger.size(key, 0)
        except RemoteStageError:
            raise
        except BaseException as error:
            if self.current_task is not None:
                note_where(error, self.current_task, self._stage, self.partitions, self.ledger)
            raise
        self.trace.end()
        self.ledger.settle()

    def _look_ahead(self, program: Program, batch: MiniBatch) -> None:
        """Note what a program tells of its forward tasks: what will follow them, and how."""
        self._has_target_route = any(
            isinstance(step, Receive) and step.transfer.kind == TARGET for step in program
        )
        tasks = [step.task for step in program if isinstance(step, Run)]
        self._in_two = {(i, j) for kind, i, j in tasks if kind == INPUT_GRADIENT}
        if self._in_two or any(task.kind == BACKWARD for task in tasks):
            self._recomputed = {(i, j) for kind, i, j in tasks if kind == RECOMPUTE}
        else:
            self._recomputed = {(i, j) for i in batch.recompute for j in self.partitions}

    # -- tasks ----------------------------------------------------------------------------------

    def _run(self, task: Task, batch: MiniBatch) -> None:
        kind, i, j = self.current_task = task
        self._board.start_task(kind, i)
        if kind == FORWARD:
            self._forward(task, batch)
        elif kind in (BACKWARD, INPUT_GRADIENT):
            self._backward(task, batch)
        else:
            partition = self.partitions[j]
            start_ns = self.trace.start()
            if kind == RECOMPUTE:
                self.ledger.hold(("output", j, i), partition.recompute(i))
            else:
                partition.backward_weight(i)
            self.trace.ran(task, start_ns)
        self.current_task = None
        self._board.end_task()

    def _forward(self, task: Task, batch: MiniBatch) -> None:
        _, i, j = task
        ports, is_last = self._ports[j], j == self._last
        inputs = [self._first_input(i, j, batch)]
        inputs += [self._take((kind, a, j, i)) for kind, a in ports.inputs[1:]]
        check_fresh(inputs)
        finish = self._finish(i, batch) if is_last else None
        recompute = (i, j) in self._recomputed
        start_ns = self.trace.start()
        output = ports.partition.forward(
            i,
            joined(inputs),
            keep=batch.keep,
            recompute=recompute,
            finish=finish,
            split=(i, j) in self._in_two,
            is_left_out=is_last and batch.loss_of is not None and batch.shares[i] == 0,
        )
        self.trace.ran(task, start_ns)
        outputs = parted(output, len(ports.outputs))
        self._wants[i, j] = [flat.requires_grad for flat in outputs]
        self._num_wanted[i, j] = [sum(flat.requires_grad) for flat in inputs]
        is_root = batch.keep and not recompute
        if is_root:
            self.ledger.hold(("output", j, i), num_bytes(output.tensors))
        for (kind, to), flat in zip(ports.outputs, outputs, strict=True):
            self._put((kind, j, to, i), flat, is_counted=not is_root)
        if j == 0 and batch.targets is not None and self._placement[-1] != self._stage:
            self._made[TARGET, 0, self._last, i] = Flat.of(batch.targets[i])
        if is_last:
            batch.outputs[i] = self._made.pop((ACTIVATION, j, j + 1, i))
            if batch.loss_of is not None:
                self._add_loss(i, batch.outputs[i], batch)
        if not batch.keep:
            self._release_inputs(i, j)

    def _backward(self, task: Task, batch: MiniBatch) -> None:
        kind, i, j = task
        ports = self._ports[j]
        gradients = self._output_gradients(i, j, batch)
        run = ports.partition.backward
        if kind == INPUT_GRADIENT:
            run = ports.partition.backward_input
        start_ns = self.trace.start()
        input_gradients = run(i, gradients)
        self.trace.ran(task, start_ns)
        pieces = cut(input_gradients, self._num_wanted.pop((i, j)))
        for (kind, to), piece in zip(ports.input_gradients, pieces, strict=True):
            self._put((kind, j, to, i), message_of(piece), is_counted=True)
        if j == 0:
            batch.input_gradients[i] = list(self._made.pop((GRADIENT, 0, -1, i)).value)
        self._release_inputs(i, j)
        self.ledger.release(("output", j, i))
        for kind, source in ports.gradients:
            self.ledger.release((kind, source, j, i))

    def _first_input(self, i: int, j: int, batch: MiniBatch) -> Flat:
        """Return what comes from the partition before, or from the user."""
        if j > 0:
            return self._take((ACTIVATION, j - 1, j, i))
        assert batch.inputs is not None, "stage 0 has the inputs"
        self.ledger.hold((ACTIVATION, -1, 0, i), num_bytes(batch.inputs[i].tensors))
        return batch.inputs[i]

    def _release_inputs(self, i: int, j: int) -> None:
        for kind, source in self._ports[j].inputs:
            self.ledger.release((kind, source, j, i))
        if j == self._last and self._has_target_route:
            self.ledger.release((TARGET, 0, j, i))

    def _output_gradients(self, i: int, j: int, batch: MiniBatch) -> list[Tensor | None]:
        """Bring together the gradients of all outputs that want one."""
        wants = self._wants.pop((i, j))
        gradients: list[Tensor | None] = []
        if j == self._last:
            gradients += self._own_gradients(i, wants.pop(0), batch)
        for (kind, source), flags in zip(self._ports[j].gradients, wants, strict=True):
            key = kind, source, j, i
            if any(flags):
                gradients += self._take(key).value
            elif self._is_local(source):
                del self._made[key]
            else:
                self._channels.receivers[key[:3]].forgo()
                self.ledger.size(key, 0)
        return gradients

    def _own_gradients(
        self, i: int, wants: tuple[bool, ...], batch: MiniBatch
    ) -> list[Tensor | None]:
        """Return the gradients of what leaves the pipeline in the last partition."""
        if batch.output_gradients is not None:
            return batch.output_gradients[i]
        (loss,) = batch.outputs[i].tensors
        if wants[0]:
            return [torch.full_like(loss, batch.shares[i])]
        is_trained = self.partitions[self._last].is_trainable
        if batch.shares[i] and (is_trained or any(self._num_wanted[i, self._last])):
            raise RuntimeError(
                "the loss requires no gradient, so nothing would be trained: loss_fn may not be "
                "differentiable (argmax, a comparison); to only evaluate, call eval() or use "
                "torch.no_grad()"
            )
        return []  # all of the model is frozen, or the micro-batch is left out

    def _finish(self, i: int, batch: MiniBatch) -> Callable[[Any], Any] | None:
        """Return what turns this micro-batch's output into its loss, if it has one."""
        loss_of = batch.loss_of
        if self._has_target_route:
            target = self._take((TARGET, 0, self._last, i)).value
        else:
            target = batch.targets[i] if batch.targets is not None else None
        if loss_of is None:
            return None
        return lambda output: loss_of(output, target, batch.shares[i])

    def _add_loss(self, i: int, output: Flat, batch: MiniBatch) -> None:
        (loss,) = output.tensors
        part = loss * batch.shares[i]
        batch.loss = part if batch.loss is None else batch.loss + part

    # -- transfers ------------------------------------------------------------------------------

    def _is_local(self, partition: int) -> bool:
        return 0 <= partition <= self._last and self._placement[partition] == self._stage

    def _put(self, key: Key, message: Flat, *, is_counted: bool) -> None:
        """Keep what a task has made until it is sent, or taken by another partition here.

        Args:
            key: what it is.
            message: the tensors.
            is_counted: whether the bytes of what stays here are not counted yet.
        """
        self._made[key] = message
        if self._is_local(key[2]):
            self.ledger.hold(key, num_bytes(message.tensors) if is_counted else 0)

    def _expect(self, transfer: Transfer) -> None:
        key = key_of(transfer)
        self._channels.receivers[key[:3]].expect()
        self.ledger.hold(key)

    def _send(self, transfer: Transfer, batch: MiniBatch) -> None:
        key = kind, *_ = key_of(transfer)
        if kind == LOSS:
            assert batch.loss is not None, "the stage of the last partition has the loss"
            message = Flat([batch.loss], "*", (False,))
        else:
            message = self._made.pop(key)
            if kind in (GRADIENT, SKIP_GRADIENT) and message.structure == ("t", ()):
                return  # nothing requires it; the receiver knows
        start_ns = time.perf_counter_ns()
        self._channels.senders[key[:3]].send(message)
        if self.trace.records_messages:
            self.trace.sent(key, message.tensors, start_ns)

    def _take(self, key: Key) -> Flat:
        """Wait for a message, and count it from where its buffer was allowed."""
        if self._is_local(key[1]):
            return self._made.pop(key)
        start_ns = time.perf_counter_ns()
        message = self._channels.receivers[key[:3]].take()
        self.trace.took(key, message.tensors, start_ns)
        self.ledger.size(key, num_bytes(message.tensors))
        return message


def _counted_from(num_before: int, enter_layer: Callable[[int], None]) -> Callable[[int], None]:
    """Return what tells of a layer by its index among all of the stage; -1 stays for none."""
    if num_before == 0:
        return enter_layer
    return lambda index: enter_layer(index + num_before if index >= 0 else index)
