"""What a stage did and for how long, as plain data; ``timeline/text.py`` writes it for people.

Times are host times. On a GPU a task's host time is the time to launch it, so shares of busy time
say how the *host* was used there; on a CPU they say how the stage was used.

PURE: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


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
