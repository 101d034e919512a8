"""What the NCCL transport computes before it calls NCCL; the rest needs GPUs."""

from __future__ import annotations

import pytest

from procpipe.channel.nccl import _num_blocks
from procpipe.torch_internals import in_a_batch
from tests.cases import for_each


def between(num_ranks, num_channels):
    """Return this many channels in each direction between each rank and the next."""
    return [
        channel
        for rank in range(num_ranks - 1)
        for kind in range(num_channels)
        for channel in ((rank, rank + 1, kind), (rank + 1, rank, kind))
    ]


@for_each(
    ("num_ranks", "num_channels", "expected"),
    [(2, 1, 4), (2, 4, 4), (3, 2, 4), (3, 4, 2), (2, 8, 2), (2, 16, 1), (2, 29, 1)],
)
def test_transfers_share_the_blocks_that_all_may_take(num_ranks, num_channels, expected):
    """All ranks use the same number, which the rank with most channels needs."""
    assert _num_blocks(between(num_ranks, num_channels)) == expected


@pytest.mark.parametrize(
    ("channels", "words"),
    [
        (
            between(3, 15),
            r"^rank 1 would send on 30 channels by NCCL, but there can be 29: use few",
        ),
        (
            [(1 + k, 0, 1) for k in range(30)],
            r"^rank 0 would receive on 30 channels by NCCL, but there can be 29",
        ),
    ],
)
def test_more_channels_than_streams_are_refused(channels, words):
    """Two communicators of one stream would wait for each other's peers, in any order."""
    with pytest.raises(ValueError, match=words):
        _num_blocks(channels)


class Batches:
    """A group of torch whose transfers fail."""

    def __init__(self):
        self.num_open = 0

    def _start_coalescing(self):
        self.num_open += 1

    def _end_coalescing(self):
        self.num_open -= 1
        raise RuntimeError("it was aborted")


def fail():
    raise KeyError("boom")


def test_a_batch_that_fails_is_ended():
    """Otherwise no later transfer of this thread in another group would begin."""
    group = Batches()

    with pytest.raises(KeyError, match="boom"):
        in_a_batch(group, fail)

    assert group.num_open == 0
