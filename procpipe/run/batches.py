"""Iterates over a loader that only rank 0 reads.

    rank 0                         between                        last stage
    item of the loader      (input, target)          (Remote, target)
                            ── order: form ──>       every other rank
                            ── target ──────>        the last stage

What loss code after ``stage(input)`` may need is sent to the last stage with the item: of a tuple
or list all but the first entry, otherwise all entries. ``step`` then does not send it again.
"""

from __future__ import annotations

import atexit
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from procpipe.data.minibatch import on_device
from procpipe.data.remote import Remote
from procpipe.errors import BoundaryError, CallMismatchError
from procpipe.notes import write_note
from procpipe.run.calls import Calls
from procpipe.run.messages import BatchDetail, Order
from procpipe.run.pipeline import Pipeline
from procpipe.run.stops import Signals, Stops, checked_signals
from procpipe.torch_internals import pytree
from procpipe.tree import (
    PLAIN_TYPES,
    TENSOR,
    Structure,
    flatten,
    is_plain,
    text_of,
    unflatten,
)

_NOTHING: Any = object()

#: Said of entries that are not sent: they are not made of dense tensors and plain values; or they
#: are a replica's share.
_CANNOT_TRAVEL = ", which cannot travel to other ranks"
_IS_SHARE = ", which batches(…, sharded=True) sends to no other rank"

#: A loader, or a function that makes one; ignored where it is not read, so None will do.
Loader = Iterable[Any] | Callable[[], Iterable[Any]] | None


class Batches:
    """One rank's part in iterating over a loader; ``output_rank`` runs the last partition.

    Attributes:
        delivered: the tensors and containers that ``output_rank`` has of rank 0's latest item, as
            they are on this rank, in the same order on both.
        stops: which signals have come, and whether the ranks have agreed to stop.
    """

    def __init__(
        self,
        calls: Calls,
        issue_or_follow: Callable[..., Order],
        rank: int,
        output_rank: int,
        device: torch.device,
    ) -> None:
        self._bodies: dict[object, bool] = {}  # the loops in whose bodies the script is
        #: The tensors of items that this rank alone has read, by their ids.
        self._shards: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self.delivered: list[Any] = []
        self._delivered_as: list[list[Any]] = []
        self._on_host: list[Any] = []  # the same as the loader gave it, on the only stage
        self._calls = calls
        self._issue_or_follow = issue_or_follow
        self._rank = rank
        self._output_rank = output_rank
        self._device = device
        self.stops = Stops(lambda: calls.has_failed)
        self._unfinished: Iterator[Any] | None = None  # what a stopped loop has read from

    def until_stopped(self, stop_on: Signals, items_of: Callable[[str], Iterator[Any]]) -> Any:
        """Yield the items of a loop that handles signals; it is made from their names."""
        with self._calls.together("batches"):
            numbers = checked_signals(stop_on)
        with self.stops.handling(numbers):
            yield from items_of(", ".join(number.name for number in numbers))

    def _is_stopped(
        self, pipeline: Pipeline, items: Iterator[Any], stop_on: str, *, is_sharded: bool = False
    ) -> bool:
        """Agree, before the next item is read, whether the loop ends because of a signal."""
        if not stop_on:
            return False
        self._issue_or_follow_item(BatchDetail(is_sharded=is_sharded, stop_on=stop_on))
        if self.stops.agree(pipeline.control.agree):
            self._keep(items)
        return self.stops.is_stopped

    def close(self) -> None:
        """Set earlier handlers of signals again, and drop what a stopped loop has read from."""
        self.stops.restore()
        self._unfinished = None

    def _keep(self, items: Iterator[Any]) -> None:
        """Keep a stopped loop's iterator: a ``Resumable`` forgets its position when that ends."""
        self._unfinished = items
        atexit.register(setattr, self, "_unfinished", None)  # ends a DataLoader's workers

    def _next(self, items: Iterator[Any], stop_on: str) -> tuple[Any, bool]:
        """Return a loader's next item, and whether the loader failed after a signal.

        A signal to the whole process group ends a DataLoader's workers, too.
        """
        try:
            return next(items, _NOTHING), False
        except Exception as error:
            if not stop_on or not self.stops.is_signalled:
                raise
            write_note(
                f"procpipe: the loop over batches ends: rank {self._rank} was told to stop, and "
                f"then its loader failed with {type(error).__name__}: {error}"
            )
            return _NOTHING, True

    def read(self, loader: Loader, stop_on: str = "") -> Iterator[Any]:
        """Yield a loader's items on rank 0, and items of their form on the others."""
        items = _items_of(loader, "batches(None) on rank 0, which reads the loader")
        while True:
            with self._calls.together("batches") as pipeline:
                if self._is_stopped(pipeline, items, stop_on):
                    return
                item, on_host, is_stopped = _NOTHING, None, False
                if self._rank == 0:
                    item, is_stopped = self._next(items, stop_on)
                form, delivered = (None, {}) if item is _NOTHING else _described(item)
                detail = self._issue_or_follow_item(
                    BatchDetail(form, list(delivered), stop_on=stop_on, is_stopped=is_stopped)
                )
                if detail.form is None:
                    self.stops.is_stopped |= detail.is_stopped
                    return
                if self._rank != 0:
                    if detail.delivered and self._rank == self._output_rank:
                        delivered = pipeline.wires.take_value(0)
                    item = self._placeholders(detail, delivered)
                elif delivered and self._output_rank != 0:
                    pipeline.wires.send_value(self._output_rank, delivered)
                elif delivered:  # this stage will use it
                    on_host = delivered
                    if self._device.type != "cpu":
                        delivered = on_device(delivered, self._device)
                        item = _with_entries(item, delivered)
                self._note(delivered, on_host)
            with self._body(is_sharded=False):
                yield item

    @property
    def is_sharded(self) -> bool:
        """Whether, in a loop over items, each replica's first rank has one of its own.

        What the loop says counts that was the last to begin its body.
        """
        return next(reversed(self._bodies.values()), False)

    @contextmanager
    def _body(self, *, is_sharded: bool) -> Iterator[None]:
        """Surround one run of a loop's body; loops may end in another order than they began."""
        key = object()
        self._bodies[key] = is_sharded
        try:
            yield
        finally:
            del self._bodies[key]

    def shards(self, loader: Loader, stop_on: str = "", *, is_first: bool) -> Iterator[Any]:
        """Yield the items of a loader that the first rank of each replica has of its own.

        The loop ends when all have ended. Until then, one that has ended yields placeholders.
        ``is_first``: whether this is such a rank, whose ``loader`` is read.
        """
        items = _items_of(
            loader,
            f"batches(None, sharded=True) on rank {self._rank}, the first of its replica, which "
            "reads a loader of its own",
        )
        while True:
            with self._calls.together("batches") as pipeline:
                if self._is_stopped(pipeline, items, stop_on, is_sharded=True):
                    return
                self._issue_or_follow_item(BatchDetail(is_sharded=True, stop_on=stop_on))
                item = self._next(items, stop_on)[0] if is_first else _NOTHING
                form = None if item is _NOTHING else _described(item, is_share=True)[0]
                forms = pipeline.exchange.gather_offers(json.dumps(form))
                found = next((f for f in map(json.loads, forms) if f is not None), None)
                detail = self._issue_or_follow_item(
                    BatchDetail(found, is_sharded=True, stop_on=stop_on)
                )
                self._note({})
            if detail.form is None:
                return
            self._shards.update({id(tensor): tensor for tensor in flattened(item)})
            with self._body(is_sharded=True):
                yield self._placeholders(detail, {}) if item is _NOTHING else item

    def _issue_or_follow_item(self, ours: BatchDetail) -> BatchDetail:
        """Issue what rank 0 says of an item, or follow it elsewhere.

        Raises:
            CallMismatchError: rank 0 reads the loader alone, or shares of it, and this rank not so;
                or ends the loop on other signals.
        """
        detail = self._issue_or_follow("batches", detail=ours).detail
        assert isinstance(detail, BatchDetail), "rank 0 describes each item"
        if detail.is_sharded != ours.is_sharded:
            here, there = (f"batches(…, sharded={of.is_sharded})" for of in (ours, detail))
            raise CallMismatchError(
                f"rank {self._rank} is in {here} while rank 0 is in {there}: every rank must make "
                "the same calls"
            )
        if detail.stop_on != ours.stop_on:
            here, there = (f"batches(…, stop_on=({of.stop_on}))" for of in (ours, detail))
            raise CallMismatchError(
                f"rank {self._rank} is in {here} while rank 0 is in {there}: give the same signals "
                "on every rank"
            )
        return detail

    def check_not_sharded(self, inputs: Any) -> None:
        """Check that inputs are not a share of a mini-batch, outside of the loop that has read it.

        Raises:
            RuntimeError: they are, and the shares of other replicas would be lost.
        """
        for tensor in flattened(inputs) if self._shards else ():
            if self._shards.get(id(tensor)) is tensor:
                raise RuntimeError(
                    "an item of batches(…, sharded=True) is used outside of the body of that loop, "
                    "where the first rank's input would be taken as the whole mini-batch: use it "
                    "in the loop, before the next item is read"
                )

    def find_delivered(self, target: Any) -> int | None:
        """Return, on rank 0, which delivered value a target is, unchanged; None if it is none."""
        for k, (value, before) in enumerate(zip(self.delivered, self._delivered_as, strict=True)):
            if target is value:
                now = _contents(target)
                is_same = len(now) == len(before) and all(
                    one is other or (not isinstance(one, Tensor) and one == other)
                    for one, other in zip(now, before, strict=True)
                )
                return k if is_same else None
        return None

    def on_host(self, target: Any) -> Any:
        """Return a target of which this rank has the loader's item as it was read.

        So no host waits for its device to see what the target counts.
        """
        k = self.find_delivered(target) if self._on_host else None
        return target if k is None else self._on_host[k]

    def _note(self, delivered: Mapping[int, Any], on_host: Mapping[int, Any] | None = None) -> None:
        self.delivered = list(chain.from_iterable(map(_all_in, delivered.values())))
        self._on_host = list(chain.from_iterable(map(_all_in, (on_host or {}).values())))
        self._delivered_as = [*map(_contents, self.delivered)] if self._rank == 0 else []

    def _placeholders(self, detail: BatchDetail, delivered: Mapping[int, Any]) -> Any:
        """Return an item with placeholders for all that was not delivered to this rank."""
        structure, names = detail.form
        entries: list[Any] = []
        for k, name in enumerate(names):
            others = [self._output_rank] if k in detail.delivered else []
            placeholder = Remote(0, name, None, others=others, here=self._rank)
            entries.append(delivered.get(k, placeholder))
        return unflatten(entries, tuple(structure))


def flattened(value: Any) -> list[Tensor]:
    """Return the tensors of a nested value, or none if it holds other objects."""
    try:
        return flatten(value)[0]
    except BoundaryError:
        return []


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


def _described(item: Any, *, is_share: bool = False) -> tuple[list[Any], dict[int, Any]]:
    """Return what other ranks are sent of a loader's item, and which entries the last stage gets.

    The first is plain JSON: the structure of a container of the entries, and what each is. Entries
    that cannot travel stay on rank 0, and so do all of a share.
    """
    entries, structure = _opened(item)
    first = 1 if isinstance(item, (tuple, list)) and len(item) > 1 else 0
    keys = [*map(repr, item)] if isinstance(item, Mapping) else []
    delivered, names = {}, []
    for k, entry in enumerate(entries):
        key = keys[k] if len(keys) == len(entries) else f"entry {k}"
        name = "the mini-batch" if structure == TENSOR else f"{key} of the mini-batch"
        if k >= first and not is_share and _can_travel(entry):
            delivered[k] = entry
        elif k >= first:
            name += _IS_SHARE if is_share else _CANNOT_TRAVEL
        names.append(name)
    return [structure, names], delivered


def _can_travel(entry: Any) -> bool:
    try:
        tensors, _ = flatten(entry)
    except BoundaryError:
        return False
    return all(is_plain(t) and t.layout == torch.strided and not t.is_meta for t in tensors)


def _with_entries(item: Any, others: Mapping[int, Any]) -> Any:
    """Return an item of a loader with other entries, by their indices."""
    entries, structure = _opened(item)
    return unflatten([others.get(k, entry) for k, entry in enumerate(entries)], structure)


def _all_in(value: Any) -> Iterator[Any]:
    """Yield a nested value, and then the tensors and containers in it, from left to right."""
    if isinstance(value, PLAIN_TYPES):
        return
    yield value
    if not pytree.tree_is_leaf(value):
        for child in _entries_of(value)[0]:
            yield from _all_in(child)


def _contents(value: Any) -> list[Any]:
    """Return a nested value's structure, tensors and versions, which a change would alter."""
    tensors, structure = flatten(value)
    versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]
    return [structure, *tensors, *versions]
