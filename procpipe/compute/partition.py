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

A micro-batch that is recomputed runs (2) first without a graph, keeps its inputs and surroundings,
and goes through (1), (2) and (3) in its recompute task.

B may be two tasks, I and W: then ``compute.split`` has layers of (2) put off weight gradients.

Independent of other partitions and of the order of tasks, which the executor takes from the plan.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.compute.buffers import BufferCopies, Buffers
from procpipe.compute.digests import MINI_BATCHES, REPEATED, Digest, difference, digest_of
from procpipe.compute.graph import Enter, Entry, check_shapes
from procpipe.compute.layers import Finish, PartitionLayers
from procpipe.compute.recompute import (
    Ambient,
    checkpointing,
    recomputing,
    sum_of_versions,
    without_autocast,
)
from procpipe.compute.split.splitter import PutOff, Splitter
from procpipe.compute.wrappers import check_not_data_parallel, check_sharded_before
from procpipe.errors import RecomputeError
from procpipe.torch_internals import is_compiled, pytree, run_backward
from procpipe.tree import Flat, Structure

_Form = tuple[Structure, tuple[torch.dtype, ...]]


@dataclass(slots=True)
class _Pass:
    """One micro-batch between its forward and its backward task."""

    inputs: Flat
    finish: Finish | None
    put_off: PutOff | None = None
    requires_grad: tuple[bool, ...] = ()
    roots: list[Tensor] = field(default_factory=list)
    entry: Entry = field(default_factory=Entry)
    ambient: Ambient | None = None
    buffers: BufferCopies | None = None
    digests: list[Digest] | None = None  # where they are compared: of F, then of R
    versions: list[int] = field(default_factory=list)

    def leaving(self, output: Flat, flags: tuple[bool, ...]) -> Flat:
        """Return the output detached; ``flags`` say which of its tensors require a gradient."""
        self.requires_grad = flags
        return Flat([tensor.detach() for tensor in output.tensors], output.structure, flags)


class Partition:
    """The local layers, run task by task.

    Where skip tensors enter, an input is the tuple of what comes from the partition before and of
    each source's skip tensors; where they leave, an output likewise.
    """

    def __init__(self, layers: PartitionLayers) -> None:
        self.layers = layers
        self.is_compiled = False
        self.device = layers.device
        self._anchor = torch.empty(0, device=self.device, requires_grad=True)
        self._buffers = Buffers(layers.named)
        self._parameters: list[nn.Parameter] = []
        self._noted: int | None = None  # the sum of versions after the last forward
        self._num_compared = 0  # mini-batches so far in which anything was recomputed
        self._is_compared: bool | None = None
        self._newest: Ambient | None = None  # of the newest micro-batch to be recomputed
        self._modules: list[nn.Module] = []
        self._splitter = Splitter(layers.named.values(), self._anchor)
        self._passes: dict[int, _Pass] = {}
        self._put_off: dict[int, PutOff] = {}
        self._trainable: tuple[bool, ...] = ()
        self._types: list[type] = []
        #: What a first forward with a graph has shown for all inputs of the same form: the form of
        #: the output, and which of its tensors require a gradient.
        self._learned: dict[tuple[Any, ...], tuple[_Form, tuple[bool, ...]]] = {}
        self.begin()

    def begin(self) -> None:
        """Start a mini-batch; whatever an unfinished one left is dropped."""
        self._passes.clear()
        self._put_off.clear()
        self._noted = self._is_compared = self._newest = None
        # Read again, since a user may replace modules and parameters.
        modules = [module for layer in self.layers.named.values() for module in layer.modules()]
        self._modules = modules
        types = list(map(type, modules))
        if types != self._types:
            check_not_data_parallel(self.layers.named.items())
            check_sharded_before(self._types or types, types)
            self._types = types
        if self.is_compiled != any(map(is_compiled, modules)):
            self.is_compiled = not self.is_compiled
            self._splitter = Splitter(self.layers.named.values(), self._anchor)
        # A parameter that several modules have is there several times.
        self._parameters = [p for m in modules for p in m._parameters.values() if p is not None]
        trainable = tuple(parameter.requires_grad for parameter in self._parameters)
        if trainable != self._trainable:
            self._trainable = trainable
            self._learned.clear()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the layers, as they are now."""
        for layer in self.layers.named.values():
            yield from layer.parameters()

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter of the layers requires a gradient in this mini-batch."""
        return any(self._trainable)

    @property
    def num_held(self) -> int:
        """Micro-batches between their forward and their last backward task."""
        return len(self._passes) + len(self._put_off)

    # -- the tasks ------------------------------------------------------------------------------

    def forward(
        self,
        i: int,
        inputs: Flat,
        *,
        keep: bool,
        recompute: bool,
        finish: Finish | None = None,
        split: bool = False,
        is_left_out: bool = False,
    ) -> Flat:
        """Run micro-batch ``i`` through the layers and return the output, detached.

        Args:
            i: the micro-batch.
            inputs: in the first partition a tuple of positional inputs; or, if some are named, a
                dict by position and name.
            keep: whether a backward task will follow.
            recompute: whether a recompute task will come before that; then no graph is kept now.
            finish: applied to the output, as a last layer.
            split: whether the backward pass will be two tasks, I and W.
            is_left_out: whether ``finish`` gives a loss of 0 whatever the output, so that other
                tensors may require a gradient than in other micro-batches.
        """
        if not keep:
            with torch.no_grad():
                output = self.layers.run(inputs, inputs.tensors, finish)
            return Flat(output.tensors, output.structure, (False,) * len(output.tensors))
        this = self._passes[i] = _Pass(inputs, finish, PutOff() if split else None)
        if recompute:
            output = self._forward_without_graph(this, is_left_out)
            self._noted = self._versions()
            return output
        with self._splitter.into(this.put_off):
            output = self._run_with_graph(this)
        if self._noted is not None:  # earlier micro-batches will be recomputed
            self._noted = self._versions()
        return this.leaving(output, output.requires_grad)

    def recompute(self, i: int) -> None:
        """Run micro-batch ``i`` again, with a graph."""
        this = self._passes[i]
        assert this.ambient is not None and this.buffers is not None, "not to be recomputed"
        if not any(this.requires_grad):
            return
        if this.versions != self.layers.versions(this.inputs.tensors):
            raise RecomputeError(
                f"the input of micro-batch {i} was changed in place after its first forward, so "
                "recomputing it would start from the wrong values: leave a mini-batch's input "
                "alone until its backward() is over, or use checkpoint='never'"
            )
        if self._noted != self._versions():
            raise RecomputeError(
                "a parameter or buffer was changed after the first forward of "
                f"micro-batch {i} and before its recomputation, whose gradients would be wrong: "
                "change parameters and buffers after backward() is over (optimizer.step(), "
                "load_state_dict())"
            )
        if this.ambient is self._newest:
            this.ambient.forget_undrawn()
            self._newest = None
        with (
            recomputing(this.ambient),
            self._buffers.lent(this.buffers),
            self._splitter.into(this.put_off),
        ):
            output = self._run_with_graph(this)
        self._noted = self._versions()
        if this.digests is not None:
            is_coarse = this.ambient.is_autocast or self.device.type != "cpu"
            if how := difference(*this.digests, is_coarse=is_coarse):
                raise RecomputeError(
                    f"the layers gave {how} when micro-batch {i} was recomputed, so gradients "
                    f"would be wrong: one depends on what recomputation does not repeat. {REPEATED}"
                )
        this.ambient = this.buffers = this.digests = None
        flags, expected = output.requires_grad, this.requires_grad
        if len(flags) != len(expected) or any(map(operator.gt, flags, expected)):
            raise RecomputeError(
                f"recomputing micro-batch {i} gave outputs that require gradients {flags}, but its "
                f"first forward was taken to give {expected}: either a layer takes another way the "
                "second time (see is_recomputing()), or which outputs require gradients differs "
                "between micro-batches of one form; use checkpoint='never'"
            )

    def backward(self, i: int, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Run the backward pass of micro-batch ``i`` and add to the parameters' gradients.

        This is task B; of a split micro-batch task I, without what W will do. Takes the gradient,
        or None, of each output tensor that requires one; returns that of each input tensor that
        requires one, None where it had no influence.
        """
        this = self._passes.pop(i)
        if this.put_off is None:
            return self._backward(i, this, gradients)
        with self._splitter.into(this.put_off, is_backward=True):
            input_gradients = self._backward(i, this, gradients)
        self._put_off[i] = this.put_off
        return input_gradients

    def backward_weight(self, i: int) -> None:
        """Run task W of a split micro-batch: add the weight gradients that task I put off."""
        put_off = self._put_off[i]
        with without_autocast(self.device):
            put_off.run()
        del self._put_off[i]

    # -- running the layers ---------------------------------------------------------------------

    def _backward(self, i: int, this: _Pass, gradients: list[Tensor | None]) -> list[Tensor | None]:
        wanting = []
        if any(this.requires_grad):  # else it may not have been recomputed, and have no roots
            wanting = [r for r, wants in zip(this.roots, this.requires_grad, strict=True) if wants]
        # A root that was predicted to require a gradient may not when it is recomputed.
        pairs = [
            (root, gradient)
            for root, gradient in zip(wanting, gradients, strict=True)
            if gradient is not None and root.requires_grad
        ]
        if pairs:
            roots, given = zip(*pairs, strict=True)
            check_shapes(i, roots, given)
            with without_autocast(self.device):
                run_backward(roots, given)
        num_wanted = sum(this.inputs.requires_grad)
        return list(this.entry.gradients) or [None] * num_wanted

    def _forward_without_graph(self, this: _Pass, is_left_out: bool) -> Flat:
        """Run a first forward that will be recomputed.

        Which outputs require a gradient is known only with a graph. So the first forward of each
        form of input builds one and drops it, and compiled layers always do, or torch would compile
        them once more for no graph. The first also compares the input with a copy: a change through
        ``x.data`` or NumPy raises no version.
        """
        inputs = this.inputs
        if self._is_compared is None:  # the first of a mini-batch
            self._num_compared += 1
            self._is_compared = self._num_compared in MINI_BATCHES
        this.digests = [] if self._is_compared else None
        ambient = this.ambient = Ambient.now(self.device, self._modules)
        if self._newest is not None:
            self._newest.forget_undrawn(ambient)
        self._newest = ambient
        this.versions = self.layers.versions(inputs.tensors)
        this.buffers = self._buffers.before_forward()
        kind = (inputs.structure, inputs.requires_grad, this.finish is not None, is_left_out)
        learned = self._learned.get(kind)
        with checkpointing():
            if learned is None or self.is_compiled:
                before = [tensor.clone() for tensor in inputs.tensors] if learned is None else []
                with torch.enable_grad():
                    output = self._run_with_graph(this)
                if not all(map(_are_same, before, inputs.tensors)):
                    raise RecomputeError(
                        "a layer changed its partition's input past autograd (through x.data or "
                        "NumPy), so recomputing it would start from the wrong values: change a "
                        "copy, or use checkpoint='never'"
                    )
                this.roots, this.entry = [], Entry()
                learned = self._learned.setdefault(kind, (_form(output), output.requires_grad))
            else:
                given = self.layers.unshared(inputs.tensors)
                output = self._run(this, given, inputs.tensors)
        self._buffers.after_forward()
        form, flags = learned
        if form != _form(output):  # the output's form depends on the data
            flags = tuple(tensor.is_floating_point() for tensor in output.tensors)
        return this.leaving(output, flags)

    def _run_with_graph(self, this: _Pass) -> Flat:
        tensors, flags = this.inputs.tensors, this.inputs.requires_grad
        # The model's input is one tensor for all micro-batches, and so is its version.
        is_kept = this.ambient is not None or self.layers.is_first
        inputs = self.layers.unshared(tensors) if is_kept else list(tensors)
        entering = [k for k, wants in enumerate(flags) if wants]
        if entering:
            entered = Enter.apply(  # type: ignore[no-untyped-call]
                this.entry, self._anchor, *(inputs[k] for k in entering)
            )
            for k, tensor in zip(entering, entered, strict=True):
                inputs[k] = tensor
        untouched = tensors if this.ambient is not None else ()
        output = self._run(this, inputs, untouched)
        this.roots = output.tensors
        return output

    def _run(self, this: _Pass, tensors: list[Tensor], untouched: Sequence[Tensor]) -> Flat:
        """Run the layers, and keep a digest of their output, of the last ones before the loss."""
        digests, finish = this.digests, this.finish
        if digests is None:
            return self.layers.run(this.inputs, tensors, finish, untouched)
        if finish is None:
            output = self.layers.run(this.inputs, tensors, None, untouched)
            digests.append(digest_of(output.tensors))
            return output

        def noted(value: Any) -> Any:
            leaves = pytree.tree_leaves(value)
            digests.append(digest_of(leaf for leaf in leaves if isinstance(leaf, Tensor)))
            return finish(value)

        return self.layers.run(this.inputs, tensors, noted, untouched)

    def _versions(self) -> int:
        return sum_of_versions([*self._parameters, *self._buffers.steady()])


def _are_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same values; NaN equals NaN here."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _form(output: Flat) -> _Form:
    return output.structure, tuple(tensor.dtype for tensor in output.tensors)
