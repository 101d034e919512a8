"""``sequential(model, *sample)``: an ordinary module as an ``nn.Sequential`` of its own modules.

model ── twin.py ──> a copy on the meta device ── record.py ──> a graph for each mode
  │                                                               │ modes.py: one graph
  └──> its modules ──> emit.py: a layer for each piece <── divide.py: pieces
"""

from __future__ import annotations

import inspect
import random
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn

from procpipe.cutting import modes
from procpipe.cutting.divide import drop_unused, localise, pieces_of, sized_nodes
from procpipe.cutting.emit import Pieces
from procpipe.cutting.layers import Inputs, arguments_of
from procpipe.cutting.record import Recorder
from procpipe.cutting.refusal import CannotCutError
from procpipe.cutting.twin import copied, opened_names, stand_in
from procpipe.torch_internals import has_hooks, is_compiled, pytree, said_to_compile


class CutModel(nn.Sequential):
    """An ordinary module as an ``nn.Sequential``, which takes what the module takes.

    Attributes:
        sample: the arguments that it was recorded with, without values.
        keys: returns the model's key for a key of this one.
    """

    sample: tuple[Any, ...] | dict[str, Any]
    keys: Callable[[str], str]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return what the model returns."""
        first, *others = self
        value = first(*inputs, **named)
        for layer in others:
            value = layer(value)
        return value

    def describe(self) -> str:
        """Return a text: for each layer what it takes from where, sends where, and its code."""
        parts = []
        layers: Any = self.named_children()
        for name, layer in layers:
            number = sum(parameter.numel() for parameter in layer.parameters())
            lines = [f"{name}: {number:,} parameters", *layer.ports.texts]
            lines += layer.ports.code.splitlines()
            parts.append("\n    ".join(lines))
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
    _check(model)
    signature = inspect.signature(model.forward)
    arguments = arguments_of(signature, inputs, named)
    opened = opened_names(model, largest, whole)
    _check_modes(model, opened)
    recorder, graph, changed = _recorded(model, signature, arguments, opened)
    sized = sized_nodes(graph, changed)
    num_elements = sum(parameter.numel() for parameter in model.parameters())
    piece = pieces_of(graph, changed, sized, _weight_in(model), largest * num_elements)
    localise(graph, piece, sized)
    drop_unused(graph)
    pieces = Pieces(model, recorder.twin if recorder.is_on_meta else None, graph, piece, sized)
    made = CutModel(OrderedDict(pieces.layers(Inputs.of(signature, arguments), recorder.tree)))
    for module in (made, *made):
        module.training = model.training
    made.sample = _without_values(inputs)
    if named:
        bound = inspect.BoundArguments(signature, OrderedDict(arguments))
        positional = dict(zip(arguments, bound.args, strict=False))
        made.sample = _without_values({**positional, **bound.kwargs})
    made.keys = lambda key: key.partition(".")[2]
    return made


def _recorded(
    model: nn.Module,
    signature: inspect.Signature,
    arguments: dict[str, Any],
    opened: dict[str, None],
) -> tuple[Recorder, fx.Graph, list[tuple[fx.Node, fx.Node]]]:
    """Record the forward in both modes; return the recorder of the model's mode, and a graph."""
    first: Exception | None = None
    for device in _devices(model):
        try:
            ours = _record(model, signature, arguments, opened, device, model.training)
        except Exception as error:  # of any kind, since it is the user's code that runs
            is_better = isinstance(error, CannotCutError) and not isinstance(first, CannotCutError)
            first = error if first is None or is_better else first
            continue
        break
    else:
        assert first is not None
        first.add_note("procpipe: while procpipe.sequential recorded the model's forward")
        raise first
    graph = ours.graph
    training = [*graph.nodes][1]
    drop_unused(graph)
    try:
        theirs = _record(model, signature, arguments, opened, device, not model.training)
        drop_unused(theirs.graph)
        different = modes.join(graph, theirs.graph, training, is_training=model.training)
    except Exception as error:
        different = f"{type(error).__name__}: {error}"
    if different:
        modes.keep_to(graph, training, different, is_training=model.training)
    drop_unused(graph)
    return ours, graph, ours.changed


def _devices(model: nn.Module) -> Iterator[torch.device | None]:
    """Yield the meta device; then None, for where the model is, if it has values."""
    yield torch.device("meta")
    if not any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers())):
        yield None


def _record(
    model: nn.Module,
    signature: inspect.Signature,
    arguments: dict[str, Any],
    opened: dict[str, None],
    device: torch.device | None,
    is_training: bool,
) -> Recorder:
    """Record the forward in one mode."""
    with _undisturbed(), said_to_compile():  # libraries then leave out what reads values
        twin = copied(model, device).train(is_training)
        given = pytree.tree_map_only(Tensor, lambda t: stand_in(t, device), arguments)
        found = pytree.tree_flatten_with_path(given)[0]
        tensors = {
            re.sub(r"\W+", "_", pytree.keystr(path)).strip("_"): leaf
            for path, leaf in found
            if isinstance(leaf, Tensor)
        }
        if not tensors:
            raise CannotCutError(f"the sample of the {type(model).__qualname__} has no tensor")
        on = next(iter(tensors.values())).device
        recorder = Recorder(twin, opened, on)
        bound = inspect.BoundArguments(signature, OrderedDict(given))
        recorder.run(bound.args, bound.kwargs, tensors)
    return recorder


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave random numbers as they were, and let compiled modules run as they were written."""
    numpy = sys.modules.get("numpy.random")
    states = random.getstate(), numpy.get_state() if numpy else None
    with torch.random.fork_rng(), warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            random.setstate(states[0])
            if numpy:
                numpy.set_state(states[1])


def _check(model: nn.Module) -> None:
    name = type(model).__qualname__
    if not isinstance(model, nn.Module):
        raise TypeError(f"a {name} is no nn.Module: pass the model, then a sample of its inputs")
    if is_compiled(model):
        raise CannotCutError(
            f"the {name} is compiled as a whole, so its forward cannot be recorded: pass the model "
            "itself, and compile the stage (stage.compile())"
        )
    if has_hooks(model):
        raise CannotCutError(
            f"the {name} has hooks, which the layers would not call: remove them, or register them "
            "at modules inside it"
        )


def _check_modes(model: nn.Module, opened: dict[str, None]) -> None:
    others = [name for name in opened if model.get_submodule(name).training != model.training]
    if others:
        raise CannotCutError(
            f"the modules {', '.join(others)} would be opened, but are in another mode than the "
            "model: let them stay whole (whole=), or call model.train() or model.eval()"
        )


def _weight_in(model: nn.Module) -> Callable[[fx.Node], int]:
    """Return a function that counts the elements of the parameters that a node uses."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    counts: dict[str, int] = {}

    def weight(node: fx.Node) -> int:
        used = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
        total = sum(parameters[name].numel() for name in used if name in parameters)
        if (name := node.meta.get("module")) is not None:
            if name not in counts:
                counts[name] = sum(p.numel() for p in model.get_submodule(name).parameters())
            total += counts[name]
        return total

    return weight


def _without_values(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: stand_in(t, torch.device("meta")), value)
