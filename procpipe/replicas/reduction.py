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
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial, reduce
from itertools import chain

import torch
from torch import Tensor, nn

from procpipe.compute.segment import Segment
from procpipe.plan.program import Run
from procpipe.replicas.bucket import Bucket, buckets_of
from procpipe.replicas.buffers import join_buffers
from procpipe.replicas.group import Group, Operation
from procpipe.run.log import Log
from procpipe.run.replicas import Parameters, Replicas, Work
from procpipe.torch_internals import has_accumulation_hooks


class Reduction(Replicas):
    """One stage's part in adding up over replicas.

    Args:
        group: the processes that run the stage.
        device: this stage's.
        log: notes each sum.
        meet: waits until all of them are in this call.
    """

    has_others = True

    def __init__(
        self, group: Group, device: torch.device, log: Log, meet: Callable[[], object]
    ) -> None:
        self._group = group
        self._device = device
        self._log = log
        self._meet = meet
        self._own: set[nn.Parameter] = set()  # gradients to be added up, see Stage.no_sync
        self._fresh: set[nn.Parameter] = set()  # without a gradient before this call
        #: How many layers with a parameter are still to add to its gradient for the last time.
        self._num_to_add: Counter[nn.Parameter] = Counter()
        #: How often autograd adds to a parameter's gradient in the last such task.
        self._times_added: dict[nn.Parameter, int] = {}
        self._apart: list[Bucket] = []  # one each: other stages have it, too
        self._buckets: deque[Bucket] = deque()  # whose sums are to begin, in order
        self._begun: deque[tuple[Bucket, Operation]] = deque()

    # -- values ---------------------------------------------------------------------------------

    def make_equal(self, layers: Iterable[nn.Module]) -> None:
        """Give the layers of this replica the values of replica 0."""
        for layer in layers:
            self._group.copy_first((*layer.parameters(), *layer.buffers()))

    def end_forward(self, layers: Iterable[nn.Module]) -> None:
        """Join the replicas' statistics of batch normalisation, and make saved buffers equal."""
        join_buffers(layers, self._group)

    def total(self, loss: Tensor) -> Tensor:
        """Return the loss of all replicas, from that of this one."""
        self._meet()
        return self._in_order("loss", loss.to(self._device, torch.float64)).to(loss.dtype)

    def _in_order(self, what: str, own: Tensor) -> Tensor:
        """Add up in the order of the replicas, so that all stages get equal bits; waits."""
        with self._log.awaited_sum(what, own.nbytes):
            return reduce(torch.add, self._group.gathered(own))

    # -- gradients ------------------------------------------------------------------------------

    def begin(
        self, parameters: Parameters, of_loss: Parameters, tied: Parameters, *, reduces: bool
    ) -> None:
        """Begin a call with a backward pass; the gradients of ``tied`` are added up apart."""
        last = [*of_loss]
        self._num_to_add = Counter(chain(parameters, last))
        free = [p for p in self._num_to_add if p.requires_grad or p in self._own]
        self._apart, self._buckets, self._begun = [], deque(), deque()
        if reduces:
            _check_hooks(free)
            apart = {*tied}
            self._apart = [Bucket([p]) for p in free if p in apart]
            self._buckets += buckets_of([p for p in free if p not in apart], {*last})
        self._fresh = {parameter for parameter in free if parameter.grad is None}
        self._divide_common(free)
        if reduces:
            self._own.difference_update(free)
        else:
            self._own.update(free)

    @torch.no_grad()
    def _divide_common(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients of earlier calls that all replicas have in common."""
        for parameter in parameters:
            if parameter.grad is not None and parameter not in self._own:
                parameter.grad.div_(self._group.num_replicas)

    def around(self, step: Run, segment: Segment, work: Work) -> Work:
        """Return what adds up gradients to which no later task adds, as they become final."""
        return partial(self._adding_up, segment, work) if step.adds_last else work

    def _adding_up(self, segment: Segment, work: Work) -> None:
        """Add up gradients in the last task that adds to those of a partition.

        Not those of parameters that later partitions have, too. In the first such task it is only
        counted how often autograd adds to each: more than once where layers are recomputed with
        reentrant checkpointing.
        """
        self._meet()
        here = Counter(segment.parameters())
        final = {p for p, num_layers in here.items() if num_layers == self._num_to_add[p]}
        self._num_to_add.subtract(here)
        bucket_of = {p: bucket for bucket in self._buckets for p in bucket.missing if p in final}
        counts: Counter[nn.Parameter] = Counter()
        handles = []
        for parameter, bucket in bucket_of.items():
            if parameter.requires_grad and self._times_added.get(parameter, 1) == 1:
                added = partial(self._added, bucket, counts)
                handles.append(parameter.register_post_accumulate_grad_hook(added))
        try:
            work()
        finally:
            for handle in handles:
                handle.remove()
        for parameter, bucket in bucket_of.items():
            bucket.missing.discard(parameter)
            self._times_added.setdefault(parameter, counts[parameter] or 1)
        self._begin_complete()

    def _added(
        self, bucket: Bucket, counts: Counter[nn.Parameter], parameter: nn.Parameter
    ) -> None:
        """Autograd has added to a gradient; ``counts`` says how often in this task."""
        counts[parameter] += 1
        if parameter not in self._times_added:
            return
        if counts[parameter] > 1:
            raise RuntimeError(
                f"autograd added to the gradient of a parameter of shape {tuple(parameter.shape)} "
                "more often than in the first backward pass, after its all-reduce had begun, so "
                "the replicas' sum lacks a part: if layers use torch.utils.checkpoint.checkpoint, "
                "give it use_reentrant=False"
            )
        bucket.missing.discard(parameter)
        self._begin_complete()

    def end(self) -> None:
        """Wait until all gradients are added up, and write the sums into ``.grad``."""
        for bucket in self._buckets:
            bucket.missing.clear()
        self._begin_complete()
        assert not self._buckets, "all are begun"
        for k in range(len(self._begun)):
            asked_ns = time.perf_counter_ns()
            self._log.ask_sum(f"gradients {k}")
            bucket, operation = self._begun.popleft()
            total = operation.wait()
            self._log.added_up(f"gradients {k}", total.nbytes, operation.begun_ns, asked_ns)
            bucket.write(total, self._fresh)
        for bucket in self._apart:
            bucket.write(self._in_order("shared gradient", bucket.copied()), self._fresh)

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

    def _begin_complete(self) -> None:
        """Begin the sums of complete buckets, in order."""
        while self._buckets and not self._buckets[0].missing:
            bucket = self._buckets.popleft()
            self._begun.append((bucket, self._group.begin_sum(bucket.copied())))
            self._log.begin_sum(f"gradients {len(self._begun) - 1}")


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
