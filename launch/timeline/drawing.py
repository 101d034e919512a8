"""The picture on the timeline page: the plan above, what was measured below, on one scale of time.

    Plan        stage 0  [F0][F1]···[B1 ][B0 ]
    43 ms       stage 1  ···[F0][F1][B1 ][B0 ]···
    Measured    stage 0  [F0][F1] ···· [B1 ] [B0 ]
    54 ms       stage 1    ···[F0] [F1][B1 ]·[B0 ]····        ··· waits, thinner
                         0    10    20    30    40    50 ms

The rows of each replica are a block of their own, if there are several. Under the waits are sums.

The names of the rows are a picture of their own, which stays in place when the other is scrolled.
Times are percentages of the width: the page's style sets the width, and no text is stretched. The
class "scrolled" marks what is shown only at full width, "fitted" what is shown only if the picture
is as wide as the page. Colours are classes, too, which the style defines for light and dark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import TypeVar

from procpipe.plan.task import Task
from procpipe.timeline.idle import replay, usual_seconds
from procpipe.timeline.palette import LOOKS, element, tick_distance
from procpipe.timeline.recording import Ran, Recording, Step
from procpipe.words import seconds_text

T = TypeVar("T")

_LANE, _BOX, _WAIT, _HEAD, _AXIS = 38, 24, 6, 26, 30  # pixels: heights
_SUM, _REPLICA = 7, 20  # likewise, in addition where there are replicas
_NAMES = 126  # width
_PAGE_WIDTH, _MOST_WIDTH = 1000, 12000

#: The width of a usual box, in which a number can be read, that of a character, and the least
#: distance of ticks.
_BOX_WIDTH, _CHARACTER, _TICK_WIDTH = 19, 7.2, 100


@dataclass(frozen=True)
class Drawing:
    """The picture in two parts, as SVG."""

    names: str  # the names of the rows
    lanes: str  # the rows
    fits: bool  # whether usual boxes can be read where the rows are as wide as a page


def draw(recording: Recording, step: Step) -> Drawing:
    """Draw a step, and its plan with the median seconds of all kept steps with the same tasks."""
    seconds = usual_seconds(recording.like(step))
    planned: list[Ran] = []
    planned_s = 0.0
    for replica in range(step.num_replicas):
        rows = step.replica(replica)
        plan = replay(rows, lambda task: seconds[task.kind, task.j])
        planned_s = max(planned_s, plan.total_s)
        for rank, row in enumerate(rows, start=replica * step.num_stages):
            planned += [Ran(rank, task, *plan.spans_s[task]) for task in row]
    measured = [
        Ran(ran.rank, ran.task, ran.start_s - step.start_s, ran.end_s - step.start_s)
        for ran in step.tasks
    ]
    canvas = _Canvas(step, max(planned_s, step.seconds), measured)
    lanes = canvas.svg(planned, measured, planned_s)
    return Drawing(canvas.names(planned_s), lanes, canvas.width == _PAGE_WIDTH)


class _Canvas:
    def __init__(self, step: Step, total_s: float, boxes: Sequence[Ran]) -> None:
        self._step = step
        self._total_s = total_s
        usual_s = median([box.end_s - box.start_s for box in boxes] or [0.0])
        wanted = _BOX_WIDTH * total_s / usual_s if usual_s else 0.0
        self.width = min(max(_PAGE_WIDTH, round(wanted)), _MOST_WIDTH)
        self._later = later_partitions(step)
        self._lane = _LANE + (_SUM if step.num_replicas > 1 else 0)
        self._plan_top = _HEAD
        self._measured_top = 2 * _HEAD + self._offset(step.num_ranks)
        self._bottom = self._measured_top + self._offset(step.num_ranks)
        self._height = self._bottom + _AXIS

    def _offset(self, rank: int) -> int:
        """Return where a rank's row begins, below the top of the first block; or where all end."""
        num_blocks = min(rank // self._step.num_stages + 1, self._step.num_replicas)
        return rank * self._lane + (num_blocks * _REPLICA if self._step.num_replicas > 1 else 0)

    def share(self, seconds: float) -> float:
        return seconds / self._total_s if self._total_s else 0.0

    def names(self, planned_s: float) -> str:
        lines = []
        for top, head, length_s in (
            (self._plan_top, "Plan", planned_s),
            (self._measured_top, "Measured", self._step.seconds),
        ):
            right = {"x": _NAMES, "text_anchor": "end"}
            lines.append(element("text", head, class_="head", x=0, y=top - 8))
            lines.append(
                element("text", seconds_text(length_s), class_="faint", y=top - 8, **right)
            )
            for rank in range(self._step.num_ranks):
                replica, stage = divmod(rank, self._step.num_stages)
                y = top + self._offset(rank)
                if stage == 0 and self._step.num_replicas > 1:
                    lines.append(element("text", f"replica {replica}", x=0, y=y - 5))
                lines.append(element("text", f"stage {stage}", y=y + _BOX / 2 + 5, **right))
        size = {"width": _NAMES + 8, "height": self._height}
        return element("svg", "".join(lines), class_="names", **size, aria_hidden="true")

    def svg(self, planned: Sequence[Ran], measured: Sequence[Ran], planned_s: float) -> str:
        parts = [
            element("title", f"Step {self._step.number}: the plan above, what was measured below"),
            *self._axes(),
            *self._lanes(),
            *self._waits(),
            *self._sums(),
            *self._boxes(self._plan_top, planned),
            *self._boxes(self._measured_top, measured),
            element("g", "\n".join(self._hops()), class_="hops"),
            self._end(planned_s, "end of the plan"),
            self._end(self._step.seconds, "end of the step"),
        ]
        size = {"width": self.width, "height": self._height}
        return element("svg", "\n".join(parts), class_="lanes", **size, role="img")

    def _lanes(self) -> Iterator[str]:
        for top in (self._plan_top, self._measured_top):
            for rank in range(self._step.num_ranks):
                y = top + self._offset(rank)
                yield element("rect", class_="lane", x=0, y=y, width="100%", height=_BOX)

    def _boxes(self, top: float, boxes: Sequence[Ran]) -> Iterator[str]:
        for box in boxes:
            kind, i, j = box.task
            x, y = self.share(box.start_s), top + self._offset(box.rank)
            width = max(self.share(box.end_s) - x, 0.5 / self.width)
            parts = [
                element(
                    "title",
                    f"{box.task}: {LOOKS[kind].name}, micro-batch {i}, partition {j}\n"
                    f"{seconds_text(box.seconds)}, from {seconds_text(box.start_s)} to "
                    f"{seconds_text(box.end_s)}",
                ),
                element("rect", x=f"{x:.4%}", y=y, width=f"{width:.4%}", height=_BOX, rx=2),
            ]
            texts = [_label(box.task, width * wide) for wide in (self.width, _PAGE_WIDTH)]
            for text, shown in _in_either(*texts):
                at = {"x": f"{x + width / 2:.4%}", "y": y + _BOX / 2 + 4}
                parts.append(element("text", text, class_=f"number{shown}", **at))
            later = " later" if j in self._later else ""
            yield element("g", "".join(parts), class_=f"task {kind}{later}")

    def _waits(self) -> Iterator[str]:
        name_of = self._step.name_of
        for hop in self._step.hops:
            title = (
                f"{name_of(hop.destination)} waited {seconds_text(hop.waited_s)} for "
                f"{hop.payload} {hop.i} from {name_of(hop.source)} ({hop.num_bytes:,} bytes)"
            )
            yield from self._strip("wait", hop.destination, hop.asked_s, hop.taken_s, title)
        for one in self._step.sums:
            title = (
                f"{name_of(one.rank)} waited {seconds_text(one.waited_s)} for the all-reduce of "
                f"{one.what} ({one.num_bytes:,} bytes)"
            )
            yield from self._strip("wait", one.rank, one.asked_s, one.taken_s, title)

    def _sums(self) -> Iterator[str]:
        for one in self._step.sums:
            title = (
                f"all-reduce of {one.what} on {self._step.name_of(one.rank)}: "
                f"{one.num_bytes:,} bytes, {seconds_text(one.end_s - one.start_s)} from begun to "
                f"over, of which the stage waited {seconds_text(one.waited_s)}"
            )
            yield from self._strip("all-reduce", one.rank, one.start_s, one.end_s, title)

    def _strip(
        self, name: str, rank: int, start_s: float, end_s: float, title: str
    ) -> Iterator[str]:
        """Draw a bar under a rank's row; nothing if it could not be seen."""
        x = self.share(start_s - self._step.start_s)
        width = self.share(end_s - self._step.start_s) - x
        if width * self.width < 0.5:
            return
        y = self._measured_top + self._offset(rank) + _BOX + 2
        y += _WAIT + 1 if name == "all-reduce" else 0
        place = {"x": f"{x:.4%}", "y": y, "width": f"{width:.4%}", "height": _WAIT}
        yield element("rect", _title(title), class_=name, **place)

    def _hops(self) -> Iterator[str]:
        middle = self._measured_top + _BOX / 2
        for hop in self._step.hops:
            title = (
                f"{hop.payload} {hop.i} from {self._step.name_of(hop.source)} to "
                f"{self._step.name_of(hop.destination)}: "
                f"{hop.num_bytes:,} bytes, {seconds_text(hop.taken_s - hop.posted_s)} from posted "
                "to taken"
            )
            yield element(
                "line",
                _title(title),
                x1=f"{self.share(hop.posted_s - self._step.start_s):.4%}",
                y1=middle + self._offset(hop.source),
                x2=f"{self.share(hop.taken_s - self._step.start_s):.4%}",
                y2=middle + self._offset(hop.destination),
            )

    def _axes(self) -> Iterator[str]:
        if self._total_s:
            for width, shown in _in_either(self.width, _PAGE_WIDTH):
                yield element("g", "\n".join(self._axis(width)), class_=f"axis{shown}")

    def _axis(self, width: int) -> Iterator[str]:
        distance_s = tick_distance(_TICK_WIDTH * self._total_s / width)
        for tick in range(int(self._total_s / distance_s + 1e-9) + 1):
            share = self.share(tick * distance_s)
            is_cut = (1 - share) * width < _TICK_WIDTH / 3  # at the right edge
            anchor = "start" if not tick else "end" if is_cut else "middle"
            yield self._upright("grid", share)
            at = {"x": f"{share:.4%}", "y": self._bottom + 16, "text_anchor": anchor}
            yield element("text", seconds_text(tick * distance_s), class_="faint", **at)

    def _end(self, seconds: float, what: str) -> str:
        title = _title(f"{what}: {seconds_text(seconds)}")
        return self._upright("end", self.share(seconds), title)

    def _upright(self, name: str, share: float, content: str = "") -> str:
        x = f"{share:.4%}"
        return element("line", content, class_=name, x1=x, y1=_HEAD - 4, x2=x, y2=self._bottom)


def _title(text: str) -> str:
    return element("title", escape(text))


def _label(task: Task, width: float) -> str:
    """Return as much of a task's name as fits."""
    names = f"{task.kind}{task.i}", f"{task.i}"
    return next((name for name in names if len(name) * _CHARACTER + 3 < width), "")


def _in_either(scrolled: T, fitted: T) -> Iterator[tuple[T, str]]:
    """Yield what is drawn for the two widths, with its class; once if it is the same."""
    both = [(scrolled, " scrolled"), (fitted, " fitted")]
    yield from (one for one in ([(scrolled, "")] if scrolled == fitted else both) if one[0])


def later_partitions(step: Step) -> set[int]:
    """Return the partitions that are not their stage's first."""
    first: dict[int, int] = {}
    for ran in step.tasks:
        first[ran.rank] = min(ran.task.j, first.get(ran.rank, ran.task.j))
    return {ran.task.j for ran in step.tasks} - set(first.values())


def step_bars(recording: Recording, shown: Step) -> str:
    """Draw the time of every kept step as a bar; the longest ones are cut."""
    height, width, gap = 36, 7, 2
    lengths = sorted(step.seconds for step in recording.steps)
    top_s = min(lengths[-1], 3 * lengths[len(lengths) // 2]) or 1.0
    bars, x, before = [], 0, None
    for step in recording.steps:
        if before is not None and step.number > before + 1:
            x += 3 * width  # steps that were not kept
        before = step.number
        tall = max(1.0, height * min(1.0, step.seconds / top_s))
        name = "bar shown" if step is shown else "bar"
        title = f"step {step.number} ({step.call}): {seconds_text(step.seconds)}"
        place = {"x": x, "y": f"{height - tall:.1f}", "width": width, "height": f"{tall:.1f}"}
        bars.append(element("rect", _title(title), class_=name, **place))
        x += width + gap
    bars.insert(0, _title("The length of each step"))
    return element("svg", "".join(bars), class_="bars", width=x, height=height, role="img")
