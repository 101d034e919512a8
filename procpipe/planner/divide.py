"""Divides a sequence of costs into contiguous parts as evenly as possible.

    costs    1  2  3  4  5  6          2 parts: [4, 2], as 1+2+3+4 = 10 and 5+6 = 11
             └────┬───┘  └─┬┘

The division is optimal: it has the smallest largest part (the slowest stage determines the speed of
a pipeline), then the smallest sum of squares of the parts' sums. Of equals, the last part has the
most layers, then the one before it, and so on: in most schedules the first stages hold the most
micro-batches. Sums of floats are equal if they differ by rounding only.

    prefix[j]    cost of the layers before cut j; layers i to j cost prefix[j] - prefix[i]
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from procpipe.errors import BalanceError
from procpipe.words import counted

#: By how much of all costs two sums may differ by rounding.
_ROUNDING = 1e-12

#: How often the range of the smallest possible limit is halved.
_NUM_HALVINGS = 60


def divide(costs: Sequence[float], num_partitions: int) -> list[int]:
    """Divide layers into contiguous parts: the smallest largest cost, then the most even.

    Args:
        costs: one a layer, in any unit, from 0.
        num_partitions: from 1 to the number of layers; no part is empty.

    Returns:
        The number of layers in each part.

    Raises:
        BalanceError: fewer than 1 part, or more parts than layers.
        ValueError: lists every cost that is negative or not finite.

    Source: the interface of torchgpipe 0.0.7, ``torchgpipe.balance.blockpartition.solve``, which
        uses the heuristic of Bárány and Grinberg, "Block partitions of sequences" (2015).
    """
    check_num_partitions(num_partitions, len(costs))
    faults = [
        f"cost {cost} of layer {index}"
        for index, cost in enumerate(costs)
        if not (math.isfinite(cost) and cost >= 0)
    ]
    if faults:
        raise ValueError(f"{', '.join(faults)}: give each layer a finite cost from 0")
    prefix = list(accumulate(costs, initial=0.0))
    limit = _smallest_limit(prefix, num_partitions)
    return [j - i for i, j in pairwise(_evenest_cuts(prefix, num_partitions, limit))]


def check_num_partitions(num_partitions: int, num_layers: int) -> None:
    """Raise BalanceError unless there is a layer for each part, and a part."""
    layers, partitions = counted(num_layers, "layer"), counted(num_partitions, "partition")
    asked = f"cannot divide {layers} into {partitions}"
    if num_partitions < 1:
        raise BalanceError(f"{asked}: ask for at least 1")
    if num_partitions > num_layers:
        raise BalanceError(
            f"{asked}, each of at least one layer: ask for at most {num_layers} (start fewer "
            "processes, or give Stage more replicas), or divide the model into more layers"
        )


def _reach(prefix: Sequence[float], num_partitions: int, limit: float) -> list[int]:
    """Return, for p = 0 … num_partitions, the last cut that p parts within the limit can reach."""
    cuts = [0]
    for _ in range(num_partitions):
        cuts.append(bisect_right(prefix, prefix[cuts[-1]] + limit) - 1)
    return cuts


def _smallest_limit(prefix: Sequence[float], num_partitions: int) -> float:
    """Return the smallest possible cost of the largest part, and what rounding may add to it.

    A limit is possible if parts filled one after the other reach the end. They may be fewer than
    ``num_partitions``: dividing one further makes none larger.
    """
    total = prefix[-1]
    low, high = 0.0, total
    for _ in range(_NUM_HALVINGS):
        limit = (low + high) / 2
        if _reach(prefix, num_partitions, limit)[-1] == len(prefix) - 1:
            high = limit
        else:
            low = limit
    return high + _ROUNDING * total


def _evenest_cuts(prefix: Sequence[float], num_partitions: int, limit: float) -> list[int]:
    """Return the cuts within the limit with the smallest sum of squares.

    Dynamic programming over the parts, restricted to the cuts that p parts can reach from the left
    and the remaining ones from the right.
    """
    n = len(prefix) - 1
    from_left = _reach(prefix, num_partitions, limit)
    mirrored = [prefix[-1] - cost for cost in reversed(prefix)]
    from_right = [n - cut for cut in reversed(_reach(mirrored, num_partitions, limit))]
    slack = _ROUNDING * prefix[-1] ** 2
    first, squares = 0, [0.0]  # the smallest sum of squares up to each cut from ``first`` on
    choices: list[dict[int, int]] = []  # for each part, by the cut at its end that at its beginning
    for p in range(1, num_partitions + 1):
        ends = range(max(p, from_right[p]), min(n - (num_partitions - p), from_left[p]) + 1)
        best, chosen = [], {}
        for j in ends:
            low = max(first, bisect_left(prefix, prefix[j] - limit))
            starts = range(low, min(first + len(squares), j))
            sums = [squares[i - first] + (prefix[j] - prefix[i]) ** 2 for i in starts]
            least = min(sums)
            best.append(least)
            chosen[j] = next(i for i, s in zip(starts, sums, strict=True) if s <= least + slack)
        first, squares = ends.start, best
        choices.append(chosen)
    cuts = [n]
    for chosen in reversed(choices):
        cuts.append(chosen[cuts[-1]])
    return cuts[::-1]
