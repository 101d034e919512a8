"""Divides a recorded graph into pieces, between which the fewest bytes travel.

    stem ─ block ─ block ─ ··· ─ head          a cut between any two modules with parameters,
         │       │               │             where least has to cross it
         x       x, mask         x

What depends on sizes alone (masks, positions) does not travel: each piece makes it. Sizes that a
piece cannot read of what it takes travel as the shapes of tensors without elements.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise

from torch import fx

from procpipe.cutting.at_run import carrier

#: Words in the names of functions whose results are others each time.
_RANDOM = (
    *("rand", "dropout", "normal", "uniform", "bernoulli", "multinomial", "poisson", "exponential"),
    *("geometric", "cauchy", "rrelu", "gumbel", "attention", "empty"),
)

#: Nodes that must be in one piece.
Together = Collection[tuple[fx.Node, fx.Node]]


def sized_nodes(graph: fx.Graph, changed: Together) -> set[fx.Node]:
    """Return the nodes whose values depend on sizes and the device alone."""
    found = {next(iter(graph.nodes))}  # the device
    never = {node for pair in changed for node in pair}
    for node in graph.nodes:
        name = getattr(node.target, "__name__", str(node.target))
        is_function = (
            node.op in ("call_function", "call_method")
            and "module" not in node.meta
            and not any(word in name for word in _RANDOM)
        )
        if "size of" in node.meta or (
            is_function and node not in never and found.issuperset(node.all_input_nodes)
        ):
            found.add(node)
    return found


def drop_unused(graph: fx.Graph) -> None:
    """Leave out what nothing uses, but modules, checks and changes in place."""
    graph.eliminate_dead_code(
        lambda node: node.op in ("placeholder", "output") or bool(node.meta.get("keep"))
    )


def pieces_of(
    graph: fx.Graph,
    together: Together,
    sized: Collection[fx.Node],
    weight: Callable[[fx.Node], int],
    largest: float,
) -> dict[fx.Node, int]:
    """Return the piece of each node.

    Args:
        graph: the recorded graph.
        together: pairs of nodes between which no cut may be.
        sized: the nodes that do not travel.
        weight: the number of elements of the parameters that a node uses.
        largest: how many elements of parameters a module may have that is not opened; pieces
            with twice as many may be joined.
    """
    nodes = [*graph.nodes]
    index = {node: k for k, node in enumerate(nodes)}
    crossing = _crossing(nodes, index, sized)
    is_free = [True] * (len(nodes) + 1)
    for first, last in [*together, *_parts(nodes)]:
        if first.op != "get_attr" and first in index and last in index:
            for k in range(index[first] + 1, index[last] + 1):
                is_free[k] = False
    weights = [weight(node) for node in nodes]
    heavy = [k for k, each in enumerate(weights) if each]
    cuts = []
    for before, after in pairwise(heavy):
        free = [k for k in range(before + 1, after + 1) if is_free[k]]
        if free:
            cuts.append(min(free, key=lambda k: (crossing[k], -k)))
    cuts = _without_peaks(cuts, crossing, weights, largest)
    starts, piece, of_node = {*cuts}, 0, {}
    for k, node in enumerate(nodes):
        piece += k in starts
        of_node[node] = 0 if node.op == "placeholder" else piece
    return of_node


def _crossing(
    nodes: list[fx.Node], index: dict[fx.Node, int], sized: Collection[fx.Node]
) -> list[int]:
    """Return for each place how many bytes would cross a cut in front of that node."""
    change = [0] * (len(nodes) + 1)
    for node in nodes:
        last = max((index[user] for user in node.users if user not in sized), default=-1)
        if node.op != "get_attr" and node not in sized and last > index[node]:
            change[index[node] + 1] += node.meta.get("bytes", 0)
            change[last + 1] -= node.meta.get("bytes", 0)
    found, total = [], 0
    for each in change:
        total += each
        found.append(total)
    return found


def _parts(nodes: Iterable[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
    """Return pairs of what returns several values, and each that is taken out of it."""
    of_several = (operator.getitem, getattr, len)
    return [
        (node, user)
        for node in nodes
        if "bytes" not in node.meta
        for user in node.users
        if user.target in of_several and user.args[0] is node
    ]


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


def localise(graph: fx.Graph, piece: dict[fx.Node, int], sized: set[fx.Node]) -> None:
    """Have each piece read parameters and sizes itself, and make what depends on sizes alone.

    Adds nodes to the graph, to ``piece`` and to ``sized``. Afterwards only tensors are used in
    other pieces than that of their node.
    """
    nodes = [*graph.nodes]
    device = nodes[0]
    start = next(node for node in nodes if node.op != "placeholder")
    carried: dict[fx.Node, fx.Node] = {}

    def carry(node: fx.Node) -> fx.Node:
        """Return the node of a tensor whose shape is a size."""
        if node not in carried:
            tensor, made = node.meta.get("size of"), node
            before = start if tensor is None or tensor.op == "placeholder" else tensor.next
            with graph.inserting_before(node.next if tensor is None else before):
                if tensor is not None:
                    made = graph.node_copy(node)
                    piece[made] = piece[tensor]
                    sized.add(made)
                carried[node] = graph.call_function(carrier, (device, made))
            piece[carried[node]] = piece[made]
            carried[node].meta.update(bytes=0, shape="a size")
        return carried[node]

    for node in reversed(nodes):
        tensor = node.meta.get("size of")
        is_repeated = node.op == "get_attr" or (node in sized and node.op != "placeholder")
        is_number = node.op.startswith("call") and "bytes" not in node.meta and not is_repeated
        for k in sorted({piece[user] for user in node.users}):
            is_read = tensor is None or _has(k, tensor, piece, sized)
            if not (is_repeated or is_number) or (k == piece[node] and is_read):
                continue
            users = [user for user in node.users if piece[user] == k]
            with graph.inserting_before(min(users)):
                if is_number or not is_read:
                    source = carry(node)
                    copy = graph.call_method("size", (source, 0))
                    copy.meta["size of"] = source
                else:
                    copy = graph.node_copy(node)
            piece[copy] = k
            if node.op != "get_attr":
                sized.add(copy)
            for user in users:
                user.replace_input_with(node, copy)


def _has(k: int, tensor: fx.Node, piece: dict[fx.Node, int], sized: Collection[fx.Node]) -> bool:
    """Return whether a piece makes or takes a tensor anyway."""
    return piece[tensor] == k or any(piece[u] == k and u not in sized for u in tensor.users)
