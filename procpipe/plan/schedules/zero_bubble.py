"""Zero bubble: backward in two, so that the half nobody waits for fills the time stages would rest.

A backward makes the gradient of its input, for which the partition before waits, and those of the
weights, for which nobody does. In two tasks, ``I`` and ``W``, the first goes on its way sooner and
the second is done when there is nothing else to do.

**ZB-H1** is 1F1B with ``W`` of stage ``j`` put off by ``j`` micro-batches. Every stage holds ``n``
micro-batches then, as many as stage 0 does under 1F1B; the bubble is ``(n-1)(F + I - W)``, a third
of 1F1B's ``(n-1)(F + I + W)`` where the three take as long as each other.

    k   stage 0   stage 1   stage 2          (m = 4, n = 3)
    0   F0
    1   F1        F0                         warm-up, as in 1F1B
    2   F2        F1        F0
    3                       I0
    4             I0        F1
    5   I0        F2        I1
    6   W0        I1        F2               steady: F, I and W in turn
    7   F3        W0        I2
    8   I1        F3        W0
    9   W1        I2        F3
    10  I2        W1        I3
    11  W2        I3        W1               cool-down: what was put off
    12  I3        W2        W2
    13  W3        W3        W3

**ZB-V** has two partitions a stage, folded, so that a micro-batch starts and ends on stage 0 and
every stage is near one end. No stage holds more than ``2n`` half micro-batches, 1F1B's peak.
Where the three kinds take as long as each other and ``m >= 2n - 1``, each stage rests only until
the first micro-batch comes: ``6m + n - 1`` tasks' time from end to end. (With fewer micro-batches
the whole is up to ``n / 2`` tasks' time longer than its longest way or stage.)

    k   stage 0   stage 1                    (m = 3, n = 2: partitions 0 and 3 on stage 0)
    0   F0@0
    1   F1@0      F0@1                       warm-up: until a micro-batch is back
    2   F2@0      F0@2
    3   F0@3      F1@1
    4   I0@3      F1@2
    5   W0@3      I0@2                       steady: F, I and W of one partition, then the other
    6   F1@3      W0@2
    7   I1@3      F2@1
    8   W1@3      I0@1
    9   I0@0      W0@1
    10  W0@0      F2@2
    11  F2@3      I1@2
    12  I2@3      W1@2
    13  W2@3      I2@2
    14            I1@1
    15  I1@0      I2@1                       cool-down: I first, then what was put off
    16  I2@0      W2@2
    17  W1@0      W1@1
    18  W2@0      W2@1

Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023), https://arxiv.org/abs/2401.10241,
Sections 2.1 (ZB-H1) and 6 (ZB-V).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from procpipe.plan.placement import folded
from procpipe.plan.schedules.rows import plan_of_rows
from procpipe.plan.task import (
    FORWARD,
    INPUT_GRADIENT,
    RECOMPUTE,
    WEIGHT_GRADIENT,
    Plan,
    Task,
)


def zb_h1(m: int, n: int, *, recompute: Collection[int] = ()) -> Plan:
    """Plan a whole mini-batch with one partition a stage.

    Args:
        m: the number of micro-batches, of which there may be fewer than stages.
        n: the number of stages.
        recompute: the micro-batches to recompute right before their backward.
    """
    return plan_of_rows(m, [list(_h1_row(m, n, j, recompute)) for j in range(n)])


def zb_v(m: int, n: int, *, recompute: Collection[int] = ()) -> Plan:
    """Plan a whole mini-batch with two partitions a stage, placed by ``folded``.

    Args:
        m: the number of micro-batches, any.
        n: the number of stages.
        recompute: the micro-batches to recompute right before their backward.
    """
    rows = [list(_v_row(m, n, stage, recompute)) for stage in range(n)]
    return plan_of_rows(m, rows, folded(2 * n, n))


def _h1_row(m: int, n: int, j: int, recompute: Collection[int]) -> Iterator[Task]:
    """Walk through the tasks of stage ``j``."""
    num_warm_up = min(m, n - 1 - j)
    for i in range(num_warm_up):
        yield Task(FORWARD, i, j)
    for i in range(m):
        if num_warm_up + i < m:
            yield Task(FORWARD, num_warm_up + i, j)
        if i in recompute:
            yield Task(RECOMPUTE, i, j)
        yield Task(INPUT_GRADIENT, i, j)
        if i >= j:
            yield Task(WEIGHT_GRADIENT, i - j, j)
    for i in range(max(0, m - j), m):
        yield Task(WEIGHT_GRADIENT, i, j)


def _v_row(m: int, n: int, stage: int, recompute: Collection[int]) -> Iterator[Task]:
    """Walk through the tasks of a stage: each phase a count and what is done so often.

    Micro-batches come to their turn one after another, kind by kind and partition by partition. A
    turn without a micro-batch is left out, so that there may be any number of them.
    """
    near, far = stage, 2 * n - 1 - stage  # its partitions, on the way there and on the way back
    turns: Counter[tuple[str, int]] = Counter()

    def take(kind: str, j: int) -> Iterator[Task]:
        i = turns[kind, j]
        is_there = i < (turns[INPUT_GRADIENT, j] if kind == WEIGHT_GRADIENT else m)
        if is_there:
            turns[kind, j] += 1
            if kind == INPUT_GRADIENT and i in recompute:
                yield Task(RECOMPUTE, i, j)
            yield Task(kind, i, j)

    def take_through(j: int) -> Iterator[Task]:
        for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT):
            yield from take(kind, j)

    # warm-up: until the first micro-batch is back, and until it is back backward
    for _ in range(2 * (n - stage) - 1):
        yield from take(FORWARD, near)
    for _ in range(stage):
        yield from take(FORWARD, far)
        yield from take(FORWARD, near)
    for _ in range(n - stage):
        yield from take_through(far)
    # steady: a whole micro-batch's work in one partition, then in the other
    while turns[FORWARD, far] < m:
        yield from take(FORWARD, near)
        yield from take(INPUT_GRADIENT, near)
        yield from take(WEIGHT_GRADIENT, near)
        yield from take_through(far)
    # cool-down: what others wait for first, then what was put off
    while turns[INPUT_GRADIENT, near] < m:
        yield from take(INPUT_GRADIENT, far)
        yield from take(INPUT_GRADIENT, near)
    for j in (far, near):
        while turns[WEIGHT_GRADIENT, j] < m:
            yield from take(WEIGHT_GRADIENT, j)
