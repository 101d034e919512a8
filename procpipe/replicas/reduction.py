"""Adds up gradients over replicas, once a step.

    last backward of a stage    layer 3 ──── layer 2 ──── layer 1 ──── layer 0
    its buckets                         └ sum of 3, 2 ─────── └ sum of 1, 0 ────
    end of the step                                                          └ wait, write .grad

A bucket's sum begins once all its gradients are final, so it runs beside the rest of the backward
pass and the drain of the pipeline. Each replica has divided its loss by what the whole mini-batch
counts, so sums are right as they are. Gradients of earlier calls that all replicas have in common
are divided by the number of replicas first, as the sum adds them up, too.

Every process of a group begins the same sums in the same order, once it knows that the others are
in the same call.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn

from procpipe.compute.segment import Segment
from procpipe.data.minibatch import MiniBatch
from procpipe.plan.buckets import bucketed
from procpipe.plan.program import Run
from procpipe.replicas.buffers import ReplicaBuffers
from procpipe.replicas.group import Group, Operation
from procpipe.run.log import Log
from procpipe.run.replicas import Around, Replicas
from procpipe.torch_internals import has_accumulation_hooks


class Reduction(Replicas):
    """One stage's part in adding up over replicas.

    Args:
        group: the processes that run the stage.
        device: this stage's.
        log: notes each sum.
        meet: waits until all of them are in this call.
    """

    def __init__(
        self, group: Group, device: torch.device, log: Log, meet: Callable[[], object]
    ) -> None:
        self._group = group
        self._device = device
        self._log = log
        self._meet = meet
        self._joined = ReplicaBuffers(group)
        self._own: set[nn.Parameter] = set()  # gradients to be added up, see Stage.no_sync
        self._fresh: set[nn.Parameter] = set()  # without a gradient before this call
        #: How many layers with a parameter are still to add to its gradient for the last time.
        self._num_to_add: Counter[nn.Parameter] = Counter()
        self._apart: list[nn.Parameter] = []
        self._buckets: list[_Bucket] = []
        self._num_begun = 0
        self._times_added: dict[nn.Parameter, int] = {}
        self._counts: Counter[nn.Parameter] = Counter()

    def close(self) -> None:
        """Drop the sums that are under way, and the connections."""
        self._buckets = []
        self._group.close()

    # -- values ---------------------------------------------------------------------------------

    def make_equal(self, layers: Iterable[nn.Module]) -> None:
        """Give the layers of this replica the values of replica 0."""
        for layer in layers:
            self._group.copy_first((*layer.parameters(), *layer.buffers()))
            self._joined.note(layer)

    def end_forward(self, layers: Iterable[nn.Module]) -> None:
        """Join the replicas' statistics of batch normalisation, and make other buffers equal."""
        self._joined.end_forward(layers)

    # -- gradients ------------------------------------------------------------------------------

    def begin(
        self, batch: MiniBatch, parameters: Iterable[nn.Parameter], tied: Iterable[nn.Parameter]
    ) -> None:
        """Begin a call with a backward pass; the gradients of ``tied`` are added up apart.

        In one order on all stages that have them.
        """
        self._meet()
        found = list(parameters)
        self._num_to_add = Counter(found)
        free = [p for p in self._num_to_add if p.requires_grad or p in self._own]
        if batch.reduces:
            _check_hooks(free)
        self._fresh = {parameter for parameter in free if parameter.grad is None}
        self._divide_common(free)
        self._apart, self._buckets, self._num_begun = [], [], 0
        if batch.reduces:
            self._own.difference_update(free)
            of_loss = set() if batch.loss is None else {*batch.loss.parameters()}
            self._fill_buckets(free, tied, of_loss)
        else:
            self._own.update(free)

    def _fill_buckets(
        self, free: list[nn.Parameter], tied: Iterable[nn.Parameter], of_loss: set[nn.Parameter]
    ) -> None:
        """Divide all that is not added up apart into buckets.

        Those of a loss come last, as their gradients are final at the call's end only.
        """
        together = dict.fromkeys(free)
        self._apart = [p for p in dict.fromkeys(tied) if p in together]
        for parameter in self._apart:
            del together[parameter]
        before = [p for p in together if p not in of_loss]
        last = [p for p in together if p in of_loss]
        self._buckets = [*_bucketed(before), *_bucketed(last)]

    def _divide_common(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients of earlier calls that all replicas have in common."""
        for parameter in parameters:
            if parameter.grad is not None and parameter not in self._own:
                with torch.no_grad():
                    parameter.grad.div_(self._group.num_replicas)

    def around(self, step: Run, segment: Segment) -> Around:
        """Return what adds up gradients to which no later task adds, as they become final."""
        return partial(self._adding_up, segment) if step.adds_last else self._looking

    @contextmanager
    def _looking(self) -> Iterator[None]:
        self._look()
        yield

    @contextmanager
    def _adding_up(self, segment: Segment) -> Iterator[None]:
        """Add up gradients in the last task that adds to those of a partition.

        Not those of parameters that later partitions have, too. In the first such task it is only
        counted how often autograd adds to each: more than once where layers are recomputed with
        reentrant checkpointing.
        """
        self._look()
        here = Counter(segment.parameters())
        own = {p for p, num_layers in here.items() if num_layers == self._num_to_add[p]}
        self._num_to_add.subtract(here)
        bucket_of = {p: bucket for bucket in self._buckets for p in bucket.missing if p in own}
        handles = []
        for parameter, bucket in bucket_of.items():
            if parameter.requires_grad and self._times_added.get(parameter, 1) == 1:
                is_final = partial(self._is_final, bucket)
                handles.append(parameter.register_post_accumulate_grad_hook(is_final))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for parameter, bucket in bucket_of.items():
            bucket.missing.discard(parameter)
            self._times_added.setdefault(parameter, self._counts.pop(parameter, 1))
        self._begin_complete()

    def end(self) -> None:
        """Wait until all gradients are added up, and write the sums into ``.grad``."""
        for bucket in self._buckets:
            bucket.missing.clear()
        self._begin_complete()
        for k, bucket in enumerate(self._buckets):
            asked_ns = time.perf_counter_ns()
            self._log.ask_sum(f"gradients {k}")
            num_bytes = bucket.wait()
            self._look()
            times_ns = bucket.begun_ns, bucket.ended_ns, asked_ns
            self._log.added_up(f"gradients {k}", num_bytes, *times_ns)
            bucket.end(self._fresh)
        self._buckets = []
        for parameter in self._apart:
            self._add_up_apart(parameter)

    def check_added_up(self, call: str) -> None:
        """Raise ``RuntimeError`` if calls in ``no_sync()`` have left gradients to be added up.

        Zeros of this replica, as zero_grad(set_to_none=False) leaves them, need no sum; if another
        replica's are not 0, that one finds it.
        """
        gradients = (parameter.grad for parameter in self._own)
        if any(g is not None and (g.is_sparse or bool(g.any())) for g in gradients):
            raise RuntimeError(
                f"{call} after calls in no_sync(): gradients are still to be added up over "
                "replicas; run the last step of an accumulation outside of it"
            )

    def _look(self) -> None:
        """Note which sums are over; on a GPU the host does not know."""
        if self._device.type == "cpu":
            for bucket in self._buckets[: self._num_begun]:
                bucket.look()

    def _is_final(self, bucket: _Bucket, parameter: nn.Parameter) -> None:
        if parameter not in self._times_added:
            self._counts[parameter] += 1
            return
        if parameter not in bucket.missing:
            raise RuntimeError(
                f"autograd added to the gradient of a parameter of shape {tuple(parameter.shape)} "
                "more often than in the first backward pass, after its all-reduce had begun, so "
                "the replicas' sum lacks a part: if layers use torch.utils.checkpoint.checkpoint, "
                "give it use_reentrant=False"
            )
        bucket.missing.discard(parameter)
        self._begin_complete()

    def _begin_complete(self) -> None:
        """Begin the sums of complete buckets, in order."""
        self._look()
        while self._num_begun < len(self._buckets):
            bucket = self._buckets[self._num_begun]
            if bucket.missing:
                return
            operation = bucket.begin(self._group)
            wait = operation.wait if operation.is_queued else None
            self._log.begin_sum(f"gradients {self._num_begun}", wait)
            self._num_begun += 1

    def _add_up_apart(self, parameter: nn.Parameter) -> None:
        """Add up one gradient in the order of the replicas, so that all stages get equal bits."""
        own = parameter.grad
        given = torch.zeros_like(parameter) if own is None else own
        is_there = torch.full((1,), own is not None, dtype=given.dtype, device=given.device)
        with self._log.awaited_sum("shared gradient", given.nbytes):
            parts = self._group.gathered(torch.cat([given.reshape(-1), is_there]))
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        if own is not None or total[-1]:
            parameter.grad = total[:-1].view_as(given)

    # -- losses ---------------------------------------------------------------------------------

    def total(self, loss: Tensor, batch: MiniBatch) -> Tensor:
        """Return the loss of all replicas, from that of this one."""
        if not batch.is_shared:
            return loss
        self._meet()
        total = loss.to(self._device, torch.float64, copy=True)
        with self._log.awaited_sum("loss", total.nbytes):
            self._group.begin_sum(total).wait()
        return total.to(loss.dtype)


def _check_hooks(parameters: Iterable[nn.Parameter]) -> None:
    """Check that no hook of the user needs a gradient before it is added up."""
    for parameter in parameters:
        if has_accumulation_hooks(parameter):
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} has a hook, by "
                "register_post_accumulate_grad_hook, but with replicas the gradient there is only "
                "a part until the call returns: remove the hook and do its work after step() or "
                "backward()"
            )


class _Bucket:
    """Gradients that are added up together: of one dtype, and of one device."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.missing = set(parameters)
        self.begun_ns = 0
        self.ended_ns = 0  # when the sum was first seen to be over
        self._parameters = parameters
        self._flat: Tensor | None = None
        self._sum: Operation | None = None

    def begin(self, group: Group) -> Operation:
        """Copy the gradients, and begin their sum, which is returned.

        Behind the gradients stands which of them there are.
        """
        first = self._parameters[0]
        parts, present = [], []
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.layout != torch.strided:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which "
                    "replicas cannot add up: use a dense one (sparse=False)"
                )
            present.append(gradient is not None)
            parts.append(
                parameter.new_zeros(parameter.numel())
                if gradient is None
                else gradient.detach().reshape(-1)
            )
        for is_there, run in groupby(present):  # no copy from the host, which would wait
            parts.append(first.new_full((len([*run]),), float(is_there)))
        self._flat = torch.cat(parts)
        self.begun_ns = time.perf_counter_ns()
        self._sum = group.begin_sum(self._flat)
        return self._sum

    def look(self) -> None:
        """Note when the sum is first seen to be over."""
        if not self.ended_ns and self._sum is not None and self._sum.is_over:
            self.ended_ns = time.perf_counter_ns()

    def wait(self) -> int:
        """Wait for the sum; return its bytes."""
        assert self._sum is not None and self._flat is not None, "it was begun"
        self._sum.wait()
        self.ended_ns = self.ended_ns or time.perf_counter_ns()
        return self._flat.nbytes

    def end(self, fresh: set[nn.Parameter]) -> None:
        """Make the sum the gradients, or write it into those of earlier calls.

        Not into those of this call: what another stage is sent may share their memory.
        """
        assert self._flat is not None, "it was begun"
        sizes = [parameter.numel() for parameter in self._parameters]
        *sums, present = self._flat.split([*sizes, len(sizes)])
        is_there: list[float] | None = None
        for k, (parameter, total) in enumerate(zip(self._parameters, sums, strict=True)):
            own = parameter.grad
            if own is not None and parameter not in fresh:
                own.copy_(total.view_as(own))
                continue
            if own is None and is_there is None:
                is_there = present.tolist()  # on a GPU the host waits, where a gradient is missing
            if own is not None or (is_there and is_there[k]):
                like = torch.empty_like(parameter, requires_grad=False)
                parameter.grad = like.copy_(total.view_as(like))
        self._flat = self._sum = None


def _bucketed(parameters: Sequence[nn.Parameter]) -> Iterator[_Bucket]:
    """Divide parameters into buckets, the last layers first, as their gradients come."""
    ordered = [*reversed(parameters)]
    for places in bucketed((parameter.dtype, parameter.nbytes) for parameter in ordered):
        yield _Bucket([ordered[place] for place in places])
