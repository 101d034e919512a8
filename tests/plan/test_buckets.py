"""Gradients that are added up over replicas together."""

from __future__ import annotations

from procpipe.plan.buckets import BUCKET_BYTES, bucketed


def test_gradients_fill_buckets_in_their_order() -> None:
    half = BUCKET_BYTES // 2
    sizes = [("a", half), ("b", 1), ("a", half), ("a", 1), ("b", 2), ("a", 2 * BUCKET_BYTES)]

    assert bucketed(sizes) == [[0, 2], [3], [5], [1, 4]]
    assert bucketed([]) == []
