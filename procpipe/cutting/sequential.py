"""``sequential(model, *sample)``: an ordinary module as an ``nn.Sequential`` of its own modules.

model ── twin.py ──> a copy on the meta device ── record.py ──> a graph for each mode
  │                                                               │ modes.py: one graph
  └──> its modules ─> build.py: a layer for each piece <── divide.py: pieces
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from procpipe.cutting import modes
from procpipe.cutting.build import layers_of
from procpipe.cutting.divide import drop_unused, localise, mark_sized, number_pieces
from procpipe.cutting.layers import Arguments
from procpipe.cutting.record import Recorder
from procpipe.cutting.refusal import CannotCutError
from procpipe.cutting.twin import META, copied, opened_names, owned, stand_in
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
            parts.append("\n    ".join([f"{name}: {number:,} parameters", *layer._texts]))
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
    opened = opened_names(model, largest, whole)
    _check(model, opened)
    arguments = Arguments(model.forward, inputs, named)
    graph = _recorded(model, opened, arguments, inputs, named)
    mark_sized(graph)
    number_pieces(graph, largest * sum(parameter.numel() for parameter in model.parameters()))
    localise(graph)
    drop_unused(graph)
    made = CutModel(layers_of(model, graph, arguments))
    for module in (made, *made):
        module.training = model.training
    by_name = dict(zip(arguments.names, inputs, strict=False)) | named
    made.sample = _stand_ins(by_name if named else inputs, META)
    made.keys = lambda key: key.partition(".")[2]
    return made


def _recorded(
    model: nn.Module,
    opened: dict[str, None],
    arguments: Arguments,
    inputs: tuple[Any, ...],
    named: dict[str, Any],
) -> fx.Graph:
    """Record the forward in both modes, and return a graph of both."""

    def record(device: torch.device | None, is_training: bool) -> fx.Graph:
        with _undisturbed(), said_to_compile():  # libraries then leave out what reads values
            twin = copied(model, device).train(is_training)
            args, kwargs = _stand_ins((inputs, named), device)
            recorder = Recorder(twin, opened, arguments.bound(args, kwargs))
            recorder.run(args, kwargs)
        drop_unused(recorder.graph)
        return recorder.graph

    is_meta = any(tensor.is_meta for _, tensor in owned(model))
    device: torch.device | None
    for device in (META,) if is_meta else (META, None):  # the model's own, if it has values
        try:
            graph = record(device, model.training)
            break
        except Exception as error:  # of any kind, since it is the user's code that runs
            fault = error
    else:
        fault.add_note("procpipe: while procpipe.sequential recorded the model's forward")
        raise fault
    try:
        other = record(device, not model.training)
        different = modes.join(graph, other, is_training=model.training)
    except Exception as error:
        different = f"{type(error).__name__}: {error}"
    if different:
        modes.keep_to(graph, different, is_training=model.training)
    return graph


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


def _check(model: nn.Module, opened: Iterable[str]) -> None:
    """Refuse a model that is compiled, has hooks, or has modules in another mode."""
    others = [name for name in opened if model.get_submodule(name).training != model.training]
    whys = {
        "is compiled as a whole, so its forward cannot be recorded: pass the model itself, and "
        "compile the stage (stage.compile())": is_compiled(model),
        "has hooks, which the layers would not call: remove them, or register them at modules "
        "inside it": has_hooks(model),
        f"has the modules {', '.join(others)}, which would be opened, but are in another mode: "
        "let them stay whole (whole=), or call model.train() or model.eval()": bool(others),
    }
    for why, is_so in whys.items():
        if is_so:
            raise CannotCutError(f"the {type(model).__qualname__} {why}")


def _stand_ins(value: Any, device: torch.device | None) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: stand_in(tensor, device), value)
