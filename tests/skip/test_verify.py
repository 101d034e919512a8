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
    faults[-1], what_to_do = faults[-1].split("\n")
    assert what_to_do.startswith("stash each in one layer, and pop it in one layer after that")
    return faults


@for_each(
    "actions",
    [
        (),
        ("",),
        ("+a", "", "-a"),
        ("+a", "+b", "-b", "-a"),
        ("+a", "+b", "-a", "-b"),
        ("+a +b", "-a", "-b"),
        ("+a", "-a +b", "-b"),
        ("+a*3", "-a", "-a", "+b", "-a -b"),
    ],
    ids=" | ".join,
)
def test_matching_pairs_are_accepted(actions: tuple[str, ...]) -> None:
    verify(*actions)


@for_each(
    ("actions", "expected"),
    [
        (("+a",), ["layer '0' stashes 'a' for 1 pop that no layer does"]),
        (("-a",), ["layer '0' pops 'a', which no layer has stashed for it"]),
        (("-a", "+a*2"), [
            "layer '0' pops 'a', which no layer has stashed for it",
            "layer '1' stashes 'a' for 2 pops that no layer does",
        ]),
        (("+a", "+a", "-a"), ["layer '1' stashes 'a', as layer '0' does"]),
        (("+a", "-a", "+a", "-a"), ["layer '2' stashes 'a', as layer '0' does"]),
        (("+a", "-a", "-a"), ["layer '2' pops 'a', which no layer has stashed for it"]),
        (("+a*2", "-a", "-b"), [
            "layer '2' pops 'b', which no layer has stashed for it",
            "layer '0' stashes 'a' for 1 pop that no layer does",
        ]),
    ],
    ids=str,
)  # fmt: skip
def test_one_error_lists_all_faults(actions: tuple[str, ...], expected: list[str]) -> None:
    assert faults_of(*actions) == expected


def test_namespaces_distinguish_pairs_of_one_name() -> None:
    first, second = Namespace(), Namespace()
    stashing = [drawn("+a", namespace) for namespace in (first, None, second)]
    verify(*stashing, *(drawn("-a", namespace) for namespace in (second, None, first)))
    assert faults_of(drawn("+a", first), drawn("-a", second)) == [
        f"layer '1' pops 'a' in {second}, which no layer has stashed for it",
        f"layer '0' stashes 'a' in {first} for 1 pop that no layer does",
    ]


def test_modules_inside_a_layer_count() -> None:
    verify(
        nn.Sequential(nn.Sequential(drawn("+a")), drawn("+b")), "", nn.Sequential(drawn("-b -a"))
    )
    outer = drawn("+a")
    outer.inner = drawn("-a")
    verify(outer)
    assert faults_of(nn.ModuleList([drawn("+a"), drawn("+a")]), "-a") == [
        "layer '0' stashes 'a', as layer '0' does"
    ]


def test_layers_run_in_order_also_in_a_nested_sequential_and_if_one_comes_twice() -> None:
    assert faults_of("", nn.Sequential(drawn("-a"), drawn("+a"))) == [
        "layer '1.0' pops 'a', which no layer has stashed for it",
        "layer '1.1' stashes 'a' for 1 pop that no layer does",
    ]
    twice = drawn("+a")
    assert faults_of(twice, twice, "-a") == ["layer '1' stashes 'a', as layer '0' does"]
