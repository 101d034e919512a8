"""Runs one stage's program: take what a task needs, run it, send what it made.

    program step        what happens here
    Receive(transfer)   the channel may post a buffer for it
    Run(F i)            take activation (and target) ─> partition.forward    ─> made[activation]
    Run(R i)            partition.recompute
    Run(B i)            take gradient                ─> partition.backward   ─> made[gradient]
    Send(transfer)      made[…] ─> channel

A gradient that nothing requires is not sent: both ends know from the activation's metadata, and
each leaves out its part of the transfer.

Knows nothing of the user's call: ``stage.py`` fills in a ``MiniBatch`` and reads it afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from procpipe.channel.base import Receiver, Sender
from procpipe.compute.stash import Ledger, num_bytes
from procpipe.compute.tasks import Partition
from procpipe.errors import RemoteStageError
from procpipe.plan.fence import Program, Receive, Run, Send
from procpipe.plan.routes import ACTIVATION, GRADIENT, LOSS, TARGET, Transfer
from procpipe.plan.task import BACKWARD, FORWARD, Task
from procpipe.run.trace import Trace
from procpipe.tree import Flat

__all__ = ["Channels", "Executor", "MiniBatch"]


@dataclass
class Channels:
    """The ends of channels on this stage, by kind and by the stage at the other end."""

    senders: dict[tuple[str, int], Sender] = field(default_factory=dict)
    receivers: dict[tuple[str, int], Receiver] = field(default_factory=dict)
    poll: Callable[[], None] = lambda: None


@dataclass
class MiniBatch:
    """What one run of a program works on, and what it leaves.

    Attributes:
        inputs: on stage 0, each micro-batch's positional inputs.
        targets: each micro-batch's target, where the user gave it: on stage 0 if it is routed,
            else on the last stage.
        loss_of: on the last stage of a ``step``: ``(output, target) -> 0-dim loss``.
        shares: each micro-batch's share in the loss of the mini-batch.
        keep: whether backward tasks follow, in this program or a later one.
        recompute: the micro-batches to be recomputed.
        output_gradients: on the last stage, for a program that begins with backward tasks: each
            micro-batch's gradients of the output tensors that want one.
        outputs: on the last stage, each micro-batch's output (or loss), detached.
        loss: the loss of the mini-batch, on every rank whose program has a loss in it.
        input_gradients: on stage 0, each micro-batch's gradients of the inputs that want one.
    """

    inputs: Sequence[Flat] | None = None
    targets: Sequence[Any] | None = None
    loss_of: Callable[[Any, Any], Tensor] | None = None
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
        num_stages: the number of stages.
        partition: the local layers.
        channels: this stage's ends of all channels.
    """

    def __init__(
        self, stage: int, num_stages: int, partition: Partition, channels: Channels
    ) -> None:
        self.partition = partition
        self.ledger = Ledger()
        self.trace = Trace()
        self.current_task: Task | None = None
        self._stage = stage
        self._is_first = stage == 0
        self._is_last = stage == num_stages - 1
        self._last = num_stages - 1
        self._channels = channels
        self._made: dict[tuple[str, int], Flat] = {}
        self._wants: dict[int, tuple[bool, ...]] = {}
        self._has_target_route = False

    def begin(self) -> None:
        """Start a mini-batch; whatever an unfinished one left is let go."""
        self.partition.begin()
        self.ledger.clear()
        self._made.clear()
        self._wants.clear()

    def run(self, program: Program, batch: MiniBatch) -> None:
        """Run a program to its end; what it leaves is in ``batch``.

        Raises:
            RemoteStageError: another rank failed.
            Exception: whatever a layer raised, with a note that says where in the pipeline.
        """
        self._has_target_route = any(
            isinstance(step, Receive) and step.transfer.kind == TARGET for step in program
        )
        awaits_loss = False
        self.trace.begin()
        try:
            for step in program:
                if isinstance(step, Run):
                    self._channels.poll()
                    self._run(step.task, batch)
                elif isinstance(step, Send):
                    self._send(step.transfer, batch)
                else:
                    awaits_loss |= step.transfer.kind == LOSS
                    self._expect(step.transfer)
            if awaits_loss:
                (batch.loss,) = self._take(LOSS, self._last).tensors
                self.ledger.size((LOSS, 0), 0)
        except RemoteStageError:
            raise
        except BaseException as error:
            self._note(error)
            raise
        self.trace.end()
        self.ledger.settle()

    # -- tasks ----------------------------------------------------------------------------------

    def _run(self, task: Task, batch: MiniBatch) -> None:
        kind, i, _ = self.current_task = task
        if kind == FORWARD:
            self._forward(task, batch)
        elif kind == BACKWARD:
            self._backward(task, batch)
        else:
            start_ns = time.perf_counter_ns()
            self.ledger.hold(("output", i), self.partition.recompute(i))
            self.trace.ran(task, start_ns)
        self.current_task = None

    def _forward(self, task: Task, batch: MiniBatch) -> None:
        i, ledger = task.i, self.ledger
        if self._is_first:
            assert batch.inputs is not None, "stage 0 has the inputs"
            inputs = batch.inputs[i]
            ledger.hold((ACTIVATION, i), num_bytes(inputs.tensors))
        else:
            inputs = self._take(ACTIVATION, self._stage - 1)
            ledger.size((ACTIVATION, i), num_bytes(inputs.tensors))
        finish = self._finish(i, batch) if self._is_last else None
        recompute = i in batch.recompute
        start_ns = time.perf_counter_ns()
        output = self.partition.forward(
            i, inputs, keep=batch.keep, recompute=recompute, finish=finish
        )
        self.trace.ran(task, start_ns)
        self._wants[i] = output.requires_grad
        if batch.keep and not recompute:
            ledger.hold(("output", i), num_bytes(output.tensors))
        if self._is_first and batch.targets is not None and self._last > 0:
            self._made[TARGET, i] = Flat.of(batch.targets[i])
        if self._is_last:
            batch.outputs[i] = output
            if batch.loss_of is not None:
                self._add_loss(i, output, batch)
        else:
            self._made[ACTIVATION, i] = output
        if not batch.keep:
            ledger.release((ACTIVATION, i))
            if self._has_target_route:
                ledger.release((TARGET, i))

    def _backward(self, task: Task, batch: MiniBatch) -> None:
        i, ledger = task.i, self.ledger
        gradients = self._output_gradients(i, batch)
        start_ns = time.perf_counter_ns()
        input_gradients = self.partition.backward(i, gradients)
        self.trace.ran(task, start_ns)
        if self._is_first:
            if input_gradients:
                batch.input_gradients[i] = input_gradients
        else:
            self._made[GRADIENT, i] = Flat.of(tuple(input_gradients))
        ledger.release((ACTIVATION, i))
        ledger.release(("output", i))
        if not self._is_last:
            ledger.release((GRADIENT, i))
        elif self._has_target_route:
            ledger.release((TARGET, i))

    def _output_gradients(self, i: int, batch: MiniBatch) -> list[Tensor | None]:
        wants = self._wants.pop(i)
        if not self._is_last:
            if not any(wants):
                self._channels.receivers[GRADIENT, self._stage + 1].forgo()
                self.ledger.size((GRADIENT, i), 0)
                return []
            message = self._take(GRADIENT, self._stage + 1)
            self.ledger.size((GRADIENT, i), num_bytes(message.tensors))
            return list(message.value)
        if batch.output_gradients is not None:
            return batch.output_gradients[i]
        (loss,) = batch.outputs[i].tensors
        return [torch.full_like(loss, batch.shares[i])] if wants[0] else []

    def _finish(self, i: int, batch: MiniBatch) -> Callable[[Any], Any] | None:
        """Return what turns this micro-batch's output into its loss, if it has one."""
        loss_of = batch.loss_of
        if self._has_target_route:
            message = self._take(TARGET, 0)
            self.ledger.size((TARGET, i), num_bytes(message.tensors))
            target = message.value
        else:
            target = batch.targets[i] if batch.targets is not None else None
        if loss_of is None:
            return None
        return lambda output: loss_of(output, target)

    def _add_loss(self, i: int, output: Flat, batch: MiniBatch) -> None:
        (loss,) = output.tensors
        part = loss * batch.shares[i]
        batch.loss = part if batch.loss is None else batch.loss + part

    # -- transfers ------------------------------------------------------------------------------

    def _expect(self, transfer: Transfer) -> None:
        kind, i, source, _ = transfer
        self._channels.receivers[kind, source].expect()
        self.ledger.hold((kind, 0 if kind == LOSS else i))

    def _send(self, transfer: Transfer, batch: MiniBatch) -> None:
        kind, i, _, destination = transfer
        if kind == LOSS:
            assert batch.loss is not None, "the last stage has the loss"
            message = Flat([batch.loss], "*", (False,))
        else:
            message = self._made.pop((kind, i))
            if kind == GRADIENT and message.structure == ("t", ()):
                return  # nothing requires it; the receiver knows
        self._channels.senders[kind, destination].send(message)

    def _take(self, kind: str, source: int) -> Flat:
        start_ns = time.perf_counter_ns()
        message = self._channels.receivers[kind, source].take()
        self.trace.waiting_ns += time.perf_counter_ns() - start_ns
        return message

    def _note(self, error: BaseException) -> None:
        if self.current_task is not None:
            kind, i, stage = self.current_task
            where = "its layers' backward" if kind == BACKWARD else self.partition.where()
            error.add_note(
                f"procpipe: in stage {stage} (rank {stage}), task {self.current_task} "
                f"(micro-batch {i}), {where}"
            )
