"""Skippable layers in a plain ``nn.Sequential``: allowed actions, and errors."""

from __future__ import annotations

import copy
import pickle
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


def test_a_stashed_tensor_is_popped() -> None:
    """3 is stashed; doubled, then added to 3."""
    assert nn.Sequential(stasher("a"), popper("a"))(torch.tensor([3.0])).tolist() == [9]


def test_several_names() -> None:
    """1 + 1 of the first, doubled; then what each of the names holds."""
    model = nn.Sequential(stasher("a", "b"), stasher("c"), popper("c", "a"), popper("b"))
    assert model(ONE).tolist() == [4 + 2 + 1 + 1]


def test_a_tensor_popped_by_several_layers() -> None:
    model = nn.Sequential(stasher("a", times=3), popper("a"), popper("a"), popper("a"))
    assert model(ONE).tolist() == [2 + 3]


def test_one_layer_pops_and_stashes_different_names() -> None:
    @skippable(stash=["b"], pop=["a"])
    class Both(nn.Module):
        def forward(self, input: Tensor) -> Generator[Any, Tensor, Tensor]:
            a = yield pop("a")
            yield stash("b", a * 10)
            return input

    assert nn.Sequential(stasher("a"), Both(), popper("b"))(ONE).tolist() == [12]


def test_none_is_stashed_and_popped() -> None:
    @skippable(stash=["a"])
    class StashNone(nn.Module):
        def forward(self, input: Tensor) -> Generator[stash, None, Tensor]:
            yield stash("a", None)
            return input

    seen = []

    @skippable(pop=["a"])
    class Pop(nn.Module):
        def forward(self, input: Tensor) -> Generator[pop, Tensor | None, Tensor]:
            seen.append((yield pop("a")))
            return input

    nn.Sequential(StashNone(), Pop())(ONE)
    assert seen == [None]


def test_several_inputs_and_outputs_and_keywords() -> None:
    @skippable(stash=["a"])
    class Layer(nn.Module):
        def forward(
            self, x: Tensor, y: Tensor, *, scale: float
        ) -> Generator[stash, None, tuple[Tensor, Tensor]]:
            """Say so."""
            yield stash("a", x)
            return y, x * scale

    layer = Layer()
    first, second = layer(ONE, 2 * ONE, scale=3.0)
    assert (first.item(), second.item()) == (2, 3)
    assert popper("a")(ONE).item() == 2
    assert layer.forward.__doc__ == "Say so."


def test_gradients_come_back_from_every_layer_that_pops() -> None:
    x = torch.ones(1, requires_grad=True)
    nn.Sequential(stasher("a", times=2), popper("a"), popper("a"))(x).backward()
    assert x.grad is not None
    assert x.grad.item() == 4


# -- errors of a forward --------------------------------------------------------------------


def faulty(forward: Callable[..., Any], *, stash: Any = (), pop: Any = ()) -> nn.Module:
    layer_class: type[nn.Module] = type("Faulty", (nn.Module,), {"forward": forward})
    return skippable(stash=stash, pop=pop)(layer_class)()


def stash_a(self: nn.Module, input: Tensor) -> Generator[stash, None, Tensor]:
    yield stash("a", input)
    return input


def stash_a_twice(self: nn.Module, input: Tensor) -> Generator[stash, None, Tensor]:
    yield stash("a", input)
    yield stash("a", input)
    return input


def pop_a(self: nn.Module, input: Tensor) -> Generator[pop, Tensor, Tensor]:
    return input + (yield pop("a"))


def pop_a_twice(self: nn.Module, input: Tensor) -> Generator[pop, Tensor, Tensor]:
    return (yield pop("a")) + (yield pop("a"))


def no_generator(self: nn.Module, input: Tensor) -> Tensor:
    return input


def yield_nothing(self: nn.Module, input: Tensor) -> Generator[Any, None, Tensor]:
    yield from ()
    return input


def yield_tensor(self: nn.Module, input: Tensor) -> Generator[Tensor, None, Tensor]:
    yield input
    return input


@for_each(
    ("layer", "message"),
    [
        (faulty(no_generator, stash=["a"]), "ended without what it declares: stash 'a'; yield it"),
        (faulty(yield_nothing, stash=["a"], pop=["b"]), "declares: pop 'b', stash 'a'; yield it"),
        (faulty(stash_a, stash=["a", "b"]), "declares: stash 'b'; yield it, and stash None if"),
        (faulty(stash_a, stash=["b"]), r"does stash 'a', which it .* @skippable\(stash=\['a'\]\)"),
        (faulty(stash_a, pop=["a"]), r"does stash 'a', which it .* @skippable\(stash=\['a'\]\)"),
        (faulty(pop_a), r"does pop 'a', which it does not declare: .* @skippable\(pop=\['a'\]\)"),
        (faulty(stash_a_twice, stash=["a"]), "does stash 'a' twice$"),
        (faulty(pop_a_twice, pop=["a"]), "does pop 'a' twice$"),
        (faulty(pop_a, pop=["a"], stash=["b"]), "declares: stash 'b'; yield it"),
    ],
)
def test_a_forward_must_do_what_its_class_declares(layer: nn.Module, message: str) -> None:
    with tracking(Tracker()):
        stasher("a", times=2)(ONE)
        with pytest.raises(RuntimeError, match=f"the forward of Faulty .*{message}"):
            layer(ONE)


def test_a_forward_that_yields_something_else_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"Faulty yields torch\.Tensor: yield stash\("):
        faulty(yield_tensor)(ONE)


def test_a_tensor_is_popped_as_often_as_declared() -> None:
    model = nn.Sequential(stasher("a", times=2), popper("a"), popper("a"), popper("a"))
    with pytest.raises(RuntimeError, match="skip tensor 'a' is popped but was not stashed"):
        model(ONE)


def test_nothing_but_a_tensor_or_none_is_stashed() -> None:
    with pytest.raises(TypeError, match="skip 'a' is stashed as tuple: stash a tensor or None"):
        stash("a", (ONE, ONE))  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"stash": "abc"}, {"pop": "abc"}])
def test_names_come_as_lists(options: dict[str, str]) -> None:
    with pytest.raises(TypeError, match="skippable got 'abc': names come as lists"):
        skippable(**options)


def test_the_decorator_takes_names() -> None:
    with pytest.raises(TypeError, match=r"as in @skippable\(stash=\[...\], pop=\[...\]\)"):
        skippable(nn.Identity)  # type: ignore[arg-type]


def test_a_tensor_is_popped_at_least_once() -> None:
    with pytest.raises(ValueError, match="skip 'a' is popped by 0 layers: give at least 1"):
        skippable(stash={"a": 0})


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


def test_isolated_pairs_of_one_name() -> None:
    """The inner pair holds 2 x 1, the outer one 1."""
    outer, inner = Namespace(), Namespace()
    model = nn.Sequential(
        isolated(stasher("a"), outer),
        isolated(stasher("a"), inner),
        isolated(popper("a"), inner),
        isolated(popper("a"), outer),
    )
    verify_skippables(model)
    assert model(ONE).tolist() == [4 + 2 + 1]


@for_each("only", ["ab", ["ab"], {"ab"}, iter(["ab"])])
def test_isolate_only_some_names(only: Any) -> None:
    namespace = Namespace()
    popped_apart = isolated(popper("ab"), namespace)
    model = nn.Sequential(
        isolated(stasher("ab", "c"), namespace, only=only), popped_apart, popper("c")
    )
    verify_skippables(model)
    assert model(ONE).tolist() == [4]


def test_isolating_an_unknown_name_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"Stash declares the skip names \['a', 'b'\], not \['c', 'd'\]"
    ):
        isolated(stasher("a", "b"), Namespace(), only=["d", "a", "c"])


def test_isolate_some_names_here_and_others_there() -> None:
    first, second = Namespace(), Namespace()
    layer = isolated(isolated(stasher("a", "b"), first, only=["a"]), second, only=["b"])
    verify_skippables(
        nn.Sequential(layer, isolated(popper("a"), first), isolated(popper("b"), second))
    )


# -- layers are ordinary modules ------------------------------------------------------------------


def test_a_skippable_layer_is_the_layer_itself():
    layer = StashProduct()
    assert type(layer) is StashProduct
    assert repr(layer).startswith("StashProduct(\n  (linear): Linear")
    assert list(layer.state_dict()) == ["linear.weight"]


@skippable(stash=["a"])
class StashProduct(nn.Module):
    """At module level, so that it can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.linear.weight, 5)

    def forward(self, input: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("a", self.linear(input))
        return input


@skippable(pop=["a"])
class PopSum(nn.Module):
    def forward(self, input: Tensor) -> Generator[pop, Tensor, Tensor]:
        return input + (yield pop("a"))


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"]
)
def test_a_copy_of_isolated_layers_matches_in_itself(
    duplicate: Callable[[nn.Sequential], nn.Sequential],
) -> None:
    namespace = Namespace()
    model = nn.Sequential(isolated(StashProduct(), namespace), isolated(PopSum(), namespace))
    again = duplicate(model)
    verify_skippables(again)
    assert again(ONE).tolist() == [6]
    verify_skippables(nn.Sequential(model[0], again[1]))
