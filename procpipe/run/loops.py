"""What the first ranks of all replicas agree on in a loop over batches, item by item.

    before an item is read      has any rank of the job got a signal? later it would be lost
    before it is yielded        has each replica an item? have two of them read the same?

In training the loops of all replicas end with the first loader, so that each has a part of every
mini-batch. In eval mode each ends with its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from procpipe.job.grid import Grid
from procpipe.notes import write_note
from procpipe.run.coordinator import Coordinator
from procpipe.run.same_input import Described, described


@dataclass
class Loop:
    """One loop, as its replica's first rank makes it."""

    grid: Grid  # this rank's place
    stop_on: str  # the names of signals
    same_data: bool  # whether replicas may read the same
    #: What any loop of this rank has done, which is done once: "compare" and "note".
    done: set[str]
    is_training: bool = True  # before its next item
    gone: set[int] = field(default_factory=set)  # the first ranks whose loops have ended

    def wait_signals(self, coordinator: Coordinator, *, is_signalled: bool) -> bool:
        """Return whether any rank has got a signal; waits for the other replicas."""
        return self._is_stopped(self._ask(coordinator, is_signalled))

    def wait_items(
        self, coordinator: Coordinator, items: Sequence[Any], *, is_signalled: bool
    ) -> tuple[bool, bool, list[str]]:
        """Agree on the next item; waits for the other replicas.

        Args:
            coordinator: of this rank.
            items: what it has read: an item, or nothing.
            is_signalled: whether a rank of this replica has got a signal.

        Returns:
            Whether loops end because of a signal, whether this one ends because of a loader, and
            why none can go on.
        """
        read: Described = []
        if self.is_training and self._is_first("compare") and not self.same_data:
            read = described(items) if self.grid.num_replicas > 1 else []
        said = self._ask(coordinator, is_signalled, bool(items), read)
        is_stopped = self._is_stopped(said)
        self.gone |= {rank for rank, (_, has_item, _) in said.items() if not has_item}
        has_ended = self.grid.rank in self.gone
        if self.is_training and self.gone:
            has_ended = True
            self._note_end()
        return is_stopped, has_ended, self._same(said)

    def _ask(
        self, coordinator: Coordinator, is_signalled: bool, *of_item: Any
    ) -> dict[int, list[Any]]:
        """Return what each first rank says whose loop has not ended, as this one says it."""
        mode = "training mode" if self.is_training else "eval mode"
        common = {"stop_on": self.stop_on, "same_data": self.same_data}
        said = coordinator.next_item(mode, common, [is_signalled, *of_item], self.gone)
        return dict(sorted(said.items()))

    def _is_stopped(self, said: Mapping[int, list[Any]]) -> bool:
        """Return whether any has got a signal, unless one has ended its loop and would not know."""
        return not self.gone and any(is_signalled for is_signalled, *_ in said.values())

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

    def _same(self, said: Mapping[int, list[Any]]) -> list[str]:
        """Say which replicas have read the same, if that is compared."""
        first: dict[str, str] = {}
        faults = []
        for rank, (_, _, read) in said.items():
            if all(checksum is None for _, checksum in read):
                continue
            name = self.grid.rank_name(rank)
            if (other := first.setdefault(repr(read), name)) != name:
                faults.append(
                    f"{name} reads the same first mini-batch in training as {other}, so it would "
                    "count twice: let each replica read data of its own, by "
                    "DistributedSampler(dataset, stage.replicas, stage.replica), or give "
                    "batches(…, same_data=True) if that is meant"
                )
        return faults
