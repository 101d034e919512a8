"""Draws when each stage ran which task, one picture over the other on one axis of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from procpipe.plan.task import BACKWARD, FORWARD, RECOMPUTE, Task

#: The tasks of one stage, each as its text, its start and its end in seconds.
Tasks = Sequence[tuple[str, float, float]]

#: As in ``procpipe timeline``: colours that colour-blind readers can distinguish.
_LOOKS = {
    FORWARD: ("forward", "#0072b2", "white"),
    RECOMPUTE: ("recompute", "#c4c4c4", "black"),
    BACKWARD: ("backward", "#e69f00", "black"),
}


def draw(figure: Any, timelines: Mapping[str, Sequence[Tasks]]) -> None:
    """Draw timelines, by title the tasks of each stage, on a matplotlib figure."""
    figure.set_size_inches(11, 1.9 * len(timelines) + 0.8)
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, stages) in zip(axes, timelines.items(), strict=True):
        end_s = max(end_s for tasks in stages for _, _, end_s in tasks)
        axis.set_title(f"{title}: {end_s:.2f} s", loc="left", fontsize=10)
        axis.axvline(end_s, color="black", linewidth=0.8, linestyle=":")
        axis.set_yticks(range(len(stages)), [f"stage {j}" for j in range(len(stages))])
        axis.invert_yaxis()
        for j, tasks in enumerate(stages):
            for text, start_s, task_end_s in tasks:
                _draw_task(axis, j, Task.parse(text), start_s, task_end_s)
    axes[-1].set_xlabel("seconds")
    handles = [axes[0].barh(0, 0, color=fill, label=name) for name, fill, _ in _LOOKS.values()]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=9)


def _draw_task(axis: Any, row: int, task: Task, start_s: float, end_s: float) -> None:
    _, fill, ink = _LOOKS[task.kind]
    axis.barh(row, end_s - start_s, left=start_s, height=0.8, color=fill, edgecolor="white")
    middle_s = (start_s + end_s) / 2
    axis.text(middle_s, row, str(task.i), color=ink, ha="center", va="center", fontsize=7)
