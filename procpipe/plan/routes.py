"""Where tensors go: across each boundary, along skips, the target directly, the loss by stages.

          F0@0 ── activation ──▶ F0@1 ── activation ──▶ F0@2
            ├─────────── skip (0, 2) ────────────────────▲ ▲        forward
            └─────────── target ───────────────────────────┘

          B0@0 ◀── gradient ──── B0@1 ◀── gradient ──── B0@2
            ▲──────── skip gradient (0, 2) ───────────────┘         backward

          ◀────── loss ───────── ◀────── loss ───────── F(last)@2

          B(last)@0 ◀── gradient of what both use ──▶ B(last)@2

A tensor goes straight from the partition that makes it to the partition that uses it. All tensors
of one hop are one transfer: skip tensors from ``a`` to ``b`` travel together. Two partitions of one
stage hand tensors over without a transfer. ``program.py`` orders the transfers.

The loss, one number, passes every stage, each time as gradients do (``loss_hops``). No task makes
it or needs it, so it is no part of a plan; ``program.py`` says when it is passed on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from procpipe.plan.task import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENT,
    Plan,
    Task,
    gradient_tasks,
)

ACTIVATION = "activation"
GRADIENT = "gradient"
SKIP = "skip"
SKIP_GRADIENT = "skip gradient"
TARGET = "target"
LOSS = "loss"
TIED_GRADIENT = "tied gradient"

#: A FIFO of transfers: payload, source and destination, which are partitions.
Channel = tuple[str, int, int]


class Transfer(NamedTuple):
    """One message from one partition to another."""

    #: ``ACTIVATION``, ``GRADIENT``, ``SKIP``, ``SKIP_GRADIENT``, ``TARGET``, ``LOSS`` or
    #: ``TIED_GRADIENT``.
    payload: str
    #: The micro-batch. The gradients of tied parameters have the number of the one that completes
    #: them, the loss of a mini-batch has 0.
    i: int
    source: int  # the partition whose stage sends it
    #: The partition whose stage receives it. The gradients of tied parameters, which go from one
    #: stage to another, not between partitions, have the first partition of each.
    destination: int

    def __str__(self) -> str:
        return f"{self.payload} {self.i}: {self.source}->{self.destination}"

    @property
    def channel(self) -> Channel:
        """The FIFO that this transfer goes through."""
        return self.payload, self.source, self.destination

    @property
    def is_gradient(self) -> bool:
        """Whether it goes backward."""
        return self.payload in (GRADIENT, SKIP_GRADIENT)

    @property
    def makers(self) -> tuple[Task, ...]:
        """The tasks that can make what is sent; a plan has one of them.

        For gradients of tied parameters none: see :meth:`Routes.tied_gradients`.
        """
        if self.payload == TIED_GRADIENT:
            return ()
        if self.is_gradient:
            return gradient_tasks(self.i, self.source)
        return (Task(FORWARD, self.i, self.source),)


@dataclass(frozen=True)
class Routes:
    """Which partitions of a model exchange tensors.

    Raises:
        ValueError: a skip is not a pair of partitions in order, or is given twice.
    """

    num_stages: int  # ``n``
    #: Pairs ``(a, b)`` with ``a < b``, each once: a skip tensor made in partition ``a`` is used in
    #: partition ``b``.
    skips: tuple[tuple[int, int], ...] = ()
    target: bool = False  # whether the target goes from stage 0 to the last partition's stage
    #: The stage of each partition; one partition a stage if left out.
    placement: tuple[int, ...] = ()
    #: Sets of partitions, ascending: each uses a parameter in common.
    ties: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", self.placement or tuple(range(self.num_stages)))
        what = "stages" if len(self.placement) == self.num_stages else "partitions"
        for skip in self.skips:
            if not 0 <= skip[0] < skip[1] < len(self.placement):
                raise ValueError(
                    f"the skip {skip} must go from a lower to a higher of {len(self.placement)} "
                    f"{what}"
                )
        if len(set(self.skips)) < len(self.skips):
            raise ValueError(f"a pair of {what} is given twice in the skips {self.skips}")

    def stages_of(self, transfer: Transfer) -> tuple[int, int]:
        """Return the stages between which a transfer goes."""
        return self.placement[transfer.source], self.placement[transfer.destination]

    def leaving(self, task: Task) -> list[Transfer]:
        """List what a stage sends after a task, in order."""
        return self._travelling(self.made_by(task))

    def made_by(self, task: Task) -> list[Transfer]:
        """List what a task makes for other partitions, including those of its own stage."""
        kind, i, j = task
        last = len(self.placement) - 1
        if kind == FORWARD:
            down = [Transfer(ACTIVATION, i, j, j + 1)] if j < last else []
            down += [Transfer(SKIP, i, j, b) for b in self.skips_from(j)]
            if self.target and j == 0 < last:
                down.append(Transfer(TARGET, i, 0, last))
            return down
        if task.makes_gradient:
            up = [Transfer(GRADIENT, i, j, j - 1)] if j > 0 else []
            return up + [Transfer(SKIP_GRADIENT, i, j, a) for a in self.skips_into(j)]
        return []

    def needed(self, task: Task) -> list[Transfer]:
        """List what a task needs from other stages."""
        return self._travelling(self.used_by(task))

    def used_by(self, task: Task) -> list[Transfer]:
        """List what a task uses from other partitions, including those of its own stage."""
        kind, i, j = task
        last = len(self.placement) - 1
        if kind == FORWARD:
            down = [Transfer(ACTIVATION, i, j - 1, j)] if j > 0 else []
            down += [Transfer(SKIP, i, a, j) for a in self.skips_into(j)]
            if self.target and j == last > 0:
                down.append(Transfer(TARGET, i, 0, last))
            return down
        if task.makes_gradient:
            up = [Transfer(GRADIENT, i, j + 1, j)] if j < last else []
            return up + [Transfer(SKIP_GRADIENT, i, b, j) for b in self.skips_from(j)]
        return []

    def sent(self, plan: Plan, stage: int) -> Iterator[tuple[int, Transfer]]:
        """Yield all that a stage sends, with its cycle; within a cycle in order."""
        for k, task in plan.row(stage):
            for transfer in self.leaving(task):
                yield k, transfer
        for k, _, transfer in self.tied_gradients(plan, stage):
            yield k, transfer

    def tied_gradients(self, plan: Plan, stage: int) -> Iterator[tuple[int, Task, Transfer]]:
        """Yield what a stage sends of the gradients of tied parameters: cycle, task, transfer.

        The task is the last that adds to them on this stage, after which they are sent.
        """
        for other, shared in self.tied_with.get(stage, {}).items():
            for k, task in reversed(plan.row(stage)):
                if task.j in shared and task.kind in (BACKWARD, WEIGHT_GRADIENT):
                    source, destination = map(self._first_partitions.__getitem__, (stage, other))
                    yield k, task, Transfer(TIED_GRADIENT, task.i, source, destination)
                    break

    def skips_from(self, partition: int) -> tuple[int, ...]:
        """List the partitions that use skip tensors made in this one."""
        return self._skips_from.get(partition, ())

    def skips_into(self, partition: int) -> tuple[int, ...]:
        """List the partitions that make skip tensors used in this one."""
        return self._skips_into.get(partition, ())

    def sources(self, stage: int) -> list[int]:
        """List the stages that may send tensors to this one."""
        return self._sources.get(stage, [])

    def channels(self) -> list[Channel]:
        """List every channel between two stages that a plan may use."""
        last = len(self.placement) - 1
        forward = [(ACTIVATION, j, j + 1) for j in range(last)]
        forward += [(SKIP, a, b) for a, b in self.skips]
        back = [(GRADIENT, j + 1, j) for j in range(last)]
        back += [(SKIP_GRADIENT, b, a) for a, b in self.skips]
        aside = [(TARGET, 0, last)] if self.target else []
        aside += [hop.channel for hop in self.loss_hops]
        firsts = self._first_partitions
        for stage, others in self.tied_with.items():
            aside += [(TIED_GRADIENT, firsts[stage], firsts[other]) for other in others]
        return [
            (payload, a, b)
            for payload, a, b in (*forward, *back, *aside)
            if self.placement[a] != self.placement[b]
        ]

    def _travelling(self, transfers: list[Transfer]) -> list[Transfer]:
        stages = self.placement
        return [t for t in transfers if stages[t.source] != stages[t.destination]]

    @cached_property
    def _skips_from(self) -> dict[int, tuple[int, ...]]:
        return {j: tuple(sorted(b for a, b in self.skips if a == j)) for j, _ in self.skips}

    @cached_property
    def _skips_into(self) -> dict[int, tuple[int, ...]]:
        return {j: tuple(sorted(a for a, b in self.skips if b == j)) for _, j in self.skips}

    @cached_property
    def _sources(self) -> dict[int, list[int]]:
        found: dict[int, set[int]] = {}
        for _, a, b in self.channels():
            found.setdefault(self.placement[b], set()).add(self.placement[a])
        return {stage: sorted(sources) for stage, sources in found.items()}

    @cached_property
    def _first_partitions(self) -> tuple[int, ...]:
        return tuple(self.placement.index(stage) for stage in range(self.num_stages))

    @cached_property
    def loss_hops(self) -> tuple[Transfer, ...]:
        """The loss's way to every stage: into the last partition of each, from the one after it.

        Between the same two stages go the gradients of that boundary.
        """
        ends = {stage: j for j, stage in enumerate(self.placement)}.values()
        return tuple(Transfer(LOSS, 0, j + 1, j) for j in ends if j + 1 < len(self.placement))

    @cached_property
    def tied_with(self) -> dict[int, dict[int, set[int]]]:
        """For each stage, by each other stage, its partitions that share a parameter with it."""
        found: dict[int, dict[int, set[int]]] = {}
        for tie in self.ties:
            for j in tie:
                for other in {self.placement[k] for k in tie} - {self.placement[j]}:
                    of_stage = found.setdefault(self.placement[j], {})
                    of_stage.setdefault(other, set()).add(j)
        return {stage: dict(sorted(found[stage].items())) for stage in sorted(found)}
