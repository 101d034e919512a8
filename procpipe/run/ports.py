"""What enters and leaves a stage and each of its partitions, and under which names.

    channels      ends of FIFOs to and from other stages, by (kind, source, destination)
    ports         of a partition: what its layers take and give, in order, with who is at the
                  other end; perhaps another partition of the same stage

Source and destination are partitions everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from procpipe.channel.link import Receiver, Sender
from procpipe.compute.partition import Partition
from procpipe.plan.routes import ACTIVATION, GRADIENT, LOSS, SKIP, SKIP_GRADIENT, Channel, Transfer
from procpipe.tree import TENSOR, Flat

#: What a message is known by: kind, source and destination partition, micro-batch.
Key = tuple[str, int, int, int]


@dataclass
class Channels:
    """The ends of channels on this stage."""

    senders: dict[Channel, Sender] = field(default_factory=dict)
    receivers: dict[Channel, Receiver] = field(default_factory=dict)
    poll: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Ports:
    """What enters and leaves one partition, each with the partition at the other end.

    Attributes:
        partition: the layers.
        inputs: activation and skips, in the order in which the layers take them.
        outputs: activation and skips, in the order in which the layers give them.
        gradients: the gradients of ``outputs``, in their order. Nobody sends that of the last
            partition's output.
        input_gradients: the gradients of ``inputs``, in their order.
    """

    partition: Partition
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]
    gradients: tuple[tuple[str, int], ...]
    input_gradients: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, j: int, partition: Partition, last: int) -> Ports:
        """Return those of partition ``j``, where ``last`` is the model's last."""
        into, out_of = partition.skips.sources, partition.skips.destinations
        gradients = [(GRADIENT, j + 1)] if j < last else []
        return cls(
            partition,
            inputs=((ACTIVATION, j - 1), *((SKIP, a) for a in into)),
            outputs=((ACTIVATION, j + 1), *((SKIP, b) for b in out_of)),
            gradients=(*gradients, *((SKIP_GRADIENT, b) for b in out_of)),
            input_gradients=((GRADIENT, j - 1), *((SKIP_GRADIENT, a) for a in into)),
        )


def key_of(transfer: Transfer) -> Key:
    """Return what a transfer's message is known by; the loss is one for all micro-batches."""
    kind, i, source, destination = transfer
    return kind, source, destination, 0 if kind == LOSS else i


def message_of(gradients: list[Tensor | None]) -> Flat:
    """Make a message of gradients: the tuple of them, and None where there is none."""
    tensors = [gradient for gradient in gradients if gradient is not None]
    structure = tuple(("v", None) if gradient is None else TENSOR for gradient in gradients)
    return Flat(tensors, ("t", structure), (False,) * len(tensors))
