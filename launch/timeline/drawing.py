"""The picture on the timeline page: the plan above, what was measured below, on one scale of time.

    Plan        stage 0  [F0][F1]···[B1 ][B0 ]
    43 ms       stage 1  ···[F0][F1][B1 ][B0 ]···
    Measured    stage 0  [F0][F1] ···· [B1 ] [B0 ]
    54 ms       stage 1    ···[F0] [F1][B1 ]·[B0 ]····        ··· waits, thinner
                         0    10    20    30    40    50 ms

The names of the rows are a picture of their own, which stays when the other is scrolled. Times are
percentages of the width, so that the page's style can make the picture as wide as it likes and no
text is stretched. What shows at full width only, where one scrolls, has the class "scrolled", and
what shows only where the picture is made to fit the page has "fitted"; all else shows in both.
Colours are classes, too, so that light and dark differ in one place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import TypeVar

from procpipe.plan.task import Task
from procpipe.timeline.idle import median_seconds, replay
from procpipe.timeline.palette import LOOKS
from procpipe.timeline.recording import Recording, Step
from procpipe.words import seconds_text

T = TypeVar("T")

_LANE, _BOX, _WAIT, _HEAD, _AXIS = 38, 24, 6, 26, 30  # pixels: heights
_NAMES = 126  # width
_PAGE_WIDTH, _MOST_WIDTH = 1000, 12000

#: A usual box is made so wide that what is in it can be read.
_BOX_WIDTH = 19

_CHARACTER = 7.2

#: Ticks of the axis are at least so far apart.
_TICK_WIDTH = 100


@dataclass(frozen=True)
class Drawing:
    """The picture in two parts, as SVG.

    Attributes:
        names: the names of the rows.
        lanes: the rows.
        fits: whether usual boxes can be told apart where the rows are as wide as a page.
    """

    names: str
    lanes: str
    fits: bool


@dataclass(frozen=True)
class _Box:
    stage: int
    task: Task
    start_s: float
    end_s: float


def draw(recording: Recording, step: Step) -> Drawing:
    """Draw a step, and its plan with the median seconds of all kept steps that did the same."""
    seconds = median_seconds(recording.like(step), lambda task: (task.kind, task.j))
    rows = [[ran.task for ran in step.row(stage)] for stage in range(step.num_stages)]
    plan = replay(rows, lambda task: seconds[task.kind, task.j])
    planned = [
        _Box(stage, task, *plan.spans_s[task]) for stage, row in enumerate(rows) for task in row
    ]
    measured = [
        _Box(ran.stage, ran.task, ran.start_s - step.start_s, ran.end_s - step.start_s)
        for ran in step.tasks
    ]
    canvas = _Canvas(step, max(plan.total_s, step.seconds), measured)
    lanes = canvas.svg(planned, measured, plan.total_s)
    return Drawing(canvas.names(plan.total_s), lanes, canvas.width == _PAGE_WIDTH)


class _Canvas:
    """Where things are in the picture of one step."""

    def __init__(self, step: Step, total_s: float, boxes: Sequence[_Box]) -> None:
        self._step = step
        self._total_s = total_s
        usual_s = median([box.end_s - box.start_s for box in boxes] or [0.0])
        wanted = _BOX_WIDTH * total_s / usual_s if usual_s else 0.0
        self.width = min(max(_PAGE_WIDTH, round(wanted)), _MOST_WIDTH)
        self._later = later_partitions(step)
        self._plan_top = _HEAD
        self._measured_top = 2 * _HEAD + step.num_stages * _LANE
        self._bottom = self._measured_top + step.num_stages * _LANE

    @property
    def height(self) -> int:
        return self._bottom + _AXIS

    def share(self, seconds: float) -> float:
        return seconds / self._total_s if self._total_s else 0.0

    def names(self, planned_s: float) -> str:
        """Draw the names of the rows."""
        lines = []
        for top, head, length_s in (
            (self._plan_top, "Plan", planned_s),
            (self._measured_top, "Measured", self._step.seconds),
        ):
            lines.append(f"<text class='head' x='0' y='{top - 8}'>{head}</text>")
            lines.append(
                f"<text class='faint' x='{_NAMES}' y='{top - 8}' text-anchor='end'>"
                f"{seconds_text(length_s)}</text>"
            )
            for stage in range(self._step.num_stages):
                y = top + stage * _LANE + _BOX / 2 + 5
                lines.append(f"<text x='{_NAMES}' y='{y:g}' text-anchor='end'>stage {stage}</text>")
        return (
            f"<svg class='names' width='{_NAMES + 8}' height='{self.height}' aria-hidden='true'>"
            f"{''.join(lines)}</svg>"
        )

    def svg(self, planned: Sequence[_Box], measured: Sequence[_Box], planned_s: float) -> str:
        """Draw the rows."""
        title = f"Step {self._step.number}: the plan above, what was measured below"
        parts = [
            f"<svg class='lanes' width='{self.width}' height='{self.height}' role='img'>",
            f"<title>{title}</title>",
            *self._axes(),
            *self._lanes(),
            *self._waits(),
            *self._boxes(self._plan_top, planned),
            *self._boxes(self._measured_top, measured),
            "<g class='hops'>",
            *self._hops(),
            "</g>",
            self._end(planned_s, "end of the plan"),
            self._end(self._step.seconds, "end of the step"),
            "</svg>",
        ]
        return "\n".join(parts)

    def _lanes(self) -> Iterator[str]:
        for top in (self._plan_top, self._measured_top):
            for stage in range(self._step.num_stages):
                y = top + stage * _LANE
                yield f"<rect class='lane' x='0' y='{y}' width='100%' height='{_BOX}'/>"

    def _boxes(self, top: float, boxes: Sequence[_Box]) -> Iterator[str]:
        for box in boxes:
            kind, i, j = box.task
            look = LOOKS[kind]
            x, y = self.share(box.start_s), top + box.stage * _LANE
            width = max(self.share(box.end_s) - x, 0.5 / self.width)
            told = (
                f"{box.task}: {look.name}, micro-batch {i}, partition {j}\n"
                f"{seconds_text(box.end_s - box.start_s)}, from {seconds_text(box.start_s)} "
                f"to {seconds_text(box.end_s)}"
            )
            later = " later" if j in self._later else ""
            yield f"<g class='task {kind}{later}'><title>{told}</title>"
            yield f"<rect x='{x:.4%}' y='{y:g}' width='{width:.4%}' height='{_BOX}' rx='2'/>"
            texts = [_label(box.task, width * wide) for wide in (self.width, _PAGE_WIDTH)]
            for text, shown in _in_either(*texts):
                at = f"x='{x + width / 2:.4%}' y='{y + _BOX / 2 + 4:g}'"
                yield f"<text class='number{shown}' {at}>{text}</text>"
            yield "</g>"

    def _waits(self) -> Iterator[str]:
        start_s = self._step.start_s
        for hop in self._step.hops:
            x = self.share(hop.asked_s - start_s)
            width = self.share(hop.taken_s - start_s) - x
            if width * self.width < 0.5:
                continue
            y = self._measured_top + hop.destination * _LANE + _BOX + 2
            told = (
                f"stage {hop.destination} waited {seconds_text(hop.waited_s)} for {hop.kind} "
                f"{hop.i} from stage {hop.source} ({hop.num_bytes:,} bytes)"
            )
            yield (
                f"<rect class='wait' x='{x:.4%}' y='{y}' width='{width:.4%}' height='{_WAIT}'>"
                f"<title>{escape(told)}</title></rect>"
            )

    def _hops(self) -> Iterator[str]:
        start_s = self._step.start_s
        for hop in self._step.hops:
            x1, x2 = self.share(hop.posted_s - start_s), self.share(hop.taken_s - start_s)
            y1, y2 = (
                self._measured_top + stage * _LANE + _BOX / 2
                for stage in (hop.source, hop.destination)
            )
            told = (
                f"{hop.kind} {hop.i} from stage {hop.source} to stage {hop.destination}: "
                f"{hop.num_bytes:,} bytes, {seconds_text(hop.taken_s - hop.posted_s)} from posted "
                "to taken"
            )
            yield (
                f"<line x1='{x1:.4%}' y1='{y1:g}' x2='{x2:.4%}' y2='{y2:g}'>"
                f"<title>{escape(told)}</title></line>"
            )

    def _axes(self) -> Iterator[str]:
        """Draw the axis: one for each width, unless they are the same."""
        if not self._total_s:
            return
        for width, shown in _in_either(self.width, _PAGE_WIDTH):
            yield f"<g class='axis{shown}'>"
            yield from self._axis(width)
            yield "</g>"

    def _axis(self, width: int) -> Iterator[str]:
        distance_s = _round_distance(_TICK_WIDTH * self._total_s / width)
        for tick in range(int(self._total_s / distance_s + 1e-9) + 1):
            share = self.share(tick * distance_s)
            yield (
                f"<line class='grid' x1='{share:.4%}' y1='{_HEAD - 4}' x2='{share:.4%}' "
                f"y2='{self._bottom}'/>"
            )
            is_cut = (1 - share) * width < _TICK_WIDTH / 3  # beside its line, at the right edge
            anchor = "start" if not tick else "end" if is_cut else "middle"
            yield (
                f"<text class='faint' x='{share:.4%}' y='{self._bottom + 16}' "
                f"text-anchor='{anchor}'>{seconds_text(tick * distance_s)}</text>"
            )

    def _end(self, seconds: float, what: str) -> str:
        x = f"{self.share(seconds):.4%}"
        return (
            f"<line class='end' x1='{x}' y1='{_HEAD - 4}' x2='{x}' y2='{self._bottom}'>"
            f"<title>{what}: {seconds_text(seconds)}</title></line>"
        )


def _label(task: Task, width: float) -> str:
    """Return as much of a task's name as there is room for."""
    names = f"{task.kind}{task.i}", f"{task.i}"
    return next((name for name in names if len(name) * _CHARACTER + 3 < width), "")


def _in_either(scrolled: T, fitted: T) -> Iterator[tuple[T, str]]:
    """Yield what is drawn for the two widths, once if it is the same, and the class it takes."""
    if scrolled == fitted:
        both = [(scrolled, "")]
    else:
        both = [(scrolled, " scrolled"), (fitted, " fitted")]
    yield from (one for one in both if one[0])


def later_partitions(step: Step) -> set[int]:
    """Return the partitions that are not their stage's first."""
    first: dict[int, int] = {}
    for ran in step.tasks:
        first[ran.stage] = min(ran.task.j, first.get(ran.stage, ran.task.j))
    return {ran.task.j for ran in step.tasks} - set(first.values())


def step_bars(recording: Recording, shown: Step) -> str:
    """Draw the length of every kept step as a bar; the longest ones are cut off."""
    height, width, gap = 36, 7, 2
    lengths = sorted(step.seconds for step in recording.steps)
    top_s = min(lengths[-1], 3 * lengths[len(lengths) // 2]) or 1.0
    bars, x, before = [], 0, None
    for step in recording.steps:
        if before is not None and step.number > before + 1:
            x += 3 * width  # some were left out here
        before = step.number
        tall = max(1.0, height * min(1.0, step.seconds / top_s))
        name = "bar shown" if step is shown else "bar"
        bars.append(
            f"<rect class='{name}' x='{x}' y='{height - tall:.1f}' width='{width}' "
            f"height='{tall:.1f}'><title>step {step.number} ({escape(step.call)}): "
            f"{seconds_text(step.seconds)}</title></rect>"
        )
        x += width + gap
    return (
        f"<svg class='bars' width='{x}' height='{height}' role='img'>"
        f"<title>The length of each step</title>{''.join(bars)}</svg>"
    )


def _round_distance(least: float) -> float:
    """Choose the distance of ticks: the first of 1, 2, 5, 10, … that is not less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least)
