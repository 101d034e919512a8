"""Iterates over loaders: each replica's first rank reads one of its own.

    first rank                     between                        last stage
    item of the loader      (input, target)          (Remote, target)
                            ── order: form ──>       every other rank
                            ── target ──────>        the last stage

What loss code after ``stage(input)`` may need is sent to the last stage with the item: of a tuple
or list all but the first entry, otherwise all entries. ``step`` then does not send it again.

Ranks agree on each item: before it is read, whether any of them has got a signal, as it would be
lost later; before it is yielded, in training, whether each replica has one. So all replicas have a
part of every mini-batch, and their loops end with the first loader. In eval mode each has its own.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from procpipe.data.microbatch import on_device
from procpipe.data.remote import Remote
from procpipe.errors import BoundaryError
from procpipe.job.grid import Grid
from procpipe.notes import write_note
from procpipe.run.calls import Calls
from procpipe.run.coordinator import Coordinator
from procpipe.run.order import Order
from procpipe.run.runner import Runner
from procpipe.run.same_input import check_apart, described
from procpipe.run.stops import Signals, Stops, checked_signals
from procpipe.torch_internals import pytree
from procpipe.tree import (
    TENSOR,
    Structure,
    flatten,
    is_dense,
    map_tensors,
    text_of,
    unflatten,
    versions_of,
)

#: A loader, or a function that makes one; ignored where it is not read, so None will do.
Loader = Iterable[Any] | Callable[[], Iterable[Any]] | None


class Batches:
    """One rank's part in iterating over a loader.

    Args:
        calls: with those of the other ranks.
        is_training: returns whether the stage is in training mode.
        grid: this rank's place.
        output_rank: runs the last partition of this replica.
        device: this stage's.

    Attributes:
        stops: which signals have come, and whether the ranks have agreed to stop.
    """

    def __init__(
        self,
        calls: Calls,
        is_training: Callable[[], bool],
        grid: Grid,
        output_rank: int,
        device: torch.device,
    ) -> None:
        self._calls = calls
        self._is_training = is_training
        self._grid = grid
        self._first = grid.rank_of(0)
        self._output_rank = output_rank
        self._device = device
        self.stops = Stops(lambda: calls.has_failed)
        self._has_compared = False  # a first mini-batch with those of other replicas
        self._has_noted = False  # that a loop has ended before others
        self._unfinished: Iterator[Any] | None = None  # what a stopped loop has read from
        #: Tensors of the latest item that the output rank has, as they are on this rank, in the
        #: same order on both; the number and the version of each; and each as it was read.
        self._delivered: list[Tensor] = []
        self._numbers: dict[Tensor, tuple[int, int | None]] = {}
        self._read: list[Tensor] = []

    def close(self) -> None:
        """Set earlier handlers of signals again, and drop what a stopped loop has read from."""
        self.stops.restore()
        self._unfinished = None

    # -- a loop ---------------------------------------------------------------------------------

    def read(self, loader: Loader, stop_on: Signals, *, same_data: bool) -> Iterator[Any]:
        """Yield a loader's items on the first rank, and items of their form on the others."""
        items = _items_of(loader)
        numbers = []
        if stop_on != ():
            with self._calls.together("batches"):  # so that an error ends all ranks
                numbers = checked_signals(stop_on)
        names = ", ".join(number.name for number in numbers)
        with self.stops.handling(numbers):
            while True:
                with self._calls.together("batches") as pipeline:
                    here = self._is_training(), torch.is_grad_enabled()
                    order = Order("batches", *here, signals=names)
                    found, detail = self._next(pipeline.coordinator, order, items, same_data)
                    if isinstance(detail, bool):
                        self.stops.is_stopped |= detail
                        if detail:
                            self._keep(items)
                        return
                    item = self._deliver(pipeline, found, detail)
                yield item

    def _next(
        self, coordinator: Coordinator, order: Order, items: Iterator[Any], same_data: bool
    ) -> tuple[list[Any], Any]:
        """Read the next item on the first rank, and return it there; on all what the order says.

        That is what :func:`_described` returns; if the loop ends, whether because of a signal.

        Raises:
            CallMismatchError: another rank is in another call or mode, or has other signals.
        """
        is_stopped = bool(order.signals) and self._agree_to_stop(coordinator, order)
        if self._grid.stage != 0:
            return [], coordinator.follow(order).detail
        found: list[Any] = []
        ends: bool | None = True
        if not is_stopped:
            found, has_failed = self._read_one(items, order.signals)
            is_compared = order.is_training and not (same_data or self._has_compared)
            self._has_compared |= is_compared
            read = described(found) if is_compared and self._grid.num_replicas > 1 else None
            coordinator.announce(order, [bool(found), has_failed, read])
            ends = self._end(order, coordinator.meet())
        detail = _described(*found) if ends is None else ends
        coordinator.issue(order._replace(detail=detail))
        return found, detail

    def _agree_to_stop(self, coordinator: Coordinator, order: Order) -> bool:
        """Return whether any rank has got a signal, before an item is read; all wait for all.

        Replicas that evaluate, each as long as its loader, look at signals after that.
        """
        if not order.is_training and self._grid.num_replicas > 1:
            return self.stops.is_stopped
        coordinator.begin(order)  # so that all ranks are in this loop
        coordinator.announce(order)
        ours = self.stops.is_stopped or self.stops.is_signalled
        return bool(coordinator.agree_in_call(ours, any))

    def _end(self, order: Order, said: Sequence[Any]) -> bool | None:
        """Return None if the next item is yielded; else whether loops end because of a signal.

        Args:
            order: this call.
            said: of each replica whether it has an item, whether it has none because of a signal,
                and what is compared.

        Raises:
            CallMismatchError: another replica has read the same.
        """
        have_items, are_stopped, read = zip(*said, strict=True)
        check_apart(read, self._grid)
        if any(are_stopped):  # in eval mode others do not know
            return order.is_training or self._grid.num_replicas == 1
        if all(have_items):
            return None
        if self._grid.rank == 0 and any(have_items) and not self._has_noted:
            self._has_noted = True
            each = zip(self._grid.same_stage(), have_items, strict=True)
            names = ", ".join(self._grid.rank_name(rank) for rank, has_item in each if not has_item)
            write_note(
                f"procpipe: the loop over batches ends on all replicas, as {names} has no more "
                "mini-batches and others have: in training all end with the first loader, so give "
                "each as many, as DistributedSampler does (this is said once)"
            )
        return False

    def _read_one(self, items: Iterator[Any], signals: str) -> tuple[list[Any], bool]:
        """Return a loader's next item, or nothing, and whether the loader failed after a signal.

        A signal to the whole process group ends a DataLoader's workers, too.
        """
        try:
            return list(islice(items, 1)), False
        except Exception as error:
            if not signals or not self.stops.is_signalled:
                raise
            write_note(
                f"procpipe: the loop over batches ends: {self._grid.rank_name(self._grid.rank)} "
                f"got a signal to stop, and its loader then raised {type(error).__name__}: {error}"
            )
            return [], True

    def _keep(self, items: Iterator[Any]) -> None:
        """Keep a stopped loop's iterator: a ``Resumable`` forgets its position when that ends."""
        self._unfinished = items
        atexit.register(setattr, self, "_unfinished", None)  # ends a DataLoader's workers

    def _deliver(self, pipeline: Runner, found: list[Any], detail: list[Any]) -> Any:
        """Bring what the last stage needs of an item there; return what this rank yields."""
        structure, described = detail
        here, wires, last = self._grid.rank, pipeline.wires, self._output_rank
        delivered = [k for k, (_, is_delivered) in enumerate(described) if is_delivered]
        if here != self._first:
            sent = wires.take_value(self._first) if delivered and here == last else {}
            self._note(sent, sent)
            entries = [
                sent.get(k, Remote(self._first, name, None, others=[last] * is_delivered))
                for k, (name, is_delivered) in enumerate(described)
            ]
            return unflatten(entries, tuple(structure))
        (item,) = found
        entries, _ = _opened(item)
        read = sent = {k: entries[k] for k in delivered}
        if here == last and self._device.type != "cpu":
            sent = on_device(read, self._device)
            item = unflatten((dict(enumerate(entries)) | sent).values(), structure)
        elif here != last and delivered:
            wires.send_value(last, sent)
        self._note(sent, read)
        return item

    # -- what was delivered ---------------------------------------------------------------------

    def _note(self, sent: Any, read: Any) -> None:
        """Note the tensors that the output rank has of an item, and as they were read."""
        self._delivered, self._read = flatten(sent)[0], flatten(read)[0]
        numbered = enumerate(versions_of(self._delivered))
        self._numbers = dict(zip(self._delivered, numbered, strict=True))

    def _number_of(self, tensor: Tensor) -> int | None:
        """Return which of the delivered tensors it is; None if it is none, or has been changed."""
        k, version = self._numbers.get(tensor, (None, None))
        return k if [version] == versions_of([tensor]) else None

    def delivered(self, target: Any) -> list[Any] | None:
        """Describe a target by delivered tensors, as plain JSON; None if it has another."""
        if not self._numbers:
            return None
        tensors, structure = flatten(target)
        numbers = [self._number_of(tensor) for tensor in tensors]
        return None if None in numbers else [structure, numbers]

    def target_of(self, structure: Any, numbers: list[int]) -> Any:
        """Return, on the output rank, the target that the first rank has described."""
        return unflatten([self._delivered[k] for k in numbers], tuple(structure))

    def as_read(self, target: Any) -> Any:
        """Return a target with the tensors that the loader gave on this rank, where it has them.

        So no host waits for its device to see what the target counts.
        """

        def as_read(tensor: Tensor) -> Tensor:
            k = self._number_of(tensor)
            return tensor if k is None else self._read[k]

        return map_tensors(as_read, target) if self._numbers else target


def _items_of(loader: Any) -> Iterator[Any]:
    """Yield a loader's items, once asked for the first."""
    for item in loader() if callable(loader) else loader:  # noqa: UP028 - its end closes no loader
        yield item


def _opened(item: Any) -> tuple[list[Any], Structure]:
    """Return the entries of a loader's item, and the structure of a container of them.

    A Mapping of an unknown class is a dict on other ranks; any other such item has one entry.
    """
    if isinstance(item, Mapping) and pytree.tree_is_leaf(item):
        item = dict(item)
    if pytree.tree_is_leaf(item):
        return [item], TENSOR
    entries, spec = pytree.tree_flatten(item, is_leaf=lambda each: each is not item)
    return entries, (text_of(spec), "")


def _described(item: Any) -> list[Any]:
    """Return the structure of a loader's item; of each entry a name, and if the last stage gets it.

    Plain JSON. Entries that cannot travel stay on the first rank.
    """
    entries, structure = _opened(item)
    first = 1 if isinstance(item, (tuple, list)) and len(item) > 1 else 0
    of_item = " of the mini-batch"
    names = [f"{key!r}{of_item}" for key in item] if isinstance(item, Mapping) else []
    if len(names) != len(entries):
        names = [f"entry {k}{of_item}" for k in range(len(entries))]
    if structure == TENSOR:
        names = ["the mini-batch"]
    described = []
    for k, (name, entry) in enumerate(zip(names, entries, strict=True)):
        is_delivered = k >= first and _can_travel(entry)
        stays = "" if is_delivered or k < first else ", which cannot travel to other ranks"
        described.append((name + stays, is_delivered))
    return [structure, described]


def _can_travel(entry: Any) -> bool:
    try:
        tensors, _ = flatten(entry)
    except BoundaryError:
        return False
    return all(map(is_dense, tensors))
