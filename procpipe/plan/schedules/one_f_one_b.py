"""One forward, one backward (1F1B): each backward as early as possible, which saves memory.

A stage runs as many forward tasks as there are stages after it, then one forward and one backward
in turn, then the remaining backward tasks. Stage ``j`` of ``n`` holds at most ``n - j``
micro-batches, whatever their number; fill-and-drain holds all of them. The bubble is the same.

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

A recomputation comes right before its backward.

Source: Narayanan et al., "PipeDream" (2019), https://arxiv.org/abs/1806.03377, Section 3.2, with
the flush of Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (2021),
https://arxiv.org/abs/2006.09503, Section 3.2.
"""

from __future__ import annotations

from collections.abc import Collection

from procpipe.plan.schedules.rows import one_forward_one_backward, plan_of_rows
from procpipe.plan.task import Plan


def one_f_one_b(m: int, n: int, *, recompute: Collection[int] = ()) -> Plan:
    """Plan a whole mini-batch; the arguments are those of ``gpipe``."""
    works = [[(i, j) for i in range(m)] for j in range(n)]
    rows = [one_forward_one_backward(w, w, n - 1 - j, recompute) for j, w in enumerate(works)]
    return plan_of_rows(m, rows)
