"""Skippable layers in a plain ``nn.Sequential``: allowed actions, and errors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from procpipe import Stage
from procpipe.skip import Namespace, pop, skippable, stash, verify_skippables
from procpipe.skip.tracker import PlainTracker, tracking
from tests.cases import for_each
from tests.skip.layers import isolated, popper, stasher

ONE = torch.ones(1)


# -- stash and pop --------------------------------------------------------------------------------


def test_a_stashed_tensor_is_popped() -> None:
    """3 is stashed; doubled, then added to 3."""
    assert nn.Sequential(stasher("a"), popper("a"))(torch.tensor([3.0])).tolist() == [9]


def test_a_skip_tensor_passes_over_layers() -> None:
    model = nn.Sequential(stasher("a"), nn.ReLU(), nn.Flatten(0), popper("a"))
    assert model(torch.tensor([-3.0])).tolist() == [-3]


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


def test_stash_has_no_value_to_yield() -> None:
    @skippable(stash=["a"], pop=["b"])
    class Layer(nn.Module):
        def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
            assert (yield pop("b")) is not None
            assert (yield stash("a", input)) is None
            return input

    nn.Sequential(stasher("b"), Layer(), popper("a"))(ONE)


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
        (faulty(stash_a_twice, stash=["a"]), "does stash 'a' twice"),
        (faulty(pop_a_twice, pop=["a"]), "does pop 'a' twice"),
        (faulty(pop_a, pop=["x"]), "does pop 'a', which it does not declare"),
        (faulty(pop_a, pop=["a"], stash=["b"]), "declares: stash 'b'; yield it"),
    ],
)
def test_a_forward_must_do_what_its_class_declares(layer: nn.Module, message: str) -> None:
    with tracking(PlainTracker()):
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


def test_a_subclass_inherits_what_is_declared() -> None:
    parent = type(stasher("a"))
    child = type("Child", (parent,), {})
    model = nn.Sequential(child(), popper("a"))
    verify_skippables(model)
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


def test_isolate_returns_the_layer() -> None:
    layer: Any = stasher("a")
    assert layer.isolate(Namespace()) is layer


@for_each("only", ["ab", ["ab"], {"ab"}, iter(["ab"])])
def test_isolate_only_some_names(only: Any) -> None:
    namespace = Namespace()
    popped_apart = isolated(popper("ab"), namespace)
    model = nn.Sequential(
        isolated(stasher("ab", "c"), namespace, only=only), popped_apart, popper("c")
    )
    verify_skippables(model)
    assert model(ONE).tolist() == [4]


def test_isolate_some_names_here_and_others_there() -> None:
    first, second = Namespace(), Namespace()
    layer = isolated(isolated(stasher("a", "b"), first, only=["a"]), second, only=["b"])
    verify_skippables(
        nn.Sequential(layer, isolated(popper("a"), first), isolated(popper("b"), second))
    )


def test_the_latest_namespace_of_a_name_counts() -> None:
    first, second = Namespace(), Namespace()
    layer = isolated(isolated(stasher("a", "b"), second), first, only=["a"])
    verify_skippables(
        nn.Sequential(layer, isolated(popper("a"), first), isolated(popper("b"), second))
    )


def test_isolating_an_unknown_name_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"Stash declares the skip names \['a', 'b'\], not \['c', 'd'\]"
    ):
        isolated(stasher("a", "b"), Namespace(), only=["d", "a", "c"])


def test_isolating_one_layer_does_not_change_others_of_its_class() -> None:
    first, second = Namespace(), Namespace()
    layer = stasher("a")
    alone, apart = type(layer)(), type(layer)()
    isolated(layer, first)
    isolated(apart, second)
    poppers = [popper("a"), isolated(popper("a"), first), isolated(popper("a"), second)]
    verify_skippables(nn.Sequential(layer, alone, apart, *poppers))


# -- layers are ordinary modules ------------------------------------------------------------------


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


def test_names_in_a_state_dict_have_no_prefix() -> None:
    assert list(StashProduct().state_dict()) == ["linear.weight"]
    assert type(StashProduct()).__name__ == "StashProduct"
    assert isinstance(StashProduct(), StashProduct)


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


def test_modules_inside_a_layer_stash_and_pop() -> None:
    model = nn.Sequential(nn.Sequential(stasher("a")), nn.ReLU(), nn.Sequential(popper("a")))
    verify_skippables(model)
    assert model(ONE).tolist() == [3]


def test_a_model_of_skippable_layers_is_a_layer_of_another() -> None:
    inner, outer = Namespace(), Namespace()
    block = nn.Sequential(isolated(stasher("a"), inner), isolated(popper("a"), inner))
    model = nn.Sequential(isolated(stasher("a"), outer), block, isolated(popper("a"), outer))
    verify_skippables(model)
    assert model(ONE).tolist() == [4 + 2 + 1]


def test_order_inside_a_nested_sequential_is_checked() -> None:
    verify_skippables(nn.Sequential(nn.Sequential(stasher("a"), popper("a"))))
    with pytest.raises(TypeError, match="pops 'a', that a later layer stashes"):
        verify_skippables(nn.Sequential(nn.Sequential(popper("a"), stasher("a"))))


def test_a_layer_used_twice_stashes_twice() -> None:
    twice = stasher("a")
    with pytest.raises(TypeError, match="layer '1' stashes 'a', which layer '0' stashes"):
        verify_skippables(nn.Sequential(twice, twice, popper("a")))


def test_only_a_sequential_can_be_verified() -> None:
    with pytest.raises(TypeError, match=r"Linear is not an nn\.Sequential"):
        verify_skippables(nn.Linear(1, 1))  # type: ignore[arg-type]


@skippable(stash=["skip"])
class Give(nn.Module):
    def __init__(self, size=3):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def extra_repr(self):
        return "gives"

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        yield stash("skip", x)
        return self.linear(x)


@skippable(pop=["skip"])
class Take(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        skip = yield pop("skip")
        return x + skip


def test_a_skippable_layer_is_the_layer_itself():
    layer = Give(3)
    assert type(layer) is Give
    assert repr(layer).startswith("Give(\n  gives")
    assert list(layer.state_dict()) == ["linear.weight", "linear.bias"]


def test_skips_of_a_model_that_repeats_its_blocks():
    """A block used again needs a namespace of its own, inside a nested model too."""
    torch.manual_seed(0)

    def block(namespace):
        give: Any = Give()
        take: Any = Take()
        return [give.isolate(namespace), nn.Tanh(), take.isolate(namespace)]

    model = nn.Sequential(
        *block(Namespace()), nn.Sequential(*block(Namespace())), *block(Namespace())
    ).double()
    verify_skippables(model)
    plain = copy.deepcopy(model)
    stage = Stage(model, [len(model)], chunks=3, checkpoint="always")
    x = torch.randn(5, 3, dtype=torch.float64)
    output, expected = stage(x), torch.cat([plain(part) for part in x.chunk(3)])
    assert torch.equal(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in zip(stage.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    stage.close()
