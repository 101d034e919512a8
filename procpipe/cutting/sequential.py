"""``sequential(model, *sample)``: an ordinary module as an ``nn.Sequential`` of its own modules.

model ──> a copy on the meta device ── record.py ──> a graph for each mode
  │                                                    │
  └──> its modules ── layers.py ──> layers <── divide.py: one graph, pieces
"""

from __future__ import annotations

import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Collection
from contextlib import nullcontext
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from procpipe.compute.wrappers import is_of_fsdp
from procpipe.cutting.divide import differences, join_modes, keep_to_mode, pieces_of
from procpipe.cutting.layers import layers_of
from procpipe.cutting.record import ReachesOutsideError, Recorder, copied
from procpipe.cutting.sizes import SAMPLE, UNKNOWN, WHOLE, CannotCutError, line_of
from procpipe.divided import Divided
from procpipe.model.cut import check_module
from procpipe.torch_internals import has_hooks, is_compiled, pytree, said_to_compile

WITHOUT_VALUES = (
    "while recorded, it has no values (modules that stay whole have those of the sample, if it is "
    "not on the meta device), and sizes are no ints (int(size) is one, and must be the same in "
    f"each call): {WHOLE}"
)

#: The modules of torch that may be opened; its others use what is inside in ways of their own.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_OPENED = (nn.Sequential, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)


class CutModel(Divided):
    """An ordinary module as an ``nn.Sequential``, which takes what the module takes."""

    def describe(self) -> str:
        """Return a text: for each layer what it takes from where, sends where, and its code."""
        layers: Any = self
        return "\n\n".join(layer.text for layer in layers)


@torch.inference_mode(False)  # whose tensors do not count their changes
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
    are opened: their forward is recorded, too; and so are those that use a parameter or buffer of
    another module, which they do not register. The others stay whole, and may do anything. The
    result is cut between them where the fewest bytes cross. Sizes are those of each call; a
    decision on a size is made once, and checked in each call. Does not communicate, and changes
    neither the model nor random number generators. The model and the result share parameters:
    build the optimizer from the stage.

    Args:
        model: a module, in the dtype in which it is to run; it may be on the meta device.
        inputs: a sample of its inputs, ``(batch, …)`` each, as for training; on all ranks the same.
            Only shapes count, but for a module that does not run on the meta device, as one that
            packs a sequence.
            Values other than tensors must be the same in each call, and may then be left out if
            they are named.
        whole: classes of modules that are not opened.
        largest: the largest share of the parameters that a module has which is not opened.
        named: the rest of the sample, by name.

    Returns:
        layers named by the first module that each calls. ``describe()`` shows them. Its attributes
        ``sample`` and ``keys`` are for ``Stage``, and for the model's keys in files.

    Raises:
        TypeError: the model is no module, or is or has a data-parallel one.
        ValueError: the forward does what layers would not repeat: names the line, and what to do.
    """
    _check(model, whole)
    limit = largest * sum(parameter.numel() for parameter in model.parameters())
    by_name, tensors = _arguments_of(model, inputs, named)
    graph = _recorded(model, _opened_names(model, limit, whole), by_name, inputs, named)
    made = CutModel(layers_of(model, pieces_of(graph, limit), tensors))
    made.training = model.training
    made.sample = copied(by_name(inputs, named) if named else inputs)
    made.keys = lambda key: key.partition(".model.")[2]
    return made


def _check(model: nn.Module, whole: Any) -> None:
    """Check that a model is one whose forward is written in Python, and called as it stands."""
    check_module(model)
    kind = type(model).__qualname__
    if not (isinstance(whole, Collection) and all(isinstance(each, type) for each in whole)):
        raise TypeError(f"whole is {whole!r}: give classes of modules, as in whole=(Block,)")
    if isinstance(model, torch.jit.ScriptModule):
        raise CannotCutError(
            f"the {kind} is compiled by torch.jit, so that no forward in Python could be recorded",
            "give the module that it was made of",
        )
    if any(is_of_fsdp(type(module)) for module in model.modules()):
        raise CannotCutError(
            f"the {kind} is sharded by fully_shard, for processes that hold all layers",
            "cut the model first, and shard layers of the stage, as docs/replicas.md shows",
        )
    if is_compiled(model) or has_hooks(model):
        raise CannotCutError(
            f"the {kind} is compiled as a whole or has hooks, which the layers would not call",
            "compile the stage (stage.compile()), and register hooks at modules inside the model",
        )


def _opened_names(
    model: nn.Module, largest: float, whole: Collection[type[nn.Module]]
) -> dict[str, None]:
    """Return the names of the modules whose forward is recorded; the others stay whole.

    ``largest`` is how many elements of parameters a module may have that is not opened.
    """
    kept = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()}
    found: dict[str, None] = {}

    def visit(name: str, module: nn.Module) -> None:
        kind = type(module)
        is_whole = (
            sum(p.numel() for p in module.parameters()) <= largest
            or isinstance(module, tuple(whole))
            or kind.__qualname__ in kept
            or (kind.__module__.startswith("torch.") and kind not in _OPENED)
            or is_compiled(module)
            or has_hooks(module)
            or parametrize.is_parametrized(module)
            or module.training != model.training
            or not any(True for _ in module.children())
        )
        if module is model or kind in _CONTAINERS or not is_whole:
            found[name] = None
            for child_name, child in module.named_children():
                visit(f"{name}.{child_name}".lstrip("."), child)

    visit("", model)
    return found


def _arguments_of(
    model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Callable[..., dict[str, Any]], Callable[..., list[Tensor]]]:
    """Return two functions of a call's arguments: these by name, and the tensors among them.

    The second raises a ``TypeError`` where they are of another form than the sample.
    """
    names = [*inspect.signature(model.forward).parameters]
    plain = {k: v for k, v in named.items() if not pytree.tree_any(torch.is_tensor, v)}

    def by_name(inputs: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        given = dict(zip(chain(names, map(str, count())), inputs, strict=False))
        return dict(sorted((plain | dict(**given, **named)).items()))

    def taken_apart(inputs: Any, named: Any) -> tuple[list[Tensor], dict[str, Any]]:
        tensors: list[Tensor] = []
        form: dict[str, Any] = {}
        for name, value in by_name(inputs, named).items():
            leaves, tree = pytree.tree_flatten(value)
            tensors += filter(torch.is_tensor, leaves)
            kinds = [(v.dim(), "dimensions") if isinstance(v, Tensor) else v for v in leaves]
            form[name] = tree, kinds
        return tensors, form

    _, expected = taken_apart(inputs, named)

    def tensors(inputs: tuple[Any, ...], named: dict[str, Any]) -> list[Tensor]:
        found, form = taken_apart(inputs, named)
        if form != expected:
            raise TypeError(
                f"the model was recorded for arguments of the form {expected}, and is given "
                f"{form}: give procpipe.sequential such a sample"
            )
        return found

    return by_name, tensors


def _recorded(
    model: nn.Module,
    opened: dict[str, None],
    by_name: Callable[..., dict[str, Any]],
    inputs: tuple[Any, ...],
    named: dict[str, Any],
) -> fx.Graph:
    """Record the forward in both modes, and return a graph of both."""
    tensors = chain(pytree.tree_leaves((inputs, named)), model.parameters())
    devices = (t.device for t in tensors if isinstance(t, Tensor) and not t.is_meta)
    device = next(devices, torch.device("cpu"))

    def record(is_training: bool, watched: Any = ()) -> fx.Graph:
        is_loaded = "torch._dynamo" in sys.modules
        as_written = torch.compiler.set_stance("force_eager") if is_loaded else nullcontext()
        with torch.random.fork_rng(), warnings.catch_warnings(), as_written, said_to_compile():
            warnings.simplefilter("ignore")
            twin, (args, kwargs) = copied(model).train(is_training), copied((inputs, named))
            sample, arguments = by_name(inputs, named), by_name(args, kwargs)
            recorder = Recorder(model, twin, opened, sample, arguments, device)
            try:
                changed = recorder.run(args, kwargs, watched)
            except ReachesOutsideError as error:  # as a head that is tied through a list
                opened[error.name] = None
                return record(is_training, watched)
            except CannotCutError:
                raise
            except Exception as error:  # of any kind, since it is the user's code that runs
                where = line_of(reversed([*traceback.walk_tb(error.__traceback__)]))
                raise CannotCutError(
                    f"the forward cannot be recorded: {type(error).__name__}: {error}",
                    SAMPLE if where == UNKNOWN else WITHOUT_VALUES,
                    "" if where == UNKNOWN else where,
                ) from error
        return record(is_training, changed) if changed else recorder.graph

    graph = record(model.training)
    try:
        different, plain = differences(graph, record(not model.training))
    except CannotCutError as error:
        different, plain = str(error), []
    if different or plain:  # by the mode, and not by what is another value in each run
        line, others = differences(graph, record(model.training))
        if line or others:
            raise CannotCutError(
                "the forward is another one each time it runs, as by random numbers",
                f"draw them by torch, or {WHOLE}",
                line or others[0][0].meta.get("line", UNKNOWN),
            )
    join_modes(plain, is_training=model.training)
    if different:
        keep_to_mode(graph, different, is_training=model.training)
    return graph
