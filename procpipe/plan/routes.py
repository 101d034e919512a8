"""Where tensors go: over each boundary, along skips, and the target and the loss on their own.

          F0@0 ── activation ──▶ F0@1 ── activation ──▶ F0@2
            ├─────────── skip (0, 2) ────────────────────▲ ▲        forward
            └─────────── target ───────────────────────────┘

          B0@0 ◀── gradient ──── B0@1 ◀── gradient ──── B0@2
            ▲──────── skip gradient (0, 2) ───────────────┘         backward

          ◀───────── loss, to every other stage ──────── F(last)@2

A tensor goes straight from the stage that makes it to the stage that uses it, once. All tensors of
one hop are one transfer: several skip tensors from stage ``a`` to stage ``b`` travel together.

Knows which stages speak to which, and after which task; not when (``fence.py``), nor how.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from procpipe.plan.task import BACKWARD, FORWARD, Plan, Task

__all__ = [
    "ACTIVATION",
    "GRADIENT",
    "LOSS",
    "SKIP",
    "SKIP_GRADIENT",
    "TARGET",
    "Channel",
    "Routes",
    "Transfer",
]

ACTIVATION = "activation"
GRADIENT = "gradient"
SKIP = "skip"
SKIP_GRADIENT = "skip gradient"
TARGET = "target"
LOSS = "loss"

#: A FIFO of transfers: kind, source, destination.
Channel = tuple[str, int, int]


class Transfer(NamedTuple):
    """One message from one stage to another.

    Attributes:
        kind: ``ACTIVATION``, ``GRADIENT``, ``SKIP``, ``SKIP_GRADIENT``, ``TARGET`` or ``LOSS``.
        i: the micro-batch. The loss, of which there is one a mini-batch, bears the micro-batch
            after which it is complete.
        source: the stage that sends it.
        destination: the stage that receives it.
    """

    kind: str
    i: int
    source: int
    destination: int

    def __str__(self) -> str:
        return f"{self.kind} {self.i}: {self.source}->{self.destination}"

    @property
    def channel(self) -> Channel:
        """The FIFO that this transfer goes through."""
        return self.kind, self.source, self.destination

    @property
    def maker(self) -> Task:
        """The task that makes what is sent."""
        backward = self.kind in (GRADIENT, SKIP_GRADIENT)
        return Task(BACKWARD if backward else FORWARD, self.i, self.source)


@dataclass(frozen=True)
class Routes:
    """Which stages of a model speak to which.

    Attributes:
        num_stages: ``n``.
        skips: pairs ``(a, b)`` with ``a < b``, each once: a skip tensor made on stage ``a`` is
            used on stage ``b``.
        target: whether the target goes from stage 0 to the last stage.
        loss: whether the last stage sends the loss of the mini-batch to every other.

    Raises:
        ValueError: a skip that is no pair of stages in order, or is given twice.
    """

    num_stages: int
    skips: tuple[tuple[int, int], ...] = ()
    target: bool = False
    loss: bool = False

    def __post_init__(self) -> None:
        for skip in self.skips:
            if not 0 <= skip[0] < skip[1] < self.num_stages:
                raise ValueError(
                    f"the skip {skip} must go from a lower to a higher of {self.num_stages} stages"
                )
        if len(set(self.skips)) < len(self.skips):
            raise ValueError(f"a pair of stages is given twice in the skips {self.skips}")

    def leaving(self, task: Task, plan: Plan) -> list[Transfer]:
        """List what leaves a stage after a task, in the order in which it is sent.

        Args:
            task: the task that has just ended.
            plan: the plan it belongs to, which tells when the loss is complete.
        """
        kind, i, j = task
        if kind == FORWARD:
            return self._leaving_forward(i, j, complete=i == plan.last_forward)
        if kind == BACKWARD:
            up = [Transfer(GRADIENT, i, j, j - 1)] if j > 0 else []
            return up + [Transfer(SKIP_GRADIENT, i, j, a) for a in self.skips_into(j)]
        return []

    def needed(self, task: Task) -> list[Transfer]:
        """List what must have come from other stages before a task can run."""
        kind, i, j = task
        last = self.num_stages - 1
        if kind == FORWARD:
            down = [Transfer(ACTIVATION, i, j - 1, j)] if j > 0 else []
            down += [Transfer(SKIP, i, a, j) for a in self.skips_into(j)]
            if self.target and j == last > 0:
                down.append(Transfer(TARGET, i, 0, last))
            return down
        if kind == BACKWARD:
            up = [Transfer(GRADIENT, i, j + 1, j)] if j < last else []
            return up + [Transfer(SKIP_GRADIENT, i, b, j) for b in self.skips_from(j)]
        return []

    def skips_from(self, stage: int) -> tuple[int, ...]:
        """List the stages that use skip tensors made on this one."""
        return self._skips_from.get(stage, ())

    def skips_into(self, stage: int) -> tuple[int, ...]:
        """List the stages that make skip tensors used on this one."""
        return self._skips_into.get(stage, ())

    def sources(self, stage: int) -> list[int]:
        """List the stages that may send anything to this one."""
        last = self.num_stages - 1
        sources = {stage - 1, stage + 1, *self.skips_into(stage), *self.skips_from(stage)}
        if self.target and stage == last:
            sources.add(0)
        if self.loss:
            sources.add(last)
        return sorted(sources & set(range(self.num_stages)) - {stage})

    def _leaving_forward(self, i: int, j: int, *, complete: bool) -> list[Transfer]:
        last = self.num_stages - 1
        down = [Transfer(ACTIVATION, i, j, j + 1)] if j < last else []
        down += [Transfer(SKIP, i, j, b) for b in self.skips_from(j)]
        if self.target and j == 0 < last:
            down.append(Transfer(TARGET, i, 0, last))
        if self.loss and j == last and complete:
            down += [Transfer(LOSS, i, last, other) for other in range(last)]
        return down

    @cached_property
    def _skips_from(self) -> Mapping[int, tuple[int, ...]]:
        return _grouped(self.skips)

    @cached_property
    def _skips_into(self) -> Mapping[int, tuple[int, ...]]:
        return _grouped((b, a) for a, b in self.skips)


def _grouped(pairs: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for key, value in sorted(pairs):
        groups[key].append(value)
    return {key: tuple(values) for key, values in groups.items()}
