"""The layers that the pieces of a graph become: their code, and what they hold.

values of the layer before ─┐                              ┌─> values for the next layer
popped skip tensors ────────┴─> modules and functions ─────┴─> stashed skip tensors
                                └─ what depends on sizes alone, once a mini-batch
"""

from __future__ import annotations

import copy
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from procpipe.cutting.divide import is_repeated
from procpipe.cutting.twin import on_meta
from procpipe.skip import Namespace, pop, skippable, stash


class Layer(nn.Module):
    """A piece of a model's forward. What is the same in all copies of one is its class's.

    Attributes:
        model: what the piece uses of the model, under the model's names.
        text: what it takes from where, and sends where, and its code.
    """

    text: str
    #: From the model and what comes in to what the next layer gets, and what is stashed.
    run: Callable[..., tuple[Any, ...]]
    arguments: Callable[..., list[Tensor]] | None  # of the first layer
    pops: list[str]
    stashes: dict[str, int]

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.training = model, model.training

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
    pieces, twin, namespace = _pieces(graph), on_meta(model), Namespace()
    layers = OrderedDict[str, Any]()
    for k, piece in enumerate(pieces):
        text = _text(pieces, k) + _compute_sizes_once(graph, piece)
        gives = pieces[k + 1].takes if k + 1 < len(pieces) else [*graph.output_node().args]
        returned = (gives[0] if len(gives) == 1 else tuple(gives), *piece.stashes)
        module = _module(model, piece.incoming, piece.own, returned)
        stashes = {node.name: number for node, number in piece.stashes.items()}
        attributes: dict[str, Any] = {"run": staticmethod(type(module).forward)}
        attributes |= {"arguments": None if k else arguments, "text": text + module.code.strip()}
        attributes |= {"pops": [node.name for node in piece.pops], "stashes": stashes}
        kind: Any = type("Layer", (SkipLayer if stashes or piece.pops else Layer,), attributes)
        layer = layers[piece.name] = kind(_part_of(model, twin))
        if issubclass(kind, SkipLayer):
            skippable(kind.stashes, kind.pops)(kind)
            layer.isolate(namespace)
        for node in module.graph.nodes:
            if node.op in ("call_module", "get_attr"):
                _hold(layer.model, model, twin, node.target)
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
        if is_repeated(node):
            continue
        made = node.meta["piece"]
        (pieces[0].takes if node.op == "placeholder" else pieces[made].own).append(node)
        later = sorted(node.meta["needed"] - {made})
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
        users = ", ".join(pieces[user].name for user in sorted(node.meta["needed"] - {k}))
        lines.append(f"sends {node.name}{_kind(node)} to {users}\n")
    return "".join(lines)


def _kind(node: fx.Node) -> str:
    if (tensor := node.meta.get("tensor")) is None:
        return ": int"
    return f": {tensor.dtype} {tuple(tensor.shape)}, {tensor.nbytes:,} bytes"


def _compute_sizes_once(graph: fx.Graph, piece: _Piece) -> str:
    """Have a piece call one function for all that depends on the sizes of what comes in alone.

    Returns:
        The text of the function.
    """
    read = [n for n in piece.own if "number" in n.meta and n.args[0] in piece.incoming]
    numbers = read + [node for node in piece.incoming if "number" in node.meta]
    given = [next(iter(graph.nodes)), *numbers]  # the device first
    known = {*given}
    for node in graph.nodes:
        is_sized = node.meta.get("sized") and "number" not in node.meta
        if is_sized and known.issuperset(node.all_input_nodes):
            known.add(node)
    checks = [node for node in piece.own if node in known and node not in read]
    own = [node for node in piece.own if node not in known]
    inputs = dict.fromkeys(source for node in own for source in node.all_input_nodes)
    used = [node for node in inputs if node in known and node not in given]
    if not (checks or used):
        return ""
    module = _module(nn.Module(), given, checks, used)
    tensor = next(node for node in piece.incoming if "tensor" in node.meta)
    with graph.inserting_before(graph.output_node()):
        call = graph.call_function(_once(type(module).forward), (tensor, *numbers))
        parts = [graph.call_function(operator.getitem, (call, k)) for k in range(len(used))]
    piece.own = [*read, call, *parts, *own]
    for node, part in zip(used, parts, strict=True):
        for user in own:
            user.replace_input_with(node, part)
    return module.code.lstrip()


def _module(
    model: nn.Module, incoming: list[fx.Node], nodes: Iterable[fx.Node], returned: Any
) -> fx.GraphModule:
    """Return a module which runs nodes, and what they use that each piece makes itself."""
    graph = fx.Graph()
    made = {node: graph.placeholder(node.name) for node in incoming}

    def made_of(node: fx.Node) -> fx.Node:
        if node not in made and node.op == "placeholder":  # the device
            tensor = next(made[n] for n in incoming if "tensor" in n.meta)
            made[node] = graph.call_function(getattr, (tensor, "device"))
        elif node not in made:
            made[node] = graph.node_copy(node, made_of)
        return made[node]

    for node in nodes:
        made_of(node)
    graph.output(fx.map_arg(returned, made_of))
    return fx.GraphModule(model, graph)


def _once(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Have what depends on sizes alone computed once for all micro-batches of the same sizes."""
    last: tuple[Any, list[Any], list[int]] = (None, [], [])

    def sizes(tensor: Tensor, *numbers: int) -> list[Any]:
        nonlocal last
        device = tensor.device
        # Changes of tensors that inference mode makes cannot be noticed.
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return function(None, device, *numbers)
        autocast = device.type != "meta" and torch.is_autocast_enabled(device.type)
        key = type(tensor), device, autocast, numbers
        if key != last[0] or _versions(last[1]) != last[2]:
            values = function(None, device, *numbers)
            last = key, values, _versions(values)
        return last[1]

    return sizes


def _versions(values: list[Any]) -> list[int]:
    return [value._version for value in values if isinstance(value, Tensor)]


# -- modules --------------------------------------------------------------------------------------


class _Part:
    """What a layer has of an opened module, of whose class this is the first base.

    All else of the module is on the meta device, so that its own ``reset_parameters()`` initialises
    what is here, and costs and changes nothing else.
    """

    _modules: dict[str, nn.Module]
    _whole: tuple[nn.Module]  # in a tuple, so that nn.Module does not register it

    def __getattr__(self, name: str) -> Any:
        if (module := self._modules.get(name)) is not None:  # sooner than nn.Module finds it
            return module
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            return getattr(self._whole[0], name)


def _part_of(module: nn.Module, twin: nn.Module) -> nn.Module:
    """Return an opened module without what it holds; ``twin`` is its copy on the meta device."""
    part = copy.copy(module)
    vars(part).update({k: copy.copy(v) for k, v in vars(part).items() if isinstance(v, dict)})
    vars(part).update(_modules={}, _parameters={}, _buffers={}, _whole=(twin,))
    part.__class__ = type(type(module).__name__, (_Part, type(module)), {})
    return part


def _hold(part: nn.Module, model: nn.Module, twin: nn.Module, path: str) -> None:
    """Have a part of the model hold a module, parameter or buffer of the model by its name."""
    *owners, name = path.split(".")
    for owner in owners:
        model, twin = model.get_submodule(owner), twin.get_submodule(owner)
        if owner not in part._modules:
            part._modules[owner] = _part_of(model, twin)
        part = part.get_submodule(owner)
        if part is model:
            return  # it is inside a module that is here as a whole
    for held in ("_modules", "_parameters", "_buffers"):
        if name in vars(model)[held]:
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
