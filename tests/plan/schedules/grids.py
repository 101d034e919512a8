"""Plans as grids that a reader can check by eye."""

from __future__ import annotations

from procpipe.plan.task import Plan

#: Every small number of micro-batches and of stages.
SIZES = [(m, n) for m in range(1, 7) for n in range(1, 7)]

#: Those up to 3, and a few more: equal, one a multiple of the other or not, and one of them 1.
SOME_SIZES = [(m, n) for m, n in SIZES if max(m, n) <= 3]
SOME_SIZES += [(4, 4), (6, 4), (8, 3), (3, 8), (7, 2), (1, 8), (8, 1)]


def grid(plan: Plan) -> list[list[str]]:
    """Return one row a cycle, one column a stage, ``--`` where the stage is idle.

    Where stages run several partitions, a task says which: ``F0@2``.
    """
    names_partition = plan.num_partitions > plan.num_stages
    rows = []
    for cycle in plan.cycles:
        row = ["--"] * plan.num_stages
        for task in cycle:
            label = str(task) if names_partition else f"{task.kind}{task.i}"
            row[plan.placement[task.j]] = label
        rows.append(row)
    return rows


def read(drawing: str) -> list[list[str]]:
    return [line.split() for line in drawing.strip().splitlines()]
