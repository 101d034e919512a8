"""Zero bubble: split backward, so that weight gradients fill the time in which stages would idle.

A backward computes the gradient of its input, which the previous partition needs, and those of the
weights, which no other task needs. Split into ``I`` and ``W``, the first is sent sooner, and the
second runs when there is nothing else to do.

**ZB-H1** is 1F1B with ``W`` of stage ``j`` deferred by ``j`` micro-batches. Every stage then holds
``n`` micro-batches, as many as stage 0 under 1F1B. If F, I and W take equally long, the bubble,
``(n-1)(F + I - W)``, is a third of 1F1B's ``(n-1)(F + I + W)``.

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
    11  W2        I3        W1               cool-down: the deferred W
    12  I3        W2        W2
    13  W3        W3        W3

**ZB-V** has two partitions a stage, folded: a micro-batch starts and ends on stage 0. No stage
holds more than ``2n`` half micro-batches, the peak of 1F1B. If F, I and W take equally long and
``m >= 2n - 1``, each stage idles only until its first micro-batch arrives, and the plan takes the
time of ``6m + n - 1`` tasks. (With fewer micro-batches it is up to ``n / 2`` tasks longer than its
longest path or stage.)

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
    15  I1@0      I2@1                       cool-down: I first, then the deferred W
    16  I2@0      W2@2
    17  W1@0      W1@1
    18  W2@0      W2@1

**Fused halves.** A split has a cost, too: tensors are kept between its two tasks. It gains time
only if another stage needs the gradient before ``W`` has ended. Where ``W`` follows right after its
``I``, and the user of the gradient starts no sooner than ``W`` ends, one ``B`` delays no task:

    stage 0   ······[I0][W0]            stage 0   ······[I0][W0]
    stage 1   [I0][W0]                  stage 1   [──B0──]          and likewise B0 on stage 0

Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023), https://arxiv.org/abs/2401.10241,
Sections 2.1 (ZB-H1) and 6 (ZB-V).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from procpipe.plan.placement import folded
from procpipe.plan.schedules.rows import one_forward_one_backward, plan_of_rows
from procpipe.plan.task import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECOMPUTE,
    WEIGHT_GRADIENT,
    Plan,
    Task,
)


def zb_h1(m: int, n: int, *, recompute: Collection[int] = ()) -> Plan:
    """Plan a mini-batch with one partition a stage; the arguments are those of ``gpipe``."""
    works = [[(i, j) for i in range(m)] for j in range(n)]
    rows = [one_forward_one_backward(w, w, n - 1 - j, recompute, j) for j, w in enumerate(works)]
    return plan_of_rows(m, rows)


def zb_v(m: int, n: int, *, recompute: Collection[int] = ()) -> Plan:
    """Plan a mini-batch with two partitions a stage, placed by ``folded``; else as ``zb_h1``."""
    rows = [_v_row(m, n, stage, recompute) for stage in range(n)]
    return plan_of_rows(m, rows, folded(2 * n, n))


def _v_row(m: int, n: int, stage: int, recompute: Collection[int]) -> Iterator[Task]:
    """Yield the tasks of a stage, phase by phase.

    Each call of ``take`` yields the next micro-batch's task of a kind in a partition, or nothing if
    no micro-batch is left, so that any number of micro-batches works.
    """
    near, far = stage, 2 * n - 1 - stage  # its partitions, by their distance from the input
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

    # warm-up: until the first micro-batch returns, forward and then backward
    for _ in range(2 * (n - stage) - 1):
        yield from take(FORWARD, near)
    for _ in range(stage):
        yield from take(FORWARD, far)
        yield from take(FORWARD, near)
    for _ in range(n - stage):
        yield from take_through(far)
    # steady: F, I and W of one micro-batch in one partition, then in the other
    while turns[FORWARD, far] < m:
        yield from take(FORWARD, near)
        yield from take(INPUT_GRADIENT, near)
        yield from take(WEIGHT_GRADIENT, near)
        yield from take_through(far)
    # cool-down: first the gradients that other stages need, then the deferred W
    while turns[INPUT_GRADIENT, near] < m:
        yield from take(INPUT_GRADIENT, far)
        yield from take(INPUT_GRADIENT, near)
    for j in (far, near):
        while turns[WEIGHT_GRADIENT, j] < m:
            yield from take(WEIGHT_GRADIENT, j)


def fused(plan: Plan) -> Plan:
    """Fuse I and W of a plan of ``plan_of_rows`` into B wherever no other task starts later.

    Every task is taken to last one clock cycle.
    """
    cycles = {task: k for k, cycle in enumerate(plan.cycles) for task in cycle}
    rows: list[list[Task]] = [[] for _ in range(plan.num_stages)]
    for stage, row in enumerate(rows):
        for task in plan.tasks_of(stage):
            kind, i, j = task
            is_pair = kind == WEIGHT_GRADIENT and row[-1] == (INPUT_GRADIENT, i, j)
            if is_pair and (j == 0 or cycles[task] < cycles[Task(INPUT_GRADIENT, i, j - 1)]):
                row[-1] = Task(BACKWARD, i, j)
            else:
                row.append(task)
    return plan_of_rows(plan.num_micro_batches, rows, plan.placement)
