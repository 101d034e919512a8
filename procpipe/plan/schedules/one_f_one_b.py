"""One forward, one backward (1F1B): a backward as soon as there can be one, to hold less.

A stage takes as many micro-batches forward as there are stages after it, then one forward and one
backward in turn, then the backwards that are left. Never does stage ``j`` of ``n`` hold more than
``n - j`` micro-batches, whatever their number; fill-and-drain holds all of them. The bubble is that
of fill-and-drain.

    k   stage 0   stage 1   stage 2          (m = 4, n = 3, nothing recomputed)
    0   F0
    1   F1        F0                         warm-up
    2   F2        F1        F0
    3                       B0
    4             B0        F1
    5   B0        F2        B1               steady
    6   F3        B1        F2
    7   B1        F3        B2
    8             B2        F3
    9   B2                  B3               cool-down
    10            B3
    11  B3

Each backward is right after its recomputation, if it has one. The skips, targets and losses of a
plan follow from its tasks, so nothing of them is said here.

Source: Narayanan et al., "PipeDream" (2019), https://arxiv.org/abs/1806.03377, Section 3.2, with
the flush of Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (2021),
https://arxiv.org/abs/2006.09503, Section 3.2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from procpipe.plan.schedules.rows import plan_of_rows
from procpipe.plan.task import BACKWARD, FORWARD, RECOMPUTE, Plan, Task


def one_f_one_b(m: int, n: int, *, recompute: Collection[int] = ()) -> Plan:
    """Plan a whole mini-batch.

    Args:
        m: the number of micro-batches, of which there may be fewer than stages.
        n: the number of stages.
        recompute: the micro-batches to recompute right before their backward.
    """
    return plan_of_rows(m, [list(_row(m, n, j, recompute)) for j in range(n)])


def _row(m: int, n: int, j: int, recompute: Collection[int]) -> Iterator[Task]:
    """Walk through the tasks of stage ``j``."""
    num_warm_up = min(m, n - 1 - j)
    for i in range(num_warm_up):
        yield Task(FORWARD, i, j)
    for i in range(m):
        if num_warm_up + i < m:
            yield Task(FORWARD, num_warm_up + i, j)
        if i in recompute:
            yield Task(RECOMPUTE, i, j)
        yield Task(BACKWARD, i, j)
