"""Runs one stage's program: take what a task needs, run it, send what it made.

    program step        what happens here
    Receive(transfer)   the channel may post a buffer for it
    Run(F i)            take activation, skips, target ─> partition.forward  ─> made[…]
    Run(R i)            partition.recompute
    Run(B i)            take gradients                 ─> partition.backward ─> made[…]
    Run(I i), Run(W i)  the same in two                ─> partition.backward, backward_weight
    Send(transfer)      made[…] ─> channel; of the loss, what this stage made or now takes
    at the end          take the loss, if it was not passed on, and the gradients of tied parameters

A message is known by its ``Transfer`` everywhere, in the program and in ``made``. What one
partition makes for another of the same stage stays in ``made`` until that one takes it. A gradient
that nothing requires is not sent: the activation's metadata shows that at both ends, and each
leaves out its part of the transfer.

Independent of the user's call: it gets a ``MiniBatch`` and returns an ``Outcome``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from procpipe.channel.link import Receiver, Sender
from procpipe.compute.partition import Partition
from procpipe.compute.tied import Part, Tied
from procpipe.data.mean_loss import LossPart
from procpipe.data.minibatch import MiniBatch, Outcome
from procpipe.errors import RemoteStageError
from procpipe.job.grid import Grid
from procpipe.plan.program import Program, Run, Send
from procpipe.plan.routes import LOSS, TARGET, TIED_GRADIENT, Channel, Transfer
from procpipe.plan.task import FORWARD, RECOMPUTE, Task
from procpipe.run.faults import note_where
from procpipe.run.log import Log
from procpipe.run.replicas import Replicas
from procpipe.tree import Flat, cut, flatten, joined, parted


@dataclass
class Channels:
    """The ends of channels on this stage."""

    senders: dict[Channel, Sender] = field(default_factory=dict)
    receivers: dict[Channel, Receiver] = field(default_factory=dict)
    poll: Callable[[], None] = lambda: None
    #: Waits until nothing that was sent holds this rank's device; reads nothing if that is so.
    wait_posted: Callable[[], None] = lambda: None


@dataclass(slots=True)
class _Passage:
    """One micro-batch in one partition, from its forward task to its backward task."""

    num_wanted: list[int]  # of each input, how many tensors require a gradient
    wants: list[tuple[bool, ...]]  # of each output, which tensors require a gradient


class Executor:
    """Runs the programs of one stage; ``placement`` is the stage of each partition."""

    def __init__(
        self,
        grid: Grid,
        placement: Sequence[int],
        partitions: Mapping[int, Partition],
        channels: Channels,
        log: Log,
        tied: Tied | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self.partitions = dict(partitions)
        self.tied = tied or Tied(grid.stage)
        self.current_task: Task | None = None
        self._log = log
        self._grid = grid
        self.replicas = replicas or Replicas()
        self._placement = tuple(placement)
        self._last = len(placement) - 1
        self._channels = channels
        self._made: dict[Transfer, Flat] = {}
        self._passages: dict[tuple[int, int], _Passage] = {}
        self._has_begun = False  # the gradients of this call
        self._taken_loss: LossPart | None = None  # of this call, from another stage
        for j, partition in self.partitions.items():
            partition.layers.on_layer = log.on_layer(j)

    @property
    def num_held(self) -> int:
        """Messages and micro-batches that wait for a task; 0 between calls, or something leaks."""
        return len(self._made) + sum(each.num_held for each in self.partitions.values())

    def begin(self) -> None:
        """Start a mini-batch; whatever an unfinished one left is dropped."""
        self.replicas.settle()
        for partition in self.partitions.values():
            partition.begin()
        self._made.clear()
        self._passages.clear()

    def run(self, program: Program, batch: MiniBatch) -> Outcome:
        """Run a program to its end.

        Raises:
            RemoteStageError: another rank failed.
            Exception: whatever a layer raised, with a note that says where in the pipeline.
        """
        outcome = Outcome()
        of_ties: list[Transfer] = []
        self._has_begun, self._taken_loss = False, None
        try:
            for step in program:
                if isinstance(step, Run):
                    self._channels.poll()
                    self._run(step, batch, outcome)
                elif isinstance(step, Send):
                    self._send(step.transfer, batch)
                else:
                    transfer = step.transfer
                    if transfer.payload == TIED_GRADIENT:
                        of_ties.append(transfer)
                    self._channels.receivers[transfer.channel].expect()
            self._channels.wait_posted()
            self._add_up_tied(of_ties)
            part = self._loss_part(batch) if batch.is_step else None
            self._end_gradients(part, batch, outcome)
        except BaseException as error:
            self.tied.abandon_gradients()
            if self.current_task is not None and not isinstance(error, RemoteStageError):
                where = self._grid.name_of(self._grid.rank)
                note_where(error, self.current_task, where, self.partitions)
            raise
        if batch.is_backward or not batch.keep:
            self.replicas.settle()
        return outcome

    def _add_up_tied(self, transfers: Sequence[Transfer]) -> None:
        """Take what other stages add to the gradients of tied parameters, and add it."""
        tied: dict[int, Sequence[Part]] = {}
        for transfer in transfers:
            tied[self._placement[transfer.source]] = self._take(transfer).value
        if tied:
            self.tied.add_up(tied)

    def _end_gradients(self, part: LossPart | None, batch: MiniBatch, outcome: Outcome) -> None:
        """Add gradients to those of earlier calls, and add up over replicas."""
        if batch.is_backward and not self._has_begun:
            self._begin_gradients(batch)  # no task makes any
        self.tied.end_gradients()  # before replicas are added up, which divides what was there
        if batch.is_backward:
            self.replicas.end()
        if part is not None:
            outcome.loss = self.replicas.total(part.loss, batch)
            outcome.weight = part.weight

    # -- tasks ----------------------------------------------------------------------------------

    def _run(self, step: Run, batch: MiniBatch, outcome: Outcome) -> None:
        task = self.current_task = step.task
        self._log.begin_task(task)
        if task.makes_gradient and not self._has_begun:
            self._begin_gradients(batch)
        partition = self.partitions[task.j]
        with self.replicas.during(step, partition):
            if task.kind == FORWARD:
                self._forward(step, batch, outcome)
            elif task.makes_gradient:
                self._backward(step, batch, outcome)
            else:
                self._log.begin_layers(task)
                if task.kind == RECOMPUTE:
                    partition.recompute(task.i)  # step 9
                else:
                    partition.backward_weight(task.i)
                self._log.end_task(task)
        self.current_task = None

    def _forward(self, step: Run, batch: MiniBatch, outcome: Outcome) -> None:
        task = step.task
        _, i, j = task
        is_last = j == self._last
        inputs = []
        target = batch.targets[i] if is_last and batch.targets is not None else None
        if j == 0:
            assert batch.inputs is not None, "stage 0 has the inputs"
            inputs.append(batch.inputs[i])
        for transfer in step.takes:
            message = self._take(transfer)
            if transfer.payload == TARGET:
                target = message.value
            else:
                inputs.append(message)
        loss = batch.loss if is_last else None
        self._log.begin_layers(task)
        output = self.partitions[j].forward(  # step 4
            i,
            joined(inputs),
            keep=batch.keep,
            recompute=step.is_recomputed,
            finish=None if loss is None else partial(loss.of, i, target=target),
            split=step.is_split,
            is_left_out=loss is not None and loss.is_left_out(i),
        )
        self._log.end_task(task)
        outputs = self._put_outputs(step, output, batch)
        if is_last:
            outcome.outputs[i] = outputs[0]
            if loss is not None:
                loss.add(i, outputs[0].tensors[0])  # step 7
        if batch.keep:
            self._passages[i, j] = _Passage(
                [sum(flat.requires_grad) for flat in inputs],
                [flat.requires_grad for flat in outputs],
            )

    def _put_outputs(self, step: Run, output: Flat, batch: MiniBatch) -> list[Flat]:
        """Keep what a forward task makes for other partitions; return all outputs, one by one."""
        of_outputs = [transfer for transfer in step.makes if transfer.payload != TARGET]
        outputs = parted(output, len(of_outputs) + (step.task.j == self._last))
        for transfer, flat in zip(of_outputs, outputs, strict=False):  # the model's own stays here
            self._made[transfer] = flat
        for transfer in step.makes[len(of_outputs) :]:
            assert batch.targets is not None, "a target that travels is given on stage 0"
            self._made[transfer] = Flat.of(batch.targets[transfer.i])
        return outputs

    def _backward(self, step: Run, batch: MiniBatch, outcome: Outcome) -> None:
        task = step.task
        _, i, j = task
        passage = self._passages.pop((i, j))
        gradients = self._output_gradients(step, passage, batch, outcome)
        partition = self.partitions[j]
        self._log.begin_layers(task)
        input_gradients = partition.backward(i, gradients)  # step 8
        self._log.end_task(task)
        pieces = cut(input_gradients, passage.num_wanted)
        if j == 0:
            outcome.input_gradients[i] = pieces.pop(0)
        for transfer, piece in zip(step.makes, pieces, strict=True):
            self._made[transfer] = _message_of(piece)

    def _begin_gradients(self, batch: MiniBatch) -> None:
        """Prepare the parameters' gradients, once a call, before its first backward task."""
        self._has_begun = True
        apart = [copy.tensor for copy in self.tied.parameters]
        self.replicas.begin(batch, self._parameters(batch), apart)
        self.tied.begin_gradients()

    def _parameters(self, batch: MiniBatch) -> Iterator[nn.Parameter]:
        """Yield what this stage trains; a walk over the modules, which few calls need."""
        for partition in self.partitions.values():
            yield from partition.parameters()
        if batch.loss is not None:
            yield from batch.loss.parameters()

    def _output_gradients(
        self, step: Run, passage: _Passage, batch: MiniBatch, outcome: Outcome
    ) -> list[Tensor | None]:
        """Bring together the gradients of all outputs that require one."""
        _, i, j = step.task
        wants = passage.wants
        gradients: list[Tensor | None] = []
        if j == self._last:
            own, *wants = wants
            gradients += self._own_gradients(i, own, passage, batch, outcome)
        for transfer, flags in zip(step.takes, wants, strict=True):
            if any(flags):
                gradients += self._take(transfer).value
            elif transfer.source in self.partitions:
                del self._made[transfer]
            else:
                self._channels.receivers[transfer.channel].forgo()
        return gradients

    def _own_gradients(
        self, i: int, own: tuple[bool, ...], passage: _Passage, batch: MiniBatch, outcome: Outcome
    ) -> list[Tensor | None]:
        """Return the gradients of what leaves the pipeline in the last partition."""
        if batch.output_gradients is not None:
            return batch.output_gradients[i]
        assert batch.loss is not None, "else the user gives the gradients of the output"
        if own[0]:
            return [batch.loss.gradient(i, outcome.outputs[i].tensors[0])]
        is_trained = self.partitions[self._last].is_trainable
        if not batch.loss.is_left_out(i) and (is_trained or any(passage.num_wanted)):
            raise RuntimeError(
                "the loss requires no gradient, so nothing would be trained: loss_fn may not be "
                "differentiable (argmax, a comparison); to only evaluate, call eval() or use "
                "torch.no_grad()"
            )
        return []  # all of the model is frozen, or the micro-batch is left out

    # -- messages -------------------------------------------------------------------------------

    def _send(self, transfer: Transfer, batch: MiniBatch) -> None:
        if transfer.payload == LOSS:
            message = Flat.of(tuple(self._loss_part(batch)))
        elif transfer.payload == TIED_GRADIENT:
            other = self._placement[transfer.destination]
            message = _message_of(self.tied.gradients_for(other))
        else:
            message = self._made.pop(transfer)
            if transfer.is_gradient and not message.tensors and message.value == ():
                return  # nothing requires it, as the metadata has shown
        start_ns = time.perf_counter_ns()
        self._channels.senders[transfer.channel].send(message)  # step 5
        self._log.sent(transfer, message.tensors, start_ns)

    def _loss_part(self, batch: MiniBatch) -> LossPart:
        """Return the mini-batch's loss; waits for it, once, unless this stage makes it."""
        if batch.loss is not None:
            return batch.loss.part
        if self._taken_loss is None:
            end = max(self.partitions)
            hop = Transfer(LOSS, 0, end + 1, end)
            self._taken_loss = LossPart(*self._take(hop).value)
        return self._taken_loss

    def _take(self, transfer: Transfer) -> Flat:
        """Return a message, of another stage after waiting for it."""
        if transfer.source in self.partitions:
            return self._made.pop(transfer)
        start_ns = time.perf_counter_ns()
        message = self._channels.receivers[transfer.channel].take()  # step 6
        self._log.took(transfer, message.tensors, start_ns)
        return message


def _message_of(gradients: Sequence[Part]) -> Flat:
    """Make a message of gradients: the tuple of them, and what there is instead of one."""
    tensors, structure = flatten(tuple(gradients))
    return Flat(tensors, structure, (False,) * len(tensors))
