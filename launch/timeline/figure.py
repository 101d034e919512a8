"""Draws plans and measured steps: a row a rank, a colour a kind of task, time to the right.

Tasks of a stage's later partitions are lighter.

    plan: 43 ms, 27% idle             one panel for each of what is compared, on one scale of time
    stage 0  [0 ][1 ]···[1   ][0   ]
    stage 1  ···[0 ][1 ][1   ][0   ]
    measured step 19: 54 ms, …
    stage 0  [0 ][1 ] ··· [1   ] [0   ]
    stage 1    ···[0 ][1 ] [1   ]·[0   ]
             0    10    20    30    40 ms

Needs matplotlib, as does nothing else of procpipe. The colours are Okabe and Ito's, which
colour-blind people can distinguish.

Source: Okabe and Ito, "Color Universal Design" (2008), https://jfly.uni-koeln.de/color/
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from procpipe.planner import Timeline
from procpipe.timeline.split import last_end_s, replay, usual_seconds
from procpipe.timeline.steps import Recording, Step, Summed, TimedTask
from procpipe.timeline.text import KIND_NAMES
from procpipe.words import seconds_text

#: The colour of each kind, and of the number in its boxes; black in lighter ones.
_COLOURS = {
    "F": ("#0072b2", "white"),
    "R": ("#c4c4c4", "black"),
    "B": ("#e69f00", "black"),
    "I": ("#d55e00", "white"),
    "W": ("#009e73", "white"),
}
_SUM_COLOUR, _IDLE_COLOUR = "#56b4e9", "#f0f0f0"  # of sums over replicas; of no task

#: In inches: the width, of both columns of a paper; the height of a row; the width of a digit.
_WIDTH, _ROW, _DIGIT = 7.0, 0.2, 0.062

_FONT = 7.5  # points


@dataclass(frozen=True)
class Panel:
    """What is drawn as one block of rows, from time 0 on."""

    title: str
    names: Sequence[str]  # of the rows
    rows: Sequence[Sequence[TimedTask]]
    seconds: float  # the end, which is marked
    sums: Sequence[Sequence[Summed]] = ()  # over replicas, by row

    @property
    def heading(self) -> str:
        """The title, the length and the idle share of the mean row."""
        busy_s = sum(one.seconds for row in self.rows for one in row)
        idle = 1 - busy_s / (self.seconds * len(self.rows)) if self.seconds else 0.0
        return f"{self.title}: {seconds_text(self.seconds)}, {idle:.0%} idle"


def panels_of(recording: Recording, step: Step) -> list[Panel]:
    """Return the panels of a measured step: its plan, and what was measured.

    In the plan tasks take the median seconds of all steps with the same work, and messages no time.
    """
    usual_s = usual_seconds(recording.like(step))
    planned: list[list[TimedTask]] = []
    for replica in range(step.num_replicas):
        tasks = [[one.task for one in row] for row in step.replica(replica)]
        planned += replay(tasks, lambda task: usual_s[task.kind, task.j])
    names = _names(step.num_stages, step.num_replicas)
    measured = f"measured, step {step.number}"
    return [
        Panel("plan", names, planned, last_end_s(planned)),
        Panel(measured, names, step.rows, step.seconds, step.sums),
    ]


def simulated(timeline: Timeline, title: str) -> Panel:
    """Return the panel of a simulated plan."""
    plan = timeline.plan
    rows = [
        [TimedTask(t, *timeline.spans_s[t]) for t in plan.tasks_of(stage)]
        for stage in range(plan.num_stages)
    ]
    return Panel(title, _names(plan.num_stages, 1), rows, timeline.total_s)


def draw(panels: Sequence[Panel]) -> Figure:
    """Draw panels below each other, on one scale; ``savefig`` writes PNG, SVG or PDF."""
    heights = [len(panel.rows) + 1 for panel in panels]
    figure = Figure((_WIDTH, 0.65 + _ROW * sum(heights)), layout="constrained")
    longest_s = max(panel.seconds for panel in panels)
    units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
    unit = next((unit for unit, size in units.items() if longest_s >= size), "µs")
    longest = longest_s / units[unit]
    of_panels = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)
    for axes, panel in zip(of_panels[:, 0], panels, strict=True):
        _draw_frame(axes, panel, panel.seconds / units[unit])
        _draw_rows(axes, panel, units[unit], longest * _DIGIT / (_WIDTH - 1))
    axes.set_xlim(0, 1.003 * longest)
    axes.set_xlabel(f"time ({unit})", fontsize=_FONT, labelpad=2)
    figure.legend(handles=_legend(panels), loc="outside lower center", ncols=8, fontsize=_FONT,
                  frameon=False, borderpad=0, handlelength=1, columnspacing=1.2)  # fmt: skip
    return figure


def _draw_frame(axes: Any, panel: Panel, end: float) -> None:
    axes.set_title(panel.heading, loc="left", fontsize=_FONT + 0.5, pad=3)
    axes.set_ylim(len(panel.rows) - 0.5, -0.5)
    axes.set_yticks(range(len(panel.rows)), panel.names)
    axes.tick_params(length=0, labelsize=_FONT)
    axes.spines[:].set_visible(False)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.axvline(end, color="#555555", linewidth=0.8, linestyle=(0, (3, 2)))
    axes.barh(range(len(panel.rows)), end, height=0.84, color=_IDLE_COLOUR)


def _draw_rows(axes: Any, panel: Panel, unit_s: float, digit: float) -> None:
    """Draw boxes, with the micro-batch in those wide enough: so much time is as wide as a digit."""
    for k, row in enumerate(panel.rows):
        tasks = [one.task for one in row]
        spans = [(one.start_s / unit_s, one.seconds / unit_s) for one in row]
        # A white edge parts the boxes; of a narrow one, it must not hide more than a fifth.
        edges = [min(0.4, 0.8 * width / digit) for _, width in spans]
        first = min((task.j for task in tasks), default=0)  # of the stage's partitions
        colours = [(_COLOURS[kind][0], 1.0 if j == first else 0.65) for kind, _, j in tasks]
        axes.broken_barh(spans, (k - 0.42, 0.84), edgecolor="white", linewidth=edges,
                         facecolor=colours)  # fmt: skip
        for task, (start, width) in zip(tasks, spans, strict=True):
            number = str(task.i)
            if width > digit * len(number):
                colour = _COLOURS[task.kind][1] if task.j == first else "black"
                axes.text(start + width / 2, k, number, color=colour,
                          ha="center", va="center_baseline", fontsize=_FONT - 1)  # fmt: skip
    for k, sums in enumerate(panel.sums):
        spans = [(one.start_s / unit_s, (one.taken_s - one.start_s) / unit_s) for one in sums]
        axes.broken_barh(spans, (k + 0.2, 0.22), facecolor=_SUM_COLOUR, edgecolor="white",
                         linewidth=0.4)  # fmt: skip


def _names(num_stages: int, num_replicas: int) -> list[str]:
    """Name the ranks: "stage 0"; of several replicas "replica 1, stage 0"."""
    of = [f"replica {k}, " for k in range(num_replicas)] if num_replicas > 1 else [""]
    return [f"{replica}stage {stage}" for replica in of for stage in range(num_stages)]


def _legend(panels: Sequence[Panel]) -> list[Patch]:
    kinds = {one.task.kind for panel in panels for row in panel.rows for one in row}
    colours = {KIND_NAMES[kind]: colour for kind, (colour, _) in _COLOURS.items() if kind in kinds}
    if any(map(any, (panel.sums for panel in panels))):
        colours["all-reduce"] = _SUM_COLOUR
    colours["idle"] = _IDLE_COLOUR
    return [Patch(color=colour, label=name) for name, colour in colours.items()]
