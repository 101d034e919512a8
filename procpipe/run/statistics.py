"""What a stage did and for how long, as plain data, and its tables for people.

Times are host times. On a GPU a task's host time is the time to launch it, so shares of busy time
say how the *host* was used there; on a CPU they say how the stage was used.

PURE: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from procpipe.plan.task import INPUT_GRADIENT, KINDS, WEIGHT_GRADIENT, Task


@dataclass(frozen=True)
class TimedTask:
    """One task of the last step; times in seconds since the step began on this stage."""

    task: Task
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Split:
    """How one stage spent one step; the last four add up to the first.

    Attributes:
        stage: which stage.
        step_s: the step, from the first stage's beginning to the last one's end.
        busy_s: in tasks.
        bubble_s: idle because of the plan.
        imbalance_s: idle because tasks take unequally long.
        communication_s: idle because of transfers, and in what the host does between tasks.
    """

    stage: int
    step_s: float
    busy_s: float
    bubble_s: float
    imbalance_s: float
    communication_s: float


@dataclass(frozen=True)
class StageStatistics:
    """What one stage did since it was made.

    Attributes:
        stage: its rank, which is the index of the stage unless there are replicas.
        num_steps: calls that ran a plan.
        num_tasks: tasks by kind, "F", "R", "B", "I", "W".
        busy_s: seconds in tasks.
        waiting_s: seconds of waiting for messages.
        step_s: seconds in calls that ran a plan, from first to last task.
        sent_bytes: bytes of tensors sent, by payload.
        num_messages: messages sent, by payload.
        peak_held_bytes: most bytes of tensors held between tasks (see ``compute.ledger``), since
            the last ``Stage.reset_peak_held_bytes``, if any; without what layers save for their
            backward, or put off to its second half.
        held_bytes: the same now; 0 between steps.
        split: how this stage spent the last step: busy, and idle because of the plan, of unequal
            stages and of communication. It needs the times of all stages, so it is that of the
            last ``stage.report()``, which every rank calls; None before.
    """

    stage: int
    num_steps: int
    num_tasks: dict[str, int]
    busy_s: float
    waiting_s: float
    step_s: float
    sent_bytes: dict[str, int]
    num_messages: dict[str, int]
    peak_held_bytes: int
    held_bytes: int
    split: Split | None = None

    @property
    def bubble(self) -> float:
        """Share of the steps' time in which the stage ran no task, whatever the reason."""
        return 1.0 - self.busy_s / self.step_s if self.step_s else 0.0


def table(stages: Sequence[StageStatistics]) -> str:
    """Lay out the statistics of all stages as a text table, one line a stage.

    Where it is known, a second table shows how each stage spent the last step.
    """
    in_two = (INPUT_GRADIENT, WEIGHT_GRADIENT)
    kinds = [k for k in KINDS if k not in in_two or any(k in s.num_tasks for s in stages)]
    header = (
        f"{'stage':>5} {'steps':>6} {' '.join(f'{kind:>7}' for kind in kinds)} {'busy s':>8} "
        f"{'waiting s':>10} {'idle':>7} {'sent MiB':>9} {'messages':>9} {'peak held MiB':>14}"
    )
    lines = [header, *(_line(s, kinds) for s in stages)]
    splits = [s.split for s in stages if s.split is not None]
    if splits:
        lines += ["", "the last step:", split_table(splits)]
    return "\n".join(lines)


def _line(s: StageStatistics, kinds: Sequence[str]) -> str:
    return (
        f"{s.stage:>5} {s.num_steps:>6} "
        f"{' '.join(f'{s.num_tasks.get(kind, 0):>7}' for kind in kinds)} {s.busy_s:>8.2f} "
        f"{s.waiting_s:>10.2f} {s.bubble:>7.1%} {sum(s.sent_bytes.values()) / 2**20:>9.2f} "
        f"{sum(s.num_messages.values()):>9} {s.peak_held_bytes / 2**20:>14.3f}"
    )


def split_table(splits: Sequence[Split]) -> str:
    """Lay out how the stages spent a step as a text table: milliseconds and shares."""
    names = ("busy", "bubble", "imbalance", "comm. etc.")
    lines = ["stage" + "".join(f"{name + ' ms':>22}" for name in names) + f"{'step ms':>11}"]
    for one in splits:
        parts_s = (one.busy_s, one.bubble_s, one.imbalance_s, one.communication_s)
        cells = [f"{s * 1e3:>14.2f} {_share(s, one.step_s):>7}" for s in parts_s]
        lines.append(f"{one.stage:>5}{''.join(cells)}{one.step_s * 1e3:>11.2f}")
    return "\n".join(lines)


def _share(part_s: float, whole_s: float) -> str:
    return f"{part_s / whole_s if whole_s else 0.0:.1%}"
