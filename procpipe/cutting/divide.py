"""Divides a recorded graph into pieces, between which the fewest bytes travel.

    stem ─ block ─ block ─ ··· ─ head          a cut between any two modules with parameters,
         │       │               │             where least has to cross it
         x       x, mask         x

What depends on sizes alone (masks, positions) does not travel: each piece makes it. Sizes that a
piece cannot read of what it takes travel as the shapes of tensors without elements. The ``meta``
of a node has then, beside what record.py notes:

    sized   whether its value depends on sizes and the device alone
    piece   the number of its piece
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

from torch import fx

from procpipe.cutting.at_run import carrier

#: Words in the names of functions whose results are others each time.
_RANDOM = (
    *("rand", "dropout", "normal", "uniform", "bernoulli", "multinomial", "poisson", "exponential"),
    *("geometric", "cauchy", "rrelu", "gumbel", "attention", "empty"),
)


def drop_unused(graph: fx.Graph) -> None:
    """Leave out what nothing uses, but modules, checks and changes in place."""
    graph.eliminate_dead_code(
        lambda node: node.op in ("placeholder", "output") or bool(node.meta.get("keep"))
    )


def mark_sized(graph: fx.Graph) -> None:
    """Note for each node whether its value depends on sizes and the device alone."""
    for number, node in enumerate(graph.nodes):
        name = getattr(node.target, "__name__", str(node.target))
        is_function = (
            node.op in ("call_function", "call_method")
            and not ("module" in node.meta or node.meta.get("changed"))
            and not any(word in name for word in _RANDOM)
        )
        node.meta["sized"] = (
            number == 0  # the device
            or "size of" in node.meta
            or (is_function and all(source.meta["sized"] for source in node.all_input_nodes))
        )


def number_pieces(graph: fx.Graph, largest: float) -> None:
    """Note the piece of each node.

    ``largest`` is how many elements of parameters a module may have that is not opened; pieces
    with as many may be joined to one of twice as many.
    """
    nodes = [*graph.nodes]
    index = {node: k for k, node in enumerate(nodes)}
    crossing = _crossing(nodes, index)
    inside: set[int] = set()  # where no cut may be
    for node in nodes:
        for first, last in _inseparable(node):
            if first in index:
                inside.update(range(index[first] + 1, index[last] + 1))
    weights = [_weight(node) for node in nodes]
    heavy = [k for k, weight in enumerate(weights) if weight]
    cuts = []
    for before, after in pairwise(heavy):
        if free := [k for k in range(before + 1, after + 1) if k not in inside]:
            cuts.append(min(free, key=lambda k: (crossing[k], -k)))
    starts, piece = {*_without_peaks(cuts, crossing, weights, largest)}, 0
    for k, node in enumerate(nodes):
        piece += k in starts
        node.meta["piece"] = 0 if node.op == "placeholder" else piece


def _weight(node: fx.Node) -> int:
    """Return how many elements the parameters have that a node uses."""
    own = 0 if node.op == "get_attr" else node.meta.get("elements", 0)
    used = (n.meta.get("elements", 0) for n in node.all_input_nodes if n.op == "get_attr")
    return int(own + sum(used))


def _crossing(nodes: list[fx.Node], index: dict[fx.Node, int]) -> list[int]:
    """Return for each place how many bytes would cross a cut in front of that node."""
    change = [0] * (len(nodes) + 1)
    for node in nodes:
        last = max((index[user] for user in node.users if not user.meta["sized"]), default=-1)
        if not _is_repeated(node) and last > index[node]:
            change[index[node] + 1] += node.meta.get("bytes", 0)
            change[last + 1] -= node.meta.get("bytes", 0)
    return [*accumulate(change)]


def _is_repeated(node: fx.Node) -> bool:
    """Return whether each piece that uses a node's value makes it, or has it."""
    return node.op == "get_attr" or bool(node.meta["sized"])


def _inseparable(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield pairs of nodes, first and last, that must be in one piece."""
    users = sorted(node.users)
    if node.op == "get_attr" and node.meta.get("changed"):
        yield users[0], users[-1]
    if "since" in node.meta:
        yield node.meta["since"], node
    if users and "bytes" not in node.meta and not _is_repeated(node):
        yield node, users[-1]  # as a tuple, of which tensors are taken


def _without_peaks(
    cuts: list[int], crossing: list[int], weights: list[int], largest: float
) -> list[int]:
    """Leave out cuts that more crosses than the next ones, if the joined piece is small enough."""
    for cut in sorted(cuts, key=lambda k: -crossing[k]):
        at = cuts.index(cut)
        around = [0, *cuts, len(weights)]
        joined = sum(weights[around[at] : around[at + 2]])
        others = [crossing[k] for k in (*cuts[at - 1 : at], *cuts[at + 1 : at + 2])]
        if others and crossing[cut] > max(others) and joined <= 2 * largest:
            cuts = [k for k in cuts if k != cut]
    return cuts


def localise(graph: fx.Graph) -> None:
    """Have each piece read parameters and sizes itself, and make what depends on sizes alone.

    Afterwards only tensors are used in other pieces than that of their node.
    """
    for node in reversed([*graph.nodes][1:]):
        tensor, carried = node.meta.get("size of"), None
        for k in sorted({user.meta["piece"] for user in node.users if _is_repeated(node)}):
            is_read = tensor is None or _has(k, tensor)
            if k == node.meta["piece"] and is_read:
                continue
            users = [user for user in node.users if user.meta["piece"] == k]
            with graph.inserting_before(min(users)):
                copy = graph.node_copy(node)
            copy.meta["piece"] = k
            if not is_read:
                copy.meta["size of"] = carried = carried or _carried(graph, node)
                copy.args = (carried, 0)
            for user in users:
                user.replace_input_with(node, copy)


def _has(k: int, tensor: fx.Node) -> bool:
    """Return whether a piece makes or takes a tensor anyway."""
    users = (user for user in tensor.users if not user.meta["sized"])
    return k == tensor.meta["piece"] or any(user.meta["piece"] == k for user in users)


def _carried(graph: fx.Graph, size: fx.Node) -> fx.Node:
    """Return the node of a tensor whose shape is a size, made where the size can be read."""
    tensor = size.meta["size of"]
    with graph.inserting_before(tensor.next):
        read = graph.node_copy(size)
        made = graph.call_function(carrier, (next(iter(graph.nodes)), read))
    made.meta.update(bytes=0, shape="a size", sized=False)
    read.meta["piece"] = made.meta["piece"] = tensor.meta["piece"]
    return made
