"""Iterates over a loader that only rank 0 reads.

    rank 0                         between                        last stage
    item of the loader      (input, target)          (Remote, target)
                            ── order: form ──>       every other rank
                            ── target ──────>        the last stage

The target is sent to the last stage with the item, for loss code after ``stage(input)``; ``step``
then does not send it again.
"""

from __future__ import annotations

import atexit
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from procpipe.containers import opened
from procpipe.data.minibatch import on_device
from procpipe.data.remote import Remote
from procpipe.errors import BoundaryError, CallMismatchError
from procpipe.notes import write_note
from procpipe.run.calls import Calls
from procpipe.run.messages import BatchDetail, Order
from procpipe.run.pipeline import Pipeline
from procpipe.run.stops import Signals, Stops, checked_signals
from procpipe.tree import TENSOR, Structure, flatten, from_json, num_tensors, unflatten

_NOTHING: Any = object()

#: A loader, or a function that makes one; ignored where it is not read, so None will do.
Loader = Iterable[Any] | Callable[[], Iterable[Any]] | None


class Batches:
    """One rank's part in iterating over a loader; ``output_rank`` runs the last partition.

    Attributes:
        delivered_target: the target that ``output_rank`` already has, as it is on this rank: the
            second of two entries of the latest item. Otherwise a value that is not a target.
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
        self.delivered_target: Any = _NOTHING
        self._delivered_as: list[Any] = []
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
                item, is_stopped = _NOTHING, False
                if self._rank == 0:
                    item, is_stopped = self._next(items, stop_on)
                delivered = _deliverable(item)
                form = None if item is _NOTHING else _form_of(item)
                detail = self._issue_or_follow_item(
                    BatchDetail(form, delivered is not None, stop_on=stop_on, is_stopped=is_stopped)
                )
                if detail.form is None:
                    self.stops.is_stopped |= detail.is_stopped
                    return
                if self._rank != 0:
                    if detail.is_delivered and self._rank == self._output_rank:
                        delivered = pipeline.wires.take_value(0)
                    item = _placeholders(detail.form, delivered)
                elif delivered is not None and self._output_rank != 0:
                    pipeline.wires.send_value(self._output_rank, delivered)
                elif delivered is not None:  # this stage will use it
                    if self._device.type != "cpu":
                        item = _with_rest_on(self._device, item, delivered)
                    delivered = None
                self._note(delivered)
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
                form = None if item is _NOTHING else _form_of(item)
                forms = pipeline.exchange.gather_offers(json.dumps(form))
                found = next((f for f in map(json.loads, forms) if f is not None), None)
                detail = self._issue_or_follow_item(
                    BatchDetail(found, is_sharded=True, stop_on=stop_on)
                )
                self._note(None)
            if detail.form is None:
                return
            self._shards.update({id(tensor): tensor for tensor in flattened(item)})
            with self._body(is_sharded=True):
                yield _placeholders(detail.form, None) if item is _NOTHING else item

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

    def has_delivered(self, target: Any) -> bool:
        """Return, on rank 0, whether the last stage has this target, unchanged."""
        if target is not self.delivered_target:
            return False
        now = _contents(target)
        return len(now) == len(self._delivered_as) and all(
            one is other or (not isinstance(one, Tensor) and one == other)
            for one, other in zip(now, self._delivered_as, strict=True)
        )

    def _note(self, delivered: tuple[Any, ...] | None) -> None:
        is_target = delivered is not None and len(delivered) == 1
        self.delivered_target = delivered[0] if delivered and is_target else _NOTHING
        self._delivered_as = _contents(delivered[0]) if delivered and is_target else []


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


def _form_of(item: Any) -> list[Any]:
    """Describe a loader's item by structures: the whole of a container, then the outer form."""
    outer: Any = TENSOR
    if isinstance(item, (tuple, list)):
        outer = ("t" if isinstance(item, tuple) else "l", (TENSOR,) * len(item))
    elif isinstance(item, Mapping):
        outer = ("d", (TENSOR,) * len(item), *item)
    if not isinstance(item, Tensor) and type(item) not in (tuple, list, dict):
        with suppress(BoundaryError):  # it need not travel: the outer form will do
            if opened(item) is not None:
                return [flatten(item)[1], outer]
    return [outer]


def _deliverable(item: Any) -> tuple[Any, ...] | None:
    """Return the part of an item that goes to the last stage, if it can."""
    if not isinstance(item, (tuple, list)) or len(item) < 2:
        return None
    rest = tuple(item[1:])
    try:
        flatten(rest)
    except BoundaryError:
        return None
    return rest


def _with_rest_on(device: torch.device, item: Any, rest: tuple[Any, ...]) -> Any:
    """Return an item of a loader with all but its first entry on a device."""
    entries = [item[0], *(on_device(entry, device) for entry in rest)]
    if hasattr(item, "_replace"):
        return item._replace(**dict(zip(item._fields, entries, strict=True)))
    return entries if isinstance(item, list) else tuple(entries)


def _contents(value: Any) -> list[Any]:
    """Return a nested value's structure, tensors and versions, which a change would alter."""
    tensors, structure = flatten(value)
    versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]
    return [structure, *tensors, *versions]


def _placeholders(form: list[Any], delivered: tuple[Any, ...] | None) -> Any:
    """Return an item of this form, with placeholders for all that was not delivered here.

    If only rank 0 has imported the class of a container, its outer form is used instead.
    """
    structure = from_json(form[0])
    try:
        item = unflatten([Remote(0, name, None) for name in _names(structure)], structure)
    except BoundaryError:
        return _placeholders(form[1:], delivered)
    if delivered is None:
        return item
    container = opened(item)
    assert container is not None, "only a part of a container is delivered"
    first, *rest = container.children
    return container.like([first, *delivered, *rest[len(delivered) :]])


def _names(structure: Structure) -> list[str]:
    """Say what each placeholder of an item stands for."""
    if structure == TENSOR:
        return ["the mini-batch"]
    name, entries, *keys = structure
    if name in ("t", "l"):
        return [f"entry {k} of the mini-batch" for k in range(len(entries))]
    if name == "d":
        return [f"{key!r} of the mini-batch" for key in keys]
    return ["a tensor of the mini-batch"] * num_tensors(structure)
