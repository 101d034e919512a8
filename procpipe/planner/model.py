"""Computes the costs of any balance, at any size of micro-batch, from those of single layers.

    measured      seconds and bytes of a layer on 2, 8 and 32 samples
    between       a straight line from one size to the next; the last line is extended
    a partition   the sum of its layers; for bytes see below

What autograd saves within a partition is what each layer saves of its own, and the values between
its layers that one of them saves. A value counts once, however many layers save it. An in-place
layer returns the memory of its input, so its input and output are one value:

    Linear ──a── ReLU(inplace) ──a── Linear       a, saved by both: counted once
    Linear ──a── Dropout ──b── Linear             b, saved by the second Linear; a by no layer

A partition's input and output are not counted here, but by ``memory.py``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from procpipe.plan.buckets import BUCKET_BYTES, bucketed
from procpipe.planner.all_reduce import Bucket
from procpipe.planner.costs import Costs


@dataclass(frozen=True)
class Layer:
    """The fields of ``balance.LayerProfile``, with a number for each size in ``Model.samples``.

    ``input_gradient_s`` is half of the backward if left out.
    """

    name: str
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    output_bytes: tuple[float, ...]
    input_gradient_s: tuple[float, ...] = ()
    kept_bytes: tuple[float, ...] = ()
    kept_input_bytes: tuple[float, ...] = ()
    kept_output_bytes: tuple[float, ...] = ()
    put_off_bytes: tuple[float, ...] = ()
    is_in_place: bool = False
    parameter_bytes: int = 0
    trained_bytes: int = 0
    type: str = ""


@dataclass(frozen=True)
class Skip:
    """The fields of ``balance.SkipProfile``, with a number for each size in ``Model.samples``."""

    source: int
    destinations: tuple[int, ...]
    tensor_bytes: tuple[float, ...]
    kept_bytes: tuple[float, ...] = ()


@dataclass(frozen=True)
class TiedLayers:
    """Layers that use one parameter or buffer."""

    name: str  # its first name in the model
    layers: tuple[int, ...]  # the layers, in order, at least two
    num_bytes: int  # its size, which each of the layers has in its ``parameter_bytes``
    is_trained: bool = True  # whether it is in their ``trained_bytes``, too


@dataclass(frozen=True)
class Link:
    """The latency and the bandwidth between devices."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of a message."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def all_reduce_s(self, num_bytes: float, num_replicas: int) -> float:
        """Return the seconds in which replicas add up a tensor, in a ring.

        Each of them sends every other one's part of it once to be added to, and once as the sum.

        Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations" (2009), https://doi.org/10.1016/j.jpdc.2008.09.002
        """
        return 2 * (num_replicas - 1) * self.seconds(num_bytes / num_replicas)

    def all_gather_s(self, num_bytes: float, num_replicas: int) -> float:
        """Return the seconds in which each replica gets all others' tensors, in a ring."""
        return (num_replicas - 1) * self.seconds(num_bytes)


@dataclass(frozen=True)
class Model:
    """The costs of a model."""

    samples: tuple[int, ...]  # the sizes of the measured micro-batches, ascending, at least one
    layers: tuple[Layer, ...]  # the layers, in order
    #: The loss function as a layer of the last partition, if it was measured.
    loss: Layer | None = None
    skips: tuple[Skip, ...] = ()  # the skip tensors
    input_bytes: tuple[float, ...] = ()  # the model's input, for each size
    target_bytes: tuple[float, ...] = ()  # the target, for each size; empty if there is none
    #: Seconds of a forward task and of a backward task in addition to the layers'.
    start_s: tuple[float, float] = (0.0, 0.0)
    #: First and last of layers that must be in one partition.
    shared: tuple[tuple[int, int], ...] = ()
    ties: tuple[TiedLayers, ...] = ()  # the parameters and buffers that several layers use

    @property
    def groups(self) -> tuple[int, ...]:
        """The numbers of layers between the places where the model may be cut."""
        within = {k for first, last in self.shared for k in range(first + 1, last + 1)}
        cuts = [k for k in range(len(self.layers)) if k not in within]
        return tuple(after - cut for cut, after in pairwise([*cuts, len(self.layers)]))

    def costs(self, balance: Sequence[int], num_samples: int, link: Link) -> Costs:
        """Return the costs of each partition, for micro-batches of ``num_samples``."""
        parts = self._parts(balance)
        output_bytes = tuple(self._count(part[-1].output_bytes, num_samples) for part in parts)
        at = _line(self.samples, num_samples)
        start_f_s, start_b_s = self.start_s
        forward_s = tuple(start_f_s + sum(at(layer.forward_s) for layer in p) for p in parts)
        backward_s = tuple(start_b_s + sum(at(layer.backward_s) for layer in p) for p in parts)
        halves_s = (start_b_s + sum(map(at, map(_first_half_s, part))) for part in parts)
        crossing, kept_inside = self._skip_bytes(balance, num_samples)
        tied_bytes = self._tied_bytes(balance)
        return Costs(
            forward_s=forward_s,
            backward_s=backward_s,
            recompute_s=forward_s,
            input_gradient_s=tuple(map(min, halves_s, backward_s)),
            transfer_s=tuple(map(link.seconds, output_bytes[:-1])),
            input_bytes=self._count(self.input_bytes, num_samples),
            output_bytes=output_bytes,
            skip_bytes=crossing,
            target_bytes=self._count(self.target_bytes, num_samples),
            saved_bytes=tuple(
                math.ceil(_kept_bytes(part, at) + kept_inside[j]) for j, part in enumerate(parts)
            ),
            put_off_bytes=tuple(
                math.ceil(sum(at(layer.put_off_bytes) for layer in part)) for part in parts
            ),
            tied_bytes=tied_bytes,
            tied_s={tie: link.seconds(size) for tie, size in tied_bytes.items()},
        )

    def buckets(
        self,
        balance: Sequence[int],
        placement: Sequence[int],
        num_samples: int,
        link: Link,
        num_replicas: int,
    ) -> tuple[tuple[Bucket, ...], ...]:
        """Return what each stage adds up over replicas, for ``Costs.buckets``.

        A layer's gradients are taken to be final at the end of its backward, all at once. The link
        is that between replicas.
        """
        partition_of, shares = _partition_of(balance), self._backward_shares(balance, num_samples)
        stage_of = [placement[j] for j in partition_of]
        layer_bytes, tied_bytes = self._gradient_bytes(stage_of)
        found = []
        for stage, of_ties in enumerate(tied_bytes):
            pieces = [
                (k, min(BUCKET_BYTES, layer_bytes[k] - first))
                for k in reversed(range(len(self.layers)))
                if stage_of[k] == stage
                for first in range(0, layer_bytes[k], BUCKET_BYTES)
            ]
            of_stage = []
            for places in bucketed(("", size) for _, size in pieces):
                in_bucket = [pieces[place] for place in places]
                num_bytes = sum(size for _, size in in_bucket)
                final = {partition_of[k]: shares[k] for k, _ in in_bucket}
                seconds = link.all_reduce_s(num_bytes, num_replicas)
                of_stage.append(Bucket(num_bytes, seconds, tuple(final.items())))
            if of_ties:
                of_stage.append(Bucket(of_ties, link.all_gather_s(of_ties, num_replicas), ()))
            found.append(tuple(of_stage))
        return tuple(found)

    def static_bytes(
        self, balance: Sequence[int], placement: Sequence[int], states: float
    ) -> tuple[int, ...]:
        """Return the bytes of each stage's parameters, gradients and optimizer states.

        What several layers of a stage use counts once. The optimizer has ``states`` bytes for each
        byte of trained parameters.
        """

        def whole(parameter_bytes: int, trained_bytes: int) -> int:
            return parameter_bytes + math.ceil((1 + states) * trained_bytes)

        found = [0] * (max(placement) + 1)
        for part, stage in zip(self._parts(balance), placement, strict=True):
            found[stage] += sum(whole(la.parameter_bytes, la.trained_bytes) for la in part)
        stage_of = [placement[j] for j in _partition_of(balance)]
        for tie in self.ties:
            for stage, users in Counter(stage_of[k] for k in tie.layers).items():
                trained_bytes = tie.num_bytes if tie.is_trained else 0
                found[stage] -= (users - 1) * whole(tie.num_bytes, trained_bytes)
        return tuple(found)

    def layer_seconds(self, num_samples: int, *, is_recomputed: bool = False) -> list[float]:
        """List the seconds of each layer's forward, backward and, if wanted, recomputation."""
        at = _line(self.samples, num_samples)
        num_forwards = 2 if is_recomputed else 1
        layers_s = [num_forwards * at(la.forward_s) + at(la.backward_s) for la in self.layers]
        if self.loss is not None:
            layers_s[-1] += num_forwards * at(self.loss.forward_s) + at(self.loss.backward_s)
        return layers_s

    def layer_bytes(self, num_samples: int, states: float, num_held: int) -> list[float]:
        """Estimate the bytes of each layer: static ones, and of ``num_held`` micro-batches."""
        at = _line(self.samples, num_samples)
        return [
            layer.parameter_bytes
            + (1 + states) * layer.trained_bytes
            + num_held * (at(layer.kept_bytes) + at(layer.output_bytes))
            for layer in self.layers
        ]

    def _parts(self, balance: Sequence[int]) -> list[tuple[Layer, ...]]:
        if sum(balance) != len(self.layers) or min(balance, default=0) < 1:
            raise ValueError(
                f"the balance {list(balance)} is not one of {len(self.layers)} layers: give each "
                "partition at least one, and all of them together all layers"
            )
        cuts = pairwise(accumulate(balance, initial=0))
        parts = [self.layers[first:last] for first, last in cuts]
        if self.loss is not None:
            parts[-1] = (*parts[-1], self.loss)
        return parts

    def _count(self, measured: Sequence[float], num_samples: int) -> int:
        return math.ceil(_line(self.samples, num_samples)(measured))

    def _skip_bytes(
        self, balance: Sequence[int], num_samples: int
    ) -> tuple[dict[tuple[int, int], int], list[int]]:
        """Return the bytes of skip tensors between each pair of partitions.

        And those that autograd saves of skip tensors within each partition.
        """
        partition_of, kept = _partition_of(balance), [0] * len(balance)
        crossing: Counter[tuple[int, int]] = Counter()
        for skip in self.skips:
            source = partition_of[skip.source]
            for destination in {partition_of[k] for k in skip.destinations}:
                if destination == source:
                    kept[source] += self._count(skip.kept_bytes, num_samples)
                else:
                    pair = source, destination
                    crossing[pair] += self._count(skip.tensor_bytes, num_samples)
        return dict(sorted(crossing.items())), kept

    def _tied_bytes(self, balance: Sequence[int]) -> dict[tuple[int, ...], int]:
        """Return the bytes of trained parameters that each set of partitions has in common."""
        partition_of = _partition_of(balance)
        found: dict[tuple[int, ...], int] = {}
        for tie in self.ties:
            users = tuple(dict.fromkeys(partition_of[k] for k in tie.layers))
            if tie.is_trained and len(users) > 1:
                found[users] = found.get(users, 0) + tie.num_bytes
        return found

    def _gradient_bytes(self, stage_of: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the bytes of each layer's gradients, and of those that stages have in common.

        Each parameter counts once on a stage, and in the latter for each stage.
        """
        layer_bytes = [layer.trained_bytes for layer in self.layers]
        tied_bytes = [0] * (max(stage_of) + 1)
        for tie in (tie for tie in self.ties if tie.is_trained):
            stages = {stage_of[k] for k in tie.layers}
            for stage in stages:
                users = [k for k in tie.layers if stage_of[k] == stage]
                # The first layer is the last to add to the gradient.
                for k in users[1:] if len(stages) == 1 else users:
                    layer_bytes[k] -= tie.num_bytes
                tied_bytes[stage] += tie.num_bytes if len(stages) > 1 else 0
        return layer_bytes, tied_bytes

    def _backward_shares(self, balance: Sequence[int], num_samples: int) -> list[float]:
        """Return the share of its partition's backward after which each layer's is done."""
        at = _line(self.samples, num_samples)
        shares: list[float] = []
        for count, part in zip(balance, self._parts(balance), strict=True):
            done_s = list(accumulate(at(layer.backward_s) for layer in reversed(part)))
            whole_s = done_s[-1] or 1.0
            shares += [seconds / whole_s for seconds in done_s[len(part) - count :][::-1]]
        return shares


def _partition_of(balance: Sequence[int]) -> list[int]:
    return [j for j, count in enumerate(balance) for _ in range(count)]


#: Returns what a number that was measured at some sizes is at another.
_Line = Callable[[Sequence[float]], float]


def _line(samples: Sequence[int], num_samples: int) -> _Line:
    """Interpolate from one measured size to the next; of one size, in proportion."""
    sizes = samples if len(samples) > 1 else (0, *samples)
    last = min(max(1, bisect_left(sizes, num_samples)), len(sizes) - 1)
    share = (num_samples - sizes[last - 1]) / (sizes[last] - sizes[last - 1])

    def at(measured: Sequence[float]) -> float:
        if not measured:
            return 0.0
        low, high = (measured if len(measured) > 1 else (0.0, *measured))[last - 1 : last + 1]
        return max(0.0, low + (high - low) * share)

    return at


def _first_half_s(layer: Layer) -> tuple[float, ...]:
    return layer.input_gradient_s or tuple(seconds / 2 for seconds in layer.backward_s)


def _kept_bytes(part: Sequence[Layer], at: _Line) -> float:
    """Return the bytes that autograd saves within a partition, without its input and output."""
    kept = [at(layer.kept_bytes) for layer in part]
    # Value k is the input of layer k; the values of a run share their memory.
    runs: list[list[int]] = [[0]]
    for k, layer in enumerate(part, start=1):
        if not layer.is_in_place:
            runs.append([])
        runs[-1].append(k)
    for run in runs:
        if 0 in run or len(part) in run:
            continue
        by_users = [at(part[k].kept_input_bytes) for k in run]
        by_makers = [at(part[k - 1].kept_output_bytes) for k in run]
        kept.append(max(by_users + by_makers))
    return math.fsum(kept)
