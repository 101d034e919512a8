"""When gradients are added up over replicas in a simulated step.

    last backward of a stage    layer 3 ──── layer 2 ──── layer 1 ──── layer 0
    its all-reduces                     └ bucket 3, 2 ────── └ bucket 1, 0 ────

A bucket's all-reduce begins when all its gradients are final: in the last B or W task of their
partition. Those of one stage run one after the other, beside the tasks. The gradients of parameters
that other stages have, too, come last, when those stages have sent theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


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
