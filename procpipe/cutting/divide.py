"""Joins the graphs of train and eval mode, and divides the result into pieces.

stem ─ block ─ block ─ ··· ─ head          a cut between any two modules with parameters,
     │       │               │             where the fewest bytes have to cross it
     x       x, mask         x
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, zip_longest
from typing import Any

from torch import fx

from procpipe.cutting.sizes import check
from procpipe.torch_internals import pytree


def differences(graph: fx.Graph, other: fx.Graph) -> tuple[str, list[tuple[fx.Node, int, Any]]]:
    """Compare two graphs, node by node.

    Returns the line at which they are different forwards, "" if they are not; and nodes with plain
    arguments that differ: which of a node's arguments, and what it is in the other graph.
    """
    same: dict[fx.Node, fx.Node] = {}
    plain: list[tuple[fx.Node, int, Any]] = []
    for a, b in zip_longest(graph.nodes, other.nodes):
        if a is None or b is None:
            return "its end", plain
        same[b] = a
        where = str(a.meta.get("line") or b.meta.get("line") or "its end")
        ours, form = pytree.tree_flatten((a.args, a.kwargs))
        theirs, other_form = pytree.tree_flatten(fx.map_arg((b.args, b.kwargs), same.__getitem__))
        if (a.op, a.target, form) != (b.op, b.target, other_form):
            return where, plain
        for k, (x, y) in enumerate(zip(ours, theirs, strict=True)):
            if repr(x) == repr(y):
                continue
            if isinstance(x, fx.Node | slice) or isinstance(y, fx.Node | slice):
                return where, plain
            plain.append((a, k, y))
    return "", plain


def join_modes(plain: list[tuple[fx.Node, int, Any]], *, is_training: bool) -> None:
    """Have arguments that differ in the other mode be those of the layer's mode.

    The nodes are those of train mode if ``is_training``.
    """
    for node, k, other in plain:
        leaves, form = pytree.tree_flatten((node.args, node.kwargs))
        by_mode = (other, leaves[k]) if is_training else (leaves[k], other)
        with node.graph.inserting_before(node):
            choice = (by_mode, node.graph.get_attr("training"))
            leaves[k] = node.graph.call_function(operator.getitem, choice)
        node.args, node.kwargs = pytree.tree_unflatten(leaves, form)


def keep_to_mode(graph: fx.Graph, different: str, *, is_training: bool) -> None:
    """Have layers raise an error in the mode in which a graph is not the model's forward.

    ``different`` is the line, or the fault, by which the forward of the other mode differs.
    """
    other = "eval" if is_training else "train"
    text = (
        f"the mode: the model's forward is another one in {other} mode: {different}\nto run it "
        f"there, cut model.{other}() and load the state dict"
    )
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        arguments = (graph.get_attr("training"), is_training, text)
        graph.call_function(check, arguments).meta["keep"] = True


@dataclass
class Piece:
    """The nodes of a piece, of what comes in, and of what goes out.

    Attributes:
        own: what the piece runs.
        takes: what the layer before returns, or the model's inputs.
        pops: the skip tensors that it takes.
        stashes: those that it makes, and how many pieces pop each.
        gives: what it returns.
        name: its number, and the first module that it calls.
    """

    own: list[fx.Node] = field(default_factory=list)
    takes: list[fx.Node] = field(default_factory=list)
    pops: list[fx.Node] = field(default_factory=list)
    stashes: dict[fx.Node, int] = field(default_factory=dict)
    gives: list[fx.Node] = field(default_factory=list)
    name: str = ""

    @property
    def incoming(self) -> list[fx.Node]:
        """What comes in."""
        return self.takes + self.pops


def pieces_of(graph: fx.Graph, largest: float) -> list[Piece]:
    """Divide a graph.

    ``largest`` is how many elements of parameters a module may have that is not opened; pieces
    with as many may be joined to one of twice as many.
    """
    nodes = [*graph.nodes]
    cuts = _cuts(nodes, largest)
    number = dict(zip(nodes, accumulate(k in cuts for k in range(len(nodes))), strict=True))
    pieces = [Piece() for _ in range(len(cuts) + 1)]
    for node in nodes[1:-1]:  # without the device, which each layer finds itself
        if node.op == "get_attr":  # which each layer has
            continue
        made = number[node]
        (pieces[made].takes if node.op == "placeholder" else pieces[made].own).append(node)
        later = sorted({number[user] for user in node.users} - {made})
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
        pieces[k - 1].gives = piece.takes
    pieces[-1].gives = graph.output_node().all_input_nodes
    return pieces


def _cuts(nodes: list[fx.Node], largest: float) -> list[int]:
    """Return in front of which nodes a graph is cut."""
    index = {node: k for k, node in enumerate(nodes)}
    inside: set[int] = set()  # where no cut may be
    change = [0] * (len(nodes) + 1)  # of the bytes that would cross a cut in front of each node
    for node in nodes:
        users = sorted(map(index.__getitem__, node.users))
        if "since" in node.meta:
            inside.update(range(index[node.meta["since"]] + 1, index[node] + 1))
        if not users or "number" in node.meta:
            continue
        if node.op == "get_attr":  # which each layer has that uses it
            if node.meta.get("changed"):
                inside.update(range(users[0] + 1, users[-1] + 1))
        elif "tensor" in node.meta:
            change[index[node] + 1] += node.meta["tensor"].nbytes
            change[users[-1] + 1] -= node.meta["tensor"].nbytes
        elif index[node] > 0:  # no device, but what cannot travel, as a tuple of tensors
            inside.update(range(index[node] + 1, users[-1] + 1))
    crossing = [*accumulate(change)]
    weights, cuts = [*map(_weight, nodes)], list[int]()
    for before, after in pairwise(k for k, weight in enumerate(weights) if weight):
        if free := [k for k in range(before + 1, after + 1) if k not in inside]:
            cuts.append(min(free, key=lambda k: (crossing[k], -k)))
    for cut in sorted(cuts, key=lambda k: -crossing[k]):  # leave out those that most crosses
        at, around = cuts.index(cut), [0, *cuts, len(nodes)]
        others = [crossing[k] for k in (*cuts[at - 1 : at], *cuts[at + 1 : at + 2])]
        is_small = sum(weights[around[at] : around[at + 2]]) <= 2 * largest
        if is_small and others and crossing[cut] > max(others):
            cuts.remove(cut)
    return cuts


def _weight(node: fx.Node) -> int:
    """Return how many elements the parameters have that a node uses."""
    used = (n.meta.get("weight", 0) for n in node.all_input_nodes if n.op == "get_attr")
    return int(sum(used, 0 if node.op == "get_attr" else node.meta.get("weight", 0)))
