"""Joins what a forward is in train and in eval mode: flags that differ become the layer's mode."""

from __future__ import annotations

from typing import Any

from torch import fx

from procpipe.cutting.at_run import check, chosen
from procpipe.torch_internals import pytree


def join(graph: fx.Graph, other: fx.Graph, training: fx.Node, *, is_training: bool) -> str:
    """Let a graph compute what it does in its mode and what another one does in the other mode.

    Args:
        graph: changed in place, where only plain arguments differ.
        other: the graph of the other mode.
        training: the node in ``graph`` that says whether a layer is in train mode.
        is_training: whether ``graph`` is that of train mode.

    Returns:
        The line at which the two are different forwards, if they are; "" if not.
    """
    pairs = list(zip(graph.nodes, other.nodes, strict=False))
    same = {b: a for a, b in pairs}
    changes: list[tuple[fx.Node, list[Any], Any]] = []
    for a, b in pairs:
        ours, form = pytree.tree_flatten((a.args, a.kwargs))
        theirs, other_form = pytree.tree_flatten((b.args, b.kwargs))
        if (a.op, _name(a.target)) != (b.op, _name(b.target)) or form != other_form:
            return str(a.meta.get("line") or b.meta.get("line") or "its end")
        values: list[Any] = []
        for x, y in zip(ours, theirs, strict=True):
            y = same[y] if isinstance(y, fx.Node) else y
            if x is y or str(x) == str(y):
                values.append(x)
            elif isinstance(x, fx.Node | slice) or isinstance(y, fx.Node | slice):
                return str(a.meta.get("line", "its end"))
            else:
                values.append((x, y) if is_training else (y, x))
        if any(new is not old for new, old in zip(values, ours, strict=True)):
            changes.append((a, values, form))
    if len(graph.nodes) != len(other.nodes):
        return "its end"
    for node, values, form in changes:
        made = []
        for value in values:
            is_mode = isinstance(value, tuple)
            with graph.inserting_before(node):
                if is_mode and value == (True, False):
                    value = training
                elif is_mode:
                    value = graph.call_function(chosen, (training, *value))
            made.append(value)
        node.args, node.kwargs = pytree.tree_unflatten(made, form)
    return ""


def keep_to(graph: fx.Graph, training: fx.Node, different: str, *, is_training: bool) -> None:
    """Have layers raise an error in the mode in which a graph is not the model's forward.

    ``different`` is the line, or the fault, by which the forward of the other mode differs.
    """
    this, other = ("train", "eval") if is_training else ("eval", "train")
    text = (
        f"the layers were recorded in {this} mode, and the model's forward is another one in "
        f"{other} mode: {different}\nto run it there, cut model.{other}() and load the state dict"
    )
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        holds = graph.call_function(chosen, (training, is_training, not is_training))
        graph.call_function(check, (holds, text)).meta["keep"] = True


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", target))
