"""Skippable layers in a plain ``nn.Sequential``: allowed actions, and errors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from procpipe.skip import Namespace, pop, skippable, stash, verify_skippables
from procpipe.skip.tracker import Tracker, tracking
from tests.cases import for_each
from tests.skip.layers import isolated, popper, stasher

ONE = torch.ones(1)


# -- stash and pop --------------------------------------------------------------------------------


def test_one_layer_pops_and_stashes_and_takes_and_returns_several_values() -> None:
    @skippable(stash=["b"], pop=["a"])
    class Both(nn.Module):
        def forward(
            self, x: Tensor, *, scale: float
        ) -> Generator[Any, Tensor, tuple[Tensor, Tensor]]:
            """Say so."""
            a = yield pop("a")
            yield stash("b", a * 10)
            return x, x * scale

    stasher("a")(ONE)
    layer = Both()
    first, second = layer(ONE, scale=3.0)
    assert (first.item(), second.item()) == (1, 3)
    assert popper("b")(ONE).item() == 11
    assert layer.forward.__doc__ == "Say so."
    assert type(layer) is Both


# -- errors of a forward --------------------------------------------------------------------


def faulty(forward: Callable[..., Any], *, stash: Any = (), pop: Any = ()) -> nn.Module:
    layer_class: type[nn.Module] = type("Faulty", (nn.Module,), {"forward": forward})
    return skippable(stash=stash, pop=pop)(layer_class)()


def stash_a(self: nn.Module, input: Tensor) -> Generator[stash, None, Tensor]:
    yield stash("a", input)
    return input


def pop_a(self: nn.Module, input: Tensor) -> Generator[pop, Tensor, Tensor]:
    return input + (yield pop("a"))


def pop_a_twice(self: nn.Module, input: Tensor) -> Generator[pop, Tensor, Tensor]:
    return (yield pop("a")) + (yield pop("a"))


def no_generator(self: nn.Module, input: Tensor) -> Tensor:
    return input


def yield_tensor(self: nn.Module, input: Tensor) -> Generator[Tensor, None, Tensor]:
    yield input
    return input


@for_each(
    ("layer", "message"),
    [
        (faulty(no_generator, stash=["a"]), "ended without what it declares: stash 'a'; yield it"),
        (faulty(stash_a, stash=["a", "b"]), "declares: stash 'b'; yield it, and stash None if"),
        (faulty(stash_a, stash=["b"]), r"does stash 'a', which it .* @skippable\(stash=\['a'\]\)"),
        (
            faulty(pop_a),
            r"does pop 'a', which it .* \(write @skippable\(pop=\['a'\]\)",
        ),
        (faulty(pop_a_twice, pop=["a"]), "does pop 'a', which .* or has done before$"),
        (faulty(pop_a, pop=["a"], stash=["b"]), "declares: stash 'b'; yield it"),
    ],
)
def test_a_forward_must_do_what_its_class_declares(layer: nn.Module, message: str) -> None:
    with tracking(Tracker()):
        stasher("a", times=2)(ONE)
        with pytest.raises(RuntimeError, match=f"the forward of Faulty .*{message}"):
            layer(ONE)


PAIR: Any = (ONE, ONE)
LAYER: Any = nn.Identity
ONCE = nn.Sequential(stasher("a"), popper("a"), popper("a"))


@for_each(
    ("call", "error", "message"),
    [
        (lambda: faulty(yield_tensor)(ONE), TypeError, r"Faulty yields torch\.Tensor: yield stash"),
        (lambda: ONCE(ONE), RuntimeError, "skip tensor 'a' is popped but was not stashed"),
        (lambda: stash("a", PAIR), TypeError, "stashed as tuple: stash a tensor or None"),
        (lambda: skippable(stash="abc"), TypeError, "names come as lists: "),
        (lambda: skippable(pop="abc"), TypeError, "names come as lists: "),
        (lambda: skippable(LAYER), TypeError, r"names come as lists: @skippable\(stash=\[..."),
        (
            lambda: isolated(stasher("a", "b"), Namespace(), only=["d", "a", "c"]),
            ValueError,
            r"Stash declares the skip names \['a', 'b'\], not \['c', 'd'\]",
        ),
    ],
)
def test_each_mistake_is_an_error(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# -- classes --------------------------------------------------------------------------------------


def test_a_class_declares_once_and_its_subclass_declares_names_of_its_own() -> None:
    class Named(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, input: Tensor) -> Generator[stash, None, Tensor]:
            yield stash(self.name, input)
            return input

    stash_a = skippable(stash=["a"])(Named)
    with pytest.raises(TypeError, match="Named is skippable already"):
        skippable(stash=["b"])(Named)
    child: type[Named] = type("Child", (Named,), {})
    stash_b = skippable(stash=["b"])(child)
    model = nn.Sequential(stash_a("a"), stash_b("b"), popper("a", "b"))
    assert model(ONE).tolist() == [3]


# -- isolate --------------------------------------------------------------------------------------


@for_each("only", [["ab"], iter(["ab"])])
def test_isolate_only_some_names(only: Any) -> None:
    namespace = Namespace()
    popped_apart = isolated(popper("ab"), namespace)
    model = nn.Sequential(
        isolated(stasher("ab", "c"), namespace, only=only), popped_apart, popper("c")
    )
    verify_skippables(model)
    assert model(ONE).tolist() == [4]


# -- layers are ordinary modules ------------------------------------------------------------------


def test_a_copy_of_isolated_layers_matches_in_itself() -> None:
    namespace = Namespace()
    model = nn.Sequential(isolated(stasher("a"), namespace), isolated(popper("a"), namespace))
    again = copy.deepcopy(model)
    verify_skippables(again)
    assert again(ONE).tolist() == [3]
    verify_skippables(nn.Sequential(model[0], again[1]))
