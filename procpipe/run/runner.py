"""Runs one stage's programs: takes what a task needs, runs it, sends what it made.

A program is bound once: each of its steps becomes a function that knows its layers, its channels
and its slots, and what the call asks for, so that nothing is looked up while it runs.

    program step        the function
    Receive(transfer)   the channel may post a buffer for it
    Run(F i)            take activation and skips ─> segment.forward   ─> slots
    Run(R i)            segment.recompute
    Run(B i)            take gradients            ─> segment.backward  ─> slots
    Run(I i), Run(W i)  the same in two           ─> segment.backward, backward_weight
    Send(transfer)      slot ─> channel; of the loss, what this stage made or now takes
    after the last one  gradients of tied parameters, sums over replicas, the loss

What one partition makes for another waits in a slot, until it is sent or, on the same stage, taken.
A gradient that nothing requires is not sent: the activation's metadata shows that at both ends, and
each leaves out its part of the transfer.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import time_ns
from typing import Any

import torch
from torch import Tensor

from procpipe.compute.segment import Segment
from procpipe.compute.tied import Tied
from procpipe.data.minibatch import MiniBatch
from procpipe.errors import RemoteStageError
from procpipe.job.world import World
from procpipe.plan.program import Run, Send
from procpipe.plan.routes import LOSS, Transfer
from procpipe.plan.task import FORWARD, RECOMPUTE, Task
from procpipe.run.coordinator import Coordinator
from procpipe.run.faults import note_where
from procpipe.run.log import Log
from procpipe.run.order import Order
from procpipe.run.replicas import Replicas
from procpipe.run.statistics import Split, StageStatistics
from procpipe.run.wiring import Wires
from procpipe.tree import Flat

#: How many programs a host may have queued on its device, and how often it checks that.
_MAX_LEAD = 2
_CHECK_LEAD_EVERY_S = 0.001

#: One step of a program, bound.
Step = Callable[[], object]

#: What a message of gradients has for a structure: they are a list, with None where its third field
#: says that there is none.
_GRADIENTS = "", ""


class Runner:
    """One rank's connected end of a pipeline; building it waits for all ranks.

    Attributes:
        coordinator: what all ranks call.
        wires: sockets and channels.
        segments: this stage's partitions, by their indices.
        replicas: what is added up with other processes.
        log: what this stage has done.
        split: how this stage spent the step of the last report; None before.
        current_task: what runs now.
    """

    def __init__(
        self,
        world: World,
        wires: Wires,
        coordinator: Coordinator,
        segments: Mapping[int, Segment],
        placement: Sequence[int],
        tied: Tied,
        replicas: Replicas,
        log: Log,
    ) -> None:
        self.coordinator = coordinator
        self.wires = wires
        self.segments = dict(segments)
        self.replicas = replicas
        self.log = log
        self.split: Split | None = None
        self.current_task: Task | None = None
        self._world = world
        self._grid = world.grid
        self._last = len(placement) - 1
        self._tied = tied
        self._bound: dict[object, list[tuple[Task | None, Step]]] = {}
        self._slots: list[Any] = []
        self._numbers: dict[Transfer, int] = {}
        self._batch = MiniBatch()
        self._order = Order("")
        self._part: tuple[Tensor, float] | None = None  # of this call's loss
        self._ends: deque[torch.cuda.Event] = deque()  # of the latest programs, on a GPU
        end = max(self.segments)
        hop = Transfer(LOSS, 0, end + 1, end)
        self._take_loss = None if end == self._last else self._taking(hop)
        # Otherwise a rank could run its part and leave while another one still connects.
        log.connected(coordinator.agree(None, lambda _: time_ns()))

    # -- a program ------------------------------------------------------------------------------

    def run(self, order: Order, batch: MiniBatch) -> None:
        """Run this stage's program under an order; its results are in the mini-batch.

        Raises:
            RemoteStageError: another rank failed.
            Exception: whatever a layer raised, with a note that says where in the pipeline.
        """
        self._limit_lead()
        key = order[:3], order.plan, order.recompute  # the call and its mode
        if key not in self._bound:
            self._bound[key] = self._bound_program(order)
        self._order, self._batch = order, batch
        self.log.begin_step(order)
        if order.call == "backward":
            for segment in self.segments.values():
                segment.resume()
        else:  # drop whatever an unfinished mini-batch has left
            if self.replicas.has_others:
                self.replicas.settle()
            for segment in self.segments.values():
                segment.begin()
            self._slots[:] = [None] * len(self._slots)
        board, poll = self._world.board, self.wires.poll
        try:
            # Autograd, which calls a backward pass, has turned gradients off.
            with torch.set_grad_enabled(order.is_grad_enabled):
                for task, step in self._bound[key]:
                    if task is None:
                        step()
                        continue
                    if poll is not None:
                        poll()
                    self.current_task = task
                    board.start_task(task.kind, task.i)
                    step()
                    board.page.task = ""
                    self.current_task = None
        except BaseException as error:
            if self.current_task is not None and not isinstance(error, RemoteStageError):
                where = self._grid.name_of(self._grid.rank)
                note_where(error, self.current_task, where, self.segments)
            raise
        finally:
            self._batch, self._part = MiniBatch(), None  # which hold tensors
        if self._world.device.type == "cuda":
            self._ends.append(torch.cuda.current_stream(self._world.device).record_event())
        self.log.end_step(order)

    def _limit_lead(self) -> None:
        """Wait until the device has at most two programs to run; it always has one meanwhile.

        A host that reads no loss may be far ahead of its device, and what travels between stages is
        kept until the device has done it: memory would grow with each step.
        """
        while len(self._ends) >= _MAX_LEAD:
            end = self._ends.popleft()
            self.wires.mesh.wait(end.query, lambda: "its device", every_s=_CHECK_LEAD_EVERY_S)

    def _add_up_tied(self) -> None:
        """Exchange gradients of tied parameters with the stages that have them, too, and add up."""
        wires, tied = self.wires, self.wires.tied
        for _, into in tied.values():
            wires.receivers[into.channel].expect()
        for stage, (out, _) in tied.items():
            self._sending(out)(Flat.of(tuple(self._tied.gradients_for(stage))))
        self._tied.add_up({stage: self._taking(into)().value for stage, (_, into) in tied.items()})

    def _begin_gradients(self) -> None:
        """Prepare the parameters' gradients, once a call, before its first backward task."""
        modules = self._batch.loss.loss.modules() if self._batch.loss is not None else []
        self.replicas.begin(
            (p for segment in self.segments.values() for p in segment.parameters()),
            (p for module in modules for p in module.parameters()),
            (copy.tensor for copy in self._tied.parameters),
            reduces=self._order.reduces,
        )
        self._tied.begin_gradients()

    # -- binding --------------------------------------------------------------------------------

    def _slot(self, transfer: Transfer) -> int:
        """Return the number of the slot where what one partition makes for another waits."""
        if transfer not in self._numbers:
            self._numbers[transfer] = len(self._slots)
            self._slots.append(None)
        return self._numbers[transfer]

    def _bound_program(self, order: Order) -> list[tuple[Task | None, Step]]:
        """Return the steps of an order's program, with their tasks, and what follows them."""
        program = self.coordinator.program(order)
        steps = [
            (step.task if isinstance(step, Run) else None, self._bound_step(step, order))
            for step in program
        ]
        replicas, has_others = self.replicas, self.replicas.has_others
        is_first = [isinstance(step, Run) and step.task.makes_gradient for step in program]
        if any(is_first) and (has_others or self._tied.parameters):
            steps.insert(is_first.index(True), (None, self._begin_gradients))
        ends: list[Step] = [self.wires.wait_posted]
        ends += [segment.end for segment in self.segments.values()]
        if order.makes_gradients:
            if self._tied.parameters:
                ends.append(self._add_up_tied)  # before what was there is divided for replicas
            if has_others:
                ends.append(replicas.end)
        if order.call == "step":
            ends.append(partial(self._end_loss, is_shared=order.is_shared and has_others))
        if has_others and (order.makes_gradients or not order.is_kept):
            ends.append(replicas.settle)
        return steps + [(None, end) for end in ends]

    def _bound_step(self, step: Any, order: Order) -> Step:
        if isinstance(step, Run):
            return self._bound_task(step, keep=order.is_kept)
        transfer = step.transfer
        if not isinstance(step, Send):
            return self.wires.receivers[transfer.channel].expect
        send = self._sending(transfer)
        if transfer.payload == LOSS:

            def send_loss() -> None:
                part, weight = self._loss_part()
                send(Flat([part], ("", repr(weight)), (False,)))  # what counts is its structure

            return send_loss
        slots, k = self._slots, self._slot(transfer)

        def send_made() -> None:
            message, slots[k] = slots[k], None
            if message is not None:  # else it is a gradient that nothing requires
                send(message)  # step 5

        return send_made

    def _bound_task(self, step: Run, *, keep: bool) -> Step:
        task, segment = step.task, self.segments[step.task.j]
        if task.kind == FORWARD:
            work = self._bound_forward(step, keep=keep)
        elif task.makes_gradient:
            work = self._bound_backward(step)
        else:
            of_kind = segment.recompute if task.kind == RECOMPUTE else segment.backward_weight
            work = self.log.of_task(task, partial(of_kind, task.i))  # step 8
        return self.replicas.around(step, segment, work)

    def _bound_forward(self, step: Run, *, keep: bool) -> Step:
        slots, device, (_, i, j) = self._slots, self._world.device, step.task
        is_last = j == self._last
        takes = list(map(self._taking, step.takes))
        places = list(map(self._slot, step.makes))
        work = partial(
            self.segments[j].forward,
            i,
            keep=keep,
            recompute=step.is_recomputed,
            split=step.is_split,
        )
        run_layers = self.log.of_task(step.task, work)

        def forward() -> None:
            batch = self._batch
            inputs = [batch.take_input(i, device)] if j == 0 else [take() for take in takes]
            loss = batch.loss if is_last else None
            made = run_layers(inputs, None if loss is None else partial(loss.of, i))  # step 4
            if is_last:
                batch.outputs[i] = made[0]
            for k, message in zip(places, made, strict=False):  # the model's output stays here
                slots[k] = message

        return forward

    def _bound_backward(self, step: Run) -> Step:
        slots, (_, i, j) = self._slots, step.task
        segment = self.segments[j]
        takes = [(self._taking(t), self._forgoing(t)) for t in step.takes]
        places = list(map(self._slot, step.makes))
        run_backward = self.log.of_task(step.task, partial(segment.backward, i))

        def backward() -> None:
            flags = segment.passes[i].flags
            gradients: list[Tensor | None] = []
            if j == self._last:
                gradients += self._own_gradients(segment, i, is_wanted=any(flags[0]))
            for (take, forgo), of_output in zip(takes, flags, strict=False):
                if any(of_output):
                    message = take()
                    given = iter(message.tensors)
                    gradients += [next(given) if some else None for some in message.requires_grad]
                else:
                    forgo()
            made = run_backward(gradients)  # step 7
            if j == 0:
                self._batch.input_gradients[i] = made[0]
            for k, of_input in zip(places, made, strict=False):
                is_there = tuple([gradient is not None for gradient in of_input])
                some = [gradient for gradient in of_input if gradient is not None]
                slots[k] = Flat(some, _GRADIENTS, is_there) if is_there else None

        return backward

    def _own_gradients(self, segment: Segment, i: int, *, is_wanted: bool) -> list[Tensor | None]:
        """Return the gradients of what leaves the pipeline in the last partition."""
        batch = self._batch
        if batch.output_gradients is not None:
            return batch.output_gradients[i]
        assert batch.loss is not None, "else the user gives the gradients of the output"
        if is_wanted:
            return [batch.loss.gradient(i, batch.outputs[i].tensors[0])]
        if batch.loss.weights[i] and segment.may_require_gradient(i):
            raise RuntimeError(
                "the loss requires no gradient, so nothing would be trained: loss_fn may not be "
                "differentiable (argmax, a comparison); to only evaluate, call eval() or use "
                "torch.no_grad()"
            )
        return []  # all of the model is frozen, or the micro-batch is left out

    # -- messages -------------------------------------------------------------------------------

    def _taking(self, transfer: Transfer) -> Callable[[], Flat]:
        """Return what takes a message: out of its slot, or of another stage, waiting for it."""
        if transfer.source not in self.segments:
            take = self.wires.receivers[transfer.channel].take  # step 6
            return self.log.of_take(transfer, take)
        slots, k = self._slots, self._slot(transfer)

        def take_made() -> Flat:
            message, slots[k] = slots[k], None
            return message  # type: ignore[no-any-return]

        return take_made

    def _forgoing(self, transfer: Transfer) -> Step:
        """Return what passes over a gradient that nothing requires."""
        if transfer.source in self.segments:
            return lambda: None
        return self.wires.receivers[transfer.channel].forgo

    def _sending(self, transfer: Transfer) -> Callable[[Flat], None]:
        """Return what sends a message to another stage."""
        return self.log.of_send(transfer, self.wires.senders[transfer.channel].send)

    def _end_loss(self, *, is_shared: bool) -> None:
        """Put the loss of the mini-batch into it; if it ``is_shared``, that of all replicas."""
        batch = self._batch
        batch.mean, batch.weight = self._loss_part()
        if is_shared:
            batch.mean = self.replicas.total(batch.mean)

    def _loss_part(self) -> tuple[Tensor, float]:
        """Return this replica's part of the mini-batch's loss, and what all count.

        Makes it once on the last stage, elsewhere waits for it.
        """
        if self._part is None and (loss := self._batch.loss) is not None:
            outputs = self._batch.outputs.items()
            self._part = loss.part({i: output.tensors[0] for i, output in outputs})  # step 9
        if self._part is None:
            assert self._take_loss is not None, "else this stage makes it"
            message = self._take_loss()
            self._part = message.tensors[0], float(message.structure[1])
        return self._part

    # -- between calls --------------------------------------------------------------------------

    def statistics(self) -> StageStatistics:
        """Return what this stage did so far."""
        sent_bytes: Counter[str] = Counter()
        num_messages: Counter[str] = Counter()
        for (payload, *_), sender in self.wires.senders.items():
            sent_bytes[payload] += sender.num_bytes
            num_messages[payload] += sender.num_messages
        log = self.log
        return StageStatistics(
            stage=self._grid.stage,
            replica=self._grid.replica,
            num_steps=log.num_steps,
            num_tasks=dict(log.num_tasks),
            busy_s=log.busy_ns / 1e9,
            waiting_s=log.waiting_ns / 1e9,
            step_s=log.step_ns / 1e9,
            sent_bytes=dict(sent_bytes),
            num_messages=dict(num_messages),
            split=self.split,
            all_reduce_bytes=log.all_reduce_bytes,
            exposed_s=log.exposed_ns / 1e9,
        )

    def close(self) -> None:
        """Wait until what was sent has arrived, say goodbye and disconnect."""
        try:
            for sender in self.wires.senders.values():
                sender.settle()
            self.wires.mesh.flush()
            self.log.finish()
            self._world.transports.drain()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Disconnect without waiting for any rank."""
        self.wires.close()
        self._world.close()
