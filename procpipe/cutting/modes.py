"""Joins what a forward is in train and in eval mode: flags that differ become the layer's mode."""

from __future__ import annotations

from itertools import zip_longest

from torch import fx

from procpipe.cutting.at_run import check_mode, chosen
from procpipe.torch_internals import pytree


def join(graph: fx.Graph, other: fx.Graph, *, is_training: bool) -> str:
    """Let a graph compute what it does in its mode and what another one does in the other mode.

    Args:
        graph: changed in place, where only plain arguments differ.
        other: the graph of the other mode.
        is_training: whether ``graph`` is that of train mode.

    Returns:
        The line at which the two are different forwards, if they are; "" if not.
    """
    pairs = list(zip_longest(graph.nodes, other.nodes))
    same = {b: a for a, b in pairs}
    for a, b in pairs:
        if a is None or b is None:
            return "its end"
        ours, form = pytree.tree_flatten((a.args, a.kwargs))
        theirs, other_form = pytree.tree_flatten(fx.map_arg((b.args, b.kwargs), same.__getitem__))
        if (a.op, a.target, form) != (b.op, b.target, other_form):
            return _line(a, b)
        for k, (x, y) in enumerate(zip(ours, theirs, strict=True)):
            if repr(x) == repr(y):
                continue
            if isinstance(x, fx.Node | slice) or isinstance(y, fx.Node | slice):
                return _line(a, b)
            in_modes = (x, y) if is_training else (y, x)
            with graph.inserting_before(a):
                ours[k] = graph.get_attr("training")
                if in_modes != (True, False):
                    ours[k] = graph.call_function(chosen, (ours[k], *in_modes))
        a.args, a.kwargs = pytree.tree_unflatten(ours, form)
    return ""


def keep_to(graph: fx.Graph, different: str, *, is_training: bool) -> None:
    """Have layers raise an error in the mode in which a graph is not the model's forward.

    ``different`` is the line, or the fault, by which the forward of the other mode differs.
    """
    this, other = ("train", "eval") if is_training else ("eval", "train")
    text = (
        f"the layers were recorded in {this} mode, and the model's forward is another one in "
        f"{other} mode: {different}\nto run it there, cut model.{other}() and load the state dict"
    )
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        arguments = (graph.get_attr("training"), is_training, text)
        graph.call_function(check_mode, arguments).meta["keep"] = True


def _line(a: fx.Node, b: fx.Node) -> str:
    return str(a.meta.get("line") or b.meta.get("line") or "its end")
