"""The picture on the timeline page: the plan above, what was measured below, on one scale of time.

    Plan        stage 0  [F0][F1]···[B1 ][B0 ]
    43 ms       stage 1  ···[F0][F1][B1 ][B0 ]···
    Measured    stage 0  [F0][F1] ···· [B1 ] [B0 ]
    54 ms       stage 1    ···[F0] [F1][B1 ]·[B0 ]····        ··· waits, thinner
                         0    10    20    30    40    50 ms

The names of the rows are a picture of their own, which stays when the other is scrolled. Colours
are classes, which the page's style gives, so that light and dark differ in one place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from procpipe.plan.idle import median_seconds, replay
from procpipe.plan.measured import Recording, Step
from procpipe.plan.palette import LOOKS
from procpipe.plan.task import Task
from procpipe.plan.words import seconds_text

__all__ = ["Drawing", "draw", "later_partitions", "step_bars"]

_LANE, _BOX, _WAIT, _HEAD, _AXIS = 38, 24, 6, 26, 30  # pixels: heights
_MARGIN, _NAMES = 6, 126  # widths
_LEAST_WIDTH, _MOST_WIDTH = 1000, 12000

#: A usual box is made so wide that what is in it can be read.
_BOX_WIDTH = 19

_CHARACTER = 7.2


@dataclass(frozen=True)
class Drawing:
    """The picture in two parts, as SVG.

    Attributes:
        names: the names of the rows.
        lanes: the rows.
        is_wide: whether the rows are wider than a usual page.
    """

    names: str
    lanes: str
    is_wide: bool


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
    return Drawing(canvas.names(plan.total_s), lanes, canvas.width > 1.2 * _LEAST_WIDTH)


class _Canvas:
    """Where things are in the picture of one step."""

    def __init__(self, step: Step, total_s: float, boxes: Sequence[_Box]) -> None:
        self._step = step
        self._total_s = total_s
        lengths = sorted(box.end_s - box.start_s for box in boxes)
        usual_s = lengths[len(lengths) // 3] if lengths else 0.0
        wanted = _BOX_WIDTH * total_s / usual_s if usual_s else 0.0
        self._inner = min(max(_LEAST_WIDTH, wanted), _MOST_WIDTH) - 2 * _MARGIN
        self._later = later_partitions(step)
        self._plan_top = _HEAD
        self._measured_top = 2 * _HEAD + step.num_stages * _LANE
        self._bottom = self._measured_top + step.num_stages * _LANE

    @property
    def height(self) -> int:
        return self._bottom + _AXIS

    @property
    def width(self) -> float:
        return self._inner + 2 * _MARGIN

    def x(self, seconds: float) -> float:
        return _MARGIN + (seconds / self._total_s * self._inner if self._total_s else 0.0)

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
            f"<svg class='lanes' width='{self.width:.0f}' height='{self.height}' "
            f"viewBox='0 0 {self.width:.0f} {self.height}' preserveAspectRatio='none' role='img'>",
            f"<title>{title}</title>",
            *self._axis(),
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
        length = self.x(self._total_s) - _MARGIN
        for top in (self._plan_top, self._measured_top):
            for stage in range(self._step.num_stages):
                y = top + stage * _LANE
                yield (
                    f"<rect class='lane' x='{_MARGIN}' y='{y}' width='{length:.1f}' "
                    f"height='{_BOX}'/>"
                )

    def _boxes(self, top: float, boxes: Sequence[_Box]) -> Iterator[str]:
        for box in boxes:
            kind, i, j = box.task
            look = LOOKS[kind]
            x, y = self.x(box.start_s), top + box.stage * _LANE
            width = max(self.x(box.end_s) - x, 0.5)
            told = (
                f"{box.task}: {look.name}, micro-batch {i}, partition {j}\n"
                f"{seconds_text(box.end_s - box.start_s)}, from {seconds_text(box.start_s)} "
                f"to {seconds_text(box.end_s)}"
            )
            later = " later" if j in self._later else ""
            yield f"<g class='task {kind}{later}'><title>{told}</title>"
            yield (f"<rect x='{x:.2f}' y='{y:g}' width='{width:.2f}' height='{_BOX}' rx='2'/>")
            label = next((text for text in (f"{kind}{i}", f"{i}")
                          if len(text) * _CHARACTER + 3 < width), "")  # fmt: skip
            if label:
                middle = x + width / 2
                yield f"<text x='{middle:.1f}' y='{y + _BOX / 2 + 4:g}'>{label}</text>"
            yield "</g>"

    def _waits(self) -> Iterator[str]:
        start_s = self._step.start_s
        for hop in self._step.hops:
            x = self.x(hop.asked_s - start_s)
            width = self.x(hop.taken_s - start_s) - x
            if width < 0.5:
                continue
            y = self._measured_top + hop.destination * _LANE + _BOX + 2
            told = (
                f"stage {hop.destination} waited {seconds_text(hop.waited_s)} for {hop.kind} "
                f"{hop.i} from stage {hop.source} ({hop.num_bytes:,} bytes)"
            )
            yield (
                f"<rect class='wait' x='{x:.2f}' y='{y}' width='{width:.2f}' height='{_WAIT}'>"
                f"<title>{escape(told)}</title></rect>"
            )

    def _hops(self) -> Iterator[str]:
        start_s = self._step.start_s
        for hop in self._step.hops:
            x1, x2 = self.x(hop.posted_s - start_s), self.x(hop.taken_s - start_s)
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
                f"<line x1='{x1:.2f}' y1='{y1:g}' x2='{x2:.2f}' y2='{y2:g}'>"
                f"<title>{escape(told)}</title></line>"
            )

    def _axis(self) -> Iterator[str]:
        per_second = self._inner / self._total_s if self._total_s else 1.0
        distance_s = _round_distance(100 / per_second)
        for tick in range(int(self._total_s / distance_s + 1e-9) + 1):
            x = self.x(tick * distance_s)
            yield (
                f"<line class='grid' x1='{x:.1f}' y1='{_HEAD - 4}' x2='{x:.1f}' "
                f"y2='{self._bottom}'/>"
            )
            anchor = "middle" if tick else "start"
            yield (
                f"<text class='faint' x='{x:.1f}' y='{self._bottom + 16}' text-anchor='{anchor}'>"
                f"{seconds_text(tick * distance_s)}</text>"
            )

    def _end(self, seconds: float, what: str) -> str:
        x = self.x(seconds)
        return (
            f"<line class='end' x1='{x:.1f}' y1='{_HEAD - 4}' x2='{x:.1f}' y2='{self._bottom}'>"
            f"<title>{what}: {seconds_text(seconds)}</title></line>"
        )


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
