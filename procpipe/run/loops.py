"""What ranks agree on in a loop over batches, item by item.

    before an item is read      has any rank of the job got a signal? later it would be lost
    before it is yielded        has each replica an item? have two of them read the same?

In training the loops of all replicas end with the first loader, so that each has a part of every
mini-batch. In eval mode each ends with its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    gone: set[int] = field(default_factory=set)  # the first ranks whose loops have ended

    def agree_to_stop(self, coordinator: Coordinator, order: Order, *, is_signalled: bool) -> bool:
        """Return whether any rank has got a signal; waits for the other replicas.

        Not once a replica has ended its loop, which would not know.
        """
        said = coordinator.exchange(order, is_signalled, self.gone)
        return not self.gone and any(said.values())

    def agree_on_item(
        self, coordinator: Coordinator, order: Order, items: Sequence[Any], *, is_stopped: bool
    ) -> bool | None:
        """Return None if the next item is yielded; else whether loops end because of a signal.

        Waits for the other replicas.

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
        said = coordinator.exchange(order, [bool(items), is_stopped, read], self.gone)
        self._check_apart({rank: read for rank, (_, _, read) in said.items()})
        ends = not self.gone and any(stops for _, stops, _ in said.values())
        self.gone |= {rank for rank, (has_item, _, _) in said.items() if not has_item}
        if ends:
            return True
        if order.is_training and self.gone:
            self._note_end()
            return False
        return False if self.grid.rank in self.gone else None

    def _is_first(self, what: str) -> bool:
        """Return whether it is done for the first time."""
        is_first = what not in self.done
        self.done.add(what)
        return is_first

    def _note_end(self) -> None:
        """Write on one rank, once, that the loops of others had not ended."""
        is_early = self.grid.rank == 0 and len(self.gone) < self.grid.num_replicas
        if is_early and self._is_first("note"):
            names = ", ".join(map(self.grid.rank_name, sorted(self.gone)))
            write_note(
                f"procpipe: the loop over batches ends on all replicas, as {names} has no more "
                "mini-batches and others have: in training all end with the first loader, so give "
                "each as many, as DistributedSampler does (this is said once)"
            )

    def _check_apart(self, of_all: Mapping[int, Any]) -> None:
        """Check that no replica has read the same as another, where that is compared."""
        first: dict[str, int] = {}
        for rank, read in sorted(of_all.items()):
            if read is not None and (other := first.setdefault(repr(read), rank)) != rank:
                raise CallMismatchError(
                    f"{self.grid.rank_name(rank)} reads the same first mini-batch in training as "
                    f"{self.grid.rank_name(other)}, so it would count twice: let each replica read "
                    "data of its own, by DistributedSampler(dataset, stage.replicas, "
                    "stage.replica), or give batches(…, same_data=True) if that is meant"
                )
