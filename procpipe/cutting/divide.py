"""Joins the graphs of train and eval mode, and divides the result into pieces.

    stem ─ block ─ block ─ ··· ─ head          a cut between any two modules with parameters,
         │       │               │             where the fewest bytes have to cross it
         x       x, mask         x

The ``meta`` of a node has then, beside what record.py notes, the number of its ``piece``.
"""

from __future__ import annotations

import operator
from itertools import accumulate, pairwise, zip_longest

from torch import fx

from procpipe.cutting.sizes import check
from procpipe.torch_internals import pytree


def join_modes(graph: fx.Graph, other: fx.Graph, *, is_training: bool) -> str:
    """Let a graph compute what it does in its mode and what another one does in the other mode.

    Changes ``graph``, which is that of train mode if ``is_training``, where only plain arguments
    differ: they become the layer's mode. Returns the line at which the two are different forwards,
    if they are; "" if not.
    """
    same: dict[fx.Node, fx.Node] = {}
    for a, b in zip_longest(graph.nodes, other.nodes):
        if a is None or b is None:
            return "its end"
        same[b] = a
        where = str(a.meta.get("line") or b.meta.get("line") or "its end")
        ours, form = pytree.tree_flatten((a.args, a.kwargs))
        theirs, other_form = pytree.tree_flatten(fx.map_arg((b.args, b.kwargs), same.__getitem__))
        if (a.op, a.target, form) != (b.op, b.target, other_form):
            return where
        for k, (x, y) in enumerate(zip(ours, theirs, strict=True)):
            if repr(x) == repr(y):
                continue
            if isinstance(x, fx.Node | slice) or isinstance(y, fx.Node | slice):
                return where
            with graph.inserting_before(a):
                ours[k] = graph.get_attr("training")
                if (x, y) != (is_training, not is_training):
                    by_mode = (y, x) if is_training else (x, y)
                    ours[k] = graph.call_function(operator.getitem, (by_mode, ours[k]))
        a.args, a.kwargs = pytree.tree_unflatten(ours, form)
    return ""


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


def number_pieces(graph: fx.Graph, largest: float) -> None:
    """Note the piece of each node.

    ``largest`` is how many elements of parameters a module may have that is not opened; pieces
    with as many may be joined to one of twice as many.
    """
    nodes = [*graph.nodes]
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
    weights, cuts, piece = [*map(_weight, nodes)], list[int](), 0
    for before, after in pairwise(k for k, weight in enumerate(weights) if weight):
        if free := [k for k in range(before + 1, after + 1) if k not in inside]:
            cuts.append(min(free, key=lambda k: (crossing[k], -k)))
    for cut in sorted(cuts, key=lambda k: -crossing[k]):  # leave out those that most crosses
        at, around = cuts.index(cut), [0, *cuts, len(nodes)]
        others = [crossing[k] for k in (*cuts[at - 1 : at], *cuts[at + 1 : at + 2])]
        is_small = sum(weights[around[at] : around[at + 2]]) <= 2 * largest
        if is_small and others and crossing[cut] > max(others):
            cuts.remove(cut)
    starts = {*cuts}
    for k, node in enumerate(nodes):
        piece += k in starts
        node.meta["piece"] = 0 if node.op == "placeholder" else piece


def _weight(node: fx.Node) -> int:
    """Return how many elements the parameters have that a node uses."""
    used = (n.meta.get("weight", 0) for n in node.all_input_nodes if n.op == "get_attr")
    return int(sum(used, 0 if node.op == "get_attr" else node.meta.get("weight", 0)))
