"""The exceptions procpipe raises on purpose, so that a user can catch exactly those they expect.

Each derives from ``ProcpipeError``, and from the built-in exception of its kind. Plain
``TypeError``, ``ValueError`` and ``IndexError`` stand for a user's mistakes that need no name of
their own (the types are torchgpipe's). An exception raised by a user's layer keeps its type on the
rank where it happened and gains a note that says where in the pipeline it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self


class ProcpipeError(Exception):
    """Everything procpipe raises on purpose derives from this."""


class BalanceError(ProcpipeError, ValueError):
    """The balance does not fit the model, or the number of partitions the processes."""


class BoundaryError(ProcpipeError, TypeError):
    """A value of a type that cannot travel between stages, or be scattered over micro-batches."""


class PlanError(ProcpipeError, ValueError):
    """A plan that cannot run to its end.

    Attributes:
        faults: every fault found, one sentence each.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__(_listing("the plan cannot run", self.faults))


class SavedStateError(ProcpipeError, ValueError):
    """A file of a saved state or of weights is damaged, of another kind, or of another save.

    Names the file. Nothing in the file has been executed.
    """


class DisagreementError(ProcpipeError, ValueError):
    """The ranks of one job have different settings, models or scalers.

    Attributes:
        differences: every difference found, one sentence each.
    """

    def __init__(self, differences: Sequence[str]) -> None:
        self.differences = tuple(differences)
        super().__init__(_listing("the ranks do not agree", self.differences))


class CallMismatchError(ProcpipeError, RuntimeError):
    """Ranks are in different calls: one in ``stage(input)``, say, and rank 0 in ``step``."""


class RemoteValueError(ProcpipeError, RuntimeError):
    """The value of a placeholder was read; the real value lives on another rank."""


class RecomputeError(ProcpipeError, RuntimeError):
    """Recomputation would not repeat the first forward, so its gradients would be wrong."""


class NonFiniteLossError(ProcpipeError, ArithmeticError):
    """The loss of a micro-batch is NaN or infinite, and the user asked for this check."""


class OverwrittenError(ProcpipeError, RuntimeError):
    """A tensor was written to while it was being sent, so what arrived may be a mixture."""


class RemoteStageError(ProcpipeError, RuntimeError):
    """Another rank failed, which ends the step here too.

    Attributes:
        rank: the rank on which the failure began.
        story: where that rank was, and its traceback.
    """

    def __init__(self, rank: int, story: str) -> None:
        self.rank = rank
        self.story = story
        super().__init__(f"rank {rank} failed:\n{story}")

    def again(self) -> Self:
        """Return the same error without its traceback, which holds what the frames do: a stage."""
        return type(self)(self.rank, self.story)


class PeerLostError(RemoteStageError):
    """Another rank's process ended without a message (killed, out of memory, crashed)."""


class WaitTimeoutError(ProcpipeError, TimeoutError):
    """A peer did not answer in time; names the waiting rank, how long, for what and which peer."""


class StageClosedError(ProcpipeError, RuntimeError):
    """The stage failed earlier, or was closed, and cannot run another step."""


def _listing(headline: str, sentences: Sequence[str]) -> str:
    return headline + ":\n" + "\n".join(f"  - {sentence}" for sentence in sentences)
