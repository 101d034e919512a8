"""Properties and statistics of a ``Stage``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from procpipe import build
from procpipe.errors import StageClosedError
from procpipe.local_layers import LocalLayers
from procpipe.run.calls import Calls
from procpipe.run.runner import Runner
from procpipe.run.statistics import StageStatistics, TimedTask, table


class About(LocalLayers):
    """A stage's place among all, its statistics, and a table of all stages."""

    _calls: Calls
    _shared_call: Callable[..., AbstractContextManager[Runner]]
    _settings: build.Settings

    @property
    def rank(self) -> int:
        """This process's rank; its stage's index, plus ``replica`` times the number of stages."""
        return self._world.rank

    @property
    def replica(self) -> int:
        """The replica that this process belongs to, from 0."""
        return self._grid.replica

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self._grid.num_replicas

    @property
    def device(self) -> torch.device:
        """This stage's device."""
        return self._world.device

    @property
    def devices(self) -> list[torch.device]:
        """Each stage's device, by rank."""
        return list(self._world.devices)

    @property
    def placement(self) -> list[int]:
        """The stage of each partition; ``[0, 1, …]`` unless each stage has several partitions."""
        return list(self._cut.placement)

    @property
    def schedule(self) -> str:
        """The name of the schedule; ``"a function"`` for a plan of your own."""
        return self._settings.schedule.name

    # -- statistics ----------------------------------------------------------------------------

    def statistics(self) -> StageStatistics:
        """Return what this stage did so far; does not communicate.

        Dividing its idle time needs the times of all stages: the result is in ``split`` once
        ``report()`` has brought them together.
        """
        return self._connected("there are no statistics").statistics()

    def last_step(self) -> list[TimedTask]:
        """Return this stage's tasks of the last call that ran any, in order, with their times.

        Does not communicate.
        """
        return self._connected("there are no tasks").log.last_step()

    def _connected(self, nothing: str) -> Runner:
        pipeline = self._calls.pipeline
        if pipeline is None:
            raise StageClosedError(f"{nothing} before the first call and after close")
        return pipeline

    def report(self) -> str:
        """Return a table of what all stages did so far, on every rank, which all call it.

        It also shows how each stage spent the last step: busy, and idle because of the plan
        (bubble), of unequal stages (imbalance) and of communication. ``statistics().split`` has
        the same numbers from then on.
        """
        report_of_all = build.reporter()
        with self._shared_call("report") as pipeline:
            pipeline.coordinator.meet()
            statistics = report_of_all(pipeline)
            pipeline.split = statistics[self.rank].split
            return table(statistics)

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 only; takes what the built-in ``print`` takes."""
        if self.rank == 0:
            print(*values, **{"flush": True, **options})
