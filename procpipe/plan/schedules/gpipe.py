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

from collections.abc import Collection, Iterator, Sequence

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
    return _wave([(FORWARD, i) for i in range(m)], range(n))


def backward_cycles(m: int, n: int, recompute: Collection[int] = ()) -> Iterator[Cycle]:
    """Yield the backward cycles: micro-batches in reverse, from the last stage to stage 0.

    Each stage does R(i) B(i) for i = m-1 … 0, without R(i) where nothing is recomputed, and begins
    as many cycles after the last stage as it is stages away from it.
    """
    return _wave(_backward_work(m, recompute), range(n)[::-1])


def gpipe(
    m: int,
    n: int,
    *,
    recompute: Collection[int] = (),
    backward: bool = True,
    placement: tuple[int, ...] = (),
) -> Plan:
    """Plan a whole mini-batch, forward and then backward.

    Args:
        m: the number of micro-batches, which may be less than ``n``.
        n: the number of stages.
        recompute: the micro-batches to recompute right before their backward; ``recomputed`` makes
            them from a mode.
        backward: whether to plan the backward pass, too.
        placement: the stage of each partition. A stage with several runs all micro-batches
            through one before the next.
    """
    return _plan(m, n, placement, recompute, forward=True, backward=backward)


def forward_plan(m: int, n: int, placement: tuple[int, ...] = ()) -> Plan:
    """Plan the forward pass alone, for evaluation or a backward pass that the user will call."""
    return gpipe(m, n, backward=False, placement=placement)


def backward_plan(
    m: int, n: int, recompute: Collection[int] = (), placement: tuple[int, ...] = ()
) -> Plan:
    """Plan the backward pass alone, after a forward pass that has a plan of its own."""
    return _plan(m, n, placement, recompute, forward=False, backward=True)


def _plan(
    m: int,
    n: int,
    placement: tuple[int, ...],
    recompute: Collection[int],
    *,
    forward: bool,
    backward: bool,
) -> Plan:
    if placement in ((), tuple(range(n))):
        cycles = list(clock_cycles(m, n)) if forward else []
        cycles += backward_cycles(m, n, recompute) if backward else []
        return Plan(m, n, tuple(cycles))
    rows: list[list[Task]] = []
    for stage in range(n):
        ours = partitions_of(placement, stage)
        row = [Task(FORWARD, i, j) for j in ours for i in range(m)] if forward else []
        if backward:
            work = _backward_work(m, recompute)
            row += [Task(kind, i, j) for j in reversed(ours) for kind, i in work]
        rows.append(row)
    return plan_of_rows(m, rows, placement)


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


def _wave(work: Sequence[tuple[str, int]], distances: range) -> Iterator[Cycle]:
    """Yield the cycles in which each stage does the same work, of kinds and micro-batches.

    In cycle ``k`` that is ``work[k - d]`` at distance ``d`` from the stage where the work begins,
    which is either the first or the last.
    """
    num_cycles = len(work) + len(distances) - 1 if work else 0
    for k in range(num_cycles):
        at_work = range(max(0, k - len(work) + 1), min(k + 1, len(distances)))
        yield tuple(Task(*work[k - d], distances[d]) for d in at_work[:: distances.step])


def _backward_work(m: int, recompute: Collection[int]) -> list[tuple[str, int]]:
    """List the kind and the micro-batch of each backward task of a partition, in order."""
    if strangers := sorted(set(recompute) - set(range(m))):
        raise ValueError(f"cannot recompute micro-batches {strangers}: there are {m}, from 0")
    return [
        (kind, i)
        for i in reversed(range(m))
        for kind in ((RECOMPUTE, BACKWARD) if i in recompute else (BACKWARD,))
    ]
