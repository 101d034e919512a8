"""Advice from measured steps: replays them with changes and reports what becomes faster.

    stage 0   [F0][F1]·········[B1][B0]        a step, with the median seconds of tasks
                  ↓ the same with another balance, schedule or number of micro-batches
    stage 0   [F0 ][F1 ]···[B1 ][B0 ]          so much shorter

Changes are replayed for the *usual* step: its tasks and its length are medians over all recorded
steps with the same work. Only communication, all-reduce and slow outliers are those of the step
that is shown. Of several replicas, the one that takes longest is replayed.
Advice without enough effect is left out. What a replay leaves out (transfers, the host's work
between tasks) is assumed not to change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import fmean, median

from procpipe.errors import BalanceError
from procpipe.plan.schedules.gpipe import recomputed
from procpipe.plan.schedules.named import SCHEDULES
from procpipe.plan.task import Task
from procpipe.run.statistics import Split
from procpipe.timeline.idle import replay, split, usual_seconds
from procpipe.timeline.recording import Ran, Recording, Step
from procpipe.words import bytes_text, seconds_text

#: Divides costs, one a layer, into contiguous parts; returns the number of layers in each:
#: ``procpipe.balance.blocks``.
Divide = Callable[[Sequence[float], int], list[int]]

#: A change must make the step shorter by this share to be reported.
_WORTH = 0.02

#: A stage this much above the mean is slow; a task of so many medians is an outlier.
_UNEQUAL, _ODD = 0.1, 2.0

#: Smaller idle shares are not reported.
_MUCH_BUBBLE, _MUCH_COMMUNICATION, _MUCH_ALL_REDUCE, _MUCH_ODD = 0.05, 0.1, 0.05, 0.05

Rows = list[list[Task]]


def advise(recording: Recording, step: Step, divide: Divide) -> list[str]:
    """Describe what would make a step of a recording shorter or need less memory."""
    of = _Advisor(recording, step, divide)
    found = (
        *(of.balance(), of.chunks(), of.schedule()),
        *(of.communication(), of.all_reduce(), of.outliers()),
    )
    return [advice for advice in found if advice]


def basis(recording: Recording, step: Step) -> str:
    """Describe what advice on a step is based on."""
    num_like = len(recording.like(step))
    return "this step alone" if num_like == 1 else f"the medians of {num_like} steps like this one"


@dataclass(frozen=True)
class _TaskSeconds:
    """Seconds of tasks by kind and partition."""

    seconds: dict[tuple[str, int], float]

    def step_s(self, rows: Rows) -> float:
        return replay(rows, lambda task: self.seconds[task.kind, task.j]).total_s

    def scaled(self, factors: Sequence[float]) -> _TaskSeconds:
        return _TaskSeconds({(kind, j): s * factors[j] for (kind, j), s in self.seconds.items()})

    def splits(self, rows: Rows, like: Step, step_s: float) -> list[Split]:
        """Divide the time of a step of ``step_s`` seconds with these tasks."""
        n = len(rows)
        spans_s = replay(rows, lambda task: self.seconds[task.kind, task.j]).spans_s
        tasks = tuple(Ran(at, task, *spans_s[task]) for at, row in enumerate(rows) for task in row)
        alone = replace(like, begins_s=(0.0,) * n, ends_s=(step_s,) * n, shares=like.shares[:1])
        return split(replace(alone, tasks=tasks, hops=(), sums=()))


class _Advisor:
    """Finds advice on one step; an empty text where there is none."""

    def __init__(self, recording: Recording, step: Step, divide: Divide) -> None:
        self._recording = recording
        self._step = step
        self._divide = divide
        like = recording.like(step)
        self._seconds = _TaskSeconds(usual_seconds(like))
        replicas = [step.replica(replica) for replica in range(step.num_replicas)]
        replayed_s = list(map(self._seconds.step_s, replicas))
        self._replayed_s = max(replayed_s)
        slowest = replayed_s.index(self._replayed_s)
        self._rows: Rows = replicas[slowest]
        self._sizes = step.shares[slowest]
        usual_s = median(other.seconds for other in like)
        self._usual_s = max(usual_s, self._replayed_s)  # medians of tasks may add up to more
        self._usual = self._seconds.splits(self._rows, step, self._usual_s)
        self._balance: list[int] = list(recording.facts.get("balance", ()))
        self._num_partitions = len(self._balance)

    def balance(self) -> str:
        """Report whether another balance would make the step shorter."""
        busy_s = self._busy_of_partitions()
        mean_s = fmean(busy_s) if busy_s else 0.0
        if self._num_partitions < 2 or not mean_s:
            return ""
        layers_s, source = self._layer_seconds(busy_s)
        better = self._divide(layers_s, self._num_partitions)
        cuts = list(accumulate(better, initial=0))
        sums_s = [sum(layers_s[a:b]) for a, b in pairwise(cuts)]
        factors = [new / old if old else 1.0 for new, old in zip(sums_s, busy_s, strict=True)]
        saved_s = self._replayed_s - self._seconds.scaled(factors).step_s(self._rows)
        saved = saved_s / self._usual_s
        slowest = max(range(self._num_partitions), key=busy_s.__getitem__)
        beyond = busy_s[slowest] / mean_s - 1
        sentence = (
            f"{self._named(slowest)} is {beyond:.0%} slower than the mean "
            f"(usually {seconds_text(busy_s[slowest])} busy, the mean is {seconds_text(mean_s)})"
        )
        if better != self._balance and saved >= _WORTH:
            return f"{sentence}: balance {better} would make a step {saved:.0%} shorter ({source})."
        imbalance = fmean(one.imbalance_s for one in self._usual) / self._usual_s
        if imbalance < 2 * _WORTH or beyond < _UNEQUAL:
            return ""
        return (
            f"{sentence}, but no other balance of whole layers would make a step {_WORTH:.0%} "
            f"shorter ({source})."
        )

    def chunks(self) -> str:
        """Report the bubble with twice as many micro-batches."""
        m, n = len(self._sizes), self._step.num_stages
        now = fmean(one.bubble_s for one in self._usual) / self._usual_s
        rows = self._rows_of(self._schedule, 2 * m)
        if now < _MUCH_BUBBLE or n == 1 or rows is None or 2 * m > sum(self._sizes):
            return ""
        halves = _TaskSeconds({key: s / 2 for key, s in self._seconds.seconds.items()})
        if not halves.seconds.keys() >= {(task.kind, task.j) for row in rows for task in row}:
            return ""  # it would recompute what was not recomputed
        saved_s = self._replayed_s - halves.step_s(rows)
        then = (now * self._usual_s - saved_s) / (self._usual_s - saved_s)
        if saved_s / self._usual_s < _WORTH or then < 0:
            return ""
        return (
            f"More micro-batches: chunks={2 * m} would take the bubble from {now:.0%} to about "
            f"{then:.0%}, if tasks of half the samples take half as long."
        )

    def schedule(self) -> str:
        """Report what 1F1B would hold."""
        if self._schedule == "1f1b" or self._step.num_stages == 1:
            return ""
        rows = self._rows_of("1f1b", len(self._sizes))
        if rows is None or any(
            sorted(a) != sorted(b) for a, b in zip(rows, self._rows, strict=True)
        ):
            return ""
        now, then = (max(map(_peak_held, some)) for some in (self._rows, rows))
        if then >= now:
            return ""
        change = self._seconds.step_s(rows) / self._replayed_s - 1
        pace = "as fast" if abs(change) < _WORTH else f"{abs(change):.0%} " + (
            "slower" if change > 0 else "faster"
        )  # fmt: skip
        return (
            f"schedule='1f1b' would hold at most {then} micro-batches on a stage, not {now} "
            f"({now / then:.1f} times fewer), and be {pace}."
        )

    def communication(self) -> str:
        """Report the share of messages and the host, and the longest waits."""
        share = fmean(one.communication_s for one in split(self._step)) / self._step.seconds
        if share < _MUCH_COMMUNICATION or not self._step.hops:
            return ""
        waited_s: dict[tuple[str, int, int], float] = {}
        for hop in self._step.hops:
            key = hop.payload, hop.source, hop.destination
            waited_s[key] = waited_s.get(key, 0.0) + hop.waited_s
        (payload, source, destination), most_s = max(waited_s.items(), key=lambda item: item[1])
        num_hops = len(self._step.hops)
        size = bytes_text(sum(hop.num_bytes for hop in self._step.hops))
        return (
            f"Communication and overhead are {share:.0%} of the step: {num_hops} "
            f"message{'' if num_hops == 1 else 's'} of {size} in all. The longest waits "
            f"were those of {self._step.name_of(destination)} for the {payload} of "
            f"{self._step.name_of(source)}: {seconds_text(most_s)}. "
            "Fewer or larger micro-batches make fewer messages."
        )

    def all_reduce(self) -> str:
        """Report the share of sums over replicas that no task hides."""
        sums_s = split(self._step)[0].all_reduce_s
        if sums_s < _MUCH_ALL_REDUCE * self._step.seconds:
            return ""
        num_bytes = Counter[int]()
        for one in self._step.sums:
            num_bytes[one.rank] += one.num_bytes
        rank, most = num_bytes.most_common(1)[0]
        return (
            f"Waits for all-reduces, after the last task, are {sums_s / self._step.seconds:.0%} of "
            f"the step. {self._step.name_of(rank).capitalize()} adds up most, {bytes_text(most)}. "
            "Larger mini-batches, or several steps in stage.no_sync() before one outside of it, "
            "need fewer all-reduces."
        )

    def outliers(self) -> str:
        """Report the time in tasks that took far longer than usual."""
        usual_s = {
            ran: self._seconds.seconds[ran.task.kind, ran.task.j] for ran in self._step.tasks
        }
        odd = [ran for ran, median_s in usual_s.items() if ran.seconds > _ODD * median_s]
        extra_s = sum(ran.seconds - usual_s[ran] for ran in odd)
        if extra_s / self._step.num_ranks < _MUCH_ODD * self._step.seconds:
            return ""
        worst = max(odd, key=lambda ran: ran.seconds - usual_s[ran])
        return (
            f"{len(odd)} of {len(usual_s)} tasks took more than twice as long as usual, "
            f"{seconds_text(extra_s)} longer in all; {worst.task} on "
            f"{self._step.name_of(worst.rank)} took "
            f"{seconds_text(worst.seconds)}, not {seconds_text(usual_s[worst])}. Look for what "
            "else used its processor, or at another step."
        )

    # -- from the step and the recording --------------------------------------------------------

    @property
    def _schedule(self) -> str:
        return str(self._recording.facts.get("schedule", ""))

    def _named(self, partition: int) -> str:
        if self._num_partitions == self._step.num_stages:
            return f"Stage {partition}"
        return f"Partition {partition}"

    def _busy_of_partitions(self) -> list[float]:
        busy_s = [0.0] * self._num_partitions
        for task in (task for row in self._rows for task in row):
            if task.j < self._num_partitions:
                busy_s[task.j] += self._seconds.seconds[task.kind, task.j]
        return busy_s

    def _layer_seconds(self, busy_s: Sequence[float]) -> tuple[list[float], str]:
        """Divide each partition's seconds among its layers; also return the basis in words."""
        measured = self._recording.layer_s
        source = "by each layer's forward seconds"
        if len(measured) != sum(self._balance):
            measured = (1.0,) * sum(self._balance)
            source = "guessed: the layers of a stage were not timed and are taken to be alike"
        layers_s: list[float] = []
        for (a, b), part_s in zip(
            pairwise(accumulate(self._balance, initial=0)), busy_s, strict=True
        ):
            whole = sum(measured[a:b])
            layers_s += [part_s * one / whole if whole else 0.0 for one in measured[a:b]]
        return layers_s, source

    def _rows_of(self, schedule: str, m: int) -> Rows | None:
        """Return the tasks of each stage under a schedule; None if they are not known."""
        n, facts = self._step.num_stages, self._recording.facts
        mode, at = facts.get("checkpoint"), tuple(facts.get("placement", range(n)))
        is_known = schedule in SCHEDULES and mode in ("always", "except_last", "never")
        if not is_known or not self._step.trains or self._step.call != "step":
            return None
        try:
            if SCHEDULES[schedule].place(len(at), n) != at:
                return None
        except BalanceError:  # it does not support this number of partitions
            return None
        plan = SCHEDULES[schedule].plan(m, at, recomputed(str(mode), m))
        return [plan.tasks_of(stage) for stage in range(n)]


def _peak_held(row: Sequence[Task]) -> int:
    """Return the most micro-batches between forward and backward at a time."""
    held = accumulate({"F": 1, "B": -1, "W": -1}.get(task.kind, 0) for task in row)
    return max(held, default=0)
