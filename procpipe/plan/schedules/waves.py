"""Cycles that are made when asked for: a list of work that travels through the stages as a wave.

Every stage of a fill-and-drain plan does the same work in the same order, one clock cycle after
the stage before it. So the whole grid follows from that one list:

    work   F0 F1 F2                     k   stage 0   stage 1   stage 2
                                        0   F0
                                        1   F1        F0
    cycle k holds work[k - d] on        2   F2        F1        F0
    the stage at distance d from        3             F2        F1
    where the wave comes in             4                       F2

A plan of thousands of stages and micro-batches then takes no more memory than its list of work,
and what one stage does is known without a walk through all the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from typing import overload

from procpipe.plan.task import Cycle, Task


@dataclass(frozen=True)
class Wave:
    """One list of work and the direction in which it travels.

    Attributes:
        kinds: the kind of each piece of work, in order.
        micro_batches: the micro-batch of each piece of work, in the same order.
        num_stages: how many stages the wave passes.
        upwards: whether it comes in at the last stage and ends at stage 0 (backward).
    """

    kinds: Sequence[str]
    micro_batches: Sequence[int]
    num_stages: int
    upwards: bool = False

    def __len__(self) -> int:
        return len(self.kinds) + self.num_stages - 1 if self.kinds else 0

    def cycle(self, k: int) -> Cycle:
        """Make cycle ``k`` of this wave, its tasks by stage."""
        nearest = max(0, k - len(self.kinds) + 1)
        farthest = min(k, self.num_stages - 1)
        work = slice(k - farthest, k - nearest + 1)  # from the farthest stage to the nearest
        kinds, micro_batches = self.kinds[work], self.micro_batches[work]
        if self.upwards:
            first = self.num_stages - 1 - farthest
        else:
            first, kinds, micro_batches = nearest, kinds[::-1], micro_batches[::-1]
        return tuple(map(Task, kinds, micro_batches, range(first, first + len(kinds))))

    def row(self, stage: int) -> Iterator[tuple[int, Task]]:
        """Walk through what one stage does, each task with its cycle."""
        distance = self.num_stages - 1 - stage if self.upwards else stage
        tasks = map(Task, self.kinds, self.micro_batches, repeat(stage))
        return enumerate(tasks, start=distance)


class Waves(Sequence[Cycle]):
    """The cycles of waves that follow one another, each starting where the one before has ended."""

    def __init__(self, *waves: Wave) -> None:
        self._waves = waves
        self._starts = tuple(accumulate(map(len, waves), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[Cycle]:
        return chain.from_iterable(map(wave.cycle, range(len(wave))) for wave in self._waves)

    @overload
    def __getitem__(self, k: int) -> Cycle: ...

    @overload
    def __getitem__(self, k: slice) -> tuple[Cycle, ...]: ...

    def __getitem__(self, k: int | slice) -> Cycle | tuple[Cycle, ...]:
        if isinstance(k, slice):
            return tuple(self[index] for index in range(*k.indices(len(self))))
        index = range(len(self))[k]  # negative indices and IndexError as everywhere
        for wave, start in zip(self._waves, self._starts, strict=False):
            if index < start + len(wave):
                return wave.cycle(index - start)
        raise AssertionError("the waves do not add up to their length")

    def row(self, stage: int) -> list[tuple[int, Task]]:
        """List what one stage does, each task with its cycle."""
        return [
            (start + k, task)
            for wave, start in zip(self._waves, self._starts, strict=False)
            for k, task in wave.row(stage)
        ]
