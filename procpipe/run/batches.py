"""Iterates over loaders: each replica's first rank reads one of its own.

    first rank                     between                        last stage
    item of the loader      (input, target)          (Remote, target)
                            ── order: form ──>       every other rank
                            ── target ──────>        the last stage

What loss code after ``stage(input)`` may need is sent to the last stage with the item: of a tuple
or list all but the first entry, otherwise all entries. ``step`` then does not send it again.

With replicas the first ranks agree before an item is yielded, see ``loops.py``.
"""

from __future__ import annotations

import atexit
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from procpipe.data.minibatch import on_device
from procpipe.data.remote import Remote
from procpipe.errors import BoundaryError, CallMismatchError, DisagreementError
from procpipe.job.grid import Grid
from procpipe.notes import write_note
from procpipe.run.calls import Calls
from procpipe.run.coordinator import Coordinator
from procpipe.run.loops import Loop
from procpipe.run.order import BatchDetail, Order
from procpipe.run.runner import Runner
from procpipe.run.stops import Signals, Stops, checked_signals
from procpipe.torch_internals import pytree
from procpipe.tree import TENSOR, Structure, flatten, is_plain, text_of, unflatten

#: A loader, or a function that makes one; ignored where it is not read, so None will do.
Loader = Iterable[Any] | Callable[[], Iterable[Any]] | None


class Batches:
    """One rank's part in iterating over a loader.

    Args:
        calls: with those of the other ranks.
        begin: begins a call, see ``Stage``.
        is_training: returns whether the stage is in training mode.
        grid: this rank's place.
        output_rank: runs the last partition of this replica.
        device: this stage's.

    Attributes:
        delivered: the values in the latest item that ``output_rank`` has, as they are on this rank,
            in the same order on both.
        stops: which signals have come, and whether the ranks have agreed to stop.
    """

    def __init__(
        self,
        calls: Calls,
        begin: Callable[..., Order],
        is_training: Callable[[], bool],
        grid: Grid,
        output_rank: int,
        device: torch.device,
    ) -> None:
        self.delivered: list[Any] = []
        self._contents: list[_Contents] = []  # of these, on the first rank
        self._on_host: list[Any] = []  # these as the loader gave them, on an only stage's GPU
        self._calls = calls
        self._begin = begin
        self._is_training = is_training
        self._grid = grid
        self._first = grid.rank_of(0)
        self._output_rank = output_rank
        self._device = device
        self.stops = Stops(lambda: calls.has_failed)
        self._done: set[str] = set()  # see ``Loop``
        self._unfinished: Iterator[Any] | None = None  # what a stopped loop has read from

    def close(self) -> None:
        """Set earlier handlers of signals again, and drop what a stopped loop has read from."""
        self.stops.restore()
        self._unfinished = None

    def read(self, loader: Loader, stop_on: Signals, *, same_data: bool) -> Iterator[Any]:
        """Yield a loader's items on the first rank, and items of their form on the others."""
        items = _items_of(loader, f"batches(None) on rank {self._first}, which reads the loader")
        numbers = []
        if stop_on != ():
            with self._calls.together("batches"):  # so that an error ends all ranks
                numbers = checked_signals(stop_on)
        names = ", ".join(number.name for number in numbers)
        with self.stops.handling(numbers):
            loop = Loop(self._grid, names, same_data, self._done)
            while True:
                with self._calls.together("batches") as pipeline:
                    item, detail = self._next(pipeline.coordinator, items, loop)
                    if detail.faults:
                        raise DisagreementError(detail.faults)
                    if detail.form is None:
                        self.stops.is_stopped |= detail.is_stopped
                        if detail.is_stopped:
                            self._keep(items)
                        return
                    item = self._deliver(pipeline, item, detail)
                yield item

    def _next(
        self, coordinator: Coordinator, items: Iterator[Any], loop: Loop
    ) -> tuple[Any, BatchDetail]:
        """Read the next item on the first rank, and bring what it says of it to the others.

        Raises:
            CallMismatchError: another rank is in another call, or has other options.
        """
        detail, is_stopped, item = BatchDetail(stop_on=loop.stop_on), False, None
        if loop.stop_on:
            self._begin_item(detail)
            ours = self.stops.is_stopped or self.stops.is_signalled
            is_stopped = coordinator.agree(ours, any, self._grid.same_replica())
        if self._grid.stage != 0:
            return None, self._begin_item(detail)
        loop.is_training = self._is_training()
        if loop.stop_on:
            is_stopped = loop.wait_signals(coordinator, is_signalled=is_stopped)
        if not is_stopped:
            found, is_stopped = self._read_one(items, loop.stop_on)
            is_stopped, has_ended, faults = loop.wait_items(
                coordinator, found, is_signalled=is_stopped
            )
            if faults:
                detail = replace(detail, faults=faults)
            elif not (is_stopped or has_ended):
                (item,) = found
                detail = _described(item, detail)
        return item, self._begin_item(replace(detail, is_stopped=is_stopped))

    def _read_one(self, items: Iterator[Any], stop_on: str) -> tuple[list[Any], bool]:
        """Return a loader's next item, or nothing, and whether the loader failed after a signal.

        A signal to the whole process group ends a DataLoader's workers, too.
        """
        try:
            return list(islice(items, 1)), False
        except Exception as error:
            if not stop_on or not self.stops.is_signalled:
                raise
            write_note(
                f"procpipe: the loop over batches ends: {self._grid.rank_name(self._grid.rank)} "
                f"got a signal to stop, and its loader then raised {type(error).__name__}: {error}"
            )
            return [], True

    def _deliver(self, pipeline: Runner, item: Any, detail: BatchDetail) -> Any:
        """Bring what the last stage needs of an item there; return what this rank yields."""
        here, wires = self._grid.rank, pipeline.wires
        self.delivered, self._contents, self._on_host = [], [], []
        sent: dict[int, Any] = {}
        if here != self._first:
            if detail.delivered and here == self._output_rank:
                sent = wires.take_value(self._first)
                self.delivered = _all_in(sent)
            return self._placeholders(detail, sent)
        if detail.delivered:
            entries, structure = _opened(item)
            sent = {k: entries[k] for k in detail.delivered}
            if here != self._output_rank:
                wires.send_value(self._output_rank, sent)
            elif self._device.type != "cpu":
                self._on_host = _all_in(sent)
                sent = on_device(sent, self._device)
                item = unflatten((dict(enumerate(entries)) | sent).values(), structure)
            self.delivered = _all_in(sent)
            self._contents = [*map(_contents, self.delivered)]
        return item

    def _begin_item(self, ours: BatchDetail) -> BatchDetail:
        """Issue what the first rank says of an item, or follow it elsewhere.

        Raises:
            CallMismatchError: the first rank ends the loop on other signals.
        """
        detail = self._begin("batches", detail=ours).detail
        assert isinstance(detail, BatchDetail), "the first rank describes each item"
        if detail.stop_on != ours.stop_on:
            here, there = (f"batches(…, stop_on=({of.stop_on}))" for of in (ours, detail))
            raise CallMismatchError(
                f"rank {self._grid.rank} is in {here} while rank {self._first} is in {there}: give "
                "the same signals on every rank"
            )
        return detail

    def _keep(self, items: Iterator[Any]) -> None:
        """Keep a stopped loop's iterator: a ``Resumable`` forgets its position when that ends."""
        self._unfinished = items
        atexit.register(setattr, self, "_unfinished", None)  # ends a DataLoader's workers

    def find_delivered(self, target: Any) -> int | None:
        """Return, on the first rank, which delivered value a target is; None if it is none.

        It is none if it has been changed.
        """
        for k, before in enumerate(self._contents):
            if target is self.delivered[k]:
                now = _contents(target)
                is_same = now[:2] == before[:2] and all(map(operator.is_, now[2], before[2]))
                return k if is_same else None
        return None

    def on_host(self, target: Any) -> Any:
        """Return a target of which this rank has the loader's item as it was read.

        So no host waits for its device to see what the target counts.
        """
        k = self.find_delivered(target) if self._on_host else None
        return target if k is None else self._on_host[k]

    def _placeholders(self, detail: BatchDetail, sent: Mapping[int, Any]) -> Any:
        """Return an item with placeholders for all that was not delivered to this rank."""
        structure, names = detail.form
        entries: list[Any] = []
        for k, name in enumerate(names):
            others = [self._output_rank] if k in detail.delivered else []
            placeholder = Remote(self._first, name, None, others=others, here=self._grid.rank)
            entries.append(sent.get(k, placeholder))
        return unflatten(entries, tuple(structure))


#: A nested value's structure, versions of tensors, and tensors, which a change would alter.
_Contents = tuple[Structure, list[int | None], list[Tensor]]


def _contents(value: Any) -> _Contents:
    tensors, structure = flatten(value)
    versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]
    return structure, versions, tensors


def _items_of(loader: Loader, nothing: str) -> Iterator[Any]:
    """Yield a loader's items, once asked for the first; ``TypeError`` if there is no loader."""
    if loader is None:
        raise TypeError(nothing)
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
    entries, spec = _entries_of(item)
    return entries, (text_of(spec), "")


def _entries_of(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    return pytree.tree_flatten(value, is_leaf=lambda each: each is not value)


def _all_in(value: Any) -> list[Any]:
    """Return a nested value, and then all values in it, from left to right."""
    children = [] if pytree.tree_is_leaf(value) else _entries_of(value)[0]
    return [value, *chain.from_iterable(map(_all_in, children))]


def _described(item: Any, detail: BatchDetail) -> BatchDetail:
    """Add what other ranks are sent of a loader's item, and which entries the last stage gets.

    Plain JSON: the structure of a container of the entries, and what each is. Entries that cannot
    travel stay on the first rank.
    """
    entries, structure = _opened(item)
    first = 1 if isinstance(item, (tuple, list)) and len(item) > 1 else 0
    delivered = [k for k in range(first, len(entries)) if _can_travel(entries[k])]
    of_item = " of the mini-batch"
    names = [f"{key!r}{of_item}" for key in item] if isinstance(item, Mapping) else []
    if len(names) != len(entries):
        names = [f"entry {k}{of_item}" for k in range(len(entries))]
    if structure == TENSOR:
        names = ["the mini-batch"]
    for k in {*range(first, len(entries))} - {*delivered}:
        names[k] += ", which cannot travel to other ranks"
    return replace(detail, form=[structure, names], delivered=delivered)


def _can_travel(entry: Any) -> bool:
    try:
        tensors, _ = flatten(entry)
    except BoundaryError:
        return False
    return all(is_plain(t) and t.layout == torch.strided and not t.is_meta for t in tensors)
