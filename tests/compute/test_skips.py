"""Which skip tensors are sent between which stages.

Partitions are drawn as what their layers do: ``names("+a", "-a")`` is of two stages of one layer
each, ``names("+a | -a")`` of one stage of two.
"""

from __future__ import annotations

from procpipe.compute.skips import SkipLayout, layout_of
from tests.skip.layers import drawn


def layout(*partitions: str) -> SkipLayout:
    layers = [[drawn(actions) for actions in part.split("|")] for part in partitions]
    return layout_of([{str(i): layer for i, layer in enumerate(part)} for part in layers])


def names(*partitions: str) -> dict[tuple[int, int], str]:
    found = layout(*partitions).items()
    return {pair: " ".join(key.name for key in keys) for pair, keys in found}


def test_tensors_between_two_stages_are_in_the_order_of_stashing() -> None:
    """Whatever the order of pops, so that a message need not name its tensors."""
    assert names("+a | +b | +c", "-c | -a | -b") == {(0, 1): "a b c"}
    assert names("+c +a | +b", "-a -b -c") == {(0, 1): "c a b"}
    assert list(names("+a | +c", "+b", "-b", "-c | -a")) == [(0, 3), (1, 2)]


def test_a_tensor_popped_on_several_stages_is_sent_once_to_each() -> None:
    """Four layers pop it: one where it is made, two on the next stage, one on the last."""
    shared = layout("+a*4 | -a", "-a | -a", "", "-a")
    assert {pair: [*keys.values()] for pair, keys in shared.items()} == {(0, 1): [2], (0, 3): [1]}
