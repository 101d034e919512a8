"""One table of layers, and the costs of any balance of them.

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
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from procpipe.planner.costs import Costs


@dataclass(frozen=True)
class Layer:
    """What one layer costs on one micro-batch."""

    name: str  # its name in the model
    forward_s: float  # seconds of its forward
    backward_s: float  # seconds of its backward, which adds to existing gradients
    input_gradient_s: float | None = None  # of ``I`` of a split backward; by default half of it
    weight_gradient_s: float | None = None  # of ``W``; by default the rest
    recompute_s: float | None = None  # of its recomputation; by default as its forward
    output_bytes: int = 0  # its output
    held_bytes: int = 0  # what autograd saves, output and stashed skip tensors; not its input
    kept_bytes: int = 0  # what autograd saves that is neither input nor output nor a skip tensor
    kept_input_bytes: int = 0  # what autograd saves of its input
    kept_output_bytes: int = 0  # what autograd saves of its output
    put_off_bytes: int = 0  # what is kept between ``I`` and ``W``
    is_in_place: bool = False  # whether its output is in the memory of its input
    parameter_bytes: int = 0  # its parameters and buffers
    trained_bytes: int = 0  # parameters that get a gradient

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of a task by its kind."""
        first_s = self.backward_s / 2 if self.input_gradient_s is None else self.input_gradient_s
        rest_s = max(0.0, self.backward_s - first_s)
        return {
            "F": self.forward_s,
            "R": self.forward_s if self.recompute_s is None else self.recompute_s,
            "B": self.backward_s,
            "I": first_s,
            "W": rest_s if self.weight_gradient_s is None else self.weight_gradient_s,
        }

    def timed(self, seconds: dict[str, float]) -> Layer:
        """Return the layer with other seconds."""
        return replace(
            self,
            forward_s=seconds["F"],
            recompute_s=seconds["R"],
            backward_s=seconds["B"],
            input_gradient_s=seconds["I"],
            weight_gradient_s=seconds["W"],
        )


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

    name: str  # its first name in the model
    layers: tuple[int, ...]  # the indices of these layers, in order
    num_bytes: int  # its size, which each of the layers has in its ``parameter_bytes``
    is_trained: bool = True  # whether it is in their ``trained_bytes``, too


@dataclass(frozen=True)
class Machine:
    """What running tasks on several processes adds to the seconds of layers."""

    host_s: float = 0.0  # seconds of the host's work for each task
    send_s: float = 0.0  # seconds a byte of a message, in which its sender does nothing else
    hop_s: float = 0.0  # seconds from then on until the receiver has it
    step_s: float = 0.0  # seconds of a step before its first task and after its last one


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
            rows = [layer.seconds for layer in part]
            sums = {kind: sum(row[kind] for row in rows) for kind in rows[0]}
            took = {kind: task_s[kind, j] for kind in sums if (kind, j) in task_s}
            if "I" in took and "B" not in took:
                took["B"] = took["I"] + took["W"]
            factors = {kind: _ratio(took[kind], sums[kind]) for kind in took}
            like = {"R": factors["F"]} | dict.fromkeys("IW", factors["B"]) | factors
            for layer, row in zip(part, rows, strict=True):
                seconds = {kind: row[kind] * like[kind] for kind in row}
                found.append(layer.timed(seconds))
        loss = None if self.loss is None else found.pop()
        return replace(self, layers=tuple(found), loss=loss)

    def costs(
        self, balance: Sequence[int], machine: Machine | None = None, num_replicas: int = 1
    ) -> Costs:
        """Return the costs of each partition.

        Raises:
            ValueError: the balance is not one of these layers.
        """
        machine, parts = machine or Machine(), self.parts(balance)
        of_parts = [[layer.seconds for layer in part] for part in parts]
        seconds = {
            kind: tuple(math.fsum(of_layer[kind] for of_layer in part) for part in of_parts)
            for kind in "FRBIW"
        }
        crossing, kept_inside = self._skip_bytes(balance)
        return Costs(
            forward_s=seconds["F"],
            backward_s=seconds["B"],
            recompute_s=seconds["R"],
            input_gradient_s=seconds["I"],
            weight_gradient_s=seconds["W"],
            transfer_s=machine.hop_s,
            host_s=machine.host_s,
            send_s=machine.send_s,
            step_s=machine.step_s,
            input_bytes=self.input_bytes,
            output_bytes=tuple(part[-1].output_bytes for part in parts),
            skip_bytes=crossing,
            target_bytes=self.target_bytes,
            saved_bytes=tuple(_kept_bytes(part) + kept_inside[j] for j, part in enumerate(parts)),
            put_off_bytes=tuple(sum(layer.put_off_bytes for layer in part) for part in parts),
            tied_bytes=self._tied_bytes(balance),
            gradient_bytes=self._gradient_bytes(balance),
            num_replicas=num_replicas,
        )

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
        for part, stage in zip(self.parts(balance), placement, strict=True):
            found[stage] += sum(whole(la.parameter_bytes, la.trained_bytes) for la in part)
        stage_of = [placement[j] for j in partition_of_each(balance)]
        for tie in self.ties:
            for stage, users in Counter(stage_of[k] for k in tie.layers).items():
                trained_bytes = tie.num_bytes if tie.is_trained else 0
                found[stage] -= (users - 1) * whole(tie.num_bytes, trained_bytes)
        return tuple(found)

    def layer_seconds(self, *, is_recomputed: bool = False) -> list[float]:
        """List the seconds of each layer's forward, backward and, if wanted, recomputation.

        Those of the loss are the last layer's.
        """
        rows = [layer.seconds for layer in self.layers]
        kinds = "FRB" if is_recomputed else "FB"
        found = [sum(row[kind] for kind in kinds) for row in rows]
        if self.loss is not None:
            found[-1] += sum(self.loss.seconds[kind] for kind in kinds)
        return found

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
        partition_of, kept = partition_of_each(balance), [0] * len(balance)
        crossing: Counter[tuple[int, int]] = Counter()
        for skip in self.skips:
            source = partition_of[skip.source]
            for destination in {partition_of[k] for k in skip.destinations}:
                if destination == source:
                    kept[source] += skip.kept_bytes
                else:
                    crossing[source, destination] += skip.tensor_bytes
        return dict(sorted(crossing.items())), kept

    def _tied_bytes(self, balance: Sequence[int]) -> dict[tuple[int, ...], int]:
        """Return the bytes of trained parameters that each set of partitions has in common."""
        partition_of = partition_of_each(balance)
        found: dict[tuple[int, ...], int] = {}
        for tie in self.ties:
            users = tuple(dict.fromkeys(partition_of[k] for k in tie.layers))
            if tie.is_trained and len(users) > 1:
                found[users] = found.get(users, 0) + tie.num_bytes
        return found

    def _gradient_bytes(self, balance: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes of each partition's gradients; what its layers share counts once."""
        found = [sum(layer.trained_bytes for layer in part) for part in self.parts(balance)]
        partition_of = partition_of_each(balance)
        for tie in (tie for tie in self.ties if tie.is_trained):
            for j, users in Counter(partition_of[k] for k in tie.layers).items():
                found[j] -= (users - 1) * tie.num_bytes
        return tuple(found)


def _ratio(new: float, old: float) -> float:
    return new / old if old else 1.0


def partition_of_each(balance: Sequence[int]) -> list[int]:
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
