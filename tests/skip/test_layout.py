"""Which skip tensors are sent between which stages.

Partitions are drawn as what their layers do: ``layout("+a", "-a")`` has two stages of one layer
each, ``layout("+a | -a")`` has one stage of two.
"""

from __future__ import annotations

from torch import nn

from procpipe.skip import Namespace
from procpipe.skip.layout import SkipLayout
from tests.skip.layers import drawn


def layout(*partitions: str) -> SkipLayout:
    return layout_of(*([drawn(actions) for actions in part.split("|")] for part in partitions))


def layout_of(*partitions: list[nn.Module]) -> SkipLayout:
    return SkipLayout.of([{str(i): layer for i, layer in enumerate(part)} for part in partitions])


def names(layout: SkipLayout) -> dict[tuple[int, int], str]:
    return {pair: " ".join(key.name for key in keys) for pair, keys in layout.keys.items()}


def num_pops(layout: SkipLayout) -> dict[tuple[int, int], tuple[int, ...]]:
    return {pair: tuple(keys.values()) for pair, keys in layout.keys.items()}


def test_a_layout_without_skip_tensors_is_empty() -> None:
    assert layout("", "") == SkipLayout({})


def test_within_a_stage_nothing_is_sent() -> None:
    assert layout("+a | -a", "+b | | -b") == SkipLayout({})


def test_a_tensor_is_sent_past_stages_that_do_not_use_it() -> None:
    far = layout("+a", "", "", "-a")
    assert names(far) == {(0, 3): "a"}
    assert [far.into(stage) for stage in range(4)] == [(), (), (), (0,)]
    assert [far.out_of(stage) for stage in range(4)] == [(3,), (), (), ()]


def test_two_tensors_popped_on_one_stage_come_from_different_stages() -> None:
    both = layout("+a", "+b", "-b -a")
    assert names(both) == {(0, 2): "a", (1, 2): "b"}
    assert both.into(2) == (0, 1)


def test_tensors_between_two_stages_are_in_the_order_of_stashing() -> None:
    """Whatever the order of pops, so that a message need not name its tensors."""
    assert names(layout("+a | +b | +c", "-c | -a | -b")) == {(0, 1): "a b c"}
    assert names(layout("+c +a | +b", "-a -b -c")) == {(0, 1): "c a b"}


def test_pairs_of_stages_are_in_order_whatever_the_order_of_pops() -> None:
    unordered = layout("+a | +c", "+b", "-b", "-c | -a")
    assert list(unordered.keys) == [(0, 3), (1, 2)]


def test_a_tensor_popped_on_several_stages_is_sent_once_to_each() -> None:
    """Four layers pop it: one where it is made, two on the next stage, one on the last."""
    shared = layout("+a*4 | -a", "-a | -a", "", "-a")
    assert names(shared) == {(0, 1): "a", (0, 3): "a"}
    assert num_pops(shared) == {(0, 1): (2,), (0, 3): (1,)}


def test_namespaces_distinguish_tensors_of_one_name() -> None:
    outer, inner = Namespace(), Namespace()
    crossed = layout_of(
        [drawn("+a", outer), drawn("+a", inner)], [drawn("-a", inner)], [drawn("-a", outer)]
    )
    assert [(pair, key.namespace) for pair, (key,) in crossed.keys.items()] == [
        ((0, 1), inner),
        ((0, 2), outer),
    ]
