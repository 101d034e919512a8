"""Where tensors go: across each boundary, along skips, the loss by stages.

          F0@0 ── activation ──▶ F0@1 ── activation ──▶ F0@2
            └─────────── skip (0, 2) ────────────────────▲          forward

          B0@0 ◀── gradient ──── B0@1 ◀── gradient ──── B0@2
            ▲──────── skip gradient (0, 2) ───────────────┘         backward

          ◀────── loss ───────── ◀────── loss ───────── F(last)@2

A tensor goes straight from the partition that makes it to the partition that uses it. All tensors
of one hop are one transfer: skip tensors from ``a`` to ``b`` travel together. Two partitions of one
stage hand tensors over without a transfer. ``program.py`` orders the transfers.

The loss, one number, passes every stage, each time as gradients do (``loss_hops``). No task makes
it or needs it, so it is no part of a plan; ``program.py`` says when it is passed on. Two more
payloads travel around a program, not within it: the target of a mini-batch goes from stage 0 to the
last partition's stage before the first task, and gradients of tied parameters go between the stages
that use them after the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from procpipe.plan.task import BACKWARD, FORWARD, INPUT_GRADIENT, Plan, Task

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
    i: int  # the micro-batch; 0 of what a mini-batch has one of
    source: int  # the partition whose stage sends it
    destination: int  # the partition whose stage receives it

    def __str__(self) -> str:
        return f"{self.payload} {self.i}: {self.source}->{self.destination}"

    @property
    def channel(self) -> Channel:
        """The FIFO that this transfer goes through."""
        return self.payload, self.source, self.destination

    @property
    def makers(self) -> tuple[Task, ...]:
        """The tasks that can make what is sent; a plan has one of them."""
        is_gradient = self.payload in (GRADIENT, SKIP_GRADIENT)
        kinds = (BACKWARD, INPUT_GRADIENT) if is_gradient else (FORWARD,)
        return tuple(Task(kind, self.i, self.source) for kind in kinds)


@dataclass(frozen=True)
class Routes:
    """Which partitions of a model exchange tensors."""

    num_stages: int  # ``n``
    #: Pairs ``(a, b)`` with ``a < b``, each once: a skip tensor made in partition ``a`` is used in
    #: partition ``b``.
    skips: tuple[tuple[int, int], ...] = ()
    #: The stage of each partition; one partition a stage if left out.
    placement: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", self.placement or tuple(range(self.num_stages)))

    def stages_of(self, transfer: Transfer) -> tuple[int, int]:
        """Return the stages between which a transfer goes."""
        return self.placement[transfer.source], self.placement[transfer.destination]

    def made_by(self, task: Task) -> list[Transfer]:
        """List what a task makes for other partitions, including those of its own stage."""
        kind, i, j = task
        last = len(self.placement) - 1
        if kind == FORWARD:
            down = [Transfer(ACTIVATION, i, j, j + 1)] if j < last else []
            return down + [Transfer(SKIP, i, j, b) for b in self.skips_from(j)]
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
            return down + [Transfer(SKIP, i, a, j) for a in self.skips_into(j)]
        if task.makes_gradient:
            up = [Transfer(GRADIENT, i, j + 1, j)] if j < last else []
            return up + [Transfer(SKIP_GRADIENT, i, b, j) for b in self.skips_from(j)]
        return []

    def sent(self, plan: Plan, stage: int) -> Iterator[tuple[int, Transfer]]:
        """Yield all that a stage sends, with its cycle; within a cycle in order."""
        for k, task in plan.row(stage):
            for transfer in self._travelling(self.made_by(task)):
                yield k, transfer

    def skips_from(self, partition: int) -> list[int]:
        """List the partitions that use skip tensors made in this one."""
        return sorted(b for a, b in self.skips if a == partition)

    def skips_into(self, partition: int) -> list[int]:
        """List the partitions that make skip tensors used in this one."""
        return sorted(a for a, b in self.skips if b == partition)

    def sources(self, stage: int) -> set[int]:
        """List the stages that may send tensors to this one."""
        return {self.placement[a] for _, a, b in self.channels() if self.placement[b] == stage}

    def channels(self) -> list[Channel]:
        """List every channel between two stages that a plan may use."""
        last = len(self.placement) - 1
        forward = [(ACTIVATION, j, j + 1) for j in range(last)]
        forward += [(SKIP, a, b) for a, b in self.skips]
        back = [(GRADIENT, j + 1, j) for j in range(last)]
        back += [(SKIP_GRADIENT, b, a) for a, b in self.skips]
        stages, loss = self.placement, [hop.channel for hop in self.loss_hops]
        return [way for way in (*forward, *back, *loss) if stages[way[1]] != stages[way[2]]]

    def _travelling(self, transfers: list[Transfer]) -> list[Transfer]:
        stages = self.placement
        return [t for t in transfers if stages[t.source] != stages[t.destination]]

    @cached_property
    def loss_hops(self) -> tuple[Transfer, ...]:
        """The loss's way to every stage: into the last partition of each, from the one after it.

        Between the same two stages go the gradients of that boundary.
        """
        ends = {stage: j for j, stage in enumerate(self.placement)}.values()
        return tuple(Transfer(LOSS, 0, j + 1, j) for j in ends if j + 1 < len(self.placement))
