"""The seconds and bytes of each partition that a simulation needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from procpipe.plan.task import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECOMPUTE,
    WEIGHT_GRADIENT,
    Plan,
)

#: The costs of each partition; those that may be left out have defaults.
_REQUIRED = ("forward_s", "backward_s", "recompute_s")
_OPTIONAL = (
    *("input_gradient_s", "weight_gradient_s"),
    *("output_bytes", "saved_bytes", "put_off_bytes", "gradient_bytes"),
)


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of one micro-batch in each partition.

    Attributes:
        forward_s: seconds of a forward task, for each partition.
        backward_s: seconds of a backward task, for each partition.
        recompute_s: seconds of a recomputation, for each partition.
        input_gradient_s: seconds of ``I`` of a split backward, for each partition; by default half
            of the backward.
        weight_gradient_s: seconds of ``W``; by default the rest of the backward.
        transfer_s: seconds from the end of a task, or of sending what it made, until the next
            partition has it, in either direction. 0 within a stage.
        host_s: seconds that the host needs before each task.
        send_s: seconds a byte of a message to another stage, in which its sender does nothing else.
        step_s: seconds of a step before its first task and after its last one.
        input_bytes: the model's input, as stage 0 keeps it.
        output_bytes: each partition's output, which is the message to the next partition, its
            input, and the size of the gradient that returns.
        skip_bytes: the skip tensors between each pair of partitions.
        target_bytes: the target.
        saved_bytes: what autograd saves inside each partition's layers, if it is to count.
        put_off_bytes: what each partition keeps of it between ``I`` and ``W``.
        tied_bytes: the gradients of the parameters that each set of partitions has in common.
        gradient_bytes: the gradients that each partition adds up over replicas.
        num_replicas: the number of replicas.

    Raises:
        ValueError: the numbers are not for the same number of partitions.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    recompute_s: tuple[float, ...]
    transfer_s: float = 0.0
    host_s: float = 0.0
    send_s: float = 0.0
    step_s: float = 0.0
    input_bytes: int = 0
    output_bytes: tuple[int, ...] = ()
    skip_bytes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    target_bytes: int = 0
    input_gradient_s: tuple[float, ...] = ()
    weight_gradient_s: tuple[float, ...] = ()
    saved_bytes: tuple[int, ...] = ()
    put_off_bytes: tuple[int, ...] = ()
    tied_bytes: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    gradient_bytes: tuple[int, ...] = ()
    num_replicas: int = 1

    def __post_init__(self) -> None:
        p = self.num_partitions
        halves_s = self.input_gradient_s or tuple(seconds / 2 for seconds in self.backward_s)
        rests_s = tuple(
            max(0.0, whole - half) for whole, half in zip(self.backward_s, halves_s, strict=False)
        )
        defaults = {"input_gradient_s": halves_s, "weight_gradient_s": rests_s}
        for name in _OPTIONAL:
            if not getattr(self, name):
                object.__setattr__(self, name, defaults.get(name, (0,) * p))
        for name in (*_REQUIRED, *_OPTIONAL):
            if (length := len(getattr(self, name))) != p:
                raise ValueError(
                    f"{name} has {length} numbers, but must have {p}, one for each partition, as "
                    "forward_s has"
                )

    @classmethod
    def uniform(
        cls,
        num_partitions: int,
        *,
        forward_s: float = 1.0,
        backward_s: float = 2.0,
        recompute_s: float | None = None,
        **others: Any,
    ) -> Costs:
        """Return the costs of equal partitions; of a tuple of ``others`` one number is given.

        By default a recomputation takes as long as a forward, and ``I`` as long as ``W``.
        """
        again_s = forward_s if recompute_s is None else recompute_s
        others |= {"forward_s": forward_s, "backward_s": backward_s, "recompute_s": again_s}
        for name in others.keys() & {*_REQUIRED, *_OPTIONAL}:
            others[name] = (others[name],) * num_partitions
        return cls(**others)

    @property
    def num_partitions(self) -> int:
        """The number of partitions that the costs are for."""
        return len(self.forward_s)

    @cached_property
    def seconds(self) -> Mapping[str, Sequence[float]]:
        """The seconds of tasks by their kind, for each partition."""
        return {
            FORWARD: self.forward_s,
            RECOMPUTE: self.recompute_s,
            BACKWARD: self.backward_s,
            INPUT_GRADIENT: self.input_gradient_s,
            WEIGHT_GRADIENT: self.weight_gradient_s,
        }

    def tied_into(self, stage: int, plan: Plan) -> dict[int, int]:
        """Return, by sending stage, the bytes of each message after the last task.

        They have the gradients of tied parameters, and follow a plan with backward tasks.
        """
        found: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for tie in self.tied_bytes if plan.has_backward else ():
            stages = {plan.placement[j] for j in tie}
            for other in stages - {stage} if stage in stages else ():
                found[other].append(tie)
        return {other: sum(self.tied_bytes[tie] for tie in ties) for other, ties in found.items()}

    def message_s(self, num_bytes: float) -> float:
        """Return the seconds of a message until its receiver has it."""
        return self.transfer_s + self.send_s * num_bytes

    def all_reduce_s(self, num_bytes: float) -> float:
        """Return the seconds in which replicas add up gradients, in a ring.

        Each of them sends every other one's part of them once to be added to, and once as the sum.

        Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations" (2009), https://doi.org/10.1016/j.jpdc.2008.09.002
        """
        return 2 * (self.num_replicas - 1) * self.message_s(num_bytes / self.num_replicas)

    def sends_s(self, placement: Sequence[int]) -> Mapping[str, Sequence[float]]:
        """Return, by kind of task, the seconds in which each partition's stage sends its result."""
        p = self.num_partitions
        sent = {FORWARD: [0.0] * p, BACKWARD: [0.0] * p}
        skips = self.skip_bytes.items()
        ends = [(j, j + 1, self.output_bytes[j]) for j in range(p - 1)]
        for a, b, size in (*ends, *((a, b, size) for (a, b), size in skips)):
            if placement[a] != placement[b]:
                sent[FORWARD][a] += self.send_s * size
                sent[BACKWARD][b] += self.send_s * size
        nothing = [0.0] * p
        more = {RECOMPUTE: nothing, WEIGHT_GRADIENT: nothing}
        return {**sent, **more, INPUT_GRADIENT: sent[BACKWARD]}
