"""The result of a run on several ranks: one outcome per rank, as picklable plain data.

Knows neither how the processes are started nor what they run; imports no torch.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any


class RanksFailedError(AssertionError):
    """Ranks failed unexpectedly, or did not fail although they should have."""


class RanksHungError(AssertionError):
    """Ranks did not end in time; the message holds the stacks of all threads of every rank."""


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank's function, or the end of its process.

    Attributes:
        type: name of the exception's class; ``"ProcessDied"`` if the process itself ended.
        text: ``str(exception)``, then its notes, one per line.
        traceback: the whole traceback, with causes.
    """

    type: str
    text: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        notes = getattr(error, "__notes__", [])
        return cls(
            type=type(error).__name__,
            text="\n".join([str(error), *notes]),
            traceback="".join(traceback.format_exception(error)),
        )


@dataclass(frozen=True)
class Outcome:
    """How a function ended on one rank.

    Attributes:
        rank: the rank.
        value: what the function returned; ``None`` if it failed.
        error: what ended it, or ``None``.
        output: what the rank's process wrote to stdout and stderr meanwhile, also from C++.
        duration_s: how long the function ran; 0.0 if the process died.
        is_spoilt: whether its process cannot run another function on a GPU.
    """

    rank: int
    value: Any
    error: Failure | None
    output: str = ""
    duration_s: float = 0.0
    is_spoilt: bool = False

    def __str__(self) -> str:
        if self.error is None:
            result = f"returned {self.value!r}"
        else:
            result = f"failed\n{self.error.traceback}"
        wrote = f"\nand wrote\n{self.output}" if self.output else ""
        return f"--- rank {self.rank} {result.rstrip()}{wrote.rstrip()}"


class Outcomes(list[Outcome]):
    """The outcomes of one run, rank by rank."""

    def values(self) -> list[Any]:
        """Return what each rank returned; raise with all outcomes if any rank failed."""
        failed = [outcome.rank for outcome in self if outcome.error is not None]
        if failed:
            raise RanksFailedError(f"rank(s) {failed} failed\n{self}")
        return [outcome.value for outcome in self]

    def errors(self) -> list[Failure]:
        """Return each rank's failure; raise with all outcomes if any rank did not fail."""
        errors = [outcome.error for outcome in self if outcome.error is not None]
        if len(errors) < len(self):
            unharmed = [outcome.rank for outcome in self if outcome.error is None]
            raise RanksFailedError(f"rank(s) {unharmed} did not fail\n{self}")
        return errors

    def __str__(self) -> str:
        return "\n".join(map(str, self))
