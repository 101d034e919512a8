"""Plans and simulated timelines drawn as text, for a terminal or a docstring.

    render_text(plan)                     render_timeline_text(timeline, width=36)

    k   stage 0   stage 1                 stage 0   F0─F1─·········B1────B0────
    0   F0                                stage 1   ···F0─F1─B1───B0────······
    1   F1        F0                                0 s                    9 s
    2             F1                                idle 33.3%
    3             B1
    4   B1        B0
    5   B0

Dots are idle time.
"""

from __future__ import annotations

from procpipe.plan.task import Plan, Task
from procpipe.planner.simulation import Timeline

#: The kinds of tasks in words.
KIND_NAMES = {
    "F": "forward",
    "R": "recompute",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
}


def render_text(plan: Plan) -> str:
    """Draw a plan as a grid: a row for each clock cycle, a column for each stage."""
    heads = [f"stage {j}" for j in range(plan.num_stages)]
    margin = len(str(len(plan.cycles) - 1)) + 3
    lines = ["k".ljust(margin) + "   ".join(heads)]
    for k, cycle in enumerate(plan.cycles):
        labels = {plan.placement[task.j]: _label(task, plan) for task in cycle}
        cells = [labels.get(j, "").ljust(len(head)) for j, head in enumerate(heads)]
        lines.append((str(k).ljust(margin) + "   ".join(cells)).rstrip())
    return "\n".join(lines) + "\n"


def render_timeline_text(timeline: Timeline, width: int = 80) -> str:
    """Draw a timeline: a row for each stage, time to the right, dots where a stage idles.

    Tasks that are too short for their number show only their kind, several in a row once. A line
    has ``width`` characters.
    """
    names = [f"stage {j}   " for j in range(timeline.plan.num_stages)]
    margin = max(map(len, names))
    columns = max(10, width - margin)
    scale = columns / timeline.total_s if timeline.total_s else 0.0
    lines = []
    for j, name in enumerate(names):
        cells = ["·"] * columns
        short_kind, short_last = "", -1  # of the last task that was too short for its number
        for task in timeline.plan.tasks_of(j):
            first, last = (round(at_s * scale) for at_s in timeline.spans_s[task])
            width = last - first
            labels = _label(task, timeline.plan), f"{task.kind}{task.i}"
            label = next((label for label in labels if len(label) <= width), "")
            if width and not label:
                goes_on = (task.kind, first) == (short_kind, short_last)
                label = "" if goes_on else task.kind
                short_kind, short_last = task.kind, last
            cells[first:last] = label.ljust(width, "─")
        lines.append(name.ljust(margin) + "".join(cells))
    end = f"{timeline.total_s:.4g} s"
    lines.append(" " * margin + "0 s" + end.rjust(columns - len("0 s")))
    sums = f", of it {timeline.exposed:.1%} all-reduce" if timeline.exposed_s else ""
    lines.append(" " * margin + f"idle {timeline.bubble:.1%}{sums}")
    return "\n".join(lines) + "\n"


def _label(task: Task, plan: Plan) -> str:
    """Return a task's text, with its partition only if stages have several."""
    is_only = plan.num_partitions == plan.num_stages
    return f"{task.kind}{task.i}" if is_only else str(task)
