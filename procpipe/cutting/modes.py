"""Joins what a forward is in train and in eval mode: flags that differ become the layer's mode."""

from __future__ import annotations

import operator
from itertools import zip_longest

from torch import fx

from procpipe.cutting.refusal import check
from procpipe.torch_internals import pytree


def join(graph: fx.Graph, other: fx.Graph, *, is_training: bool) -> str:
    """Let a graph compute what it does in its mode and what another one does in the other mode.

    Changes ``graph``, which is that of train mode if ``is_training``, where only plain arguments
    differ. Returns the line at which the two are different forwards, if they are; "" if not.
    """
    pairs = list(zip_longest(graph.nodes, other.nodes))
    same = {b: a for a, b in pairs}
    for a, b in pairs:
        if a is None or b is None:
            return "its end"
        where = str(a.meta.get("line") or b.meta.get("line") or "its end")
        ours, form = pytree.tree_flatten((a.args, a.kwargs))
        theirs, other_form = pytree.tree_flatten(fx.map_arg((b.args, b.kwargs), same.__getitem__))
        kind, other_kind = ((n.op, n.target, n.meta.get("within")) for n in (a, b))
        if (kind, form) != (other_kind, other_form):
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


def keep_to(graph: fx.Graph, different: str, *, is_training: bool) -> None:
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
