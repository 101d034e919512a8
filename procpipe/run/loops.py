"""What the first ranks of all replicas agree on in loops over batches, item by item.

    before an item is read      has any rank of the job got a signal? later it would be lost
    before it is yielded        has each replica an item? have two of them read the same?

In training the loops of all replicas end with the first loader, so that each has a part of every
mini-batch. In eval mode each ends with its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from procpipe.job.grid import Grid
from procpipe.notes import write_note
from procpipe.run.coordinator import Coordinator
from procpipe.run.same_input import Described, described


@dataclass
class Loop:
    """One loop, as its replica's first rank makes it."""

    stop_on: str  # the names of signals
    same_data: bool  # whether replicas may read the same
    is_training: bool = True  # before its next item
    gone: set[int] = field(default_factory=set)  # the first ranks whose loops have ended


class _Said(NamedTuple):
    """What a first rank says before its next item."""

    is_signalled: bool
    has_item: bool = False
    read: Described = []  # noqa: RUF012 - never changed


class Loops:
    """One first rank's side of it; ``grid`` is its place."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._has_compared = False  # what replicas read first in training
        self._has_noted = False  # that loops have ended with the first loader

    def wait_signals(self, coordinator: Coordinator, loop: Loop, *, is_signalled: bool) -> bool:
        """Return whether any rank has got a signal; waits for the other replicas."""
        return _is_stopped(loop, self._ask(coordinator, loop, _Said(is_signalled)))

    def wait_items(
        self, coordinator: Coordinator, loop: Loop, items: Sequence[Any], *, is_signalled: bool
    ) -> tuple[bool, bool, list[str]]:
        """Agree on the next item; waits for the other replicas.

        Args:
            coordinator: of this rank.
            loop: this rank's.
            items: what it has read: an item, or nothing.
            is_signalled: whether a rank of this replica has got a signal.

        Returns:
            Whether loops end because of a signal, whether this one ends because of a loader, and
            why none can go on.
        """
        compares = loop.is_training and not loop.same_data and not self._has_compared
        self._has_compared |= loop.is_training
        read = described(items) if compares and self._grid.num_replicas > 1 else []
        said = self._ask(coordinator, loop, _Said(is_signalled, bool(items), read))
        is_stopped = _is_stopped(loop, said)
        loop.gone |= {rank for rank, of_one in said.items() if not of_one.has_item}
        has_ended = self._grid.rank in loop.gone
        if loop.is_training and loop.gone:
            self._note_end(loop.gone)
            has_ended = True
        return is_stopped, has_ended, self._same(said)

    def _ask(self, coordinator: Coordinator, loop: Loop, ours: _Said) -> dict[int, _Said]:
        """Return what each first rank says whose loop has not ended."""
        mode = "training mode" if loop.is_training else "eval mode"
        common = {"stop_on": loop.stop_on, "same_data": loop.same_data}
        said = coordinator.next_item(mode, common, ours, loop.gone)
        return {rank: _Said(*said[rank]) for rank in sorted(said)}

    def _note_end(self, ended: Collection[int]) -> None:
        """Write on one rank, once, that the loops of others had not ended."""
        if self._has_noted or self._grid.rank > 0 or len(ended) == self._grid.num_replicas:
            return
        self._has_noted = True
        names = ", ".join(map(self._grid.rank_name, sorted(ended)))
        write_note(
            f"procpipe: the loop over batches ends on all replicas, as {names} has no more "
            "mini-batches and others have: in training all end with the first loader, so give "
            "each as many, as DistributedSampler does (this is said once)"
        )

    def _same(self, said: Mapping[int, _Said]) -> list[str]:
        """Say which replicas have read the same, if that is compared."""
        first: dict[str, str] = {}
        faults = []
        for rank, of_one in said.items():
            if all(checksum is None for _, checksum in of_one.read):
                continue
            name = self._grid.rank_name(rank)
            if (other := first.setdefault(repr(of_one.read), name)) != name:
                faults.append(
                    f"{name} reads the same first mini-batch in training as {other}, so it would "
                    "count twice: let each replica read data of its own, by "
                    "DistributedSampler(dataset, stage.replicas, stage.replica), or give "
                    "batches(…, same_data=True) if that is meant"
                )
        return faults


def _is_stopped(loop: Loop, said: Mapping[int, _Said]) -> bool:
    """Return whether any has got a signal, unless one has ended its loop and would not know."""
    return not loop.gone and any(of_one.is_signalled for of_one in said.values())
