"""The parameters that layers of several stages use: one value, and one gradient, on all of them.

Each stage has a copy. In each call with a backward pass

    begin          what earlier calls have left in .grad is set aside
    B, W tasks     add what this stage's layers contribute
    message        goes to each other stage that has a copy, after the last of these tasks
    add_up         sums the contributions in the order of the stages, which is the same everywhere,
                   so that all copies get equal bits; and adds what was set aside

So equal optimizers keep the copies equal. Partitions of one stage use the tensor itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Copy:
    """This stage's copy of a parameter or buffer that other stages have, too.

    Attributes:
        name: its first name in the full model.
        stages: all that have it, ascending.
        owner: the module that has it here.
        key: its name in that module.
    """

    name: str
    stages: tuple[int, ...]
    owner: nn.Module
    key: str

    @property
    def tensor(self) -> Any:
        """The parameter or buffer, as it is now."""
        return getattr(self.owner, self.key)


class TiedParameters:
    """This stage's copies of parameters, in an order that all stages share."""

    def __init__(self, stage: int, copies: Sequence[Copy]) -> None:
        self._stage = stage
        self._copies = copies
        self._set_aside: list[tuple[nn.Parameter, Tensor | None]] = []
        self._is_open = False

    def begin(self) -> None:
        """Set aside the gradients of earlier calls, once a call."""
        if self._is_open:
            return
        self._is_open = True
        for copy in self._copies:
            parameter = copy.tensor
            self._set_aside.append((parameter, parameter.grad))
            parameter.grad = None

    def gradients_for(self, stage: int) -> list[Tensor | None]:
        """Return what this stage contributes to the parameters that another has, too."""
        return [copy.tensor.grad for copy in self._copies if stage in copy.stages]

    def add_up(self, received: Mapping[int, Sequence[Tensor | None]]) -> None:
        """Set the sums as gradients; ``received`` has what each other stage contributes."""
        others = {stage: iter(gradients) for stage, gradients in received.items()}
        sums = [self._sum_of(copy, others) for copy in self._copies]
        for (parameter, before), total in zip(self._set_aside, sums, strict=True):
            if before is not None and total is not None:
                total = before.add_(total)
            parameter.grad = before if total is None else total
        self._close()

    def abandon(self) -> None:
        """Put back what was set aside, if a call has failed."""
        for parameter, before in self._set_aside:
            parameter.grad = before
        self._close()

    def _close(self) -> None:
        self._set_aside.clear()
        self._is_open = False

    def _sum_of(self, copy: Copy, others: Mapping[int, Iterator[Tensor | None]]) -> Tensor | None:
        own = copy.tensor.grad
        total: Tensor | None = None
        is_fresh = False
        for stage in copy.stages:
            part = own if stage == self._stage else next(others[stage])
            if part is None:
                continue
            if total is None:
                total = part
            else:  # not in place at first: ours may still be read by a transfer
                total = total.add_(part) if is_fresh else total + part
                is_fresh = True
        return total if is_fresh or total is own or total is None else total.clone()
