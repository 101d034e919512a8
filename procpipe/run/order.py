"""Orders: what the first rank of a replica decides of a call, as data and as JSON.

    first rank of a replica                   its other ranks
    Order(call="step", plan=…, …)        ->   in step(…) too? then they run the plan

PURE: no sockets, no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

#: Where the last stage finds the target: sent by the first rank, given to it by the user on its own
#: rank, or already there from ``batches``.
SENT, LOCAL, DELIVERED = "sent", "local", "delivered"


@dataclass(frozen=True)
class BatchDetail:
    """An item of a first rank's loader."""

    form: Any = None  # plain JSON, see ``run.batches``; None if the loop has ended
    #: The entries of the item that are sent to the last stage, by their indices, if any are.
    delivered: list[int] = field(default_factory=list)
    stop_on: str = ""  # the names of the signals on which the loop ends
    is_stopped: bool = False  # whether the loop ends because of one
    faults: list[str] = field(default_factory=list)  # why no loop can go on


@dataclass(frozen=True)
class FetchDetail:
    """Where a value is that every rank gets."""

    holder: int = 0  # the rank that has it


Detail = BatchDetail | FetchDetail

_DETAILS: dict[str, type[Detail]] = {
    "batches": BatchDetail,
    "fetch": FetchDetail,
}


@dataclass(frozen=True)
class Order:
    """One call that the ranks of a replica make together, as its first rank made it."""

    call: str  # the method: "step", "forward", "backward", "batches", …
    is_training: bool = True  # whether the first rank's stage is in training mode
    is_grad_enabled: bool = True  # whether gradients are recorded on the first rank
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
    target: str = LOCAL  # where the last stage finds the target (SENT, LOCAL, DELIVERED)
    delivered: int = 0  # which of the delivered values it is
    reduces: bool = True  # whether gradients are added up over replicas
    detail: Detail | None = None  # what else this call needs to say, if it does

    @property
    def program(self) -> tuple[str, bool, tuple[int, ...]]:
        """What identifies the programs of its stages."""
        return self.plan, self.call == "step", self.recompute

    @property
    def keeps_graph(self) -> bool:
        """Whether a ``step`` runs its backward pass."""
        return self.is_training and self.is_grad_enabled

    @property
    def is_shared(self) -> bool:
        """Whether all replicas make this call together.

        In eval mode each has mini-batches of its own, and as many as it wants.
        """
        is_own = self.call in ("batches", "fetch")
        return not is_own and (self.is_training or self.call not in ("step", "forward"))

    @property
    def count(self) -> float:
        """What the mini-batch counts, as far as all stages know: its weights, or its samples."""
        return math.fsum(self.weights or self.sizes)

    def common(self) -> dict[str, Any]:
        """Return what all replicas must have in common, by its name; plain JSON."""
        return {
            "total_weight": self.total_weight,
            "accumulate": self.accumulate,
            "no_sync()": not self.reduces,
        }

    def mode(self) -> str:
        """Describe the modes that must be the same on every rank."""
        return (
            f"{'training' if self.is_training else 'eval'} mode with gradients "
            f"{'on' if self.is_grad_enabled else 'off'}"
        )


def encode(message: Any) -> bytes:
    """Write an order, or any plain value, as JSON."""
    if isinstance(message, Order):
        *message, detail = vars(message).values()
        message.append(None if detail is None else list(vars(detail).values()))
    return json.dumps(message, separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """Read a plain value that :func:`encode` wrote."""
    return json.loads(data)


def decode_order(data: bytes) -> Order:
    """Read an order that :func:`encode` wrote."""
    *fields, detail = json.loads(data)
    order = Order(*map(_with_tuples, fields))
    if detail is None:
        return order
    of_call = _DETAILS[order.call]  # the form of a loader's item stays as it is
    detail = of_call(*(detail if of_call is BatchDetail else _with_tuples(detail)))
    return dataclasses.replace(order, detail=detail)


def _with_tuples(decoded: Any) -> Any:
    """Put tuples in the place of JSON's lists."""
    return tuple(map(_with_tuples, decoded)) if isinstance(decoded, list) else decoded
