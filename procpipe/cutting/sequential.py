"""``sequential(model, *sample)``: an ordinary module as an ``nn.Sequential`` of its own modules.

model ── twin.py ──> a copy on the meta device ── record.py ──> a graph for each mode
  │                                                               │ modes.py: one graph
  └──> its modules ─> layers.py: a layer for each piece <─ divide.py: pieces
"""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from procpipe.cutting import modes
from procpipe.cutting.divide import drop_unused, number_pieces
from procpipe.cutting.layers import layers_of
from procpipe.cutting.record import Recorder
from procpipe.cutting.refusal import CannotCutError
from procpipe.cutting.twin import on_meta, opened_names, owned
from procpipe.divided import Divided
from procpipe.torch_internals import has_hooks, is_compiled, pytree, said_to_compile


class CutModel(Divided):
    """An ordinary module as an ``nn.Sequential``, which takes what the module takes."""

    def describe(self) -> str:
        """Return a text: for each layer what it takes from where, sends where, and its code."""
        parts = []
        layers: Any = self.named_children()
        for name, layer in layers:
            number = sum(parameter.numel() for parameter in layer.parameters())
            parts.append(f"{name}: {number:,} parameters\n{layer.text}")
        return "\n\n".join(parts)


def sequential(
    model: nn.Module,
    *inputs: Any,
    whole: Collection[type[nn.Module]] = (),
    largest: float = 1 / 8,
    **named: Any,
) -> CutModel:
    """Make an ``nn.Sequential`` of an ordinary module, whose layers hold its own modules.

    Records the module's forward once in train and once in eval mode, on a copy on the meta device,
    with a sample of what it is to be called with. Modules with more than a share of the parameters
    are opened: their forward is recorded, too. The others stay whole, and may do anything. The
    result is cut between them where the fewest bytes cross. Sizes are those of each call; a
    decision on a size is made once, and checked in each call. Does not communicate, and changes
    neither the model nor random number generators. The model and the result share parameters:
    build the optimizer from the stage.

    Args:
        model: a module, in the dtype in which it is to run; it may be on the meta device.
        inputs: a sample of its inputs, ``(batch, …)`` each, as for training. Only shapes count,
            unless the forward cannot run on the meta device. Values other than tensors must be the
            same in each call, and may then be left out if they are named.
        whole: classes of modules that are not opened.
        largest: the largest share of the parameters that a module has which is not opened.
        named: the rest of the sample, by name.

    Returns:
        layers named by the first module that each calls. ``describe()`` shows them. Its attributes
        ``sample`` and ``keys`` are for ``Stage``, and for the model's keys in files.

    Raises:
        ValueError: the forward does what layers would not repeat: names the line, and what to do.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"a {type(model).__qualname__} is no nn.Module: pass the model, then a sample of its "
            "inputs"
        )
    kind = type(model).__qualname__
    if is_compiled(model):
        raise CannotCutError(
            f"the {kind} is compiled as a whole, so its forward cannot be recorded: pass the model "
            "itself, and compile the stage (stage.compile())"
        )
    if has_hooks(model):
        raise CannotCutError(
            f"the {kind} has hooks, which the layers would not call: remove them, or register them "
            "at modules inside it"
        )
    limit = largest * sum(parameter.numel() for parameter in model.parameters())
    arguments = _Arguments(model, inputs, named)
    graph = _recorded(model, opened_names(model, limit, whole), arguments, inputs, named)
    number_pieces(graph, limit)
    made = CutModel(layers_of(model, graph, arguments.tensors))
    made.training = model.training
    by_name = dict(zip(inspect.signature(model.forward).parameters, inputs, strict=False)) | named
    made.sample = on_meta(by_name if named else inputs)
    made.keys = lambda key: key.partition(".model.")[2]
    return made


class _Arguments:
    """The arguments of a model's forward, in the form that a sample has."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._signature = inspect.signature(model.forward)
        self._plain = {
            name: value
            for name, value in named.items()
            if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
        }
        _, self._form = self._taken_apart(inputs, named)

    def by_name(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, in the order of the signature."""
        return dict(self._signature.bind(*inputs, **self._plain | named).arguments)

    def tensors(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> list[Tensor]:
        """Return the tensors among a micro-batch's arguments.

        Raises:
            TypeError: they are others than the sample's.
        """
        tensors, form = self._taken_apart(inputs, named)
        if form != self._form:
            raise TypeError(
                f"the model was recorded for arguments of the form {self._form}, and is given "
                f"{form}: give procpipe.sequential such a sample"
            )
        return tensors

    def _taken_apart(self, inputs: Any, named: Any) -> tuple[list[Tensor], Any]:
        leaves, tree = pytree.tree_flatten(self.by_name(inputs, named))
        plain = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)], (tree, plain)


def _recorded(
    model: nn.Module,
    opened: dict[str, None],
    arguments: _Arguments,
    inputs: tuple[Any, ...],
    named: dict[str, Any],
) -> fx.Graph:
    """Record the forward in both modes, and return a graph of both."""

    def record(copied: Any, is_training: bool) -> fx.Graph:
        is_loaded = "torch._dynamo" in sys.modules
        as_written = torch.compiler.set_stance("force_eager") if is_loaded else nullcontext()
        with torch.random.fork_rng(), warnings.catch_warnings(), as_written, said_to_compile():
            warnings.simplefilter("ignore")
            twin, (args, kwargs) = copied(model).train(is_training), copied((inputs, named))
            recorder = Recorder(twin, opened, arguments.by_name(args, kwargs))
            recorder.run(args, kwargs)
        drop_unused(recorder.graph)
        return recorder.graph

    is_meta = any(tensor.is_meta for _, tensor in owned(model))
    copied: Any
    for copied in (on_meta,) if is_meta else (on_meta, copy.deepcopy):
        try:
            graph = record(copied, model.training)
            break
        except Exception as error:  # of any kind, since it is the user's code that runs
            fault = error
    else:
        fault.add_note("procpipe: while procpipe.sequential recorded the model's forward")
        raise fault
    try:
        other = record(copied, not model.training)
        different = modes.join(graph, other, is_training=model.training)
    except Exception as error:
        different = f"{type(error).__name__}: {error}"
    if different:
        modes.keep_to(graph, different, is_training=model.training)
    return graph
