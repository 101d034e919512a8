"""Plans and timelines as pictures: text for a terminal or a docstring, SVG for a page.

    render_text(plan)                     render_timeline_text(timeline, width=36)

    k   stage 0   stage 1                 stage 0   F0─F1─·········B1────B0────
    0   F0                                stage 1   ···F0─F1─B1───B0────······
    1   F1        F0                                0 s                    9 s
    2             F1                                idle 33.3%
    3             B1
    4   B1        B0
    5   B0

``render_svg`` draws either with stages as rows. Its colours are told apart by people who do not
see all of them (Okabe and Ito's palette), and each box tells its task when pointed at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from procpipe.plan.simulate import Timeline
from procpipe.plan.task import KINDS, Plan, Task
from procpipe.timeline.palette import LOOKS
from procpipe.words import counted

# Text ---------------------------------------------------------------------------------------


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
    """Draw a timeline: a row for each stage, time to the right, dots where a stage rests.

    Tasks that are too short for their numbers show their kind only, several in a row once.

    Args:
        timeline: what to draw.
        width: characters a line.
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
            first = round(timeline.start_s(task) * scale)
            last = round(timeline.end_s(task) * scale)
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
    lines.append(" " * margin + f"idle {timeline.bubble:.1%}")
    return "\n".join(lines) + "\n"


def _label(task: Task, plan: Plan) -> str:
    """Return a task's text, without its partition where that is the stage's only one."""
    is_only = plan.num_partitions == plan.num_stages
    return f"{task.kind}{task.i}" if is_only else str(task)


# SVG ----------------------------------------------------------------------------------------

LEFT, TOP, ROW, GAP = 76, 52, 30, 4  # pixels: margins, height of a stage's row, space between rows
FONT = "font-family='system-ui, sans-serif' font-size='12'"


@dataclass(frozen=True)
class _Box:
    """A task and when it runs, in the picture's unit of time and in words."""

    task: Task
    start: float
    end: float
    when: str


@dataclass(frozen=True)
class _Picture:
    """A plan or a timeline, as far as drawing goes.

    Attributes:
        plan: whose tasks they are.
        boxes: the tasks.
        total: when the last ends.
        idle: the share of time that stages rest.
        unit: of time, for the axis.
        scale: pixels for one unit of time.
    """

    plan: Plan
    boxes: Sequence[_Box]
    total: float
    idle: float
    unit: str
    scale: float

    @property
    def title(self) -> str:
        m, n = self.plan.num_micro_batches, self.plan.num_stages
        return f"{counted(m, 'micro-batch')} on {counted(n, 'stage')}, {self.idle:.1%} idle"

    @property
    def width(self) -> float:
        return max(LEFT + self.total * self.scale + 24, 380)

    @property
    def bottom(self) -> int:
        """Where the rows end and the axis begins."""
        return TOP + self.plan.num_stages * (ROW + GAP)


def render_svg(what: Plan | Timeline) -> str:
    """Draw a plan, each task one clock cycle long, or a timeline, as an SVG document."""
    picture = _of_plan(what) if isinstance(what, Plan) else _of_timeline(what)
    width, height = picture.width, picture.bottom + 64
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height}'"
            f" viewBox='0 0 {width:.0f} {height}' role='img' {FONT}>",
            f"<title>{picture.title}</title>",
            f"<rect width='{width:.0f}' height='{height}' fill='#ffffff'/>",
            f"<text x='{LEFT}' y='30' font-size='16' font-weight='600'>{picture.title}</text>",
            *_rows(picture),
            *_boxes(picture),
            *_axis(picture),
            *_legend(picture),
            "</svg>\n",
        ]
    )


def _of_plan(plan: Plan) -> _Picture:
    boxes = [
        _Box(task, k, k + 1, when=f"cycle {k}")
        for k, cycle in enumerate(plan.cycles)
        for task in cycle
    ]
    total = len(plan.cycles)
    idle = 1 - len(boxes) / (total * plan.num_stages) if total else 0.0
    return _Picture(plan, boxes, total, idle, unit="cycle", scale=34)


def _of_timeline(timeline: Timeline) -> _Picture:
    plan = timeline.plan
    boxes = []
    for task in plan.tasks():
        start_s, end_s = timeline.start_s(task), timeline.end_s(task)
        boxes.append(_Box(task, start_s, end_s, when=f"{start_s:.4g} to {end_s:.4g} s"))
    shortest = min((box.end - box.start for box in boxes if box.end > box.start), default=1.0)
    # Wide enough for the number in the shortest box, but no wider than a page scrolls well.
    scale = min(28 / shortest, 4000 / timeline.total_s) if timeline.total_s else 1.0
    return _Picture(plan, boxes, timeline.total_s, timeline.bubble, unit="s", scale=scale)


def _rows(picture: _Picture) -> Iterator[str]:
    length = picture.total * picture.scale
    for j in range(picture.plan.num_stages):
        y = TOP + j * (ROW + GAP)
        middle = y + ROW / 2 + 4
        yield f"<text x='{LEFT - 12}' y='{middle:g}' text-anchor='end'>stage {j}</text>"
        yield f"<rect x='{LEFT}' y='{y}' width='{length:.2f}' height='{ROW}' fill='#f1f1f1'/>"


def _boxes(picture: _Picture) -> Iterator[str]:
    for box in picture.boxes:
        look = LOOKS[box.task.kind]
        stage = picture.plan.placement[box.task.j]
        x, y = LEFT + box.start * picture.scale, TOP + stage * (ROW + GAP)
        width = (box.end - box.start) * picture.scale
        yield f"<g><title>{box.task}: {look.name}, {box.when}</title>"
        yield (
            f"<rect x='{x:.2f}' y='{y}' width='{width:.2f}' height='{ROW}' rx='2'"
            f" fill='{look.fill}' stroke='#ffffff'/>"
        )
        number = str(box.task.i)
        if width > 8 * len(number):
            yield (
                f"<text x='{x + width / 2:.2f}' y='{y + ROW / 2 + 4:g}' text-anchor='middle'"
                f" fill='{look.ink}'>{number}</text>"
            )
        yield "</g>"


def _axis(picture: _Picture) -> Iterator[str]:
    step = _round_step(90 / picture.scale)
    if picture.unit == "cycle":
        step = max(1.0, step)
    y = picture.bottom + 14
    ink = "fill='#555555'"
    yield f"<text x='{LEFT - 12}' y='{y}' text-anchor='end' {ink}>{picture.unit}</text>"
    for tick in range(int(picture.total / step + 1e-9) + 1):
        x = LEFT + tick * step * picture.scale
        yield f"<text x='{x:.2f}' y='{y}' text-anchor='middle' {ink}>{tick * step:.4g}</text>"


def _legend(picture: _Picture) -> Iterator[str]:
    x, y = LEFT, picture.bottom + 34
    for kind in KINDS:
        if any(box.task.kind == kind for box in picture.boxes):
            look = LOOKS[kind]
            yield f"<rect x='{x}' y='{y}' width='14' height='14' rx='2' fill='{look.fill}'/>"
            yield f"<text x='{x + 20}' y='{y + 11}'>{look.name}</text>"
            x += 104
    yield f"<rect x='{x}' y='{y}' width='14' height='14' fill='#f1f1f1' stroke='#d0d0d0'/>"
    yield f"<text x='{x + 20}' y='{y + 11}'>idle {picture.idle:.1%}</text>"


def _round_step(least: float) -> float:
    """Choose the distance of ticks: the first of 1, 2, 5, 10, 20, … that is not less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least)
