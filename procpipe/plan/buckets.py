"""Which gradients are added up over replicas together.

    last backward of a stage    layer 3 ──── layer 2 ──── layer 1 ──── layer 0
    its all-reduces                     └ bucket 3, 2 ────── └ bucket 1, 0 ────

Gradients are put into buckets in the order in which they become final. A replica begins its
all-reduces in the same order whatever its plan is, and no task waits for one, so they cannot
deadlock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

#: Gradients of so many bytes are added up at a time; larger ones alone.
BUCKET_BYTES = 25 * 2**20


def bucketed(sizes: Iterable[tuple[Hashable, int]]) -> list[list[int]]:
    """Divide gradients into buckets; return the places of each bucket's gradients.

    Args:
        sizes: of each gradient, in the order in which they become final, its dtype and its bytes.
    """
    found: list[list[int]] = []
    open_ones: dict[Hashable, tuple[list[int], int]] = {}  # by dtype, with their bytes
    for place, (dtype, size) in enumerate(sizes):
        bucket, num_bytes = open_ones.get(dtype, ([], 0))
        if bucket and num_bytes + size > BUCKET_BYTES:
            found.append(bucket)
            bucket, num_bytes = [], 0
        bucket.append(place)
        open_ones[dtype] = bucket, num_bytes + size
    return found + [bucket for bucket, _ in open_ones.values()]
