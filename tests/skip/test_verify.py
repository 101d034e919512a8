"""``verify_skippables`` names every skip tensor that is not stashed and popped in a pair.

Models are drawn as what each layer does: ``verify("+a", "+b", "-b", "-a")`` checks two layers that
stash and two that pop.
"""

from __future__ import annotations

import pytest
from torch import nn

from procpipe import Stage
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


@for_each(
    ("actions", "expected"),
    [
        (("+a",), ["'a' is stashed by layer '0' (pops declared: 1), and popped by no layer"]),
        (("-a",), ["'a' is stashed by no layer (pops declared: 0), and popped by layer '0'"]),
        (("+a", "-b"), [
            "'a' is stashed by layer '0' (pops declared: 1), and popped by no layer",
            "'b' is stashed by no layer (pops declared: 0), and popped by layer '1'",
        ]),
        (("-a", "+a"), ["'a' is stashed by layer '1' (pops declared: 1), and popped by layer '0'"]),
        (("+a", "+a", "-a"), [
            "'a' is stashed by layer '0' and layer '1' (pops declared: 2), and popped by layer '2'"
        ]),
        (("+a", "-a", "-a"), [
            "'a' is stashed by layer '0' (pops declared: 1), and popped by layer '1' and layer '2'"
        ]),
        (("+a*2", "-a"), [
            "'a' is stashed by layer '0' (pops declared: 2), and popped by layer '1'",
        ]),
        (("-a", "+a*2", "-a"), [
            "'a' is stashed by layer '1' (pops declared: 2), and popped by layer '0' and layer '2'"
        ]),
        (("+a -a",), ["layer '0' both stashes and pops 'a'"]),
        (("+a*2 -a", "-a", "+b"), [
            "layer '0' both stashes and pops 'a'",
            "'b' is stashed by layer '2' (pops declared: 1), and popped by no layer",
        ]),
    ],
    ids=str,
)  # fmt: skip
def test_one_error_lists_all_faults(actions: tuple[str, ...], expected: list[str]) -> None:
    assert faults_of(*actions) == expected


def test_namespaces_distinguish_pairs_of_one_name() -> None:
    first, second = Namespace(), Namespace()
    verify(drawn("+a", first), drawn("+a"), drawn("+a", second), *(
        drawn("-a", namespace) for namespace in (second, None, first)
    ))  # fmt: skip
    assert faults_of(drawn("+a", first), drawn("-a", second)) == [
        f"'a' in {first} is stashed by layer '0' (pops declared: 1), and popped by no layer",
        f"'a' in {second} is stashed by no layer (pops declared: 0), and popped by layer '1'",
    ]


def test_modules_inside_a_layer_count() -> None:
    verify(
        nn.Sequential(nn.Sequential(drawn("+a")), drawn("+b")), "", nn.Sequential(drawn("-b -a"))
    )
    outer = drawn("+a")
    outer.inner = drawn("-a")
    verify(outer)
    assert faults_of(nn.ModuleList([drawn("+a"), drawn("+a")]), "-a") == [
        "'a' is stashed by layer '0' and layer '0' (pops declared: 2), and popped by layer '1'"
    ]


def test_layers_of_a_nested_sequential_are_in_order_and_have_its_name() -> None:
    verify(nn.Sequential(drawn("+a"), drawn("-a")))
    assert faults_of("", nn.Sequential(drawn("-a"), drawn("+a"))) == [
        "'a' is stashed by layer '1.1' (pops declared: 1), and popped by layer '1.0'"
    ]


def test_a_layer_used_twice_stashes_twice() -> None:
    twice = drawn("+a")
    assert faults_of(twice, twice, "-a") == [
        "'a' is stashed by layer '0' and layer '1' (pops declared: 2), and popped by layer '2'"
    ]


def test_only_a_sequential_can_be_verified() -> None:
    with pytest.raises(TypeError, match=r"Linear is not an nn\.Sequential"):
        verify_skippables(nn.Linear(1, 1))  # type: ignore[arg-type]


class OfTorchgpipe(nn.Module):
    """The base class of torchgpipe's skippables."""

    __module__ = "torchgpipe.skip.skippable"


class OfOldTorch(nn.Module):
    """That of torch's pipe, which torch has removed."""

    __module__ = "torch.distributed.pipeline.sync.skip.skippable"


def test_skippables_of_other_packages_are_refused() -> None:
    theirs = type("Theirs", (OfTorchgpipe,), {})
    with pytest.raises(TypeError) as info:
        Stage(nn.Sequential(drawn("+a"), nn.Sequential(theirs()), OfOldTorch()), [3])
    assert str(info.value).startswith(
        "layer '1.0' (Theirs) is a skippable of torchgpipe.skip; layer '2' (OfOldTorch) is a "
        "skippable of torch.distributed.pipeline.sync.skip: a pipeline of procpipe carries"
    )
    assert "write `from procpipe.skip import skippable, stash, pop`" in str(info.value)
