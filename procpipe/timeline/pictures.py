"""Plans and timelines as pictures: text for a terminal or a docstring, SVG for a page.

    render_text(plan)                     render_timeline_text(timeline, width=36)

    k   stage 0   stage 1                 stage 0   F0─F1─·········B1────B0────
    0   F0                                stage 1   ···F0─F1─B1───B0────······
    1   F1        F0                                0 s                    9 s
    2             F1                                idle 33.3%
    3             B1
    4   B1        B0
    5   B0

With replicas, ``=`` is where a stage has no task but adds up gradients over them.

``render_svg`` draws either with stages as rows; each box has its task as a tooltip. All-reduces are
narrow boxes at the lower edge of a row, below the tasks that they run beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from procpipe.plan.simulate import Timeline
from procpipe.plan.task import Plan, Task
from procpipe.timeline.palette import ALL_REDUCE, LOOKS, tick_distance
from procpipe.words import bytes_text, counted

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
        for one in timeline.all_reduces:
            if one.stage == j:
                first, last = round(one.start_s * scale), round(one.end_s * scale)
                cells[first:last] = "=" * (last - first)
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
    if timeline.all_reduces:
        words = f"= {ALL_REDUCE.name}, {timeline.hidden:.0%} hidden"
        lines.append(" " * margin + f"{words}; {timeline.exposed:.1%} of the step is that alone")
    return "\n".join(lines) + "\n"


def _label(task: Task, plan: Plan) -> str:
    """Return a task's text, with its partition only if stages have several."""
    is_only = plan.num_partitions == plan.num_stages
    return f"{task.kind}{task.i}" if is_only else str(task)


# SVG ----------------------------------------------------------------------------------------

LEFT, TOP, ROW, GAP = 76, 52, 30, 4  # pixels: margins, height of a stage's row, space between rows
STRIP = 8  # pixels: height of an all-reduce
FONT = "font-family='system-ui, sans-serif' font-size='12'"


@dataclass(frozen=True)
class _Picture:
    """What to draw: boxes are tasks with start, end and words; ``scale`` is pixels per ``unit``.

    Strips are stages that add up gradients over replicas, with start, end and words.
    """

    plan: Plan
    boxes: Sequence[tuple[Task, float, float, str]]
    total: float
    idle: float
    unit: str
    scale: float
    strips: Sequence[tuple[int, float, float, str]] = ()

    @property
    def bottom(self) -> int:
        """Where the rows end and the axis begins."""
        return TOP + self.plan.num_stages * (ROW + GAP)


def render_svg(what: Plan | Timeline) -> str:
    """Draw a plan, each task one clock cycle long, or a timeline, as an SVG document."""
    picture = _of_plan(what) if isinstance(what, Plan) else _of_timeline(what)
    width, height = max(LEFT + picture.total * picture.scale + 24, 380), picture.bottom + 64
    m, n = picture.plan.num_micro_batches, picture.plan.num_stages
    title = f"{counted(m, 'micro-batch')} on {counted(n, 'stage')}, {picture.idle:.1%} idle"
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height}'"
            f" viewBox='0 0 {width:.0f} {height}' role='img' {FONT}>",
            f"<title>{title}</title>",
            f"<rect width='{width:.0f}' height='{height}' fill='#ffffff'/>",
            f"<text x='{LEFT}' y='30' font-size='16' font-weight='600'>{title}</text>",
            *_rows(picture),
            *_boxes(picture),
            *_strips(picture),
            *_axis(picture),
            *_legend(picture),
            "</svg>\n",
        ]
    )


def _of_plan(plan: Plan) -> _Picture:
    cycles = enumerate(plan.cycles)
    boxes = [(task, k, k + 1, f"cycle {k}") for k, cycle in cycles for task in cycle]
    total = len(plan.cycles)
    idle = 1 - len(boxes) / (total * plan.num_stages) if total else 0.0
    return _Picture(plan, boxes, total, idle, unit="cycle", scale=34)


def _of_timeline(timeline: Timeline) -> _Picture:
    plan = timeline.plan
    boxes = []
    for task in plan.tasks():
        start_s, end_s = timeline.start_s(task), timeline.end_s(task)
        boxes.append((task, start_s, end_s, f"{start_s:.4g} to {end_s:.4g} s"))
    shortest = min((end - start for _, start, end, _ in boxes if end > start), default=1.0)
    # Wide enough for the number in the shortest box, but not too wide to scroll.
    scale = min(28 / shortest, 4000 / timeline.total_s) if timeline.total_s else 1.0
    strips = [
        (stage, start_s, end_s, f"{bytes_text(size)}, {start_s:.4g} to {end_s:.4g} s")
        for stage, size, start_s, end_s in timeline.all_reduces
    ]
    return _Picture(plan, boxes, timeline.total_s, timeline.bubble, "s", scale, strips)


def _rows(picture: _Picture) -> Iterator[str]:
    length = picture.total * picture.scale
    for j in range(picture.plan.num_stages):
        y = TOP + j * (ROW + GAP)
        middle = y + ROW / 2 + 4
        yield f"<text x='{LEFT - 12}' y='{middle:g}' text-anchor='end'>stage {j}</text>"
        yield f"<rect x='{LEFT}' y='{y}' width='{length:.2f}' height='{ROW}' fill='#f1f1f1'/>"


def _boxes(picture: _Picture) -> Iterator[str]:
    for task, start, end, when in picture.boxes:
        look = LOOKS[task.kind]
        stage = picture.plan.placement[task.j]
        x, y = LEFT + start * picture.scale, TOP + stage * (ROW + GAP)
        width = (end - start) * picture.scale
        yield f"<g><title>{task}: {look.name}, {when}</title>"
        yield (
            f"<rect x='{x:.2f}' y='{y}' width='{width:.2f}' height='{ROW}' rx='2'"
            f" fill='{look.fill}' stroke='#ffffff'/>"
        )
        number = str(task.i)
        if width > 8 * len(number):
            yield (
                f"<text x='{x + width / 2:.2f}' y='{y + ROW / 2 + 4:g}' text-anchor='middle'"
                f" fill='{look.ink}'>{number}</text>"
            )
        yield "</g>"


def _strips(picture: _Picture) -> Iterator[str]:
    for stage, start, end, what in picture.strips:
        x, y = LEFT + start * picture.scale, TOP + stage * (ROW + GAP) + ROW - STRIP
        yield f"<g><title>{ALL_REDUCE.name} of {what}</title>"
        yield (
            f"<rect x='{x:.2f}' y='{y}' width='{(end - start) * picture.scale:.2f}'"
            f" height='{STRIP}' fill='{ALL_REDUCE.fill}' stroke='#ffffff'/></g>"
        )


def _axis(picture: _Picture) -> Iterator[str]:
    step = tick_distance(90 / picture.scale)
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
    drawn = {task.kind for task, *_ in picture.boxes}
    looks = [look for kind, look in LOOKS.items() if kind in drawn]
    for look in [*looks, ALL_REDUCE] if picture.strips else looks:
        yield f"<rect x='{x}' y='{y}' width='14' height='14' rx='2' fill='{look.fill}'/>"
        yield f"<text x='{x + 20}' y='{y + 11}'>{look.name}</text>"
        x += 104
    yield f"<rect x='{x}' y='{y}' width='14' height='14' fill='#f1f1f1' stroke='#d0d0d0'/>"
    yield f"<text x='{x + 20}' y='{y + 11}'>idle {picture.idle:.1%}</text>"
