"""What a stage did and for how long, as plain data, and its tables for people.

Times are host times. On a GPU a task's host time is the time to launch it, so shares of busy time
say how the *host* was used there; on a CPU they say how the stage was used.

PURE: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from procpipe.plan.task import KINDS
from procpipe.words import text_table


@dataclass(frozen=True)
class Split:
    """How one stage spent one step; busy, bubble, imbalance, communication and all-reduce add up.

    Attributes:
        stage: which stage.
        step_s: the step, from the first stage's beginning to the last one's end, of all replicas:
            the sum of what follows.
        busy_s: in tasks.
        bubble_s: idle because of the plan.
        imbalance_s: idle because tasks take unequally long.
        communication_s: idle because of transfers, and in what the host does between tasks.
        all_reduce_s: what the step is longer because of sums over replicas: waits for them after
            the last task of all stages. Sums and waits beside tasks cost nothing.
        replica: which replica the stage belongs to.
    """

    stage: int
    step_s: float
    busy_s: float
    bubble_s: float
    imbalance_s: float
    communication_s: float
    all_reduce_s: float = 0.0
    replica: int = 0


@dataclass(frozen=True)
class StageStatistics:
    """What one stage did since it was made.

    Attributes:
        stage: its index, within its replica.
        num_steps: calls that ran a plan.
        num_tasks: tasks by kind, "F", "R", "B", "I", "W".
        busy_s: seconds in tasks.
        waiting_s: seconds of waiting for messages.
        step_s: seconds in calls that ran a plan, from first to last task.
        sent_bytes: bytes of tensors sent, by payload.
        num_messages: messages sent, by payload.
        split: how this stage spent the last step: busy, and idle because of the plan, of unequal
            stages and of communication. It needs the times of all stages, so it is that of the
            last ``stage.report()``, which every rank calls; None before.
        replica: the replica that the stage belongs to.
        all_reduce_bytes: bytes of gradients and losses that it added up over replicas.
        exposed_s: seconds of waiting for such a sum.
    """

    stage: int
    num_steps: int
    num_tasks: dict[str, int]
    busy_s: float
    waiting_s: float
    step_s: float
    sent_bytes: dict[str, int]
    num_messages: dict[str, int]
    split: Split | None = None
    replica: int = 0
    all_reduce_bytes: int = 0
    exposed_s: float = 0.0

    @property
    def bubble(self) -> float:
        """Share of the steps' time in which the stage ran no task, whatever the reason."""
        return 1.0 - self.busy_s / self.step_s if self.step_s else 0.0


def table(stages: Sequence[StageStatistics]) -> str:
    """Lay out the statistics of all stages as a text table, one line a stage.

    Where it is known, a second table shows how each stage spent the last step.
    """
    kinds = [kind for kind in KINDS if any(kind in one.num_tasks for one in stages)]
    header = ["stage", "steps", *kinds, "busy s", "waiting s", "idle", "sent MiB", "messages"]
    has_sums = any(s.all_reduce_bytes for s in stages)
    header += ["all-reduce MiB", "exposed s"] * has_sums
    rows = [header]
    for name, s in zip(_stages_of(stages), stages, strict=True):
        row = [name, f"{s.num_steps}", *(f"{s.num_tasks.get(kind, 0)}" for kind in kinds)]
        row += [f"{s.busy_s:.2f}", f"{s.waiting_s:.2f}", f"{s.bubble:.1%}"]
        row += [f"{sum(s.sent_bytes.values()) / 2**20:.2f}", f"{sum(s.num_messages.values())}"]
        sums = [f"{s.all_reduce_bytes / 2**20:.2f}", f"{s.exposed_s:.2f}"]
        rows.append(row + sums * has_sums)
    lines = text_table(rows, 0)
    if splits := [s.split for s in stages if s.split is not None]:
        lines += ["", "the last step:", split_table(splits)]
    return "\n".join(lines)


def split_table(splits: Sequence[Split]) -> str:
    """Lay out how the stages spent a step as a text table: milliseconds and shares."""
    has_replicas = any(one.replica for one in splits)
    names = ["busy", "bubble", "imbalance", "comm. etc.", *["all-reduce"] * has_replicas]
    rows = [["stage", *(cell for name in names for cell in (f"{name} ms", "")), "step ms"]]
    for name, one in zip(_stages_of(splits), splits, strict=True):
        parts_s = [one.busy_s, one.bubble_s, one.imbalance_s, one.communication_s]
        row = [name]
        for part_s in parts_s + [one.all_reduce_s] * has_replicas:
            row += [f"{part_s * 1e3:.2f}", f"{part_s / one.step_s if one.step_s else 0.0:.1%}"]
        rows.append([*row, f"{one.step_s * 1e3:.2f}"])
    return "\n".join(text_table(rows, 0))


def _stages_of(several: Sequence[StageStatistics | Split]) -> list[str]:
    """Name the stage of each; of several replicas "1 of replica 0"."""
    has_replicas = any(one.replica for one in several)
    return [f"{one.stage}" + f" of replica {one.replica}" * has_replicas for one in several]
