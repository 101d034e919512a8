"""The tasks of one partition: forward, recompute and backward of one micro-batch on its layers.

The autograd graph is cut at the partition's edges. What comes in is detached and enters the local
graph through a node that catches its gradient; what goes out is detached and kept as a root:

              F or R, left to right                B, right to left

    inputs ──(1) Enter ───(2) layers ──(3) roots ──(4) detached, sent on
                  ^                         |
                  |                         v
           (6) gradients  <──(5) torch.autograd.backward(roots, gradients received)

(1) makes received tensors look as they do in the plain model: results of an earlier layer, which a
layer may change in place, and not leaves, which it may not.

A micro-batch that is recomputed goes through (1), (2) and (3) twice. The first forward keeps its
inputs, buffers and random numbers, and drops its graph, which is there so that layers go the same
way both times, and to show which outputs require gradients. That takes no more memory than the
recomputation will. What no layer changes is noted once a mini-batch: modes and autocast, parameters
and other buffers.

B may be two tasks, I and W: then ``compute.split`` has layers of (2) put off weight gradients.

Independent of other partitions and of the order of tasks, which the runner takes from the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.compute.buffers import BufferCopies, Buffers, put
from procpipe.compute.digests import MINI_BATCHES, Digest, difference, digest_of
from procpipe.compute.generators import Generator, RandomStates, check_numpy, generators
from procpipe.compute.layers import Finish, Layers, Leaving
from procpipe.compute.recompute import Autocast, phase
from procpipe.compute.split import PutOff, Splitter
from procpipe.compute.wrappers import check_sharded_before
from procpipe.errors import RecomputeError
from procpipe.torch_internals import run_backward
from procpipe.tree import TENSOR, Flat, unflatten, versions_of

#: What comes in: from the partition before, or the model's inputs; then the skip tensors of each
#: source.
Inputs = Sequence[Flat]


class Enter(torch.autograd.Function):
    """Received tensors become results of this node, which catches their gradients.

    ``detach`` makes aliases that are not views, so that layers may change them in place as in the
    plain model. They share their version with the received tensors, so that this is detected.
    (``mark_dirty`` would count as such a change itself.)
    """

    @staticmethod
    def forward(ctx: Any, caught: Any, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Pass the tensors on; ``anchor`` requires a gradient, so that they do."""
        ctx.caught = caught
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        """Put the gradients into the list ``caught``."""
        ctx.caught[:] = gradients
        return (None,) * (2 + len(gradients))


#: ``Enter.apply`` without its search for transforms of ``torch.func``, which takes as long again.
_enter: Any = super(torch.autograd.Function, Enter).apply


@dataclass(slots=True)
class Pass:
    """One micro-batch between its forward and its backward task."""

    inputs: Inputs
    finish: Finish | None
    put_off: PutOff | None
    tensors: Sequence[Tensor]  # of all inputs
    wants: tuple[bool, ...]  # which of them require a gradient
    #: Of each output, which of its tensors require a gradient.
    flags: Sequence[tuple[bool, ...]] = ()
    roots: Sequence[Tensor] = ()
    caught: Sequence[Tensor | None] = ()  # gradients of inputs
    # If it is recomputed:
    random: RandomStates | None = None
    buffers: BufferCopies = field(default_factory=dict)
    digests: list[Digest] | None = None  # where they are compared: of F, then of R
    versions: Sequence[int | None] = ()  # of the inputs
    forms: Sequence[tuple[tuple[int, ...], bool]] = ()  # of the outputs


class Segment:
    """The layers of one partition, run task by task.

    Attributes:
        passes: micro-batches between their forward and their backward task.
    """

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.device = layers.device
        self._anchor = torch.empty(0, device=self.device, requires_grad=True)
        self._buffers = Buffers(layers.named)
        self._splitter: Splitter | None = None  # from the first split task on
        self.passes: dict[int, Pass] = {}
        self._put_off: dict[int, PutOff] = {}
        self._num_recomputed = 0  # mini-batches so far in which anything was recomputed
        self._generators: list[Generator] = []
        self._types: list[type] = []
        self.begin()

    def begin(self) -> None:
        """Start a mini-batch; whatever an unfinished one left is dropped."""
        self.passes.clear()
        self._put_off.clear()
        self._recomputes = False  # whether anything of this mini-batch is recomputed
        self._newest: RandomStates | None = None  # of the newest micro-batch to be recomputed
        types = [type(m) for layer in self.layers.named.values() for m in layer.modules()]
        if types != self._types:
            check_sharded_before(self._types or types, types)
            self._types = types
        self._autocast = self._first_autocast = Autocast(self.device)

    def resume(self) -> None:
        """Begin the backward tasks of a mini-batch whose forward tasks were in another program.

        Raises:
            RecomputeError: what is needed to recompute it has changed since.
        """
        now = Autocast(self.device)
        self._autocast = now if now.settings != self._first_autocast.settings else self._autocast
        if self._recomputes:
            what = self._buffers.changed(by_forward=False)
            _check_unchanged(what, "after the first forward of this mini-batch and before its")

    def end(self) -> None:
        """Check, at the end of a program, that it has changed nothing that is to be recomputed.

        Raises:
            RecomputeError: it has.
        """
        if self._recomputes:
            what = self._buffers.changed(by_forward=True)
            _check_unchanged(what, "by a hook, or for the first time by a layer, before a")
            self._buffers.note()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the layers, as they are now."""
        for layer in self.layers.named.values():
            yield from layer.parameters()

    @property
    def num_held(self) -> int:
        """Micro-batches between their forward and their last backward task."""
        return len(self.passes) + len(self._put_off)

    # -- the tasks ------------------------------------------------------------------------------

    def forward(
        self,
        i: int,
        inputs: Inputs,
        finish: Finish | None = None,
        *,
        keep: bool,
        recompute: bool,
        split: bool = False,
    ) -> list[Flat]:
        """Run micro-batch ``i`` through the layers.

        Args:
            i: the micro-batch.
            inputs: see ``Inputs``. Of the model they are a tuple of positional ones; or, if some
                are named, a dict by position and name.
            finish: applied to the output, as a last layer.
            keep: whether a backward task will follow.
            recompute: whether a recompute task will come before that; then no graph is kept now.
            split: whether the backward pass will be two tasks, I and W.

        Returns:
            The output, then the skip tensors for each destination, detached.
        """
        if not keep:
            with torch.no_grad():
                made = self.layers.run([flat.value for flat in inputs], finish)
            return [Flat([t.detach() for t in ts], form, (False,) * len(ts)) for ts, form in made]
        tensors, wants = inputs[0].tensors, inputs[0].requires_grad
        for flat in inputs[1:]:
            tensors, wants = tensors + flat.tensors, wants + flat.requires_grad
        this = self.passes[i] = Pass(inputs, finish, PutOff() if split else None, tensors, wants)
        if recompute:
            made = self._forward_to_repeat(this)
        else:
            made = self._run(this)
        leaving = []
        for tensors, form in made:
            flags = tuple([tensor.requires_grad for tensor in tensors])
            leaving.append(Flat([tensor.detach() for tensor in tensors], form, flags))
        this.flags = [flat.requires_grad for flat in leaving]
        return leaving

    def recompute(self, i: int) -> None:
        """Run micro-batch ``i`` again, with a graph that is kept.

        Raises:
            RecomputeError: the layers go another way this time, or start from another input.
        """
        this = self.passes[i]
        assert this.random is not None, "not to be recomputed"
        if not any(map(any, this.flags)):
            return
        if this.versions and this.versions != versions_of(this.tensors):
            raise RecomputeError(
                f"the input of micro-batch {i} was changed in place after its first forward, so "
                "recomputing it would start from the wrong values: leave a mini-batch's input "
                "alone until its backward() is over, or use checkpoint='never'"
            )
        if this.random is self._newest:
            this.random.forget_undrawn(RandomStates(self._generators))
            self._newest = None
        random = this.random.put() if this.random.states else None
        buffers = put(this.buffers) if this.buffers else None
        is_same = self._autocast is self._first_autocast
        autocast = None if is_same else self._first_autocast.restored()
        token = phase.set("recomputing")
        try:
            self._run(this, autocast=autocast)
        finally:
            phase.reset(token)
            if autocast is not None:
                autocast.close()
            if random is not None:
                random.put()
            if buffers is not None:
                put(buffers)
        if this.forms != (found := _forms_of(this.roots)):
            raise RecomputeError(
                f"recomputing micro-batch {i} gave outputs of (shape, requires gradient) {found}, "
                f"but its first forward gave {this.forms}: a layer takes another way the second "
                "time (see is_recomputing()); use checkpoint='never'"
            )
        if this.digests is not None:
            is_coarse = self._first_autocast.is_on or self.device.type != "cpu"
            if how := difference(*this.digests, is_coarse=is_coarse):
                raise RecomputeError(
                    f"the layers gave {how} when micro-batch {i} was recomputed, so gradients "
                    "would be wrong: one depends on what recomputation does not repeat. Repeated "
                    "are the global generators of torch, random and numpy.random (if it was "
                    "imported before), and buffers (register_buffer, for a counter): use these, "
                    "or checkpoint='never'"
                )
        this.random = this.digests = None
        this.buffers = {}

    def backward(self, i: int, gradients: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
        """Run the backward pass of micro-batch ``i`` and add to the parameters' gradients.

        This is task B; of a split micro-batch task I, without what W will do. Takes the gradient,
        or None, of each output tensor that requires one, of all outputs; returns, for each input,
        that of each of its tensors that requires one, None where it had no influence.
        """
        this = self.passes.pop(i)
        roots = [root for root in this.roots if root.requires_grad]
        pairs = zip(roots, gradients, strict=True)
        given = [(root, gradient) for root, gradient in pairs if gradient is not None]
        if this.put_off is not None:
            this.put_off.is_in_backward = True
        if given:
            around = self._around(this, self._autocast.off() if self._autocast.is_on else None)
            try:
                run_backward(*zip(*given, strict=True))
            finally:
                if around is not None:
                    around.close()
        if this.put_off is not None:
            self._put_off[i] = this.put_off
        caught = iter(this.caught or (None,) * sum(this.wants))
        return [[next(caught) for wants in flat.requires_grad if wants] for flat in this.inputs]

    def backward_weight(self, i: int) -> None:
        """Run task W of a split micro-batch: add the weight gradients that task I put off."""
        with self._autocast.off():
            self._put_off[i].run()
        del self._put_off[i]

    def may_require_gradient(self, i: int) -> bool:
        """Return whether any input of micro-batch ``i``, or parameter, requires a gradient."""
        is_trained = any(parameter.requires_grad for parameter in self.parameters())
        return is_trained or any(self.passes[i].wants)

    # -- running the layers ---------------------------------------------------------------------

    def _forward_to_repeat(self, this: Pass) -> list[Leaving]:
        """Run the first forward of a micro-batch that is recomputed."""
        if not self._recomputes:  # the first of a mini-batch
            self._recomputes = True
            self._num_recomputed += 1
            self._generators = generators(self.device)
            self._buffers.read()
        this.digests = [] if self._num_recomputed in MINI_BATCHES else None
        random = this.random = RandomStates(self._generators)
        if self._newest is not None:
            self._newest.forget_undrawn(random)
        self._newest = random
        # If the first layer may change its input in place, it works on copies.
        is_watched = not self.layers.changes_input
        this.versions = versions_of(this.tensors) if is_watched else []
        watched = [t for t in this.tensors if is_watched and not t.is_inference()]
        this.buffers = self._buffers.before_forward()
        token = phase.set("checkpointing")
        try:
            made = self._run(this, watched)
        finally:
            phase.reset(token)
        check_numpy(self._generators)
        self._buffers.after_forward(this.buffers)
        this.forms, this.roots = _forms_of(this.roots), []
        return made

    def _run(
        self, this: Pass, watched: Sequence[Tensor] = (), autocast: ExitStack | None = None
    ) -> list[Leaving]:
        """Go through (1), (2) and (3), and then leave ``autocast``."""
        # The first layer may change inputs that are kept. The model's input is one tensor for all
        # micro-batches, and so is its version.
        is_kept = this.random is not None or self.layers.is_first
        is_copied = is_kept and self.layers.changes_input
        tensors = [t.clone() for t in this.tensors] if is_copied else list(this.tensors)
        if True in this.wants:
            entering = [k for k, wants in enumerate(this.wants) if wants]
            this.caught = []
            entered = _enter(this.caught, self._anchor, *[tensors[k] for k in entering])
            for k, tensor in zip(entering, entered, strict=True):
                tensors[k] = tensor
        values: list[Any] = tensors
        if len(this.inputs) > 1:
            given = iter(tensors)
            values = [unflatten(islice(given, len(f.tensors)), f.structure) for f in this.inputs]
        elif this.inputs[0].structure != TENSOR:
            values = [unflatten(tensors, this.inputs[0].structure)]
        finish, digests = this.finish, this.digests
        if finish is not None and digests is not None:
            finish = partial(_digested, digests, finish)
        around = self._around(this, autocast)
        try:
            made = self.layers.run(values, finish, watched)
        finally:
            if around is not None:
                around.close()
        if finish is None and digests is not None:
            digests.append(digest_of(made[0][0]))
        this.roots = [tensor for tensors, _ in made for tensor in tensors]
        return made

    def _around(self, this: Pass, autocast: ExitStack | None) -> ExitStack | None:
        """Return what surrounds a task on the layers: ``autocast`` and, if it is split, that."""
        if this.put_off is None:
            return autocast
        if self._splitter is None:
            self._splitter = Splitter(self.layers.named.values(), self._anchor)
        stack = ExitStack() if autocast is None else autocast
        stack.enter_context(self._splitter.into(this.put_off))
        return stack


def _digested(digests: list[Digest], finish: Finish, output: Any) -> Any:
    """Add a digest of the layers' output, before ``loss_fn`` makes a loss of it."""
    digests.append(digest_of(output))
    return finish(output)


def _forms_of(tensors: Sequence[Tensor]) -> list[tuple[tuple[int, ...], bool]]:
    """Return of each tensor its shape, and whether it requires a gradient."""
    return [(tuple(tensor.shape), tensor.requires_grad) for tensor in tensors]


def _check_unchanged(what: str, when: str) -> None:
    """Raise an error if anything was changed that recomputation uses.

    Without recomputation autograd refuses such a backward pass; with it, the gradients would be
    those of another function.
    """
    if what:
        raise RecomputeError(
            f"{what} was changed {when} recomputation, whose gradients would be wrong: change "
            "modes, parameters and buffers after backward() is over (optimizer.step(), "
            "load_state_dict()), a layer's own buffers in every forward or in none, or use "
            "checkpoint='never'"
        )
