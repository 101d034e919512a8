"""Cycles that are computed when needed: every stage does the same work, one cycle after the last.

    work   F0 F1 F2                     k   stage 0   stage 1   stage 2
                                        0   F0
                                        1   F1        F0
    cycle k holds work[k - d] on        2   F2        F1        F0
    the stage at distance d from        3             F2        F1
    where the wave enters               4                       F2

A fill-and-drain plan of thousands of stages needs no more memory than its list of work, and the row
of one stage is found without the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from typing import Any

from procpipe.plan.task import Cycle, Task


@dataclass(frozen=True)
class Wave:
    """One list of work, as kinds and micro-batches; ``upwards`` begins at the last stage."""

    kinds: Sequence[str]
    micro_batches: Sequence[int]
    num_stages: int
    upwards: bool = False

    def __len__(self) -> int:
        return len(self.kinds) + self.num_stages - 1 if self.kinds else 0

    def cycle(self, k: int) -> Cycle:
        """Return the tasks of cycle ``k`` of this wave, by stage."""
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
        """Yield a stage's tasks, each with its cycle."""
        distance = self.num_stages - 1 - stage if self.upwards else stage
        tasks = map(Task, self.kinds, self.micro_batches, repeat(stage))
        return enumerate(tasks, start=distance)


class Waves(Sequence[Cycle]):
    """The cycles of several waves, one wave after another."""

    def __init__(self, *waves: Wave) -> None:
        self._waves = waves
        self._starts = tuple(accumulate(map(len, waves), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[Cycle]:
        return chain.from_iterable(map(wave.cycle, range(len(wave))) for wave in self._waves)

    def __getitem__(self, k: int | slice) -> Any:
        index = range(len(self))[k]  # negative indices and IndexError as for any sequence
        if isinstance(index, range):
            return tuple(self[at] for at in index)
        parts = zip(self._waves, self._starts, strict=False)
        wave, start = next(part for part in parts if index < part[1] + len(part[0]))
        return wave.cycle(index - start)

    def row(self, stage: int) -> list[tuple[int, Task]]:
        """List a stage's tasks, each with its cycle."""
        return [
            (start + k, task)
            for wave, start in zip(self._waves, self._starts, strict=False)
            for k, task in wave.row(stage)
        ]
