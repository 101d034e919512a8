"""The layers that pieces become: their code, and what they hold.

values of the layer before ─┐                              ┌─> values for the next layer
popped skip tensors ────────┴─> modules and functions ─────┴─> stashed skip tensors
"""

from __future__ import annotations

import copy
import hashlib
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

from procpipe.cutting.divide import Piece
from procpipe.cutting.record import copied
from procpipe.cutting.sizes import check
from procpipe.skip.skippable import NAMESPACES, POPS, STASHES, declared
from procpipe.skip.tracker import Namespace, SkipKey, current_tracker

#: Where a module keeps what it holds.
_HELD = ("_modules", "_parameters", "_buffers")


class Layer(nn.Module):
    """A piece of a model's forward."""

    #: What the piece uses of the model, under the model's names.
    model: nn.Module
    #: From the model and what comes in to what the next layer gets, and what is stashed.
    run: Callable[..., tuple[Any, ...]]
    #: Of the first layer: the tensors among the arguments of a call of the model.
    arguments: Callable[..., list[Tensor]] | None
    #: What is popped; and what is stashed, for how many layers each.
    pops: list[SkipKey]
    stashes: list[tuple[SkipKey, int]]
    #: What the piece takes from where, and sends where, and its code.
    text: str
    #: A digest of the code, which depends on the sample where the forward decides by its sizes, so
    #: that ranks compare it.
    recorded_as: str
    #: The lines of the model's code, by what the piece's code makes of each.
    lines: dict[str, str]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the piece."""
        if self.arguments is not None:
            values: Any = self.arguments(inputs, named)
        else:
            values = inputs[0] if isinstance(inputs[0], tuple) else inputs
        tracker = current_tracker()
        popped = map(tracker.pop, self.pops)
        try:
            given, *stashed = self.run(self._modules["model"], *values, *popped)
        except Exception as error:
            self._add_line(error)
            raise
        for (key, num_pops), value in zip(self.stashes, stashed, strict=True):
            tracker.stash(key, value, num_pops)
        return given

    def _add_line(self, error: Exception) -> None:
        """Note the line of the model's code whose function or module has raised an error."""
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename.startswith("<eval_with_key>"):
                name = str(frame.line).partition(" ")[0]
                if name in self.lines:
                    error.add_note(f"procpipe: in {self.lines[name]}")

    def reset_parameters(self) -> None:
        """Initialise what models of transformers hold; modules of others do it themselves."""
        _initialise(self.model)


def layers_of(
    model: nn.Module, pieces: list[Piece], arguments: Callable[..., list[Tensor]]
) -> OrderedDict[str, nn.Module]:
    """Return the layers of a model's pieces by name.

    ``arguments`` returns the tensors among the arguments of a call of the model.
    """
    twin, namespace = copied(model), Namespace()
    layers = OrderedDict[str, Any]()
    for k, piece in enumerate(pieces):
        layer: Any = Layer()
        layers[piece.name] = layer
        code = _module(model, piece)
        layer.model, layer.training = _part_of(model, twin), model.training
        layer.run, layer.arguments = type(code).forward, None if k else arguments
        pops = [node.name for node in piece.pops]
        stashes = {node.name: number for node, number in piece.stashes.items()}
        of_names = dict.fromkeys([*pops, *stashes], namespace)
        vars(layer).update({POPS: pops, STASHES: stashes, NAMESPACES: of_names})
        layer.stashes, layer.pops = declared(layer)
        layer.recorded_as = f" recorded as {_digest(code.graph)}"
        layer.lines = {n.name: n.meta["line"] for n in code.graph.nodes if "line" in n.meta}
        for node in code.graph.nodes:
            if node.op in ("call_module", "get_attr"):
                _hold(layer.model, model, twin, node.target)
        number = sum(parameter.numel() for parameter in layer.parameters())
        title = f"{piece.name}: {number:,} parameters\n"
        layer.text = title + _text(pieces, k) + code.code.strip()
    held = {key for layer in layers.values() for key in layer.model.state_dict()}
    for key, value in model.state_dict(keep_vars=True).items():
        if key not in held and isinstance(value, Tensor):  # which nothing uses
            _hold(layers[pieces[0].name].model, model, twin, key)
    return layers


# -- code -----------------------------------------------------------------------------------------


def _text(pieces: list[Piece], k: int) -> str:
    """Return what a piece takes from where, and sends where."""
    lines = []
    for node in pieces[k].incoming:
        source = next((p.name for p in pieces[:k] if node in p.own), "the model's inputs")
        lines.append(f"takes {node.name}{_kind(node)} from {source}\n")
    following = pieces[k].gives if k + 1 < len(pieces) else []
    for node in dict.fromkeys([*following, *pieces[k].stashes]):
        users = ", ".join(piece.name for piece in pieces[k + 1 :] if node in piece.incoming)
        lines.append(f"sends {node.name}{_kind(node)} to {users}\n")
    return "".join(lines)


def _kind(node: fx.Node) -> str:
    if (tensor := node.meta.get("tensor")) is None:
        return ": int"
    return f": {tensor.dtype} {tuple(tensor.shape)}, {tensor.nbytes:,} bytes"


def _module(model: nn.Module, piece: Piece) -> fx.GraphModule:
    """Return a module which runs a piece, and reads what the layer has of the model."""
    graph = fx.Graph()
    made = {node: graph.placeholder(node.name) for node in piece.incoming}

    def made_of(node: fx.Node) -> fx.Node:
        if node not in made and node.op == "placeholder":  # the device
            tensor = next(made[n] for n in piece.incoming if "tensor" in n.meta)
            made[node] = graph.call_function(getattr, (tensor, "device"))
        elif node not in made:
            made[node] = graph.node_copy(node, made_of)
        return made[node]

    for node in piece.own:
        made_of(node)
    given = piece.gives[0] if len(piece.gives) == 1 else tuple(piece.gives)
    graph.output(fx.map_arg((given, *piece.stashes), made_of))
    return fx.GraphModule(model, graph)


def _digest(graph: fx.Graph) -> str:
    """Return a digest of what a graph computes, without the lines and errors that it names."""
    found = hashlib.blake2b(digest_size=4)
    for node in graph.nodes:
        of_target = ("__name__", "tree", "is_grad", "autocasts")
        target = [getattr(node.target, each, "") for each in of_target]
        args = node.args[:2] if node.target is check else node.args
        kind = node.target if isinstance(node.target, str) else target
        found.update(f"{node.op} {kind} {args} {node.kwargs}\n".encode())
    return found.hexdigest()


# -- modules --------------------------------------------------------------------------------------


def _part_of(module: nn.Module, twin: nn.Module) -> nn.Module:
    """Return what a layer has of an opened module, at first nothing: another instance of its class.

    All that the module holds is there from ``twin``, its copy on the meta device, as attributes
    that are not registered. So its own ``train()`` and ``reset_parameters()`` find all, change what
    is registered here, and cost nothing else.
    """
    part = copy.copy(module)
    vars(part).update({k: copy.copy(v) for k, v in vars(part).items() if isinstance(v, dict)})
    for held in _HELD:
        vars(part)[held] = {}
        vars(part).update(vars(twin)[held])
    return part


def _hold(part: nn.Module, model: nn.Module, twin: nn.Module, path: str) -> None:
    """Have a part of the model hold a module, parameter or buffer of the model by its name."""
    *owners, name = path.split(".")
    for owner in owners:
        model, twin = model.get_submodule(owner), twin.get_submodule(owner)
        if owner not in part._modules:
            del vars(part)[owner]
            part._modules[owner] = _part_of(model, twin)
        part = part.get_submodule(owner)
        if part is model:
            return  # it is inside a module that is here as a whole
    for held in _HELD:
        if name in vars(model)[held]:
            vars(part).pop(name, None)
            vars(part)[held][name] = vars(model)[held][name]


def _initialise(module: Any, rule: Callable[[Any], None] | None = None) -> None:
    """Initialise inner modules first, each by the rule of the model of transformers around it."""
    models = sys.modules.get("transformers.modeling_utils")
    if models is not None and isinstance(module, models.PreTrainedModel):
        rule = module._init_weights
    for child in module.children():
        _initialise(child, rule)
    if rule is not None:
        rule(module)
