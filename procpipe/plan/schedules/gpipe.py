"""GPipe's schedule, fill and drain: every micro-batch forward, then every micro-batch backward.

A micro-batch moves by one stage per cycle. The backward pass mirrors the forward pass, with the
micro-batches in reverse order: the newest activations are freed first.

    k   stage 0   stage 1   stage 2          (m = 3, n = 3, recompute = {0, 1}: 'except_last')
    0   F0
    1   F1        F0                         fill
    2   F2        F1        F0
    3             F2        F1
    4                       F2               drain
    5                       B2
    6             B2        R1
    7   B2        R1        B1
    8   R1        B1        R0
    9   B1        R0        B0
    10  R0        B0
    11  B0

A recomputation is in the cycle before its backward, in which the next stage computes the gradient:
R1 of stage 1 runs beside B1 of stage 2, and only B1 of stage 1 waits for that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache

from procpipe.plan.placement import partitions_of
from procpipe.plan.schedules.rows import plan_of_rows
from procpipe.plan.task import BACKWARD, FORWARD, RECOMPUTE, Cycle, Plan, Task


def clock_cycles(m: int, n: int) -> Iterator[Cycle]:
    """Yield the forward cycles: cycle ``k`` holds every ``F(i,j)`` with ``i + j = k``.

    m: number of micro-batches    i: index of a micro-batch
    n: number of stages           j: index of a stage
    k: clock cycle

    k   (i,j) (i,j) (i,j)
    -   ----- ----- -----
    0   (0,0)
    1   (1,0) (0,1)
    2   (2,0) (1,1) (0,2)
    3         (2,1) (1,2)
    4               (2,2)
    """
    for k in range(m + n - 1):
        yield tuple(Task(FORWARD, k - j, j) for j in range(max(0, k - m + 1), min(k + 1, n)))


def gpipe(
    m: int, n: int, *, recompute: Collection[int] = (), placement: tuple[int, ...] = ()
) -> Plan:
    """Plan a whole mini-batch, forward and then backward.

    Args:
        m: the number of micro-batches, which may be less than ``n``.
        n: the number of stages.
        recompute: the micro-batches to recompute right before their backward; ``recomputed`` makes
            them from a mode.
        placement: the stage of each partition. A stage with several runs all micro-batches
            through one before the next.
    """
    forward, backward = forward_plan(m, n, placement), backward_plan(m, n, recompute, placement)
    return Plan(m, n, (*forward.cycles, *backward.cycles), placement)


def forward_plan(m: int, n: int, placement: tuple[int, ...] = ()) -> Plan:
    """Plan the forward pass alone, for evaluation or a backward pass that the user will call."""
    if placement in ((), tuple(range(n))):
        return Plan(m, n, tuple(clock_cycles(m, n)))
    ours = [partitions_of(placement, stage) for stage in range(n)]
    rows = [[Task(FORWARD, i, j) for j in partitions for i in range(m)] for partitions in ours]
    return plan_of_rows(m, rows, placement)


def backward_plan(
    m: int, n: int, recompute: Collection[int] = (), placement: tuple[int, ...] = ()
) -> Plan:
    """Plan the backward pass alone, after a forward pass that has a plan of its own.

    In each partition a stage does R(i) B(i) for i = m-1 … 0, without R(i) where nothing is
    recomputed.
    """
    kinds = [(RECOMPUTE, BACKWARD) if i in recompute else (BACKWARD,) for i in range(m)]
    work = [(kind, i) for i in reversed(range(m)) for kind in kinds[i]]
    ours = [partitions_of(placement or range(n), stage)[::-1] for stage in range(n)]
    rows = [[Task(kind, i, j) for j in partitions for kind, i in work] for partitions in ours]
    return plan_of_rows(m, rows, placement)


@cache
def recomputed(mode: str, m: int) -> frozenset[int]:
    """Choose the micro-batches to recompute.

    Args:
        mode: ``"always"`` all, ``"except_last"`` all but the last, ``"never"`` none.
        m: the real number of micro-batches, which may be less than ``chunks``.

    Raises:
        ValueError: the mode is unknown.
    """
    counts = {"always": m, "except_last": m - 1, "never": 0}
    if mode not in counts:
        raise ValueError(
            f"the checkpoint mode is {mode!r}; it must be one of 'always', 'except_last', 'never'"
        )
    return frozenset(range(counts[mode]))
