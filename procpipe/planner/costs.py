"""The seconds and bytes of each partition that a simulation needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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
