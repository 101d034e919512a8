"""The vocabulary of plans: a task, a clock cycle, and the plan of one mini-batch.

A plan says which stage does what in which clock cycle, and nothing about tensors, ranks or devices.
The same plan can be drawn, verified, simulated, sent as text and run.

    F3@1            forward of micro-batch 3 through partition 1
    R3@1            its recomputation, from the stored input
    B3@1            its backward
    I3@1  W3@1      its backward, split: the gradient of its input, which the previous partition
                    needs, and the gradients of the weights, which no other task needs

The *placement* lists the stage of each partition. By default partition ``j`` is on stage ``j``.

The text of a plan has a header and one line a clock cycle:

    plan m=2 n=2    2 micro-batches, 2 stages
    F0@0            cycle 0
    F1@0 F0@1       cycle 1
    F1@1            cycle 2

Another placement is in the header: ``plan m=2 n=2 placement=0,1,1,0``.

A plan with faults can be built; ``verify.py`` lists all of them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

FORWARD, BACKWARD, RECOMPUTE, INPUT_GRADIENT, WEIGHT_GRADIENT = "F", "B", "R", "I", "W"

#: Every kind of task, in the order in which they run for one micro-batch.
KINDS = (FORWARD, RECOMPUTE, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)

_TASK = re.compile(rf"([{''.join(KINDS)}])([0-9]+)@([0-9]+)")
_HEADER = re.compile(r"plan m=([0-9]+) n=([0-9]+)(?: placement=([0-9]+(?:,[0-9]+)*))?")


class Task(NamedTuple):
    """One unit of work of one stage on one micro-batch.

    Attributes:
        kind: ``"F"``, ``"B"``, ``"R"``, ``"I"`` or ``"W"``; see ``KINDS``.
        i: the micro-batch.
        j: the partition.
    """

    kind: str
    i: int
    j: int

    def __str__(self) -> str:
        return f"{self.kind}{self.i}@{self.j}"

    @classmethod
    def parse(cls, text: str) -> Task:
        """Read a task from its text form, ``"F3@1"``.

        Raises:
            ValueError: the text is not a task.
        """
        match = _TASK.fullmatch(text)
        if match is None:
            kinds = ", ".join(KINDS)
            raise ValueError(f"{text!r} is not a task; one reads like 'F3@1', of the kinds {kinds}")
        return cls(match[1], int(match[2]), int(match[3]))

    @property
    def makes_gradient(self) -> bool:
        """Whether it makes the gradient of its partition's input: ``"B"`` or ``"I"``."""
        return self.kind in (BACKWARD, INPUT_GRADIENT)


#: The tasks of one clock cycle, at most one a stage.
Cycle = tuple[Task, ...]


@dataclass(frozen=True)
class Plan:
    """The whole clock-cycle schedule of one mini-batch.

    Attributes:
        num_micro_batches: ``m``, at least 1.
        num_stages: ``n``, at least 1.
        cycles: the clock cycles in order.
        placement: the stage of each partition; one partition a stage if left out.
    """

    num_micro_batches: int
    num_stages: int
    cycles: Sequence[Cycle]
    placement: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        m, n = self.num_micro_batches, self.num_stages
        if m < 1 or n < 1:
            raise ValueError(f"a plan needs a micro-batch and a stage, but has m={m} and n={n}")
        object.__setattr__(self, "cycles", tuple(map(tuple, self.cycles)))
        object.__setattr__(self, "placement", self.placement or tuple(range(self.num_stages)))

    def row(self, stage: int) -> list[tuple[int, Task]]:
        """List a stage's tasks in order, each with its clock cycle."""
        return [*zip(*self._rows.get(stage, ((), ())), strict=True)]

    @property
    def num_partitions(self) -> int:
        """The number of partitions, over all stages."""
        return len(self.placement)

    def tasks_of(self, stage: int) -> list[Task]:
        """List the tasks of a stage in order."""
        return [*self._rows.get(stage, ((), ()))[1]]

    def tasks(self) -> Iterator[Task]:
        """Yield every task, cycle by cycle."""
        for cycle in self.cycles:
            yield from cycle

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of its tasks."""
        return frozenset(task.kind for task in self.tasks())

    @property
    def has_backward(self) -> bool:
        """Whether the plan has backward tasks."""
        return not self.kinds.isdisjoint((BACKWARD, INPUT_GRADIENT))

    def to_text(self) -> str:
        """Write the plan as text; ``from_text`` reads it back."""
        header = f"plan m={self.num_micro_batches} n={self.num_stages}"
        if self.placement != tuple(range(self.num_stages)):
            header += f" placement={','.join(map(str, self.placement))}"
        return "\n".join([header, *(" ".join(map(str, cycle)) for cycle in self.cycles)]) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Plan:
        """Read a plan from its text.

        Raises:
            ValueError: the text is not a plan; names the line and the reason.
        """
        number, (header, *lines) = 1, text.removesuffix("\n").split("\n")
        try:
            match = _HEADER.fullmatch(header)
            if match is None:
                raise ValueError(f"{header!r} is not a header; one reads like 'plan m=4 n=3'")
            placement = tuple(map(int, match[3].split(","))) if match[3] else ()
            empty = cls(int(match[1]), int(match[2]), (), placement)
            cycles = []
            for line in lines:
                number += 1
                cycles.append(tuple(map(Task.parse, line.split())))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        return replace(empty, cycles=cycles)

    @cached_property
    def digest(self) -> str:
        """The first 16 hexadecimal digits of its text's SHA-256."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()[:16]

    @cached_property
    def _rows(self) -> Mapping[int, tuple[Sequence[int], Sequence[Task]]]:
        """The cycles of each stage's tasks, and the tasks: of millions, no pairs are kept."""
        rows: dict[int, tuple[list[int], list[Task]]] = {}
        stages = dict(enumerate(self.placement))  # a faulty plan may name other partitions
        for k, cycle in enumerate(self.cycles):
            for task in cycle:
                cycles, tasks = rows.setdefault(stages.get(task.j, -1), ([], []))
                cycles.append(k)
                tasks.append(task)
        return rows
