"""Builds the layers of a graph whose nodes have pieces: their code, and what they hold.

values of the layer before ─┐                              ┌─> values for the next layer
popped skip tensors ────────┴─> modules and functions ─────┴─> stashed skip tensors
                                └─ sizes, once a mini-batch
"""

from __future__ import annotations

import linecache
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor, fx, nn

from procpipe.cutting.at_run import Sizes
from procpipe.cutting.layers import Arguments, Layer, SkipLayer, shell_of
from procpipe.cutting.twin import META, copied
from procpipe.skip import Namespace, skippable
from procpipe.torch_internals import is_persistent

_numbers = count()


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


def layers_of(
    model: nn.Module, graph: fx.Graph, arguments: Arguments
) -> OrderedDict[str, nn.Module]:
    """Return the layers of a model's graph by name; the first one takes the model's arguments."""
    pieces, twin, namespace = _pieces(graph), copied(model, META), Namespace()
    layers, output = OrderedDict[str, nn.Module](), graph.output_node()
    for k, piece in enumerate(pieces):
        texts = _texts(pieces, k) + _compute_sizes_once(graph, piece)
        gives = pieces[k + 1].takes if k + 1 < len(pieces) else [*output.args]
        returned = (gives[0] if len(gives) == 1 else tuple(gives), *piece.stashes)
        run, code = _function(piece.name, piece.incoming, piece.own, returned)
        stashes = {node.name: number for node, number in piece.stashes.items()}
        pops = [node.name for node in piece.pops]
        attributes: dict[str, Any] = {"_run": run, "_arguments": None if k else arguments}
        attributes |= {"_stashes": [*stashes], "_pops": pops, "_texts": [*texts, *code]}
        if stashes or pops:
            kind: Any = skippable(stashes, pops)(type("Layer", (SkipLayer,), attributes))
            layer: Any = shell_of(twin, kind)
            layer.isolate(namespace)
        else:
            layer = shell_of(twin, type("Layer", (Layer,), attributes))
        used = {node.meta["module"] for node in piece.own if "module" in node.meta}
        used |= {str(node.target) for node in piece.own if node.op == "get_attr"}
        for path in sorted(used):
            _hold(layer, model, twin, path)
        layers[piece.name] = layer
    held = {key for layer in layers.values() for key in layer.state_dict()}
    for key, value in model.state_dict(keep_vars=True).items():
        if key not in held and isinstance(value, Tensor):  # which nothing uses
            _hold(layers[pieces[0].name], model, twin, key)
    return layers


def _pieces(graph: fx.Graph) -> list[_Piece]:
    """Return the pieces, with what each returns for the next one, and stashes for later ones."""
    pieces = [_Piece() for _ in range(graph.output_node().meta["piece"] + 1)]
    for node in [*graph.nodes][1:-1]:  # without the device, which each layer finds itself
        made = node.meta["piece"]
        (pieces[0].takes if node.op == "placeholder" else pieces[made].own).append(node)
        later = sorted({user.meta["piece"] for user in node.users} - {made})
        if later[:1] == [made + 1]:
            pieces[later.pop(0)].takes.append(node)
        for k in later:
            pieces[k].pops.append(node)
        if later:
            pieces[made].stashes[node] = len(later)
    for k, piece in enumerate(pieces):
        called = next((n.meta["module"] for n in piece.own if "module" in n.meta), "functions")
        piece.name = f"{k}_{called.replace('.', '_')}"
    return pieces


def _texts(pieces: list[_Piece], k: int) -> list[str]:
    """Return what a piece takes from where, and sends where, for ``describe()``."""
    lines = []
    for node in pieces[k].incoming:
        source = "the model's inputs" if k == 0 else pieces[node.meta["piece"]].name
        lines.append(f"takes {_text(node)} from {source}")
    following = pieces[k + 1].takes if k + 1 < len(pieces) else []
    for node in dict.fromkeys([*following, *pieces[k].stashes]):
        users = sorted({user.meta["piece"] for user in node.users} - {k})
        lines.append(f"sends {_text(node)} to {', '.join(pieces[u].name for u in users)}")
    return lines


def _text(node: fx.Node) -> str:
    return f"{node.name}: {node.meta['shape']}, {node.meta['bytes']:,} bytes"


# -- code -----------------------------------------------------------------------------------------


def _compute_sizes_once(graph: fx.Graph, piece: _Piece) -> list[str]:
    """Have a piece call one function for all that depends on the sizes of what comes in alone.

    Returns:
        The lines of the function.
    """
    device, once = next(iter(graph.nodes)), dict[fx.Node, None]()
    for node in piece.own:
        sources = {*node.all_input_nodes} - {device, *once}
        if node.meta["sized"] and (node.meta.get("size of") in piece.incoming or not sources):
            once[node] = None
    if not once:
        return []
    roots = {node.meta.get("size of") for node in once}
    measured = [node for node in piece.incoming if node in roots] or piece.incoming[:1]
    numbers = [node for node in once if not once.keys() >= node.users.keys()]
    function, code = _function(f"{piece.name}, sizes", measured, once, tuple(numbers))
    sizes = graph.call_function(Sizes(partial(function, None)), tuple(measured))
    own = [sizes]
    for k, node in enumerate(numbers):
        target, arguments = operator.getitem, (sizes, k)
        own.append(graph.create_node("call_function", target, arguments, name=node.name))
        for user in [user for user in node.users if user not in once]:
            user.replace_input_with(node, own[-1])
    piece.own = own + [node for node in piece.own if node not in once]
    return code


def _function(
    name: str, incoming: list[fx.Node], nodes: Iterable[fx.Node], returned: Any
) -> tuple[Callable[..., Any], list[str]]:
    """Return a method which runs nodes, from incoming tensors to those returned; and its lines."""
    graph = fx.Graph()
    made = {node: graph.placeholder(node.name) for node in incoming}

    def made_of(node: fx.Node) -> fx.Node:
        if node not in made:  # the device
            made[node] = graph.call_function(getattr, (made[incoming[0]], "device"))
        return made[node]

    for node in nodes:
        made[node] = graph.node_copy(node, made_of)
    graph.output(fx.map_arg(returned, made_of))
    code = graph.python_code("self")
    lines = [line for line in code.src.splitlines(keepends=True) if line.strip()]
    file = f"<procpipe.sequential: layer {name} ({next(_numbers)})>"
    linecache.cache[file] = len(code.src), None, lines, file  # for tracebacks
    scope = {**code.globals}
    exec(compile("".join(lines), file, "exec"), scope)
    return scope["forward"], [line.rstrip() for line in lines]


# -- modules --------------------------------------------------------------------------------------


def _hold(layer: nn.Module, model: nn.Module, twin: nn.Module, path: str) -> None:
    """Have a layer hold a module, parameter, buffer or other tensor of the model by its name."""
    *owners, name = path.split(".")
    for owner in owners:
        model, twin = model.get_submodule(owner), twin.get_submodule(owner)
        if owner not in layer._modules:
            layer.add_module(owner, shell_of(twin))
        layer = layer.get_submodule(owner)
        if layer is model:
            return  # it is inside a module that is here as a whole
    value = getattr(model, name)
    if isinstance(value, nn.Module):
        layer._modules[name] = value
    elif name in model._buffers:
        layer.register_buffer(name, value, persistent=is_persistent(model, name))
    else:
        setattr(layer, name, value)
