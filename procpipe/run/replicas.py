"""The interface to the other processes that run the same layers: what is added up over them.

    begin … during … end       gradients
    total                      the loss
    end_forward                buffers

``Replicas`` is that of a pipeline without others, which adds nothing up. That of several replicas
is in ``procpipe/replicas/``, that of layers which FSDP shards in ``procpipe/sharded/``.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from procpipe.compute.partition import Partition
from procpipe.data.mean_loss import LossPart
from procpipe.data.minibatch import MiniBatch
from procpipe.plan.program import Run

_NOTHING = nullcontext()


class Replicas:
    """What a stage adds up with others: nothing, as there are none.

    Attributes:
        overlaps: whether gradients may be added up before a call's end.
    """

    overlaps = True

    def make_equal(self, layers: Iterable[nn.Module]) -> None:
        """Give the layers of all replicas the values of replica 0."""

    def settle(self) -> None:
        """Bring the layers to the state that they have between calls."""

    def begin(
        self, batch: MiniBatch, parameters: Iterable[nn.Parameter], tied: Iterable[nn.Parameter]
    ) -> Iterable[nn.Parameter]:
        """Begin a call with a backward pass, before the first backward task.

        Returns the parameters whose gradients may be corrected before :meth:`end`.

        Args:
            batch: the call's mini-batch.
            parameters: of this stage's layers, in the order of the model.
            tied: those of them that other stages have, too.
        """
        return parameters

    def during(self, step: Run, partition: Partition) -> AbstractContextManager[None]:
        """Surround a task; after the last that adds to a gradient, that can be added up."""
        return _NOTHING

    def end(self, factor: Tensor | None = None) -> None:
        """Wait until all gradients are added up.

        ``factor`` is what those must still be multiplied by that ``begin`` did not return; 0-dim.
        """

    def total(self, part: LossPart | None, batch: MiniBatch) -> LossPart | None:
        """Return the loss parts of all replicas together."""
        return part

    def check_added_up(self, call: str) -> None:
        """Check before a call that uses gradients that none is still to be added up."""

    def end_forward(self, layers: Iterable[nn.Module]) -> None:
        """Join what layers have noted of a mini-batch, such as running statistics."""

    def close(self) -> None:
        """Drop the connections."""
