"""What a model costs on each stage: the numbers that a simulation needs, and no more.

They come from a measurement, from a guess, or from ``Costs.uniform`` to compare schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Costs"]


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of one micro-batch on each stage.

    Attributes:
        forward_s: seconds of a forward task, for each stage.
        backward_s: seconds of a backward task, for each stage.
        recompute_s: seconds of a recomputation, for each stage.
        transfer_s: seconds from the end of a task until the next stage has what it made, either
            one number or one for each of the ``n - 1`` boundaries. The way back takes as long.
        input_bytes: one micro-batch of the model's input, as stage 0 keeps it.
        output_bytes: one micro-batch of each stage's output: the message to the next stage, which
            keeps it as its input, and of the gradient that comes back.
        skip_bytes: for each pair of stages, the skip tensors of one micro-batch between them.
        target_bytes: one micro-batch of the target.

    Raises:
        ValueError: the numbers are not for the same number of stages.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    recompute_s: tuple[float, ...]
    transfer_s: float | tuple[float, ...] = 0.0
    input_bytes: int = 0
    output_bytes: tuple[int, ...] = ()
    skip_bytes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    target_bytes: int = 0

    def __post_init__(self) -> None:
        n = self.num_stages
        if not self.output_bytes:
            object.__setattr__(self, "output_bytes", (0,) * n)
        lengths = {
            "backward_s": (len(self.backward_s), n),
            "recompute_s": (len(self.recompute_s), n),
            "output_bytes": (len(self.output_bytes), n),
        }
        if isinstance(self.transfer_s, tuple):
            lengths["transfer_s"] = (len(self.transfer_s), n - 1)
        for name, (length, expected) in lengths.items():
            if length != expected:
                raise ValueError(
                    f"{name} has {length} numbers, but forward_s has {n},"
                    f" one for each stage, so it must have {expected}"
                )

    @classmethod
    def uniform(
        cls,
        n: int,
        *,
        forward_s: float = 1.0,
        backward_s: float = 2.0,
        recompute_s: float | None = None,
        transfer_s: float = 0.0,
        input_bytes: int = 0,
        output_bytes: int = 0,
        skip_bytes: Mapping[tuple[int, int], int] | None = None,
        target_bytes: int = 0,
    ) -> Costs:
        """Make the costs of ``n`` equal stages; a recomputation takes as long as a forward."""
        return cls(
            forward_s=(forward_s,) * n,
            backward_s=(backward_s,) * n,
            recompute_s=(forward_s if recompute_s is None else recompute_s,) * n,
            transfer_s=transfer_s,
            input_bytes=input_bytes,
            output_bytes=(output_bytes,) * n,
            skip_bytes=skip_bytes or {},
            target_bytes=target_bytes,
        )

    @property
    def num_stages(self) -> int:
        """The number of stages that the costs are for."""
        return len(self.forward_s)

    def hops_s(self) -> tuple[float, ...]:
        """List the seconds over each of the ``n - 1`` boundaries."""
        if isinstance(self.transfer_s, tuple):
            return self.transfer_s
        return (self.transfer_s,) * (self.num_stages - 1)
