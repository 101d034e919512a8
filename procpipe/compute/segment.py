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

A micro-batch that is recomputed runs (2) first without a graph, keeps its inputs, buffers and
random numbers, and goes through (1), (2) and (3) in its recompute task. What no layer changes is
noted once a mini-batch: modes and autocast, which a backward pass restores; parameters and other
buffers, which are compared at the end of a program.

B may be two tasks, I and W: then ``compute.split`` has layers of (2) put off weight gradients.

Independent of other partitions and of the order of tasks, which the runner takes from the plan.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.compute.buffers import BufferCopies, Buffers
from procpipe.compute.digests import MINI_BATCHES, REPEATED, Digest, difference, digest_of
from procpipe.compute.generators import Generator, RandomStates, check_numpy, generators
from procpipe.compute.graph import Enter, Entry, check_shapes
from procpipe.compute.layers import Finish, Layers, Leaving, versions_of
from procpipe.compute.recompute import NOTHING, Surroundings, checkpointing, recomputing
from procpipe.compute.split.splitter import PutOff, Splitter
from procpipe.compute.wrappers import check_sharded_before
from procpipe.errors import RecomputeError
from procpipe.torch_internals import is_compiled, pytree, run_backward
from procpipe.tree import Flat, unflatten

#: What comes in: from the partition before, or the model's inputs; then the skip tensors of each
#: source.
Inputs = Sequence[Flat]

#: Of each output, which of its tensors require a gradient.
Flags = list[tuple[bool, ...]]


@dataclass(slots=True)
class _Pass:
    """One micro-batch between its forward and its backward task."""

    inputs: Inputs
    finish: Finish | None
    put_off: PutOff | None
    tensors: list[Tensor]  # of all inputs
    wants: tuple[bool, ...]  # which of them require a gradient
    flags: Flags = field(default_factory=list)
    roots: list[Tensor] = field(default_factory=list)
    entry: Entry = field(default_factory=Entry)
    # If it is recomputed:
    random: RandomStates | None = None
    buffers: BufferCopies = field(default_factory=dict)
    digests: list[Digest] | None = None  # where they are compared: of F, then of R
    versions: list[int] = field(default_factory=list)  # of the inputs


class Segment:
    """The layers of one partition, run task by task."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.is_compiled = False
        self.device = layers.device
        self._anchor = torch.empty(0, device=self.device, requires_grad=True)
        self._buffers = Buffers(layers.named)
        self._parameters: list[nn.Parameter] = []
        self._trainable: tuple[bool, ...] = ()
        self._splitter = Splitter(layers.named.values(), self._anchor)
        self._passes: dict[int, _Pass] = {}
        self._put_off: dict[int, PutOff] = {}
        self._num_recomputed = 0  # mini-batches so far in which anything was recomputed
        self._generators: list[Generator] = []
        self._types: list[type] = []
        self._changes_parameters = False  # whether a forward does, as nn.Embedding(max_norm=…)
        #: What a first forward with a graph has shown for all inputs of the same form: the form of
        #: the output, and which of its tensors require a gradient.
        self._learned: dict[tuple[Any, ...], tuple[list[Any], Flags]] = {}
        self.begin()

    def begin(self) -> None:
        """Start a mini-batch; whatever an unfinished one left is dropped."""
        self._passes.clear()
        self._put_off.clear()
        self._recomputes = False  # whether anything of this mini-batch is recomputed
        self._newest: RandomStates | None = None  # of the newest micro-batch to be recomputed
        # Read again, since a user may replace modules and parameters.
        modules = [module for layer in self.layers.named.values() for module in layer.modules()]
        types = list(map(type, modules))
        if types != self._types:
            check_sharded_before(self._types or types, types)
            self._types = types
        if self.is_compiled != any(map(is_compiled, modules)):
            self.is_compiled = not self.is_compiled
            self._splitter = Splitter(self.layers.named.values(), self._anchor)
        places = [(module, name) for module in modules for name in module._buffers]
        if places != self._buffers.places:
            self._buffers = Buffers(self.layers.named)
        # A parameter that several modules have is there several times.
        self._parameters = [p for m in modules for p in m._parameters.values() if p is not None]
        trainable = tuple(parameter.requires_grad for parameter in self._parameters)
        if trainable != self._trainable:
            self._trainable = trainable
            self._learned.clear()
        self._surroundings = self._first = Surroundings.now(modules, self.device)

    def resume(self) -> None:
        """Begin the backward tasks of a mini-batch whose forward tasks were in another program.

        Raises:
            RecomputeError: what is needed to recompute it has changed since.
        """
        now = Surroundings.now(self._first.modules, self.device)
        self._surroundings = self._first if now == self._first else now
        self._check_unchanged("after the first forward of this mini-batch and before its")

    def end(self) -> None:
        """Check, at the end of a program, that it has changed nothing that is to be recomputed.

        Raises:
            RecomputeError: it has.
        """
        self._check_unchanged("by a hook, or for the first time by a layer, before a", is_own=True)
        if self._recomputes:
            self._note_unchanged()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the layers, as they are now."""
        for layer in self.layers.named.values():
            yield from layer.parameters()

    @property
    def num_held(self) -> int:
        """Micro-batches between their forward and their last backward task."""
        return len(self._passes) + len(self._put_off)

    # -- the tasks ------------------------------------------------------------------------------

    def forward(
        self,
        i: int,
        inputs: Inputs,
        *,
        keep: bool,
        recompute: bool,
        finish: Finish | None = None,
        split: bool = False,
        is_left_out: bool = False,
    ) -> list[Flat]:
        """Run micro-batch ``i`` through the layers.

        Args:
            i: the micro-batch.
            inputs: see ``Inputs``. Of the model they are a tuple of positional ones; or, if some
                are named, a dict by position and name.
            keep: whether a backward task will follow.
            recompute: whether a recompute task will come before that; then no graph is kept now.
            finish: applied to the output, as a last layer.
            split: whether the backward pass will be two tasks, I and W.
            is_left_out: whether ``finish`` gives a loss of 0 whatever the output, so that other
                tensors may require a gradient than in other micro-batches.

        Returns:
            The output, then the skip tensors for each destination, detached.
        """
        if not keep:
            with torch.no_grad():
                made = self.layers.run([flat.value for flat in inputs], finish)
            return [Flat(tensors, form, (False,) * len(tensors)) for tensors, form in made]
        tensors, wants = inputs[0].tensors, inputs[0].requires_grad
        for flat in inputs[1:]:
            tensors, wants = tensors + flat.tensors, wants + flat.requires_grad
        this = self._passes[i] = _Pass(inputs, finish, PutOff() if split else None, tensors, wants)
        if recompute:
            made = self._forward_without_graph(this, is_left_out)
        else:
            with self._split(this):
                made = self._run_with_graph(this)
            this.flags = _flags(made)
        return [
            Flat([tensor.detach() for tensor in tensors], form, flags)
            for (tensors, form), flags in zip(made, this.flags, strict=True)
        ]

    def recompute(self, i: int) -> None:
        """Run micro-batch ``i`` again, with a graph."""
        this = self._passes[i]
        assert this.random is not None, "not to be recomputed"
        if not any(map(any, this.flags)):
            return
        if this.versions != self._versions(this):
            raise RecomputeError(
                f"the input of micro-batch {i} was changed in place after its first forward, so "
                "recomputing it would start from the wrong values: leave a mini-batch's input "
                "alone until its backward() is over, or use checkpoint='never'"
            )
        if this.random is self._newest:
            this.random.forget_undrawn(RandomStates(self._generators))
            self._newest = None
        with (
            recomputing(),
            self._in_first_surroundings(),
            this.random.restored(),
            self._buffers.lent(this.buffers),
            self._split(this),
        ):
            made = self._run_with_graph(this)
        if this.digests is not None:
            is_coarse = self._first.is_autocast or self.device.type != "cpu"
            if how := difference(*this.digests, is_coarse=is_coarse):
                raise RecomputeError(
                    f"the layers gave {how} when micro-batch {i} was recomputed, so gradients "
                    f"would be wrong: one depends on what recomputation does not repeat. {REPEATED}"
                )
        this.random = this.digests = None
        this.buffers = {}
        flags, expected = sum(_flags(made), ()), sum(this.flags, ())
        if len(flags) != len(expected) or any(map(operator.gt, flags, expected)):
            raise RecomputeError(
                f"recomputing micro-batch {i} gave outputs that require gradients {flags}, but its "
                f"first forward was taken to give {expected}: either a layer takes another way the "
                "second time (see is_recomputing()), or which outputs require gradients differs "
                "between micro-batches of one form; use checkpoint='never'"
            )

    def backward(self, i: int, gradients: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
        """Run the backward pass of micro-batch ``i`` and add to the parameters' gradients.

        This is task B; of a split micro-batch task I, without what W will do. Takes the gradient,
        or None, of each output tensor that requires one, of all outputs; returns, for each input,
        that of each of its tensors that requires one, None where it had no influence.
        """
        this = self._passes.pop(i)
        if this.put_off is None:
            self._backward(i, this, gradients)
        else:
            with self._splitter.into(this.put_off, is_backward=True):
                self._backward(i, this, gradients)
            self._put_off[i] = this.put_off
        made = iter(this.entry.gradients or (None,) * sum(this.wants))
        return [[next(made) for wants in flat.requires_grad if wants] for flat in this.inputs]

    def backward_weight(self, i: int) -> None:
        """Run task W of a split micro-batch: add the weight gradients that task I put off."""
        put_off = self._put_off[i]
        with self._without_autocast():
            put_off.run()
        del self._put_off[i]

    def flags(self, i: int) -> Flags:
        """Return which tensors of each output of micro-batch ``i`` require a gradient."""
        return self._passes[i].flags

    def may_require_gradient(self, i: int) -> bool:
        """Return whether any input of micro-batch ``i``, or parameter, requires a gradient."""
        return any(self._trainable) or any(self._passes[i].wants)

    # -- running the layers ---------------------------------------------------------------------

    def _backward(self, i: int, this: _Pass, gradients: Sequence[Tensor | None]) -> None:
        # Without any it may not have been recomputed, and have no roots.
        flags = sum(this.flags, ())
        wanting = (
            [r for r, wants in zip(this.roots, flags, strict=True) if wants] if gradients else []
        )
        # A root that was predicted to require a gradient may not when it is recomputed.
        pairs = [
            (root, gradient)
            for root, gradient in zip(wanting, gradients, strict=True)
            if gradient is not None and root.requires_grad
        ]
        if pairs:
            roots, given = zip(*pairs, strict=True)
            if self._recomputes:
                check_shapes(i, roots, given)
            with self._without_autocast():
                run_backward(roots, given)

    def _forward_without_graph(self, this: _Pass, is_left_out: bool) -> list[Leaving]:
        """Run a first forward that will be recomputed.

        Which outputs require a gradient is known only with a graph. So the first forward of each
        form of input builds one and drops it, and compiled layers always do, or torch would compile
        them once more for no graph. The first also compares the input with a copy: a change through
        ``x.data`` or NumPy raises no version.
        """
        if not self._recomputes:  # the first of a mini-batch
            self._recomputes = True
            self._num_recomputed += 1
            self._generators = generators(self.device)
            self._note_unchanged()
        this.digests = [] if self._num_recomputed in MINI_BATCHES else None
        random = this.random = RandomStates(self._generators)
        if self._newest is not None:
            self._newest.forget_undrawn(random)
        self._newest = random
        this.versions = self._versions(this)
        this.buffers = self._buffers.before_forward()
        forms = [(flat.structure, flat.requires_grad) for flat in this.inputs]
        kind = (*forms, this.finish is None, is_left_out)
        learned = self._learned.get(kind)
        with checkpointing():
            if learned is None or self.is_compiled or self._may_begin_to_train(this, learned[1]):
                made = self._learn(this, is_first=learned is None)
                learned = self._learned[kind] = _form(made), _flags(made)
            else:
                made = self._run(this, self._unshared(this.tensors))
        check_numpy(self._generators)
        if this.versions != self._versions(this):
            self.layers.refuse_change("a layer")
        self._buffers.after_forward(this.buffers)
        form, this.flags = learned
        if form != _form(made):  # the output's form depends on the data
            trains = any(map(any, this.flags))
            this.flags = [tuple(trains and t.is_floating_point() for t in ts) for ts, _ in made]
        return made

    def _may_begin_to_train(self, this: _Pass, flags: Flags) -> bool:
        """Return whether layers that keep gradients from all their outputs may no longer do so.

        Nothing is recomputed for such outputs, so only a graph can show it.
        """
        return not any(map(any, flags)) and (any(self._trainable) or any(this.wants))

    def _learn(self, this: _Pass, *, is_first: bool) -> list[Leaving]:
        before = [tensor.clone() for tensor in this.tensors] if is_first else []
        version = self._version()
        with torch.enable_grad():
            made = self._run_with_graph(this, this.tensors if this.versions else ())
        if not all(map(_are_same, before, this.tensors)):
            raise RecomputeError(
                "a layer changed its partition's input past autograd (through x.data or "
                "NumPy), so recomputing it would start from the wrong values: change a "
                "copy, or use checkpoint='never'"
            )
        if version != self._version():
            self._changes_parameters = True
        this.roots, this.entry = [], Entry()
        return made

    def _run_with_graph(self, this: _Pass, watched: Sequence[Tensor] = ()) -> list[Leaving]:
        # The model's input is one tensor for all micro-batches, and so is its version.
        is_kept = this.random is not None or self.layers.is_first
        tensors = self._unshared(this.tensors) if is_kept else list(this.tensors)
        entering = [k for k, wants in enumerate(this.wants) if wants]
        if entering:
            entered = Enter.apply(  # type: ignore[no-untyped-call]
                this.entry, self._anchor, *(tensors[k] for k in entering)
            )
            for k, tensor in zip(entering, entered, strict=True):
                tensors[k] = tensor
        made = self._run(this, tensors, watched)
        this.roots = [tensor for tensors, _ in made for tensor in tensors]
        return made

    def _run(
        self, this: _Pass, tensors: list[Tensor], watched: Sequence[Tensor] = ()
    ) -> list[Leaving]:
        """Run the layers, and keep a digest of their output, of the last ones before the loss."""
        given = iter(tensors)
        values = [unflatten(islice(given, len(f.tensors)), f.structure) for f in this.inputs]
        digests, finish = this.digests, this.finish
        if digests is None:
            return self.layers.run(values, finish, watched)
        if finish is None:
            made = self.layers.run(values, None, watched)
            digests.append(digest_of(tensor for tensors, _ in made for tensor in tensors))
            return made

        def noted(value: Any) -> Any:
            leaves = pytree.tree_leaves(value)
            digests.append(digest_of(leaf for leaf in leaves if isinstance(leaf, Tensor)))
            return finish(value)

        return self.layers.run(values, noted, watched)

    def _unshared(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return inputs that the first layer may change although they are kept."""
        return [t.clone() for t in tensors] if self.layers.changes_input else list(tensors)

    def _split(self, this: _Pass) -> AbstractContextManager[None]:
        return NOTHING if this.put_off is None else self._splitter.into(this.put_off)

    def _without_autocast(self) -> AbstractContextManager[object]:
        now = self._surroundings
        return now.without_autocast() if now.is_autocast else NOTHING

    def _in_first_surroundings(self) -> AbstractContextManager[None]:
        return NOTHING if self._surroundings is self._first else self._first.restored()

    # -- what no layer may change ---------------------------------------------------------------

    def _versions(self, this: _Pass) -> list[int]:
        """Return what rises when an input of a micro-batch that is recomputed is changed in place.

        Empty where the first layer may do so: it works on copies then.
        """
        return [] if self.layers.changes_input else versions_of(this.tensors)

    def _version(self) -> int:
        """Return a number that rises with each change in place of a parameter.

        A change past autograd (``weight.data``, the fused optimizers of torch 2.13) raises none.
        """
        return sum(each._version for each in self._parameters if not each.is_inference())

    def _note_unchanged(self) -> None:
        self._noted = self._version()
        self._buffers.note_steady()

    def _check_unchanged(self, when: str, *, is_own: bool = False) -> None:
        """Check that what recomputation uses is as it was noted; ``is_own``: in a program.

        Without recomputation autograd refuses such a backward pass; with it, the gradients would be
        those of another function.
        """
        if not self._recomputes:
            return
        buffers = self._buffers.changed()
        may_change = is_own and self._changes_parameters
        if buffers or not (may_change or self._noted == self._version()):
            what = f"the buffer {buffers[0]!r}" if buffers else "a parameter"
            raise RecomputeError(
                f"{what} was changed {when} recomputation, whose gradients would be wrong: change "
                "parameters and buffers after backward() is over (optimizer.step(), "
                "load_state_dict()), a layer's own buffers in every forward or in none, or use "
                "checkpoint='never'"
            )


def _are_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same values; NaN equals NaN here."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _flags(made: Sequence[Leaving]) -> Flags:
    return [tuple([tensor.requires_grad for tensor in tensors]) for tensors, _ in made]


def _form(made: Sequence[Leaving]) -> list[Any]:
    return [(form, [tensor.dtype for tensor in tensors]) for tensors, form in made]
