"""Adding up gradients over replicas: which are added up together, and when that can begin.

    last backward of a stage    layer 3 ──── layer 2 ──── layer 1 ──── layer 0
    its all-reduces                     └ bucket 3, 2 ────── └ bucket 1, 0 ────

Gradients are put into buckets in the order in which they become final. A bucket's all-reduce begins
when all its gradients are final: in the last B or W task of their partition. Those of one stage run
one after the other, beside the tasks. The gradients of parameters that other stages have, too, come
last, when those stages have sent theirs.

A replica begins its all-reduces in the same order whatever its plan is, and no task waits for one,
so they cannot deadlock, and ``verify.py`` does not check them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from procpipe.plan.task import BACKWARD, WEIGHT_GRADIENT, Task

#: Gradients of so many bytes are added up at a time; larger ones alone.
BUCKET_BYTES = 25 * 2**20


class Bucket(NamedTuple):
    """Gradients of one stage that are added up together."""

    num_bytes: int  # their size
    seconds: float  # of their all-reduce
    #: The partitions that they are of, each with the share of its last B or W task after which they
    #: are final, from 0 to 1; empty for those of parameters that other stages have, too.
    final: tuple[tuple[int, float], ...]


class AllReduce(NamedTuple):
    """When a bucket is added up in a simulated step."""

    stage: int
    num_bytes: int
    start_s: float
    end_s: float


def last_additions(tasks: Sequence[Task]) -> dict[int, Task]:
    """Return the last task that adds to each partition's gradients, the last of all first.

    Args:
        tasks: those of a stage, in order.
    """
    found: dict[int, Task] = {}
    for task in reversed(tasks):
        if task.kind in (BACKWARD, WEIGHT_GRADIENT):
            found.setdefault(task.j, task)
    return found


def in_a_row(buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """Merge neighbours that become final together, and so run as one: less to simulate."""
    found: list[Bucket] = []
    for bucket in buckets:
        if found and found[-1].final == bucket.final:
            before = found.pop()
            num_bytes, seconds = (
                before.num_bytes + bucket.num_bytes,
                before.seconds + bucket.seconds,
            )
            bucket = Bucket(num_bytes, seconds, bucket.final)
        found.append(bucket)
    return tuple(found)


def bucketed(sizes: Iterable[tuple[Hashable, int]]) -> list[list[int]]:
    """Divide gradients into buckets; return the places of each bucket's gradients.

    Args:
        sizes: of each gradient, in the order in which they become final, its dtype and its bytes.
    """
    found: list[list[int]] = []
    open_ones: dict[Hashable, list[int]] = {}
    num_bytes: dict[Hashable, int] = {}
    for place, (dtype, size) in enumerate(sizes):
        held = open_ones.setdefault(dtype, [])
        if held and num_bytes[dtype] + size > BUCKET_BYTES:
            found.append(held)
            held = open_ones[dtype] = []
            num_bytes[dtype] = 0
        held.append(place)
        num_bytes[dtype] = num_bytes.get(dtype, 0) + size
    return found + list(open_ones.values())
