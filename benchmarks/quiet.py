"""How quiet the machine was during a part: what others took of its processors, and drift.

    stolen    time in which the hypervisor ran another machine, of all processors' time
    others    time of programs other than this command and the processes that it has started
    drift     of each workload, the slowest round of one process over its fastest round

A quiet run has less than a hundredth of the first two, and a drift of a few hundredths.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Watch:
    """Counts the processors' time from now on."""

    def __init__(self) -> None:
        self._start = _counts()

    def shares(self) -> dict[str, float]:
        """Return what was stolen and what other programs used, each as a share of all time."""
        all_s, stolen_s, busy_s, own_s = (
            now - before for now, before in zip(_counts(), self._start, strict=True)
        )
        if all_s <= 0:  # the kernel counts hundredths of a second
            return {"stolen": 0.0, "others": 0.0}
        return {"stolen": stolen_s / all_s, "others": max(0.0, busy_s - own_s) / all_s}


def drift(rounds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return of each workload the ratio of one process's slowest round to its fastest.

    Args:
        rounds: by workload, the seconds of one process in each round.
    """
    return {what: max(seconds) / min(seconds) for what, seconds in rounds.items() if seconds}


def drift_text(quiet: Mapping[str, Any]) -> str:
    """Write each workload's drift in a line."""
    each = quiet["drift"].items()
    return "; ".join(f"{what.replace(' = ', '=')} {ratio:.2f}" for what, ratio in each)


def _counts() -> tuple[float, float, float, float]:
    """Return seconds of all processors: all, stolen, busy; and of this command's processes."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, idle, iowait, irq, softirq, steal = (
        int(field) / os.sysconf("SC_CLK_TCK") for field in fields
    )
    busy_s = user + nice + system + irq + softirq
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own_s = sum(usage.ru_utime + usage.ru_stime for usage in used)
    return busy_s + idle + iowait + steal, steal, busy_s, own_s
