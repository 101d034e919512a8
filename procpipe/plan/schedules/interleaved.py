"""Interleaved 1F1B: ``v`` partitions a stage make the bubble ``v`` times shorter.

With ``v`` partitions a stage, placed in a loop, each task takes a ``v``-th of the time, and so do
fill and drain. A stage runs a group of micro-batches through its first partition, then through its
second, and so on. A group has ``n`` micro-batches, so that the first one is back from the other
stages when the stage starts its next partition.

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

``m`` need not be a multiple of ``n``: there are ``m // n`` groups, of ``n`` micro-batches or a few
more. (With a smaller last group, as elsewhere, stages can deadlock: ``m = 7``, ``n = 5``,
``v = 2``.) If all tasks of a kind take equally long, no schedule is faster for these partitions.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021),
https://arxiv.org/abs/2104.04473, Section 2.2.
"""

from __future__ import annotations

from collections.abc import Collection

from procpipe.plan.placement import looped, partitions_of
from procpipe.plan.schedules.one_f_one_b import one_f_one_b
from procpipe.plan.schedules.rows import one_forward_one_backward, plan_of_rows
from procpipe.plan.task import Plan


def interleaved(m: int, n: int, v: int, *, recompute: Collection[int] = ()) -> Plan:
    """Plan a mini-batch with ``v`` partitions a stage; with one, as ``one_f_one_b``."""
    if v == 1:
        return one_f_one_b(m, n, recompute=recompute)
    placement, groups = looped(v * n, n), _groups(m, n)
    rows = []
    for stage in range(n):
        ours = partitions_of(placement, stage)
        forward = [(i, j) for group in groups for j in ours for i in group]
        backward = [(i, j) for group in groups for j in reversed(ours) for i in group]
        num_warm_up = 2 * (n - 1 - stage) + (v - 1) * max(map(len, groups))
        rows.append(one_forward_one_backward(forward, backward, num_warm_up, recompute))
    return plan_of_rows(m, rows, placement)


def _groups(m: int, n: int) -> list[range]:
    """Divide micro-batches into ``m // n`` groups (at least one) of sizes as equal as possible."""
    num_groups = max(1, m // n)
    return [range(m * g // num_groups, m * (g + 1) // num_groups) for g in range(num_groups)]
