"""This rank's end of a connected pipeline: sockets, channels, coordinator and executor together.

    Stage ── what the user called
      └─ Pipeline
           ├─ Coordinator   which plan             (orders from rank 0, over Control)
           ├─ Executor      this stage's program   (tasks of the Partition)
           └─ Channels      tokens over the Mesh, large tensors by a Transport

Building one connects to every other rank and compares what must agree.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from procpipe.channel.link import Receiver, Sender
from procpipe.compute.partition import Partition
from procpipe.data.upload import uploaded
from procpipe.errors import (
    BalanceError,
    CallMismatchError,
    DisagreementError,
    PeerLostError,
    RemoteStageError,
)
from procpipe.job.world import World
from procpipe.plan.routes import Channel, Routes
from procpipe.plan.schedules.named import SCHEDULES, Schedule
from procpipe.run.control import Control
from procpipe.run.coordinator import Coordinator
from procpipe.run.executor import Executor, MiniBatch
from procpipe.run.messages import Order, compare_facts
from procpipe.run.ports import Channels
from procpipe.run.trace import StageStatistics, Trace
from procpipe.run.transports import agree_on_transports
from procpipe.timeline.clocks import Clocks
from procpipe.timeline.collect import Tracing
from procpipe.timeline.idle import Split
from procpipe.timeline.recorder import Recorder
from procpipe.timeline.reporting import statistics_of, with_splits
from procpipe.tree import Flat, map_tensors
from procpipe.tuning.auto import AutoSchedule
from procpipe.tuning.meter import Meter

#: Values that a user's call moves beside the plan (``fetch``, the targets of ``batches``).
VALUE = "value"

#: How often a wait looks at what no socket tells of.
_LOOK_EVERY_S = 0.01

#: The number on the mesh of the channel beside the plan; 0 is the control plane, and the channels
#: of the plan from one rank to another are numbered from 1.
_VALUE_NUMBER = 63

#: How many programs a host may have queued on its device, and how often it checks that.
_MAX_LEAD = 2
_CHECK_LEAD_EVERY_S = 0.001

#: How often a stage says how much memory of its device it uses.
_TELL_DEVICE_EVERY_S = 0.5


class Pipeline:
    """One rank's connected end; building it waits for all ranks.

    Args:
        world: this process's place in the job.
        partitions: the local layers, by the indices of this stage's partitions.
        routes: which partitions speak to which, on which stages.
        facts: what must be the same on every rank, by name; plain JSON.
        transport: one of ``transports.NAMES``; None for the best that every rank can use.
        schedule: the plan of a ``step`` with its backward; rank 0's counts.
        trace: where rank 0 writes a timeline of all stages; None to record none.
        auto: chooses that plan instead; rank 0's counts.

    Raises:
        CallMismatchError: another rank is in the first call of another pipeline.
        DisagreementError: facts differ between ranks; raised on every rank.
        RemoteStageError: another rank failed.
    """

    def __init__(
        self,
        world: World,
        partitions: Mapping[int, Partition],
        routes: Routes,
        facts: dict[str, Any],
        transport: str | None = None,
        schedule: Schedule = SCHEDULES["gpipe"],
        trace: str | os.PathLike[str] | None = None,
        auto: AutoSchedule | None = None,
    ) -> None:
        self._world = world
        self._rank = world.rank
        self._mesh = world.connect()
        self.control = Control(self._mesh)
        self._check_number(self.control.agree(world.number, list))
        differences = self.control.agree(facts, compare_facts)
        if differences:
            raise DisagreementError(differences)
        self.channels = self._open_channels(routes, transport)
        self._clocks = Clocks(self._mesh)
        self._tracing = None
        if trace is not None:
            self._tracing = Tracing(trace, self._mesh, self._clocks, facts)
        # Who ran its part and left, while another still connected, would break its connection.
        self.control.agree(None, self._all_are_here)
        self._values_to, self._values_from = self._open_value_channels()
        self._board = world.board
        self._device_told_s = 0.0
        self._ends: deque[torch.cuda.Event] = deque()  # of the latest programs, on a GPU
        asks_device = auto is not None and world.device.type == "cuda"  # the host's times lie there
        places = [place for partition in partitions.values() for place in partition.places]
        self._board.tell_facts({"device": str(world.device), "layers": places})
        self.executor = Executor(
            self._rank,
            routes.placement,
            partitions,
            self.channels,
            self._board,
            Recorder(world.device) if trace is not None or asks_device else Trace(),
        )
        self._split: Split | None = None
        self.coordinator = Coordinator(self.control, self._rank, routes, schedule, auto)
        self.meter = Meter(self.executor)

    def run(self, order: Order, batch: MiniBatch) -> None:
        """Run this stage's program under an order."""
        self._board.start_mini_batch(len(order.sizes))
        self._limit_lead()
        with self.meter.watching(order):
            self.executor.run(self.coordinator.program(order), batch)
        if self._world.device.type == "cuda":
            self._ends.append(torch.cuda.current_stream(self._world.device).record_event())
        if self._tracing is not None:
            self._note(self._tracing, order)
        is_done = order.call != "forward" or not batch.keep  # else its backward call will be
        self._board.end_program(
            sum(order.sizes) if is_done else 0,
            busy_ns=self.executor.trace.busy_ns,
            step_ns=self.executor.trace.step_ns,
            held_bytes=self.executor.ledger.peak_bytes,
        )
        self._tell_device_bytes()
        self.meter.tell(order, self.control, self.coordinator.heard)

    def _limit_lead(self) -> None:
        """Wait until the device has at most two programs to run; it always has one meanwhile.

        A host that reads no loss may be far ahead of its device, and what travels between stages is
        kept until the device has done it: memory would grow with each step.
        """
        while len(self._ends) >= _MAX_LEAD:
            end = self._ends.popleft()
            self._mesh.wait(end.query, lambda: "its device", every_s=_CHECK_LEAD_EVERY_S)

    def _tell_device_bytes(self) -> None:
        """Tell how full the device is, now and then: asking takes as long as a task's host part."""
        now_s = time.monotonic()
        device = self._world.device
        if device.type == "cuda" and now_s > self._device_told_s + _TELL_DEVICE_EVERY_S:
            self._device_told_s = now_s
            self._board.tell_device_bytes(torch.cuda.memory_allocated(device))

    def send_value(self, destination: int, value: Any) -> None:
        """Send a nested value of tensors to a rank, beside the plan.

        Waits, if it is large, until the rank has read most of it.
        """
        on_cpu = map_tensors(lambda tensor: tensor.detach().cpu(), value)
        self._values_to[destination].send(Flat.of(on_cpu))

    def take_value(self, source: int) -> Any:
        """Wait for a value that another rank sends, and return it on this stage's device."""
        receiver = self._values_from[source]
        receiver.expect()
        device = self._world.device
        return map_tensors(lambda tensor: uploaded(tensor, device), receiver.take().value)

    def wait_until(self, ready: Callable[[], object], what: str) -> None:
        """Wait for what this process does in the background; a peer's failure ends the wait."""
        self._mesh.wait(ready, lambda: what, every_s=_LOOK_EVERY_S)

    def statistics(self) -> StageStatistics:
        """Return what this stage did so far."""
        trace, ledger = self.executor.trace, self.executor.ledger
        sent_bytes: dict[str, int] = {}
        num_messages: dict[str, int] = {}
        for (kind, *_), sender in self.channels.senders.items():
            sent_bytes[kind] = sent_bytes.get(kind, 0) + sender.num_bytes
            num_messages[kind] = num_messages.get(kind, 0) + sender.num_messages
        return StageStatistics(
            stage=self._rank,
            num_steps=trace.num_steps,
            num_tasks=dict(trace.num_tasks),
            busy_s=trace.busy_ns / 1e9,
            waiting_s=trace.waiting_ns / 1e9,
            step_s=trace.step_ns / 1e9,
            sent_bytes=sent_bytes,
            num_messages=num_messages,
            peak_held_bytes=ledger.peak_bytes,
            held_bytes=ledger.held_bytes,
            split=self._split,
        )

    def report(self) -> list[StageStatistics]:
        """Return what every stage did so far, and how it spent the last step.

        Every rank calls it, and it waits for all of them.
        """
        ours = {"statistics": asdict(self.statistics()), "step": self.executor.trace.last_record()}
        of_all = self.control.agree(
            ours, lambda values: with_splits(values, self._clocks.read_all())
        )
        statistics = [statistics_of(told) for told in of_all]
        self._split = statistics[self._rank].split
        return statistics

    def flush(self) -> None:
        """Wait until nothing of this call is left to be done by this rank, or read from its memory.

        Until its next call a rank may do anything: wait for a peer by other means, write into the
        mini-batch it gave, or into parameters that a layer returned.
        """
        for sender in self.channels.senders.values():
            sender.wait_reusable()
        self._mesh.flush()

    def pass_on(self, error: RemoteStageError) -> None:
        """Tell this pipeline's peers of a failure that another one's told us of."""
        is_lost = isinstance(error, PeerLostError)
        self._mesh.send_failure(error.rank, error.story, is_lost=is_lost)

    def close(self) -> None:
        """Wait until what was sent has arrived, say goodbye and disconnect."""
        try:
            for sender in self.channels.senders.values():
                sender.settle()
            self._mesh.flush()
            if self._tracing is not None:
                self._tracing.finish()
            self._world.drain()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Disconnect without waiting for anybody."""
        self.channels.senders.clear()
        self.channels.receivers.clear()
        self._values_to.clear()
        self._values_from.clear()
        self._world.close()
        if self._tracing is not None:
            self._tracing.write()

    def _all_are_here(self, _: list[Any]) -> None:
        """Read the clocks of the other ranks, which all wait, on rank 0."""
        if self._tracing is not None:
            self._tracing.read_clocks()

    def _note(self, tracing: Tracing, order: Order) -> None:
        """Hand in what this stage recorded of the step that has just ended."""
        record = self.executor.trace.last_record()
        record |= {"call": order.call, "sizes": order.sizes}
        if order.call == "step" and order.detail:
            record["schedule"] = order.detail["schedule"]
        tracing.note(record, order.plan, self.coordinator.plan_text(order))

    def _check_number(self, numbers: list[int]) -> None:
        """Check that every rank is in the first call of the same pipeline."""
        for rank, number in enumerate(numbers):
            if number != numbers[0]:
                raise CallMismatchError(
                    f"rank {rank} makes the first call of its pipeline {number} while rank 0 makes "
                    f"that of pipeline {numbers[0]} (counted from 0 in the order they are made): "
                    "every rank must make the same calls in the same order"
                )

    # -- wiring ---------------------------------------------------------------------------------

    def _open_channels(self, routes: Routes, wanted: str | None) -> Channels:
        """Open this rank's ends of every channel a plan may use."""
        numbers = _numbered(routes)
        choice = agree_on_transports(self.control, self._world.offer(), wanted)
        transports = self._world.open_transports(choice, numbers.values())
        channels = Channels()
        if not transports:
            return channels
        channels.poll = self._poll
        for channel, (source, destination, number) in numbers.items():
            kind = channel[0]
            if source == self._rank:
                channels.senders[channel] = Sender(
                    self._mesh,
                    destination,
                    number,
                    transports[destination],
                    self._world.device,
                    f"{kind} to stage {destination} (rank {destination})",
                )
            if destination == self._rank:
                channels.receivers[channel] = Receiver(
                    self._mesh, source, number, transports[source], _described(kind, source)
                )
        return channels

    def _poll(self) -> None:
        """Read what has come, and let go of what has arrived elsewhere."""
        self._mesh.poll()
        for sender in self.channels.senders.values():
            sender.reap()

    def _open_value_channels(self) -> tuple[dict[int, Sender], dict[int, Receiver]]:
        """Open the channels beside the plan: on the CPU, all inside tokens, between all ranks."""
        mesh, number, cpu = self._mesh, _VALUE_NUMBER, torch.device("cpu")
        return (
            {peer: Sender(mesh, peer, number, None, cpu) for peer in mesh.peers},
            {
                peer: Receiver(mesh, peer, number, None, _described(VALUE, peer))
                for peer in mesh.peers
            },
        )


def _numbered(routes: Routes) -> dict[Channel, tuple[int, int, int]]:
    """Return source rank, destination rank and number of each channel, alike on every rank."""
    routes = replace(routes, target=True, loss=True)
    numbers: dict[Channel, tuple[int, int, int]] = {}
    used: Counter[tuple[int, int]] = Counter()
    for channel in routes.channels():
        _, a, b = channel
        ranks = routes.placement[a], routes.placement[b]
        used[ranks] += 1
        numbers[channel] = (*ranks, used[ranks])
    if used and max(used.values()) >= _VALUE_NUMBER:
        (source, destination), most = used.most_common(1)[0]
        raise BalanceError(
            f"between ranks {source} and {destination} there would be {most} channels, for skips "
            f"between many partitions, but there can be {_VALUE_NUMBER - 1}: use fewer partitions"
        )
    return numbers


def _described(kind: str, source: int) -> str:
    return f"{kind} from stage {source} (rank {source})"
