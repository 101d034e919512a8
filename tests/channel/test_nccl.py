"""What the NCCL transport computes before it calls NCCL; the rest needs GPUs."""

from __future__ import annotations

import pytest

from procpipe.channel.nccl import blocks_of
from procpipe.torch_internals import in_a_batch
from tests.cases import for_each


@for_each(
    ("num_multiprocessors", "num_peers", "expected"),
    [(132, 1, 8), (132, 2, 8), (132, 3, 4), (132, 7, 2), (108, 2, 4), (40, 1, 4), (16, 2, 1)],
)
def test_transfers_share_the_blocks_that_all_may_take(num_multiprocessors, num_peers, expected):
    """A power of two, to which NCCL would round up; what other ranks have does not count."""
    star = [pair for peer in range(1, 1 + num_peers) for pair in ((0, peer), (peer, 0))]

    assert (
        blocks_of(0, [*star, *((8, rank) for rank in range(9, 30))], num_multiprocessors)
        == expected
    )


def test_more_communicators_than_streams_are_refused():
    """Two of one stream would wait for each other's peers, in any order."""
    pairs = [(0, peer) for peer in range(1, 31)]
    assert blocks_of(0, pairs[1:], 132) == 1
    with pytest.raises(ValueError, match=r"^rank 0 .* had 30 communicators, but there can be 29: "):
        blocks_of(0, pairs, 132)


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
