"""What the replicas agree on before each item of a loop over batches is yielded, in training.

    has each replica an item? have two of them read the same?

The loops of all replicas end with the first loader, so that each has a part of every mini-batch. In
eval mode each has its own, of which the others need not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from procpipe.errors import CallMismatchError
from procpipe.job.grid import Grid
from procpipe.notes import write_note
from procpipe.run.coordinator import Coordinator
from procpipe.run.order import Order
from procpipe.run.same_input import described


@dataclass
class Loop:
    """One loop, as its replica's first rank makes it."""

    grid: Grid  # this rank's place
    same_data: bool  # whether replicas may read the same
    #: What any loop of this rank has done, which is done once: "compare" and "note".
    done: set[str]

    def agree(
        self, coordinator: Coordinator, order: Order, items: Sequence[Any], *, is_stopped: bool
    ) -> bool | None:
        """Return None if the next item is yielded; else whether loops end because of a signal.

        Waits for the other replicas, in training.

        Args:
            coordinator: of this rank.
            order: this call.
            items: what this rank has read: an item, or nothing.
            is_stopped: whether that is nothing because of a signal.

        Raises:
            CallMismatchError: another replica has read the same, or is in another call or mode.
        """
        is_compared = order.is_training and not self.same_data and self.grid.num_replicas > 1
        read = described(items) if is_compared and self._is_first("compare") else None
        coordinator.announce(order, [bool(items), is_stopped, read])
        have_items, are_stopped, of_all = zip(*coordinator.meet(), strict=True)
        self._check_apart(of_all)
        if any(are_stopped):  # in eval mode others do not know
            return order.is_training or self.grid.num_replicas == 1
        if all(have_items):
            return None
        self._note_end(have_items)
        return False

    def _is_first(self, what: str) -> bool:
        """Return whether it is done for the first time."""
        is_first = what not in self.done
        self.done.add(what)
        return is_first

    def _note_end(self, have_items: Sequence[bool]) -> None:
        """Write on one rank, once, that the loops of others had not ended."""
        if self.grid.rank == 0 and any(have_items) and self._is_first("note"):
            each = zip(self.grid.same_stage(), have_items, strict=True)
            names = ", ".join(self.grid.rank_name(rank) for rank, has_item in each if not has_item)
            write_note(
                f"procpipe: the loop over batches ends on all replicas, as {names} has no more "
                "mini-batches and others have: in training all end with the first loader, so give "
                "each as many, as DistributedSampler does (this is said once)"
            )

    def _check_apart(self, of_all: Sequence[Any]) -> None:
        """Check that no replica has read the same as another, where that is compared."""
        first: dict[str, int] = {}
        for rank, read in zip(self.grid.same_stage(), of_all, strict=False):
            if read is not None and (other := first.setdefault(repr(read), rank)) != rank:
                raise CallMismatchError(
                    f"{self.grid.rank_name(rank)} reads the same first mini-batch in training as "
                    f"{self.grid.rank_name(other)}, so it would count twice: let each replica read "
                    "data of its own, by DistributedSampler(dataset, stage.replicas, "
                    "stage.replica), or give batches(…, same_data=True) if that is meant"
                )
