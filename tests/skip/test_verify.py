"""``verify_skippables`` names every skip tensor that is not stashed and popped in a pair.

Models are drawn as what each layer does: ``verify("+a", "+b", "-b", "-a")`` checks two layers that
stash and two that pop.
"""

from __future__ import annotations

import pytest
from torch import nn

from procpipe.skip import Namespace, verify_skippables
from tests.cases import for_each
from tests.skip.layers import drawn


def verify(*layers: str | nn.Module) -> None:
    verify_skippables(nn.Sequential(*(drawn(x) if isinstance(x, str) else x for x in layers)))


def faults_of(*layers: str | nn.Module) -> list[str]:
    with pytest.raises(TypeError) as info:
        verify(*layers)
    title, *faults = str(info.value).split("\n  - ")
    assert title == "some skip tensors are not stashed and popped in pairs:"
    return faults


@for_each(
    "actions",
    [
        (),
        ("",),
        ("+a", "-a"),
        ("+a", "", "-a"),
        ("+a", "+b", "-b", "-a"),
        ("+a", "+b", "-a", "-b"),
        ("+a +b", "-a", "-b"),
        ("+a", "+b", "-a -b"),
        ("+a", "-a +b", "-b"),
        ("+a*2", "-a", "-a"),
        ("+a*3", "-a", "-a", "+b", "-a -b"),
    ],
    ids=" | ".join,
)
def test_matching_pairs_are_accepted(actions: tuple[str, ...]) -> None:
    verify(*actions)


MORE = "isolate one of the pairs by a Namespace"


@for_each(
    ("actions", "expected"),
    [
        (("+a",), ["layer '0' stashes 'a', but none pops it"]),
        (("-a",), ["layer '0' pops 'a', that none stashes"]),
        (("+a", "-b"), [
            "layer '1' pops 'b', that none stashes",
            "layer '0' stashes 'a', but none pops it",
        ]),
        (("-a", "+a"), ["layer '0' pops 'a', that a later layer stashes"]),
        (("+a", "+a", "-a"), [f"layer '1' stashes 'a', which layer '0' stashes: {MORE}"]),
        (("+a", "-a", "-a"), [
            f"layer '2' pops 'a' once more than declared: {MORE}, or declare stash={{name: number "
            "of layers}",
        ]),
        (("+a", "-a", "+a", "-a"), [
            f"layer '2' stashes 'a', which layer '0' stashes: {MORE}",
            f"layer '3' pops 'a' once more than declared: {MORE}, or declare stash={{name: number "
            "of layers}",
        ]),
        (("+a*2", "-a"), ["layer '0' stashes 'a', but 1 of 2 layers pop it"]),
        (("+a*2", "-a", "-a", "-a"), [
            f"layer '3' pops 'a' once more than declared: {MORE}, or declare stash={{name: number "
            "of layers}",
        ]),
        (("+a -a",), ["layer '0' both stashes and pops 'a'"]),
        (("-a", "+b", "+b", "-b", "+c"), [
            "layer '0' pops 'a', that none stashes",
            f"layer '2' stashes 'b', which layer '1' stashes: {MORE}",
            "layer '4' stashes 'c', but none pops it",
        ]),
    ],
    ids=str,
)  # fmt: skip
def test_one_error_lists_all_faults(actions: tuple[str, ...], expected: list[str]) -> None:
    assert faults_of(*actions) == expected


def test_namespaces_distinguish_pairs_of_one_name() -> None:
    first, second = Namespace(), Namespace()
    verify(drawn("+a", first), drawn("-a", first), drawn("+a", second), drawn("-a", second))
    verify(drawn("+a", first), drawn("+a", second), drawn("-a", first), drawn("-a", second))
    verify(drawn("+a", first), drawn("+a"), drawn("-a"), drawn("-a", first))


def test_a_pair_in_two_namespaces_does_not_match() -> None:
    first, second = Namespace(), Namespace()
    assert faults_of(drawn("+a", first), drawn("-a", second)) == [
        f"layer '1' pops 'a' in {second}, that none stashes",
        f"layer '0' stashes 'a' in {first}, but none pops it",
    ]


def test_errors_name_layers_as_in_the_model() -> None:
    model = nn.Sequential()
    model.add_module("encoder", drawn("+a"))
    with pytest.raises(TypeError, match="layer 'encoder' stashes 'a', but none pops it"):
        verify_skippables(model)


# -- modules inside a layer -----------------------------------------------------------------------


def test_a_layer_declares_what_the_modules_inside_it_do() -> None:
    verify(
        nn.Sequential(nn.Sequential(drawn("+a")), drawn("+b")), "", nn.Sequential(drawn("-b -a"))
    )
    verify(nn.Sequential(drawn("+a"), drawn("-a")))


def test_a_skippable_layer_may_hold_the_module_that_pops_its_tensor() -> None:
    outer = drawn("+a")
    outer.inner = drawn("-a")
    verify(outer)


def test_two_stashes_inside_one_layer_are_an_error() -> None:
    assert faults_of(nn.Sequential(drawn("+a"), drawn("+a")), "-a") == [
        "layer '0.1' stashes 'a', which layer '0.0' stashes: isolate one of the pairs by a "
        "Namespace"
    ]
    inside_another = nn.ModuleList([drawn("+a"), drawn("+a")])
    assert faults_of(inside_another, "-a") == [
        "layer '0' stashes 'a' 2 times: isolate each by a Namespace"
    ]


def test_a_module_inside_may_not_stash_and_pop_one_name_either() -> None:
    assert faults_of(nn.Sequential(drawn("+a -a"))) == ["layer '0.0' both stashes and pops 'a'"]
