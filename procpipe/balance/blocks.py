"""Divides a sequence of costs into contiguous parts as evenly as possible.

    costs    1  2  3  4  5  6          2 parts: [4, 2], as 1+2+3+4 = 10 and 5+6 = 11
             └────┬───┘  └─┬┘

The division is optimal: it has the smallest largest part (the slowest stage determines the speed of
a pipeline), then the smallest sum of squares of the parts' sums. Of equals, the last part has the
most layers, then the one before it, and so on: in most schedules the first stages hold the most
micro-batches.

Costs are converted to integers on a common scale, so that comparisons are exact.

    n, m          layers, parts
    i, j          cuts: before layer 0 … behind layer n - 1, from 0 to n
    p             parts so far
    prefix[j]     cost of the layers before cut j; layers i to j cost prefix[j] - prefix[i]
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise, repeat
from operator import mul, sub

from procpipe.errors import BalanceError
from procpipe.words import counted


def blocks(costs: Sequence[float], num_partitions: int) -> list[int]:
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
    prefix = list(accumulate(_as_integers(costs), initial=0))
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


def _as_integers(costs: Sequence[float]) -> list[int]:
    """Return the costs on a scale on which all are integers."""
    faults = [
        f"cost {cost} of layer {index}"
        for index, cost in enumerate(costs)
        if not (math.isfinite(cost) and cost >= 0)
    ]
    if faults:
        raise ValueError(f"{', '.join(faults)}: give each layer a finite cost from 0")
    ratios = [cost.as_integer_ratio() for cost in costs]
    scale = math.lcm(*(denominator for _, denominator in ratios))
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def _smallest_limit(prefix: list[int], num_partitions: int) -> int:
    """Return the smallest possible cost of the largest part.

    A limit is possible if parts filled one after the other reach the end. They may be fewer than
    ``num_partitions``: dividing one further makes none larger.
    """
    total = prefix[-1]
    low, high = -(-total // num_partitions), total
    while low < high:
        limit = (low + high) // 2
        if _reach(prefix, num_partitions, limit)[-1] == len(prefix) - 1:
            high = limit
        else:
            low = limit + 1
    return low


def _reach(prefix: list[int], num_partitions: int, limit: int) -> list[int]:
    """Return, for p = 0 … num_partitions, the last cut that p parts within the limit can reach."""
    cuts = [0]
    for _ in range(num_partitions):
        cuts.append(bisect_right(prefix, prefix[cuts[-1]] + limit) - 1)
    return cuts


def _evenest_cuts(prefix: list[int], num_partitions: int, limit: int) -> list[int]:
    """Return the cuts within the limit with the smallest sum of squares.

    Dynamic programming over p, restricted to the cuts that p parts can reach from the left and the
    remaining parts from the right.
    """
    n = len(prefix) - 1
    from_left = _reach(prefix, num_partitions, limit)
    mirrored = [prefix[-1] - cost for cost in reversed(prefix)]
    from_right = [n - cut for cut in reversed(_reach(mirrored, num_partitions, limit))]

    step = _Divisions(first=0, squares=[0], choices=[0])
    steps = []
    for p in range(1, num_partitions + 1):
        first = max(p, from_right[p])
        last = min(n - (num_partitions - p), from_left[p])
        step = step.extended(prefix, limit, first, last)
        steps.append(step)

    cuts = [n]
    for step in reversed(steps):
        cuts.append(step.choices[cuts[-1] - step.first])
    return cuts[::-1]


class _Divisions:
    """The best divisions into p parts, for each cut at which part p may end.

    Attributes:
        first: the first such cut, that of the first entry of the lists.
        squares: the smallest sum of squares up to the cut.
        choices: the cut at which part p begins, the first of equals.
    """

    def __init__(self, first: int, squares: list[int], choices: list[int]) -> None:
        self.first = first
        self.squares = squares
        self.choices = choices

    def extended(self, prefix: list[int], limit: int, first: int, last: int) -> _Divisions:
        """Return the same for one more part, which ends at one of the cuts ``first … last``.

        The later a part ends, the later it begins at best (quadrangle inequality). So the best
        beginning for the middle cut bounds those on both sides: divide and conquer.

        Of the cost of a part from i to j, squares[i] + prefix[i]² - 2 · prefix[i] · prefix[j]
        depends on i.
        """
        starts = range(self.first, self.first + len(self.squares))
        costs = prefix[starts.start : starts.stop]
        heights = [square + cost * cost for square, cost in zip(self.squares, costs, strict=True)]
        squares, choices = [0] * (last + 1 - first), [0] * (last + 1 - first)

        halves = [(first, last, starts.start, starts.stop - 1)]
        while halves:
            first_j, last_j, first_i, last_i = halves.pop()
            if first_j > last_j:
                continue
            j = (first_j + last_j) // 2
            low = max(first_i, bisect_left(prefix, prefix[j] - limit))
            window = slice(low - starts.start, min(last_i, j - 1) + 1 - starts.start)
            values = list(map(sub, heights[window], map(mul, costs[window], repeat(2 * prefix[j]))))
            best = min(values)
            i = low + values.index(best)
            squares[j - first], choices[j - first] = best + prefix[j] ** 2, i
            halves += [(first_j, j - 1, first_i, i), (j + 1, last_j, i, last_i)]
        return _Divisions(first, squares, choices)
