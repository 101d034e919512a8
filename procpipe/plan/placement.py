"""Which stage runs which partition, if there are several partitions a stage.

    partitions 0 … 5 on three stages      stage 0   stage 1   stage 2

    looped   0 1 2 0 1 2                   0 3       1 4       2 5
    folded   0 1 2 2 1 0                   0 5       1 4       2 3

Looped, every boundary is between stages. Folded, a micro-batch turns at the last stage and returns
to the first, so that all stages hold micro-batches for about the same time.

In every placement partition 0 is on stage 0, which has the mini-batch. The last partition, and so
the loss, is on the last stage if looped, and on stage 0 if folded once.

Source: looped, Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters"
(2021), https://arxiv.org/abs/2104.04473, Section 2.2; folded, Qi et al., "Pipeline Parallelism with
Controllable Memory" (2024), https://arxiv.org/abs/2405.15362, Section 2.
"""

from __future__ import annotations

from collections.abc import Sequence


def looped(num_partitions: int, num_stages: int) -> tuple[int, ...]:
    """Place partition ``j`` on stage ``j mod n``."""
    return tuple(j % num_stages for j in range(num_partitions))


def folded(num_partitions: int, num_stages: int) -> tuple[int, ...]:
    """Place partitions on stages 0, 1, …, n - 1, n - 1, …, 0, and so on."""
    there_and_back = [*range(num_stages), *reversed(range(num_stages))]
    return tuple(there_and_back[j % (2 * num_stages)] for j in range(num_partitions))


def partitions_of(placement: Sequence[int], stage: int) -> tuple[int, ...]:
    """List the partitions of a stage, in the order of the model."""
    return tuple(j for j, its_stage in enumerate(placement) if its_stage == stage)
