"""Orders: what the first rank of a replica decides of a call, as data.

    first rank of a replica                   its other ranks
    Order(call="step", plan=…, …)        ->   in step(…) too? then they run the plan

PURE: no sockets, no torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

#: Where the last stage finds the target: sent by the first rank, or given to it by the user on its
#: own rank. Else it has its tensors from ``batches``: their structure and numbers.
SENT, LOCAL = "sent", "local"


class Order(NamedTuple):
    """One call that the ranks of a replica make together, as its first rank made it."""

    # First what must be the same on all ranks: ``order[:4]``.
    call: str  # the method: "step", "forward", "backward", "batches", …
    is_training: bool = True  # whether the first rank's stage is in training mode
    is_grad_enabled: bool = True  # whether gradients are recorded on the first rank
    signals: str = ""  # the names of those on which a loop over batches ends
    plan: str = ""  # digest of the plan, or ""
    plan_text: str = ""  # the plan itself, the first time it is named
    sizes: tuple[int, ...] = ()  # samples of each micro-batch
    #: What each micro-batch counts in the loss of the mini-batch; empty if only the last stage
    #: has them.
    weights: tuple[float, ...] = ()
    #: What the loss is divided by; None for the sum of the weights.
    total_weight: float | None = None
    accumulate: int = 1  # of how many mini-batches this is one whose gradients are added up
    recompute: tuple[int, ...] = ()  # the micro-batches that are recomputed
    target: Any = LOCAL  # where the last stage finds the target
    reduces: bool = True  # whether gradients are added up over replicas
    detail: Any = None  # what else this call says, if it does; plain JSON

    @property
    def is_kept(self) -> bool:
        """Whether backward tasks follow the forward tasks, in this call or in one of its own."""
        return self.is_grad_enabled and (self.is_training or self.call != "step")

    @property
    def makes_gradients(self) -> bool:
        """Whether this call makes gradients of parameters."""
        return self.is_kept and self.call in ("step", "backward")

    @property
    def is_shared(self) -> bool:
        """Whether all replicas make this call together.

        In eval mode each has mini-batches of its own, and as many as it wants.
        """
        is_of_eval = not self.is_training and self.call in ("batches", "step", "forward")
        return not is_of_eval and self.call != "fetch"

    def common(self) -> dict[str, Any]:
        """Return what all replicas must have in common, by its name; plain JSON."""
        return {
            "total_weight": self.total_weight,
            "accumulate": self.accumulate,
            "no_sync()": not self.reduces,
        }

    def mode(self) -> str:
        """Describe the modes that must be the same on every rank."""
        signals = f" and stop_on=({self.signals})" if self.signals else ""
        return (
            f"{'training' if self.is_training else 'eval'} mode with gradients "
            f"{'on' if self.is_grad_enabled else 'off'}{signals}"
        )
