"""Divides a recorded graph into pieces, between which the fewest bytes travel.

    stem ─ block ─ block ─ ··· ─ head          a cut between any two modules with parameters,
         │       │               │             where least has to cross it
         x       x, mask         x

What depends on sizes alone (masks, positions) does not travel: each piece makes it, of the sizes,
which do. The ``meta`` of a node has then, beside what record.py notes:

    sized   whether its value depends on sizes and the device alone
    piece   the number of its piece; those of sizes are where the tensor is
    needed  the pieces whose own nodes use its value, if need be by nodes that each piece repeats
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from torch import fx

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


def number_pieces(graph: fx.Graph, largest: float) -> None:
    """Note which nodes depend on sizes alone, and the piece of each node.

    ``largest`` is how many elements of parameters a module may have that is not opened; pieces
    with as many may be joined to one of twice as many.
    """
    _mark_sized(graph)
    nodes = [*graph.nodes]
    index = {node: k for k, node in enumerate(nodes)}
    inside: set[int] = set()  # where no cut may be
    change = [0] * (len(nodes) + 1)  # of the bytes that would cross a cut in front of each node
    for node in nodes:
        users = sorted(index[user] for user in node.users if not user.meta["sized"])
        if "since" in node.meta:
            inside.update(range(index[node.meta["since"]] + 1, index[node] + 1))
        if users and node.op == "get_attr" and node.meta.get("changed"):
            inside.update(range(users[0] + 1, users[-1] + 1))
        if users and not is_repeated(node):
            if "tensor" in node.meta:
                change[index[node] + 1] += node.meta["tensor"].nbytes
                change[users[-1] + 1] -= node.meta["tensor"].nbytes
            elif "number" not in node.meta:  # as a tuple of tensors
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
        if "number" in node.meta and node.op == "call_method":
            node.meta["piece"] = node.args[0].meta["piece"]
    for node in reversed(nodes):
        node.meta["needed"] = set().union(
            *(u.meta["needed"] if is_repeated(u) else {u.meta["piece"]} for u in node.users)
        )


def _mark_sized(graph: fx.Graph) -> None:
    for number, node in enumerate(graph.nodes):
        name = getattr(node.target, "__name__", str(node.target))
        is_function = node.op in ("call_function", "call_method") and not (
            node.meta.get("changed") or any(word in name for word in _RANDOM)
        )
        node.meta["sized"] = (
            number == 0  # the device
            or "number" in node.meta
            or (is_function and all(source.meta["sized"] for source in node.all_input_nodes))
        )


def is_repeated(node: fx.Node) -> bool:
    """Return whether each piece that uses a node's value makes it, or has it."""
    is_own = "number" in node.meta or node.meta.get("keep")
    return node.op == "get_attr" or (node.meta["sized"] and not is_own)


def _weight(node: fx.Node) -> int:
    """Return how many elements the parameters have that a node uses."""
    used = (n.meta.get("weight", 0) for n in node.all_input_nodes if n.op == "get_attr")
    return int(sum(used, 0 if node.op == "get_attr" else node.meta.get("weight", 0)))
