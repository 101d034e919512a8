"""Runs one stage's program: take what a task needs, run it, send what it made.

    program step        what happens here
    Receive(transfer)   the channel may post a buffer for it
    Run(F i)            take activation, skips, target ─> partition.forward  ─> made[…]
    Run(R i)            partition.recompute
    Run(B i)            take gradients                 ─> partition.backward ─> made[…]
    Send(transfer)      made[…] ─> channel

A gradient that nothing requires is not sent: both ends know from the activation's metadata, and
each leaves out its part of the transfer.

Knows nothing of the user's call: ``stage.py`` fills in a ``MiniBatch`` and reads it afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from procpipe.channel.base import Receiver, Sender
from procpipe.compute.stash import Ledger, num_bytes
from procpipe.compute.tasks import Partition
from procpipe.errors import RemoteStageError
from procpipe.host.board import Board
from procpipe.plan.fence import Program, Receive, Run, Send
from procpipe.plan.routes import (
    ACTIVATION,
    GRADIENT,
    LOSS,
    SKIP,
    SKIP_GRADIENT,
    TARGET,
    Transfer,
)
from procpipe.plan.task import BACKWARD, FORWARD, RECOMPUTE, Task
from procpipe.run.trace import Trace
from procpipe.tree import TENSOR, Flat, cut, joined, parted

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
        recompute: the micro-batches that a later program recomputes. A program that holds the
            backward tasks says itself what is recomputed.
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
        board: where to say which task and layer is running.
        trace: times the tasks.
    """

    def __init__(
        self,
        stage: int,
        num_stages: int,
        partition: Partition,
        channels: Channels,
        board: Board,
        trace: Trace | None = None,
    ) -> None:
        self.partition = partition
        self.trace = trace or Trace()
        partition.on_layer = self.trace.on_layer(board.enter_layer)
        self._board = board
        self.ledger = Ledger()
        self.current_task: Task | None = None
        self._stage = stage
        self._is_first = stage == 0
        self._is_last = stage == num_stages - 1
        self._last = num_stages - 1
        self._channels = channels
        self._down = [(ACTIVATION, stage + 1)]
        self._down += [(SKIP, b) for b in partition.skips.destinations]
        self._up = [(GRADIENT, stage - 1)]
        self._up += [(SKIP_GRADIENT, a) for a in partition.skips.sources]
        self._made: dict[tuple[str, int, int], Flat] = {}
        self._wants: dict[int, list[tuple[bool, ...]]] = {}
        self._num_wanted: dict[int, list[int]] = {}
        self._has_target_route = False
        self._recomputed: Collection[int] = ()

    def begin(self) -> None:
        """Start a mini-batch; whatever an unfinished one left is let go."""
        self.partition.begin()
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
        self._has_target_route = any(
            isinstance(step, Receive) and step.transfer.kind == TARGET for step in program
        )
        self._recomputed = _recomputed(program, batch)
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
                (batch.loss,) = self._take(LOSS, self._last, 0).tensors
                self.ledger.size((LOSS, self._last, 0), 0)
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
        self._board.start_task(kind, i)
        if kind == FORWARD:
            self._forward(task, batch)
        elif kind == BACKWARD:
            self._backward(task, batch)
        else:
            start_ns = self.trace.start()
            self.ledger.hold(("output", i), self.partition.recompute(i))
            self.trace.ran(task, start_ns)
        self.current_task = None
        self._board.end_task()

    def _forward(self, task: Task, batch: MiniBatch) -> None:
        i, ledger = task.i, self.ledger
        inputs = [self._first_input(i, batch)]
        inputs += [self._take(SKIP, a, i) for a in self.partition.skips.sources]
        finish = self._finish(i, batch) if self._is_last else None
        recompute = i in self._recomputed
        start_ns = self.trace.start()
        output = self.partition.forward(
            i, joined(inputs), keep=batch.keep, recompute=recompute, finish=finish
        )
        self.trace.ran(task, start_ns)
        outputs = parted(output, len(self._down))
        self._wants[i] = [flat.requires_grad for flat in outputs]
        self._num_wanted[i] = [sum(flat.requires_grad) for flat in inputs]
        if batch.keep and not recompute:
            ledger.hold(("output", i), num_bytes(output.tensors))
        for (kind, to), flat in zip(self._down, outputs, strict=True):
            self._made[kind, to, i] = flat
        if self._is_first and batch.targets is not None and self._last > 0:
            self._made[TARGET, self._last, i] = Flat.of(batch.targets[i])
        if self._is_last:
            batch.outputs[i] = self._made.pop((ACTIVATION, self._stage + 1, i))
            if batch.loss_of is not None:
                self._add_loss(i, batch.outputs[i], batch)
        if not batch.keep:
            self._release_inputs(i)

    def _backward(self, task: Task, batch: MiniBatch) -> None:
        i, ledger = task.i, self.ledger
        gradients = self._output_gradients(i, batch)
        start_ns = self.trace.start()
        input_gradients = self.partition.backward(i, gradients)
        self.trace.ran(task, start_ns)
        pieces = cut(input_gradients, self._num_wanted.pop(i))
        for (kind, to), piece in zip(self._up, pieces, strict=True):
            self._made[kind, to, i] = _message_of(piece)
        if self._is_first:
            batch.input_gradients[i] = list(self._made.pop((GRADIENT, -1, i)).value)
        self._release_inputs(i)
        ledger.release(("output", i))
        for kind, source in self._gradient_sources():
            ledger.release((kind, source, i))

    def _first_input(self, i: int, batch: MiniBatch) -> Flat:
        """Return what comes from the stage before, or from the user."""
        if not self._is_first:
            return self._take(ACTIVATION, self._stage - 1, i)
        assert batch.inputs is not None, "stage 0 has the inputs"
        self.ledger.hold((ACTIVATION, -1, i), num_bytes(batch.inputs[i].tensors))
        return batch.inputs[i]

    def _release_inputs(self, i: int) -> None:
        self.ledger.release((ACTIVATION, self._stage - 1, i))
        for a in self.partition.skips.sources:
            self.ledger.release((SKIP, a, i))
        if self._is_last and self._has_target_route:
            self.ledger.release((TARGET, 0, i))

    def _gradient_sources(self) -> list[tuple[str, int]]:
        """List where gradients of this stage's outputs come from, in the outputs' order."""
        skips = [(SKIP_GRADIENT, b) for b in self.partition.skips.destinations]
        return skips if self._is_last else [(GRADIENT, self._stage + 1), *skips]

    def _output_gradients(self, i: int, batch: MiniBatch) -> list[Tensor | None]:
        """Bring together the gradients of all outputs that want one."""
        wants = self._wants.pop(i)
        gradients: list[Tensor | None] = []
        if self._is_last:
            gradients += self._own_gradients(i, wants.pop(0), batch)
        for (kind, source), flags in zip(self._gradient_sources(), wants, strict=True):
            if any(flags):
                gradients += self._take(kind, source, i).value
            else:
                self._channels.receivers[kind, source].forgo()
                self.ledger.size((kind, source, i), 0)
        return gradients

    def _own_gradients(
        self, i: int, wants: tuple[bool, ...], batch: MiniBatch
    ) -> list[Tensor | None]:
        """Return the gradients of what leaves the pipeline on the last stage."""
        if batch.output_gradients is not None:
            return batch.output_gradients[i]
        (loss,) = batch.outputs[i].tensors
        if wants[0]:
            return [torch.full_like(loss, batch.shares[i])]
        if self.partition.is_trainable or any(self._num_wanted[i]):
            raise RuntimeError(
                "the loss requires no gradient, so nothing would be trained: loss_fn may not be "
                "differentiable (argmax, a comparison); to only evaluate, call eval() or use "
                "torch.no_grad()"
            )
        return []  # all of the model is frozen

    def _finish(self, i: int, batch: MiniBatch) -> Callable[[Any], Any] | None:
        """Return what turns this micro-batch's output into its loss, if it has one."""
        loss_of = batch.loss_of
        if self._has_target_route:
            target = self._take(TARGET, 0, i).value
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
        self.ledger.hold((kind, source, 0 if kind == LOSS else i))

    def _send(self, transfer: Transfer, batch: MiniBatch) -> None:
        kind, i, _, destination = transfer
        if kind == LOSS:
            assert batch.loss is not None, "the last stage has the loss"
            # A copy: the user may change the loss that step returns while it is on its way.
            message = Flat([batch.loss.clone()], "*", (False,))
        else:
            message = self._made.pop((kind, destination, i))
            if kind in (GRADIENT, SKIP_GRADIENT) and message.structure == ("t", ()):
                return  # nothing requires it; the receiver knows
        start_ns = time.perf_counter_ns()
        self._channels.senders[kind, destination].send(message)
        if self.trace.records_messages:
            self.trace.sent(kind, i, destination, message.tensors, start_ns)

    def _take(self, kind: str, source: int, i: int) -> Flat:
        """Wait for a message, and count it from where its buffer was allowed."""
        start_ns = time.perf_counter_ns()
        message = self._channels.receivers[kind, source].take()
        self.trace.took(kind, i, source, message.tensors, start_ns)
        self.ledger.size((kind, source, i), num_bytes(message.tensors))
        return message

    def _note(self, error: BaseException) -> None:
        if self.current_task is None:
            return
        kind, i, stage = self.current_task
        where = "its layers' backward" if kind == BACKWARD else self.partition.where()
        error.add_note(
            f"procpipe: in stage {stage} (rank {stage}), task {self.current_task} "
            f"(micro-batch {i}), {where}"
        )
        if _is_out_of_memory(error):
            error.add_note(self._memory_note(stage))

    def _memory_note(self, stage: int) -> str:
        """Say what the stage held when its memory ran out, and what would need less."""
        device = self.partition.device
        held = (
            f"procpipe: out of memory on {device}: stage {stage} held {self.partition.num_held} "
            f"micro-batches between forward and backward, whose inputs, outputs and waiting "
            f"messages take {self.ledger.bytes_now() / 2**20:.1f} MiB"
        )
        if device.type == "cuda":
            mib = [
                value / 2**20
                for value in (
                    torch.cuda.memory_allocated(device),
                    torch.cuda.memory_reserved(device),
                    torch.cuda.mem_get_info(device)[1],
                )
            ]
            held += "; torch has {:.0f} MiB in use, {:.0f} reserved, of {:.0f}".format(*mib)
        return (
            f"{held}. Give the stage fewer layers (balance), split the mini-batch further "
            "(chunks), or recompute more (checkpoint='always')"
        )


def _recomputed(program: Program, batch: MiniBatch) -> Collection[int]:
    """Return the micro-batches that are recomputed after a program's forward tasks."""
    tasks = [step.task for step in program if isinstance(step, Run)]
    if any(task.kind == BACKWARD for task in tasks):
        return {task.i for task in tasks if task.kind == RECOMPUTE}
    return batch.recompute


def _message_of(gradients: list[Tensor | None]) -> Flat:
    """Make a message of gradients: the tuple of them, and None where there is none."""
    tensors = [gradient for gradient in gradients if gradient is not None]
    structure = tuple(("v", None) if gradient is None else TENSOR for gradient in gradients)
    return Flat(tensors, ("t", structure), (False,) * len(tensors))


def _is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an allocator has failed; on a CPU torch says so only in words."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
