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
from typing import NamedTuple

from procpipe.plan.task import Plan, Task
from procpipe.planner.simulation import Timeline
from procpipe.timeline.palette import ALL_REDUCE, LOOKS, Look, element, tick_distance
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


class _Box(NamedTuple):
    """A task, or an all-reduce: a narrow box at the lower edge of the row."""

    stage: int
    start: float
    end: float
    look: Look
    title: str  # the tooltip
    number: str = ""  # shown if it fits
    height: int = ROW


def render_svg(what: Plan | Timeline) -> str:
    """Draw a plan, each task one clock cycle long, or a timeline, as an SVG document."""
    if isinstance(what, Plan):
        plan, unit, scale, least_step, total = what, "cycle", 34.0, 1.0, float(len(what.cycles))
        cycles = enumerate(plan.cycles)
        boxes = [_box(plan, t, k, k + 1, f"cycle {k}") for k, cycle in cycles for t in cycle]
        idle = 1 - len(boxes) / (total * plan.num_stages) if total else 0.0
    else:
        plan, unit, least_step, total, idle = what.plan, "s", 0.0, what.total_s, what.bubble
        boxes = list(_of_timeline(what))
        shortest = min((b.end - b.start for b in boxes if b.number and b.end > b.start), default=1)
        # Wide enough for the number in the shortest box, but not too wide to scroll.
        scale = min(28 / shortest, 4000 / total) if total else 1.0
    bottom = TOP + plan.num_stages * (ROW + GAP)
    legend, end = _legend([box.look for box in boxes], f"idle {idle:.1%}", bottom + 34)
    width, height = f"{max(LEFT + total * scale + 24, end):.0f}", bottom + 64
    m, n = plan.num_micro_batches, plan.num_stages
    title = f"{counted(m, 'micro-batch')} on {counted(n, 'stage')}, {idle:.1%} idle"
    parts = [
        element("title", title),
        element("rect", width=width, height=height, fill="#ffffff"),
        element("text", title, x=LEFT, y=30, font_size=16, font_weight=600),
        *_rows(n, total * scale),
        *(_drawn(box, scale) for box in boxes),
        *_axis(unit, total, scale, max(least_step, tick_distance(90 / scale)), bottom + 14),
        *legend,
    ]
    return element(
        "svg", "\n".join(["", *parts, ""]), xmlns="http://www.w3.org/2000/svg", width=width,
        height=height, viewBox=f"0 0 {width} {height}", role="img",
        font_family="system-ui, sans-serif", font_size=12,
    ) + "\n"  # fmt: skip


def _box(plan: Plan, task: Task, start: float, end: float, when: str) -> _Box:
    look = LOOKS[task.kind]
    title = f"{task}: {look.name}, {when}"
    return _Box(plan.placement[task.j], start, end, look, title, str(task.i))


def _of_timeline(timeline: Timeline) -> Iterator[_Box]:
    for task in timeline.plan.tasks():
        start_s, end_s = timeline.start_s(task), timeline.end_s(task)
        yield _box(timeline.plan, task, start_s, end_s, f"{start_s:.4g} to {end_s:.4g} s")
    for stage, size, start_s, end_s in timeline.all_reduces:
        what = f"{bytes_text(size)}, {start_s:.4g} to {end_s:.4g} s"
        title = f"{ALL_REDUCE.name} of {what}"
        yield _Box(stage, start_s, end_s, ALL_REDUCE, title, height=STRIP)


def _rows(num_stages: int, length: float) -> Iterator[str]:
    for j in range(num_stages):
        y = TOP + j * (ROW + GAP)
        middle = y + ROW / 2 + 4
        yield element("text", f"stage {j}", x=LEFT - 12, y=middle, text_anchor="end")
        yield element("rect", x=LEFT, y=y, width=f"{length:.2f}", height=ROW, fill="#f1f1f1")


def _drawn(box: _Box, scale: float) -> str:
    x, width = LEFT + box.start * scale, (box.end - box.start) * scale
    y = TOP + box.stage * (ROW + GAP) + ROW - box.height
    size = {"width": f"{width:.2f}", "height": box.height}
    fill = {"fill": box.look.fill, "stroke": "#ffffff"}
    fill |= {"rx": "2"} if box.number else {}
    parts = [element("title", box.title), element("rect", "", x=f"{x:.2f}", y=y, **size, **fill)]
    if box.number and width > 8 * len(box.number):
        at = {"x": f"{x + width / 2:.2f}", "y": y + ROW / 2 + 4, "text_anchor": "middle"}
        parts.append(element("text", box.number, **at, fill=box.look.ink))
    return element("g", "".join(parts))


def _axis(unit: str, total: float, scale: float, step: float, y: int) -> Iterator[str]:
    ink = {"y": y, "fill": "#555555"}
    yield element("text", unit, x=LEFT - 12, text_anchor="end", **ink)
    for tick in range(int(total / step + 1e-9) + 1):
        at = {"x": f"{LEFT + tick * step * scale:.2f}", "text_anchor": "middle"}
        yield element("text", f"{tick * step:.4g}", **at, **ink)


def _legend(drawn: Sequence[Look], idle: str, y: int) -> tuple[list[str], int]:
    """Return the elements of the legend, and where it ends on the right."""
    entries = [
        (look.name, {"fill": look.fill, "rx": 2})
        for look in (*LOOKS.values(), ALL_REDUCE)
        if look in drawn
    ]
    entries.append((idle, {"fill": "#f1f1f1", "stroke": "#d0d0d0"}))
    x, parts = LEFT, []
    for name, how in entries:
        parts.append(element("rect", "", x=x, y=y, width=14, height=14, **how))
        parts.append(element("text", name, x=x + 20, y=y + 11))
        x += max(104, 34 + 7 * len(name))
    return parts, x
