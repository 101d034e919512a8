"""The interface to the other processes that run the same layers: what is added up over them.

    begin … around … end       gradients
    total                      the loss
    end_forward                buffers

``Replicas`` is that of a pipeline without others, which adds nothing up. That of several replicas
is in ``procpipe/replicas/``, that of layers which FSDP shards in ``procpipe/sharded/``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from procpipe.compute.segment import Segment
from procpipe.plan.program import Run

#: Runs a task.
Work = Callable[[], object]

Parameters = Iterable[nn.Parameter]


class Replicas:
    """What a stage adds up with others: nothing, as there are none."""

    #: Whether there are; if not, a step calls none of these methods.
    has_others = False

    def make_equal(self, layers: Iterable[nn.Module]) -> None:
        """Give the layers of all replicas the values of replica 0."""

    def settle(self) -> None:
        """Bring the layers to the state that they have between calls."""

    def begin(
        self, parameters: Parameters, of_loss: Parameters, tied: Parameters, *, reduces: bool
    ) -> None:
        """Begin a call with a backward pass, before the first backward task.

        Args:
            parameters: of this stage's layers, in the order of the model.
            of_loss: those of the loss function, on the stage that calls it.
            tied: those of this stage's layers that other stages have, too.
            reduces: whether gradients are added up in this call, with those of earlier ones.
        """

    def around(self, step: Run, segment: Segment, work: Work) -> Work:
        """Return what runs a task, given what does: ``work``, and what surrounds it.

        After the last task that adds to a gradient, that can be added up.
        """
        return work

    def end(self) -> None:
        """Wait until all gradients are added up."""

    def total(self, loss: Tensor) -> Tensor:
        """Return the sum of the losses of all replicas, given this one's, in a call of all."""
        return loss

    def check_added_up(self, call: str) -> None:
        """Check before a call that uses gradients that none is still to be added up."""

    def end_forward(self, layers: Iterable[nn.Module]) -> None:
        """Join what layers have noted of a mini-batch in training, such as running statistics."""
