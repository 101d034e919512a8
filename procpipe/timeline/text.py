"""Plans drawn as text, for a terminal or a docstring."""

from __future__ import annotations

from procpipe.plan.task import Plan

#: The kinds of tasks in words.
KIND_NAMES = {
    "F": "forward",
    "R": "recompute",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
}


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
    heads = [f"stage {j}" for j in range(plan.num_stages)]
    margin = len(str(len(plan.cycles) - 1)) + 3
    lines = ["k".ljust(margin) + "   ".join(heads)]
    has_one_each = plan.num_partitions == plan.num_stages
    for k, cycle in enumerate(plan.cycles):
        labels = {
            plan.placement[task.j]: f"{task.kind}{task.i}" if has_one_each else str(task)
            for task in cycle
        }
        cells = [labels.get(j, "").ljust(len(head)) for j, head in enumerate(heads)]
        lines.append((str(k).ljust(margin) + "   ".join(cells)).rstrip())
    return "\n".join(lines) + "\n"
