"""Text for a terminal: plans, the statistics of stages, and other tables.

PURE: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from procpipe.plan.task import KINDS, Plan
from procpipe.run.statistics import Split, StageStatistics

#: The kinds of tasks in words.
KIND_NAMES = {
    "F": "forward",
    "R": "recompute",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
}


def table(stages: Sequence[StageStatistics]) -> str:
    """Lay out the statistics of all stages as a text table, one line a stage.

    Where it is known, a second table shows how each stage spent the last step.
    """
    kinds = [kind for kind in KINDS if any(kind in one.num_tasks for one in stages)]
    header = ["stage", "steps", *kinds, "busy s", "waiting s", "idle", "sent MiB", "messages"]
    has_sums = any(s.all_reduce_bytes for s in stages)
    header += ["all-reduce MiB", "exposed s"] * has_sums
    rows = [header]
    for name, s in zip(_stages_of(stages), stages, strict=True):
        row = [name, f"{s.num_steps}", *(f"{s.num_tasks.get(kind, 0)}" for kind in kinds)]
        row += [f"{s.busy_s:.2f}", f"{s.waiting_s:.2f}", f"{s.bubble:.1%}"]
        row += [f"{sum(s.sent_bytes.values()) / 2**20:.2f}", f"{sum(s.num_messages.values())}"]
        sums = [f"{s.all_reduce_bytes / 2**20:.2f}", f"{s.exposed_s:.2f}"]
        rows.append(row + sums * has_sums)
    lines = text_table(rows, 0)
    if splits := [s.split for s in stages if s.split is not None]:
        lines += ["", "the last step:", split_table(splits)]
    return "\n".join(lines)


def split_table(splits: Sequence[Split]) -> str:
    """Lay out how the stages spent a step as a text table: milliseconds and shares."""
    has_replicas = any(one.replica for one in splits)
    names = ["busy", "bubble", "imbalance", "comm. etc.", *["all-reduce"] * has_replicas]
    rows = [["stage", *(cell for name in names for cell in (f"{name} ms", "")), "step ms"]]
    for name, one in zip(_stages_of(splits), splits, strict=True):
        parts_s = [one.busy_s, one.bubble_s, one.imbalance_s, one.communication_s]
        row = [name]
        for part_s in parts_s + [one.all_reduce_s] * has_replicas:
            row += [f"{part_s * 1e3:.2f}", f"{part_s / one.step_s if one.step_s else 0.0:.1%}"]
        rows.append([*row, f"{one.step_s * 1e3:.2f}"])
    return "\n".join(text_table(rows, 0))


def _stages_of(several: Sequence[StageStatistics | Split]) -> list[str]:
    """Name the stage of each; of several replicas "1 of replica 0"."""
    has_replicas = any(one.replica for one in several)
    return [f"{one.stage}" + f" of replica {one.replica}" * has_replicas for one in several]


def render_text(plan: Plan) -> str:
    """Draw a plan as a grid: a row for each clock cycle, a column for each stage.

    k   stage 0   stage 1
    0   F0
    1   F1        F0
    2             F1
    3             B1
    4   B1        B0
    5   B0
    """
    has_one_each = plan.num_partitions == plan.num_stages
    rows = [["k", *(f"stage {j}" for j in range(plan.num_stages))]]
    for k, cycle in enumerate(plan.cycles):
        rows.append([str(k), *[""] * plan.num_stages])
        for task in cycle:
            label = f"{task.kind}{task.i}" if has_one_each else str(task)
            rows[-1][1 + plan.placement[task.j]] = label
    return "\n".join(text_table(rows, len(rows[0]), gap="   ")) + "\n"


def text_table(rows: Sequence[Sequence[str]], num_left: int, gap: str = "  ") -> list[str]:
    """Lay out a table as lines: its first columns flush left, the others right."""
    adjust = (str.ljust if k < num_left else str.rjust for k in range(len(rows[0])))
    widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    columns = list(zip(adjust, widths, strict=True))
    return [
        gap.join(to(cell, width) for cell, (to, width) in zip(row, columns, strict=True)).rstrip()
        for row in rows
    ]
