"""The layers that the pieces of a graph become: their code, and what they hold.

values of the layer before ─┐                              ┌─> values for the next layer
popped skip tensors ────────┴─> modules and functions ─────┴─> stashed skip tensors
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from procpipe.cutting.record import copied
from procpipe.skip import Namespace, pop, skippable, stash

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
    #: The names of what is popped, and of what is stashed.
    pops: list[str]
    stashes: list[str]
    #: What the piece takes from where, and sends where, and its code.
    text: str

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the piece."""
        return self.run(self._modules["model"], *self.taken(inputs, named))[0]

    def taken(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return what comes in of the layer before, or the tensors among the model's arguments."""
        if self.arguments is not None:
            return self.arguments(inputs, named)
        return inputs[0] if isinstance(inputs[0], tuple) else inputs

    def reset_parameters(self) -> None:
        """Initialise what models of transformers hold; modules of others do it themselves."""
        _initialise(self.model)


class SkipLayer(Layer):
    """A piece that stashes or pops skip tensors."""

    def forward(self, *inputs: Any, **named: Any) -> Generator[Any, Any, Any]:
        """Run the piece."""
        values = [*self.taken(inputs, named)]
        for name in self.pops:
            values += [(yield pop(name))]
        given, *stashed = self.run(self._modules["model"], *values)
        for name, value in zip(self.stashes, stashed, strict=True):
            yield stash(name, value)
        return given


def layers_of(
    model: nn.Module, graph: fx.Graph, arguments: Callable[..., list[Tensor]]
) -> OrderedDict[str, nn.Module]:
    """Return the layers of a model's graph by name.

    ``arguments`` returns the tensors among the arguments of a call of the model.
    """
    pieces, twin, namespace = _pieces(graph), copied(model), Namespace()
    layers = OrderedDict[str, Any]()
    for k, piece in enumerate(pieces):
        pops = [node.name for node in piece.pops]
        stashes = {node.name: number for node, number in piece.stashes.items()}
        kind: Any = Layer
        if pops or stashes:
            kind = skippable(stashes, pops)(type("SkipLayer", (SkipLayer,), {}))
        layer = layers[piece.name] = kind()
        if pops or stashes:
            layer.isolate(namespace)
        gives = pieces[k + 1].takes if k + 1 < len(pieces) else [*graph.output_node().args]
        returned = (gives[0] if len(gives) == 1 else tuple(gives), *piece.stashes)
        code = _module(model, piece, returned)
        layer.model, layer.training = _part_of(model, twin), model.training
        layer.run, layer.arguments = type(code).forward, None if k else arguments
        layer.pops, layer.stashes = pops, [*stashes]
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


# -- pieces ---------------------------------------------------------------------------------------


@dataclass
class _Piece:
    """The nodes of a piece, of what comes in, and of what goes out."""

    own: list[fx.Node] = field(default_factory=list)
    takes: list[fx.Node] = field(default_factory=list)  # of the layer before, or the inputs
    pops: list[fx.Node] = field(default_factory=list)
    stashes: dict[fx.Node, int] = field(default_factory=dict)  # and how many pieces pop each
    name: str = ""

    @property
    def incoming(self) -> list[fx.Node]:
        return self.takes + self.pops


def _pieces(graph: fx.Graph) -> list[_Piece]:
    """Return the pieces, with what each returns for the next one, and stashes for later ones."""
    pieces = [_Piece() for _ in range(graph.output_node().meta["piece"] + 1)]
    for node in [*graph.nodes][1:-1]:  # without the device, which each layer finds itself
        if node.op == "get_attr":  # which each layer has
            continue
        made = node.meta["piece"]
        (pieces[0].takes if node.op == "placeholder" else pieces[made].own).append(node)
        later = sorted({user.meta["piece"] for user in node.users} - {made})
        if "number" in node.meta:  # is passed on from layer to layer
            for piece in pieces[made + 1 : max(later, default=0) + 1]:
                piece.takes.append(node)
            continue
        if later[:1] == [made + 1]:
            pieces[later.pop(0)].takes.append(node)
        for k in later:
            pieces[k].pops.append(node)
        if later:
            pieces[made].stashes[node] = len(later)
    for k, piece in enumerate(pieces):
        called = next((str(n.target) for n in piece.own if n.op == "call_module"), "functions")
        piece.name = f"{k}_{called.replace('.', '_')}"
        if not any("tensor" in node.meta for node in piece.incoming):  # whose device is the piece's
            before = pieces[k - 1].incoming + pieces[k - 1].own
            piece.takes.append(next(n for n in reversed(before) if "tensor" in n.meta))
    return pieces


# -- code -----------------------------------------------------------------------------------------


def _text(pieces: list[_Piece], k: int) -> str:
    """Return what a piece takes from where, and sends where."""
    lines = []
    for node in pieces[k].incoming:
        source = pieces[node.meta["piece"]].name if k > 0 else "the model's inputs"
        lines.append(f"takes {node.name}{_kind(node)} from {source}\n")
    following = pieces[k + 1].takes if k + 1 < len(pieces) else []
    for node in dict.fromkeys([*following, *pieces[k].stashes]):
        users = ", ".join(piece.name for piece in pieces[k + 1 :] if node in piece.incoming)
        lines.append(f"sends {node.name}{_kind(node)} to {users}\n")
    return "".join(lines)


def _kind(node: fx.Node) -> str:
    if (tensor := node.meta.get("tensor")) is None:
        return ": int"
    return f": {tensor.dtype} {tuple(tensor.shape)}, {tensor.nbytes:,} bytes"


def _module(model: nn.Module, piece: _Piece, returned: Any) -> fx.GraphModule:
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
    graph.output(fx.map_arg(returned, made_of))
    return fx.GraphModule(model, graph)


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
