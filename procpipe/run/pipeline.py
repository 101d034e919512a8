"""One rank's end of a connected pipeline.

    Stage ── what the user called
      └─ Pipeline
           ├─ Coordinator   what all ranks call    (orders and announcements, over Control)
           ├─ Executor      this stage's program   (tasks of the Partitions)
           ├─ Log           board, times, perhaps a recording
           └─ Wires         sockets and channels, see ``wiring.py``

Building one waits for every other rank.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import torch

from procpipe.data.minibatch import MiniBatch, Outcome
from procpipe.job.world import World
from procpipe.run.coordinator import Coordinator
from procpipe.run.executor import Executor
from procpipe.run.log import Log
from procpipe.run.messages import Order
from procpipe.run.statistics import Split, StageStatistics
from procpipe.run.wiring import Wires

#: How many programs a host may have queued on its device, and how often it checks that.
_MAX_LEAD = 2
_CHECK_LEAD_EVERY_S = 0.001


class Pipeline:
    """One rank's connected end; building it waits for all ranks.

    Attributes:
        log: what this stage has done.
        split: how this stage spent the step of the last report; None before.
    """

    def __init__(
        self,
        world: World,
        wires: Wires,
        executor: Executor,
        coordinator: Coordinator,
        log: Log,
    ) -> None:
        self.wires = wires
        self.control = wires.control
        self.channels = wires.channels
        self.executor = executor
        self.replicas = executor.replicas
        self.coordinator = coordinator
        self.log = log
        self.split: Split | None = None
        self._world = world
        self._ends: deque[torch.cuda.Event] = deque()  # of the latest programs, on a GPU
        # Otherwise a rank could run its part and leave while another one still connects.
        self.control.agree(None, self._all_are_here)

    def run(self, order: Order, batch: MiniBatch) -> Outcome:
        """Run this stage's program under an order."""
        self._limit_lead()
        program = self.coordinator.program(order)
        self.log.begin_step(order)
        outcome = self.executor.run(program, batch)
        if self._world.device.type == "cuda":
            self._ends.append(torch.cuda.current_stream(self._world.device).record_event())
        self.log.end_step(order)
        return outcome

    def _limit_lead(self) -> None:
        """Wait until the device has at most two programs to run; it always has one meanwhile.

        A host that reads no loss may be far ahead of its device, and what travels between stages is
        kept until the device has done it: memory would grow with each step.
        """
        while len(self._ends) >= _MAX_LEAD:
            end = self._ends.popleft()
            self.wires.mesh.wait(end.query, lambda: "its device", every_s=_CHECK_LEAD_EVERY_S)

    def statistics(self) -> StageStatistics:
        """Return what this stage did so far."""
        grid = self._world.grid
        sent_bytes: Counter[str] = Counter()
        num_messages: Counter[str] = Counter()
        for (payload, *_), sender in self.channels.senders.items():
            sent_bytes[payload] += sender.num_bytes
            num_messages[payload] += sender.num_messages
        return StageStatistics(
            stage=grid.stage,
            replica=grid.replica,
            sent_bytes=dict(sent_bytes),
            num_messages=dict(num_messages),
            split=self.split,
            **self.log.totals(),
        )

    def flush(self) -> None:
        """Wait until nothing of this call is left to be done by this rank, or read from its memory.

        Until its next call a rank may do anything: wait for a peer by other means, write into the
        mini-batch it gave, or into parameters that a layer returned.
        """
        self.channels.wait_posted()
        for sender in self.channels.senders.values():
            sender.wait_reusable()
        self.wires.mesh.flush()

    def close(self) -> None:
        """Wait until what was sent has arrived, say goodbye and disconnect."""
        try:
            for sender in self.channels.senders.values():
                sender.settle()
            self.wires.mesh.flush()
            self.log.finish()
            self._world.transports.drain()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Disconnect without waiting for any rank."""
        self.replicas.close()
        self.wires.close()
        self._world.close()
        self.log.leave()

    def _all_are_here(self, _: list[Any]) -> None:
        self.log.connected()
