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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from procpipe.compute import refused
from procpipe.compute.buffers import BufferCopies, Buffers
from procpipe.compute.digests import Digests, Look, difference, differs
from procpipe.compute.generators import Generators
from procpipe.compute.graph import Enter, Entry, check_shapes
from procpipe.compute.ledger import num_bytes
from procpipe.compute.outside import OutsideChanges
from procpipe.compute.recompute import Ambient, checkpointing, recomputing, without_autocast
from procpipe.compute.sharing import SharedInputs, Sharing, are_same
from procpipe.compute.skips import SkipPorts
from procpipe.compute.split.splitter import PutOff, Splitter
from procpipe.compute.wrappers import check_not_data_parallel, check_sharded_before
from procpipe.skip.layout import SkipLayout
from procpipe.skip.tracker import tracking
from procpipe.torch_internals import is_compiled, run_backward
from procpipe.tree import Flat, Structure, flatten, in_words, is_plain, unflatten

#: What the last stage of a ``step`` does to a micro-batch's output: ``loss_fn(output, target)``.
Finish = Callable[[Any], Any]


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
    look: Look | None = None
    versions: list[int] = field(default_factory=list)


class _Learned(NamedTuple):
    """What a first forward with a graph has shown for all inputs of the same form."""

    form: tuple[Structure, tuple[torch.dtype, ...]]
    requires_grad: tuple[bool, ...]


class Partition:
    """The local layers, by their names in the full model, run task by task.

    The model's first layer takes several inputs; the output of the last partition need not travel.
    Where skip tensors enter, an input is the tuple of what comes from the partition before and of
    each source's skip tensors; where they leave, an output likewise. Every tensor at the edges must
    be on ``device``.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        device: torch.device,
        *,
        is_first: bool,
        is_last: bool = True,
        skips: SkipPorts | None = None,
    ) -> None:
        self.on_layer: Callable[[int], None] = lambda index: None
        self.is_compiled = False
        self._layers = tuple(layers.items())
        self._current = -1
        self.device = device
        self._is_first = is_first
        self._is_last = is_last
        self.skips = skips or SkipPorts(SkipLayout(), 0)
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._buffers = Buffers(layers)
        self._outside = OutsideChanges(self._layers, self._buffers)
        self._generators = Generators(device)
        self._digests = Digests()
        self._splitter = Splitter(layers.values(), self._anchor)
        self._sharing = Sharing()
        self._passes: dict[int, _Pass] = {}
        self._put_off: dict[int, PutOff] = {}
        self._trainable: tuple[bool, ...] = ()
        self._types: list[type] = []
        self._learned: dict[tuple[Structure, tuple[bool, ...], bool, bool], _Learned] = {}
        self._clone_inputs = bool(layers) and any(
            getattr(module, "inplace", False) for module in self._layers[0][1].modules()
        )
        self.begin()

    def begin(self) -> None:
        """Start a mini-batch; whatever an unfinished one left is dropped."""
        self._passes.clear()
        self._put_off.clear()
        self._digests.begin()
        # Read again, since a user may replace modules and parameters.
        modules = [module for _, layer in self._layers for module in layer.modules()]
        types = list(map(type, modules))
        if types != self._types:
            check_not_data_parallel(self._layers)
            check_sharded_before(self._types or types, types)
            self._types = types
        self._generators.begin(modules)
        if self.is_compiled != any(map(is_compiled, modules)):
            self.is_compiled = not self.is_compiled
            self._splitter = Splitter((layer for _, layer in self._layers), self._anchor)
        trainable = self._outside.begin(modules)
        if trainable != self._trainable:
            self._trainable = trainable
            self._learned.clear()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the layers, as they are now."""
        for _, layer in self._layers:
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
                tensors, structure = self._run(inputs, inputs.tensors, finish)
            return Flat(tensors, structure, (False,) * len(tensors)).sharing(*self._sharing)
        this = self._passes[i] = _Pass(inputs, finish, PutOff() if split else None)
        if recompute:
            output = self._forward_without_graph(this, is_left_out)
            self._outside.note(is_repeated=True)
            return output
        with self._splitter.into(this.put_off):
            tensors, structure = self._run_with_graph(this)
        self._outside.note(is_repeated=False)
        this.requires_grad = tuple(tensor.requires_grad for tensor in tensors)
        detached = [tensor.detach() for tensor in tensors]
        return Flat(detached, structure, this.requires_grad).sharing(*self._sharing)

    def recompute(self, i: int) -> int:
        """Run micro-batch ``i`` again, with a graph; return the bytes of the roots it keeps."""
        this = self._passes[i]
        assert this.ambient is not None and this.buffers is not None, "not to be recomputed"
        if not any(this.requires_grad):
            return 0
        if this.versions != self._versions(this.inputs.tensors):
            raise refused.micro_batch_changed(i)
        if fault := self._outside.fault(this.buffers):
            raise refused.changed_between(fault, i)
        self._digests.start_again(this.look)
        with (
            recomputing(this.ambient),
            self._buffers.lent(this.buffers),
            self._splitter.into(this.put_off),
        ):
            tensors, _ = self._run_with_graph(this)
        self._outside.note(is_repeated=True)
        self._compare(i, this)
        this.ambient = this.buffers = None
        flags = tuple(tensor.requires_grad for tensor in tensors)
        if len(flags) != len(this.requires_grad) or any(
            now and not before for now, before in zip(flags, this.requires_grad, strict=True)
        ):
            raise refused.other_gradients(i, flags, this.requires_grad)
        return num_bytes(tensors)

    def backward(self, i: int, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Run the backward pass of micro-batch ``i`` and add to the parameters' gradients.

        Takes the gradient, or None, of each output tensor that requires one; returns that of each
        input tensor that requires one, None where it had no influence.
        """
        assert self._passes[i].put_off is None, "split: its tasks are I and W"
        return self._backward(i, gradients)

    def backward_input(self, i: int, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Run task I of a split micro-batch: ``backward`` without what W will do."""
        this = self._passes[i]
        assert this.put_off is not None, "not split: its task is B"
        with self._splitter.into(this.put_off):
            input_gradients = self._backward(i, gradients)
        self._put_off[i] = this.put_off
        return input_gradients

    def backward_weight(self, i: int) -> None:
        """Run task W of a split micro-batch: add the weight gradients that task I put off."""
        put_off = self._put_off[i]
        with without_autocast(self.device):
            put_off.run()
        del self._put_off[i]

    def put_off_bytes(self, i: int) -> int:
        """Return the bytes that are held from task I of a micro-batch to its task W."""
        return self._put_off[i].num_bytes

    # -- running the layers ---------------------------------------------------------------------

    def _backward(self, i: int, gradients: list[Tensor | None]) -> list[Tensor | None]:
        this = self._passes.pop(i)
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
        this.look = self._digests.start()
        generators = self._generators
        this.ambient = Ambient.now(self.device, generators.sources(), generators.modules)
        this.versions = self._versions(inputs.tensors)
        this.buffers = self._buffers.before_forward()
        kind = (inputs.structure, inputs.requires_grad, this.finish is not None, is_left_out)
        learned = self._learned.get(kind)
        with checkpointing():
            if learned is None or self.is_compiled:
                before = [tensor.clone() for tensor in inputs.tensors] if learned is None else []
                with torch.enable_grad():
                    tensors, structure = self._run_with_graph(this)
                if not all(map(are_same, before, inputs.tensors)):
                    raise refused.input_changed_past_autograd()
                this.roots, this.entry = [], Entry()
                learned = learned or _Learned(
                    _form(tensors, structure), tuple(t.requires_grad for t in tensors)
                )
                self._learned[kind] = learned
            else:
                given = self._unshared(inputs.tensors)
                tensors, structure = self._run(inputs, given, this.finish, inputs.tensors)
        self._digests.stop()
        self._buffers.after_forward()
        this.requires_grad = learned.requires_grad
        if learned.form != _form(tensors, structure):  # the output's form depends on the data
            this.requires_grad = tuple(tensor.is_floating_point() for tensor in tensors)
        detached = [tensor.detach() for tensor in tensors]
        return Flat(detached, structure, this.requires_grad).sharing(*self._sharing)

    def _run_with_graph(self, this: _Pass) -> tuple[list[Tensor], Structure]:
        tensors, flags = this.inputs.tensors, this.inputs.requires_grad
        # The model's input is one tensor for all micro-batches, and so is its version.
        is_kept = this.ambient is not None or self._is_first
        inputs = self._unshared(tensors) if is_kept else list(tensors)
        entering = [k for k, wants in enumerate(flags) if wants]
        if entering:
            entered = Enter.apply(  # type: ignore[no-untyped-call]
                this.entry, self._anchor, *(inputs[k] for k in entering)
            )
            for k, tensor in zip(entering, entered, strict=True):
                inputs[k] = tensor
        untouched = tensors if this.ambient is not None else ()
        this.roots, structure = self._run(this.inputs, inputs, this.finish, untouched)
        return this.roots, structure

    def _run(
        self,
        inputs: Flat,
        tensors: list[Tensor],
        finish: Finish | None,
        untouched: Sequence[Tensor] = (),
    ) -> tuple[list[Tensor], Structure]:
        """Run the layers on ``tensors``, in the structure of ``inputs``.

        ``untouched`` are the tensors that recomputation needs as they are now.
        """
        value = unflatten(tensors, inputs.structure)
        watch = SharedInputs(tensors, Sharing(inputs.memories, inputs.changes))
        entered: list[Any] = []
        if self.skips.sources:
            value, *entered = value
        tracker = self.skips.tracker(entered)
        tracker.on_stash = lambda tensor: self._digests.add(self._current, tensor)
        with tracking(tracker):
            value = self._run_layers(value, finish, untouched, watch)
        self.skips.check(tracker)
        if self.skips.destinations:
            value = (value, *self.skips.messages(tracker))
        outputs, structure = flatten(value)
        for output in outputs:
            if not (self._is_last or is_plain(output)):
                raise refused.not_plain(self.where(), output)
            if output.device != self.device or output.layout != torch.strided:
                raise refused.misplaced(self.where(), output, self.device)
        if not self._is_last:
            self._sharing = watch.leaving(outputs, self._layers[0][0] if self._layers else "")
        self._enter(-1)
        return outputs, structure

    def _run_layers(
        self, value: Any, finish: Finish | None, untouched: Sequence[Tensor], watch: SharedInputs
    ) -> Any:
        versions = self._versions(untouched)
        spread = self._is_first
        must_look = watch.is_needed or self._digests.is_looking  # rarely
        self._digests.add(-1, value)
        for k, (_, layer) in enumerate(self._layers):
            self._enter(k)
            try:
                value = _called(layer, value) if spread else layer(value)
            except Exception as error:
                error.add_note(f"procpipe: {self.where()} was given {in_words(value)}")
                raise
            spread = False
            if must_look:
                watch.look(self.where)
                self._digests.add(self._current, value)
            if versions and versions != self._versions(untouched):
                raise refused.input_changed(self.where())
        if finish is not None:
            self._enter(len(self._layers))
            value = finish(_passed_on(value) if spread else value)
            if must_look:
                watch.look(self.where)
                self._digests.add(self._current, value)
            if versions and versions != self._versions(untouched):
                raise refused.input_changed(self.where())
        elif spread:  # a partition without layers passes its inputs on
            value = _passed_on(value)
        return value

    def _versions(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return what rises when one of these inputs is changed in place.

        Empty where the first layer may do so: it works on copies of what is recomputed, but not of
        the last micro-batch, whose version is that of the whole mini-batch.
        """
        return [] if self._clone_inputs else [tensor._version for tensor in tensors]

    def _unshared(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return inputs that the first layer may change although they are kept."""
        return [tensor.clone() for tensor in tensors] if self._clone_inputs else list(tensors)

    def tensors_of(self, i: int) -> Iterator[Tensor]:
        """Yield the layers' own tensors and a micro-batch's inputs and roots."""
        for _, layer in self._layers:
            yield from layer.parameters()
            yield from layer.buffers()
        if (this := self._passes.get(i)) is not None:
            yield from this.inputs.tensors
            yield from this.roots

    # -- faults ---------------------------------------------------------------------------------

    @property
    def places(self) -> list[str]:
        """The layers in words, then the loss, by the indices of ``on_layer``."""
        layers = [f"layer {name!r} ({type(layer).__name__})" for name, layer in self._layers]
        return [*layers, "loss_fn"]

    def where(self) -> str:
        """Name the layer that is running, or that raised."""
        return self.places[self._current] if self._current >= 0 else "between layers"

    def _enter(self, index: int) -> None:
        self._current = index
        self.on_layer(index)

    def _compare(self, i: int, this: _Pass) -> None:
        """Compare a recomputation with its first forward, if both have digests."""
        first, again = this.look, self._digests.stop()
        this.look = None
        if first is None or again is None:
            return
        assert this.ambient is not None
        is_coarse = this.ambient.is_autocast or self.device.type != "cpu"
        if found := difference(first, again, is_coarse=is_coarse):
            self._current = found.place  # which the error's notes name, too
            raise differs(found, self.where(), i)


def _passed_on(inputs: Any) -> Any:
    """Return the model's inputs as the first partition passes them on without a layer."""
    if isinstance(inputs, dict):
        raise refused.named_without_layer()
    return inputs[0] if len(inputs) == 1 else inputs


def _called(layer: nn.Module, inputs: Any) -> Any:
    """Call the model's first layer with its inputs: positional, or a dict by position and name."""
    if isinstance(inputs, tuple):
        return layer(*inputs)
    positional = [value for key, value in inputs.items() if isinstance(key, int)]
    return layer(*positional, **{k: value for k, value in inputs.items() if isinstance(k, str)})


def _form(tensors: list[Tensor], structure: Structure) -> tuple[Structure, tuple[torch.dtype, ...]]:
    return structure, tuple(tensor.dtype for tensor in tensors)
