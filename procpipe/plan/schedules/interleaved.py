"""Interleaved 1F1B: several partitions a stage, for a bubble that is shorter by their number.

With ``v`` partitions a stage, placed in a loop, a task takes a ``v``-th of the time, and so does
the wait for the first and after the last. A stage takes micro-batches in groups: a group through
its first partition, then through its second, … A group has ``n`` micro-batches, so that the first
is back from the other stages just when the stage comes to its next partition.

    k   stage 0   stage 1           (m = 2, n = 2, v = 2: partitions 0 and 2 on stage 0)
    0   F0@0
    1   F1@0      F0@1
    2   F0@2      F1@1              warm-up
    3   F1@2      F0@3
    4             B0@3
    5   B0@2      F1@3              steady
    6             B1@3
    7   B1@2      B0@1
    8   B0@0      B1@1              cool-down
    9   B1@0

The number of micro-batches need not be a multiple of ``n``: there are ``m // n`` groups, of ``n``
or a few more. (With a smaller last group, as is done elsewhere, stages can wait for each other for
ever: ``m = 7``, ``n = 5``, ``v = 2``.) The whole takes as long as it must, the time of its longest
stage or of its longest way, whatever ``m``, ``n`` and ``v``, if all tasks of a kind are alike.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021),
https://arxiv.org/abs/2104.04473, Section 2.2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from procpipe.plan.placement import looped, partitions_of
from procpipe.plan.schedules.one_f_one_b import one_f_one_b
from procpipe.plan.schedules.rows import plan_of_rows
from procpipe.plan.task import BACKWARD, FORWARD, RECOMPUTE, Plan, Task


def interleaved(m: int, n: int, v: int, *, recompute: Collection[int] = ()) -> Plan:
    """Plan a whole mini-batch.

    Args:
        m: the number of micro-batches, any.
        n: the number of stages.
        v: the number of partitions on each stage; with one, this is ``one_f_one_b``.
        recompute: the micro-batches to recompute right before their backward.
    """
    if v == 1:
        return one_f_one_b(m, n, recompute=recompute)
    placement = looped(v * n, n)
    rows = [list(_row(m, n, v, stage, placement, recompute)) for stage in range(n)]
    return plan_of_rows(m, rows, placement)


def _row(
    m: int, n: int, v: int, stage: int, placement: Sequence[int], recompute: Collection[int]
) -> Iterator[Task]:
    """Walk through the tasks of a stage."""
    groups = _groups(m, n)
    ours = partitions_of(placement, stage)
    forward = [(i, j) for group in groups for j in ours for i in group]
    backward = [(i, j) for group in groups for j in reversed(ours) for i in group]
    longest = max(map(len, groups))
    num_warm_up = min(len(forward), 2 * (n - 1 - stage) + (v - 1) * longest)
    for i, j in forward[:num_warm_up]:
        yield Task(FORWARD, i, j)
    for place, (i, j) in enumerate(backward):
        if num_warm_up + place < len(forward):
            yield Task(FORWARD, *forward[num_warm_up + place])
        if i in recompute:
            yield Task(RECOMPUTE, i, j)
        yield Task(BACKWARD, i, j)


def _groups(m: int, n: int) -> list[range]:
    """Divide micro-batches into as many groups as there can be of ``n``, as even as can be."""
    num_groups = max(1, m // n)
    return [range(m * g // num_groups, m * (g + 1) // num_groups) for g in range(num_groups)]
