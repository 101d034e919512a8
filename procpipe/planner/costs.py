"""One table of layers, and the seconds and bytes of each partition of any balance of them.

    a row a layer    F, R, B, I, W seconds     bytes of its output, what autograd keeps, parameters
    a machine        host_s a task             send_s a byte

A table is of one size of micro-batch. It is filled by measuring layers one by one, by counting
their FLOPs (``procpipe.balance.profile``), or from a recorded run.

A partition costs the sum of its layers. What autograd saves within it is what each layer saves of
its own, and the values between its layers that one of them saves. A value counts once, however many
layers save it. An in-place layer returns the memory of its input, so its input and output are one
value:

    Linear ──a── ReLU(inplace) ──a── Linear       a, saved by both: counted once
    Linear ──a── Dropout ──b── Linear             b, saved by the second Linear; a by no layer

A partition's input and output are not counted here, but by ``memory.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from procpipe.plan.task import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    KINDS,
    RECOMPUTE,
    WEIGHT_GRADIENT,
)


@dataclass(frozen=True)
class Layer:
    """What one layer costs on one micro-batch; a partition is like one large layer."""

    name: str  # its name in the model
    seconds: Mapping[str, float]  # of a task, by its kind; backward adds to existing gradients
    output_bytes: int = 0  # its output: of a partition, also each message to the next one
    held_bytes: int = 0  # what autograd saves, output and stashed skip tensors; not its input
    kept_bytes: int = 0  # what autograd saves that is neither input nor output nor a skip tensor
    kept_input_bytes: int = 0  # what autograd saves of its input
    kept_output_bytes: int = 0  # what autograd saves of its output
    put_off_bytes: int = 0  # what is kept between ``I`` and ``W``
    is_in_place: bool = False  # whether its output is in the memory of its input
    parameter_bytes: int = 0  # its parameters and buffers
    trained_bytes: int = 0  # parameters that get a gradient, which replicas add up


def task_seconds(
    forward_s: float,
    backward_s: float,
    recompute_s: float | None = None,
    input_gradient_s: float | None = None,
) -> dict[str, float]:
    """Return the seconds of tasks by kind.

    By default a recomputation takes as long as a forward, and ``I`` half of the backward. ``W``
    takes the rest.
    """
    first_s = backward_s / 2 if input_gradient_s is None else input_gradient_s
    return {
        FORWARD: forward_s,
        RECOMPUTE: forward_s if recompute_s is None else recompute_s,
        BACKWARD: backward_s,
        INPUT_GRADIENT: first_s,
        WEIGHT_GRADIENT: max(0.0, backward_s - first_s),
    }


@dataclass(frozen=True)
class Machine:
    """What running tasks on several processes adds to the seconds of layers."""

    host_s: float = 0.0  # seconds of the host's work before each task
    send_s: float = 0.0  # seconds a byte of a message, in which its sender does nothing else
    hop_s: float = 0.0  # seconds from then on until the receiver has it; 0 within a stage
    step_s: float = 0.0  # seconds of a step before its first task and after its last one


@dataclass(frozen=True)
class Costs:
    """What one micro-batch costs in each partition."""

    partitions: tuple[Layer, ...]  # in order, each like one layer
    machine: Machine = Machine()
    input_bytes: int = 0  # the model's input, as stage 0 keeps it
    #: The skip tensors between each pair of partitions.
    skip_bytes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    target_bytes: int = 0  # the target
    num_replicas: int = 1  # how many pipelines add up gradients

    @classmethod
    def uniform(
        cls,
        num_partitions: int,
        *,
        forward_s: float = 1.0,
        backward_s: float = 2.0,
        recompute_s: float | None = None,
        input_gradient_s: float | None = None,
        **sizes: Any,
    ) -> Costs:
        """Return the costs of equal partitions; seconds as in ``task_seconds``, sizes as in Layer.

        A machine takes no time in addition: ``replace(costs, machine=Machine(…))`` is another.
        """
        seconds = task_seconds(forward_s, backward_s, recompute_s, input_gradient_s)
        return cls((Layer("", seconds, **sizes),) * num_partitions)

    @cached_property
    def seconds(self) -> Mapping[str, Sequence[float]]:
        """The seconds of tasks by their kind, for each partition."""
        return {kind: [one.seconds[kind] for one in self.partitions] for kind in KINDS}

    def all_reduce_s(self, num_bytes: float) -> float:
        """Return the seconds in which replicas add up gradients, in a ring.

        Each of them sends every other one's part of them once to be added to, and once as the sum.

        Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations" (2009), https://doi.org/10.1016/j.jpdc.2008.09.002
        """
        part_s = self.machine.hop_s + self.machine.send_s * num_bytes / self.num_replicas
        return 2 * (self.num_replicas - 1) * part_s

    def sends_s(self, placement: Sequence[int]) -> Mapping[str, Sequence[float]]:
        """Return, by kind of task, the seconds in which each partition's stage sends its result."""
        p = len(self.partitions)
        sent = {kind: [0.0] * p for kind in KINDS}
        ends = [(j, j + 1, self.partitions[j].output_bytes) for j in range(p - 1)]
        skips = [(a, b, size) for (a, b), size in self.skip_bytes.items()]
        for a, b, size in ends + skips:
            if placement[a] != placement[b]:
                sent[FORWARD][a] += self.machine.send_s * size
                for kind in (BACKWARD, INPUT_GRADIENT):
                    sent[kind][b] += self.machine.send_s * size
        return sent


@dataclass(frozen=True)
class Skip:
    """A skip tensor of one micro-batch."""

    source: int  # the index of the layer that stashes it
    destinations: tuple[int, ...]  # the indices of the layers that pop it
    tensor_bytes: int  # its size
    kept_bytes: int = 0  # what autograd saves of it where it is popped


@dataclass(frozen=True)
class Tie:
    """A parameter or buffer that several layers use."""

    layers: tuple[int, ...]  # the indices of these layers, in order
    num_bytes: int  # its size, which each of the layers has in its ``parameter_bytes``
    trained_bytes: int  # and in its ``trained_bytes``


@dataclass(frozen=True)
class Table:
    """The costs of a model's layers on one micro-batch."""

    samples: int  # the size of the micro-batch
    layers: tuple[Layer, ...]  # in order
    loss: Layer | None = None  # the loss function as a layer of the last partition, if known
    skips: tuple[Skip, ...] = ()
    ties: tuple[Tie, ...] = ()
    input_bytes: int = 0  # the model's input
    target_bytes: int = 0  # the target; 0 if there is none

    def timed(self, balance: Sequence[int], task_s: Mapping[tuple[str, int], float]) -> Table:
        """Return the layers with such seconds that each partition's add up to what its tasks took.

        A kind of task that was not measured is taken to differ by as much as the whole backward,
        which is measured, and a recomputation by as much as the forward.

        Args:
            balance: of the run in which tasks were measured.
            task_s: seconds by kind of task and partition.
        """
        found: list[Layer] = []
        for j, part in enumerate(self.parts(balance)):
            sums = {kind: sum(layer.seconds[kind] for layer in part) for kind in KINDS}
            took = {kind: task_s[kind, j] for kind in KINDS if (kind, j) in task_s}
            if "I" in took and "B" not in took:
                took["B"] = took["I"] + took["W"]
            factors = {kind: took[kind] / sums[kind] if sums[kind] else 1.0 for kind in took}
            like = {"R": factors["F"]} | dict.fromkeys("IW", factors["B"]) | factors
            for layer in part:
                seconds = {kind: layer.seconds[kind] * like[kind] for kind in KINDS}
                found.append(replace(layer, seconds=seconds))
        loss = None if self.loss is None else found.pop()
        return replace(self, layers=tuple(found), loss=loss)

    def costs(
        self, balance: Sequence[int], machine: Machine | None = None, num_replicas: int = 1
    ) -> Costs:
        """Return the costs of each partition.

        Raises:
            ValueError: the balance is not one of these layers.
        """
        parts = self.parts(balance)
        crossing, kept_bytes = self._skip_bytes(balance)
        _, trained_bytes = self._sizes(_partition_of_each(balance))
        return Costs(
            tuple(
                Layer(
                    f"partition {j}",
                    {kind: math.fsum(layer.seconds[kind] for layer in part) for kind in KINDS},
                    output_bytes=part[-1].output_bytes,
                    kept_bytes=_kept_bytes(part) + kept_bytes[j],
                    put_off_bytes=sum(layer.put_off_bytes for layer in part),
                    trained_bytes=trained_bytes[j],
                )
                for j, part in enumerate(parts)
            ),
            machine or Machine(),
            self.input_bytes,
            crossing,
            self.target_bytes,
            num_replicas,
        )

    def static_bytes(
        self, balance: Sequence[int], placement: Sequence[int], states: float
    ) -> tuple[int, ...]:
        """Return the bytes of each stage's parameters, gradients and optimizer states.

        The optimizer has ``states`` bytes for each byte of trained parameters.
        """
        sizes, trained = self._sizes([placement[j] for j in _partition_of_each(balance)])
        return tuple(
            own + math.ceil((1 + states) * with_gradient)
            for own, with_gradient in zip(sizes, trained, strict=True)
        )

    def layer_seconds(self, *, is_recomputed: bool = False) -> list[float]:
        """List the seconds of each layer's forward, backward and, if wanted, recomputation.

        Those of the loss are the last layer's.
        """
        kinds = "FRB" if is_recomputed else "FB"
        of_each = self.parts([1] * len(self.layers))
        return [sum(one.seconds[kind] for kind in kinds for one in part) for part in of_each]

    def parts(self, balance: Sequence[int]) -> list[tuple[Layer, ...]]:
        """Divide the layers into partitions; the last one has the loss."""
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

    def _skip_bytes(self, balance: Sequence[int]) -> tuple[dict[tuple[int, int], int], list[int]]:
        """Return the bytes of skip tensors between each pair of partitions.

        And those that autograd saves of skip tensors within each partition.
        """
        partition_of, kept = _partition_of_each(balance), [0] * len(balance)
        crossing: Counter[tuple[int, int]] = Counter()
        for skip in self.skips:
            source = partition_of[skip.source]
            for destination in {partition_of[k] for k in skip.destinations}:
                if destination == source:
                    kept[source] += skip.kept_bytes
                else:
                    crossing[source, destination] += skip.tensor_bytes
        return dict(sorted(crossing.items())), kept

    def _sizes(self, group_of: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the bytes of parameters, and of trained ones, of each group of layers.

        What several layers of a group use counts once. ``group_of`` has the group of each layer,
        from 0; the loss is in that of the last.
        """
        sizes, trained = [0] * (max(group_of) + 1), [0] * (max(group_of) + 1)
        loss = [] if self.loss is None else [self.loss]
        for group, layer in zip([*group_of, group_of[-1]], [*self.layers, *loss], strict=False):
            sizes[group] += layer.parameter_bytes
            trained[group] += layer.trained_bytes
        for tie in self.ties:
            for group, num_users in Counter(group_of[k] for k in tie.layers).items():
                sizes[group] -= (num_users - 1) * tie.num_bytes
                trained[group] -= (num_users - 1) * tie.trained_bytes
        return sizes, trained


def _partition_of_each(balance: Sequence[int]) -> list[int]:
    """List the partition of each layer."""
    return [j for j, count in enumerate(balance) for _ in range(count)]


def _kept_bytes(part: Sequence[Layer]) -> int:
    """Return the bytes that autograd saves within a partition, without its input and output."""
    kept = [layer.kept_bytes for layer in part]
    # Value k is the input of layer k; the values of a run share their memory.
    runs: list[list[int]] = [[0]]
    for k, layer in enumerate(part, start=1):
        if not layer.is_in_place:
            runs.append([])
        runs[-1].append(k)
    for run in runs:
        if 0 in run or len(part) in run:
            continue
        by_users = [part[k].kept_input_bytes for k in run]
        by_makers = [part[k - 1].kept_output_bytes for k in run]
        kept.append(max(by_users + by_makers))
    return sum(kept)
