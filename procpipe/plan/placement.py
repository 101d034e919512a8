"""Which stage runs which partition, where there are several partitions a stage.

    partitions 0 … 5 on three stages      stage 0   stage 1   stage 2

    looped   0 1 2 0 1 2                   0 3       1 4       2 5
    folded   0 1 2 2 1 0                   0 5       1 4       2 3

Looped, every boundary is between stages. Folded, the micro-batch turns on the last stage and comes
back to the first, whose two partitions are the first to start and the last to end: all stages
hold micro-batches for about as long.

Partition 0 is on stage 0, where the mini-batch is, in every placement. The last partition, and so
the loss, is on the last stage when looped and on stage 0 when folded in two.

Source: looped, Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters"
(2021), https://arxiv.org/abs/2104.04473, Section 2.2; folded, Qi et al., "Pipeline Parallelism with
Controllable Memory" (2024), https://arxiv.org/abs/2405.15362, Section 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def looped(num_partitions: int, num_stages: int) -> tuple[int, ...]:
    """Place partition ``j`` on stage ``j mod n``."""
    return tuple(j % num_stages for j in range(num_partitions))


def folded(num_partitions: int, num_stages: int) -> tuple[int, ...]:
    """Place partitions on stage 0, 1, … and back again, and so on."""
    there_and_back = [*range(num_stages), *reversed(range(num_stages))]
    return tuple(there_and_back[j % (2 * num_stages)] for j in range(num_partitions))


def partitions_of(placement: Sequence[int], stage: int) -> tuple[int, ...]:
    """List the partitions of a stage, in the order of the model."""
    return tuple(j for j, its_stage in enumerate(placement) if its_stage == stage)


def placement_faults(placement: Sequence[int], num_stages: int) -> Iterator[str]:
    """Walk through what keeps a placement from being one for so many stages."""
    for j, stage in enumerate(placement):
        if not 0 <= stage < num_stages:
            yield f"partition {j} is placed on stage {stage}, but there are {num_stages}, from 0"
    for stage in range(num_stages):
        if stage not in placement:
            yield f"stage {stage} has no partition in the placement {list(placement)}"
    if placement and placement[0] != 0:
        yield f"partition 0 is placed on stage {placement[0]}, but the mini-batch is on stage 0"
