"""Makes the layers of a graph whose nodes have pieces: their ports, code and modules."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Collection, Iterable
from itertools import count
from typing import Any

from torch import Tensor, fx, nn

from procpipe.cutting.layers import Inputs, Layer, Ports, Shell, layer_of, shell_of
from procpipe.skip import Namespace
from procpipe.torch_internals import is_persistent

_numbers = count()


class Pieces:
    """A graph whose nodes have pieces, and the model that it was recorded of.

    Attributes:
        names: of the layers.
    """

    def __init__(
        self,
        model: nn.Module,
        twin: nn.Module | None,
        graph: fx.Graph,
        piece: dict[fx.Node, int],
        sized: Collection[fx.Node],
    ) -> None:
        self._model, self._twin, self._sized = model, twin, sized
        self._nodes, self._piece = [*graph.nodes], piece
        self._given = self._nodes[:2]  # device and training, which every layer knows itself
        self._last = max(piece.values())
        self._own: list[list[fx.Node]] = [[] for _ in range(self._last + 1)]
        for node in self._nodes:
            if node.op not in ("placeholder", "output"):
                self._own[piece[node]].append(node)
        self._takes: list[list[fx.Node]] = [[] for _ in self._own]
        self._pops: list[list[fx.Node]] = [[] for _ in self._own]
        self._stashes: list[dict[fx.Node, int]] = [{} for _ in self._own]
        self._takes[0] = [n for n in self._nodes[2:] if n.op == "placeholder"]
        self._route()
        self.names = [f"{k}_{self._title(own)}" for k, own in enumerate(self._own)]

    def _route(self) -> None:
        """Find what is returned for the next layer, and what is stashed for later ones."""
        for node in self._nodes[2:]:
            made = self._piece[node]
            later = sorted({self._piece[user] for user in node.users} - {made})
            if later[:1] == [made + 1]:
                self._takes[later.pop(0)].append(node)
            for k in later:
                self._pops[k].append(node)
            if later:
                self._stashes[made][node] = len(later)

    def layers(self, inputs: Inputs, tree: Any) -> dict[str, Layer]:
        """Return the layers by name; ``tree`` is how the model nests what it returns."""
        namespace = Namespace()
        shells = [self._shell(own) for own in self._own]
        self._add_unused(shells)
        return {
            name: self._layer(
                k,
                shells[k],
                inputs if k == 0 else None,
                tree if k == self._last else None,
                namespace,
            )
            for k, name in enumerate(self.names)
        }

    def _layer(
        self, k: int, shell: Shell, inputs: Inputs | None, tree: Any, namespace: Namespace
    ) -> Layer:
        own, incoming = self._own[k], self._takes[k] + self._pops[k]
        sizes = self._once_a_mini_batch(own, incoming)
        roots = {node.meta.get("size of") for node in sizes}
        measured = [i for i, node in enumerate(incoming) if node in roots]
        rest = [node for node in own if node not in sizes]
        output = self._nodes[-1]
        users = {*rest, output} if k == self._last else {*rest}
        numbers = [node for node in sizes if not users.isdisjoint(node.users)]
        gives = self._takes[k + 1] if k < self._last else []
        returned: Any = output.args[0] if tree is not None else (*gives, *self._stashes[k])
        run, code = _function(
            f"{self.names[k]}", [*self._given, *incoming, *numbers], rest, returned
        )
        find_sizes = None
        if sizes:
            tensors = [self._given[0], *(incoming[i] for i in measured)]
            find_sizes, text = _function(f"{self.names[k]}, sizes", tensors, sizes, tuple(numbers))
            code = f"{text}\n{code}"
        ports = Ports(
            takes=[node.name for node in self._takes[k]],
            pops=[node.name for node in self._pops[k]],
            gives=[str(n) for n in (gives if tree is None else range(len(returned)))],
            stashes={node.name: number for node, number in self._stashes[k].items()},
            measured=measured,
            texts=self._texts(k),
            code=code,
        )
        return layer_of(shell, namespace, run, find_sizes, ports=ports, inputs=inputs, tree=tree)

    def _once_a_mini_batch(
        self, own: Iterable[fx.Node], incoming: Collection[fx.Node]
    ) -> dict[fx.Node, None]:
        """Return what depends on the sizes of what comes in alone."""
        found: dict[fx.Node, None] = {}
        for node in own:
            sources = [n for n in node.all_input_nodes if n not in (*found, self._given[0])]
            is_read = node.meta.get("size of") in incoming
            if node in self._sized and (is_read or not sources):
                found[node] = None
        return found

    def _title(self, own: Iterable[fx.Node]) -> str:
        called = next((n.meta["module"] for n in own if "module" in n.meta), "functions")
        return str(called).replace(".", "_")

    def _texts(self, k: int) -> list[str]:
        lines = []
        for node in self._takes[k] + self._pops[k]:
            source = "the model's inputs" if k == 0 else self.names[self._piece[node]]
            lines.append(f"takes {_text(node)} from {source}")
        following = self._takes[k + 1] if k < self._last else []
        for node in dict.fromkeys([*following, *self._stashes[k]]):
            users = sorted({self._piece[user] for user in node.users} - {k})
            lines.append(f"sends {_text(node)} to {', '.join(self.names[u] for u in users)}")
        return lines

    # -- modules ------------------------------------------------------------------------------

    def _shell(self, own: Iterable[fx.Node]) -> Shell:
        """Return what holds the modules, parameters and buffers that a piece uses."""
        shell = shell_of(self._model, self._twin)
        used = {node.meta["module"] for node in own if "module" in node.meta}
        used |= {str(node.target) for node in own if node.op == "get_attr"}
        for path in sorted(used):
            self._add(shell, path)
        return shell

    def _add(self, shell: nn.Module, path: str) -> None:
        """Add a module, parameter, buffer or other tensor of the model under its name."""
        of_model, of_twin = self._model, self._twin
        *owners, name = path.split(".")
        for owner in owners:
            of_model = of_model.get_submodule(owner)
            of_twin = None if of_twin is None else of_twin.get_submodule(owner)
            if owner not in shell._modules:
                shell.add_module(owner, shell_of(of_model, of_twin))
            shell = shell.get_submodule(owner)
            if shell is of_model:
                return  # it is inside a module that is here as a whole
        value = getattr(of_model, name)
        if isinstance(value, nn.Module):
            shell._modules[name] = value
        elif name in of_model._buffers:
            shell.register_buffer(name, value, persistent=is_persistent(of_model, name))
        else:
            setattr(shell, name, value)

    def _add_unused(self, shells: list[Shell]) -> None:
        """Let the first layer hold what no layer uses, so that state dicts have all keys."""
        held = {key for shell in shells for key in shell.state_dict()}
        for key, value in self._model.state_dict(keep_vars=True).items():
            if key not in held and isinstance(value, Tensor):
                self._add(shells[0], key)


def _function(
    name: str, inputs: Iterable[fx.Node], nodes: Iterable[fx.Node], returned: Any
) -> tuple[Callable[..., Any], str]:
    """Return a function of a shell and of inputs, which runs nodes; and its source."""
    graph, made = fx.Graph(), {}
    for node in inputs:
        made[node] = graph.placeholder(node.name)
    for node in nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(fx.map_arg(returned, made.__getitem__))
    code = graph.python_code("self")
    file = f"<procpipe.sequential: layer {name} ({next(_numbers)})>"
    linecache.cache[file] = len(code.src), None, code.src.splitlines(keepends=True), file
    scope = {**code.globals}
    exec(compile(code.src, file, "exec"), scope)
    source = "\n".join(line for line in code.src.splitlines() if line.strip())
    return scope["forward"], source


def _text(node: fx.Node) -> str:
    size = node.meta.get("bytes", 0)
    return f"{node.name}: {node.meta.get('shape', 'a value')}, {size:,} bytes"
