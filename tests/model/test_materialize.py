"""Layers on the meta device get the initial values of their constructors, for every balance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from procpipe.model.cut import cut
from procpipe.model.materialize import _seeded, materialize
from tests.model.test_cut import model_of_many_layers

CPU = torch.device("cpu")


def materialized(balance: list[int], seed: int = 7) -> dict[str, Tensor]:
    model = model_of_many_layers("meta")
    for layers in cut(model, balance):
        materialize(dict(model.named_children()), layers, CPU, seed=seed)
    return model.state_dict()


def test_values_do_not_depend_on_the_balance() -> None:
    expected = materialized([6])
    assert list(expected) == list(model_of_many_layers().state_dict())
    for balance in ([1, 1, 1, 1, 1, 1], [2, 4], [5, 1]):
        state = materialized(balance)
        assert all(torch.equal(state[key], expected[key]) for key in expected)
    with_other_seed = materialized([6], seed=8)
    assert not torch.equal(with_other_seed["0.weight"], expected["0.weight"])


def test_layers_and_seeds_draw_different_numbers() -> None:
    def weights(seed: int) -> list[Tensor]:
        model = nn.Sequential(*(nn.Linear(2, 2, device="meta") for _ in range(3)))
        materialize(dict(model.named_children()), ["0", "1", "2"], CPU, seed=seed)
        return [model[k].get_parameter("weight") for k in range(3)]

    drawn = [*weights(0), *weights(1)]
    assert len({tuple(weight.flatten().tolist()) for weight in drawn}) == 6


def test_the_callers_generator_is_untouched() -> None:
    before = torch.get_rng_state()
    materialized([6])
    assert torch.equal(torch.get_rng_state(), before)


class Pair(nn.Module):
    """Initialises all that is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded, self.new = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")

    def reset_parameters(self) -> None:
        for module in (self.loaded, self.new):
            module.reset_parameters()


def test_values_that_are_there_are_kept() -> None:
    pair = Pair()
    before = {key: value.clone() for key, value in pair.loaded.state_dict().items()}
    materialize({"0": pair}, ["0"], CPU, seed=0)

    after = pair.state_dict()
    assert all(torch.equal(after[f"loaded.{key}"], value) for key, value in before.items())
    assert all(value.isfinite().all() for value in after.values())


@pytest.mark.gpu(2)
def test_on_a_gpu_the_generator_of_that_gpu_is_seeded() -> None:
    device = torch.device("cuda", 1)
    drawn = []
    for seed in range(2):
        torch.cuda.manual_seed_all(seed)
        with _seeded(device, 0, 3):
            drawn.append(torch.rand(4, device=device))

    assert torch.cuda.current_device() == 0
    assert torch.equal(*drawn)


def test_each_holder_of_a_tied_weight_gets_the_same_values_and_no_other_layer() -> None:
    def build() -> dict[str, Any]:
        with torch.device("meta"):
            layers = [nn.Embedding(5, 2), nn.Linear(2, 2), nn.Linear(2, 5), nn.Linear(2, 5)]
        layers[2].weight = layers[0].weight
        layers[3].weight = layers[0].weight
        return dict(zip("abcd", layers, strict=True))

    expected = build()
    materialize(expected, [*"abcd"], CPU, seed=3)
    for ours in (["a"], ["c"], ["a", "b"], ["c", "d"], ["d"]):
        layers = build()
        materialize(layers, ours, CPU, seed=3)
        for name, layer in layers.items():
            if name in ours:
                assert torch.equal(layer.weight, expected[name].weight), (ours, name)
            elif name == "b":
                assert all(parameter.is_meta for parameter in layer.parameters()), (ours, name)
            else:  # still shared
                assert layer.weight is layers[ours[-1]].weight or ours[-1] == "b", (ours, name)
                assert getattr(layer, "bias", layer.weight).is_meta == (name != "a"), (ours, name)


class ScaledEmbedding(nn.Embedding):
    """Has a buffer that is no table."""

    scale: Tensor

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.register_buffer("scale", torch.ones((), device=self.weight.device))


@pytest.mark.parametrize("ours", ["01", "0", "1"])
def test_an_embeddings_row_of_padding_is_zeros_also_where_a_later_layer_initialises_it(
    ours: str,
) -> None:
    with torch.device("meta"):
        embedding = ScaledEmbedding(5, 4, padding_idx=1)
        model = nn.Sequential(embedding, nn.Linear(4, 5, bias=False))
    model[1].weight = embedding.weight
    materialize(dict(model.named_children()), ours, CPU, seed=0)
    weight: Any = model[int(ours[0])].weight
    assert [bool(row.any()) for row in weight] == [True, False, True, True, True]


def test_attributes_of_parameters_are_kept() -> None:
    layer = nn.Linear(2, 2, device="meta")
    layer.weight.requires_grad_(False)
    layer.weight.no_weight_decay = True  # type: ignore[attr-defined]
    materialize({"0": layer}, ["0"], CPU, seed=0)
    assert layer.weight.no_weight_decay  # type: ignore[attr-defined]
    assert not layer.weight.requires_grad
    assert layer.bias.requires_grad


class Scaled(nn.Module):
    """Owns a parameter, an integer and a boolean buffer; resets them by a given function."""

    def __init__(self, reset: Callable[[Any], None] | None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(2))
        self.register_buffer("places", torch.arange(3))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)
        if reset is not None:
            self.reset_parameters = lambda: reset(self)


def reset_all(module: Any) -> None:
    module.scale.data.fill_(2.0)
    module.places.copy_(torch.arange(3))
    module.mask = torch.ones(3, dtype=torch.bool)


def reset_partly(module: Any) -> None:
    nn.init.ones_(module.scale[:1])


def test_a_custom_layer_initialises_itself() -> None:
    with torch.device("meta"):
        layer = Scaled(reset_all)
    materialize({"0": layer}, ["0"], CPU, seed=0)
    assert layer.scale.tolist() == [2.0, 2.0]
    assert layer.get_buffer("places").tolist() == [0, 1, 2]
    assert layer.get_buffer("mask").all()


def test_the_outer_module_initialises_last() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def reset_parameters(self) -> None:
            nn.init.zeros_(self.linear.weight)

    with torch.device("meta"):
        block = Block()
    materialize({"0": block}, ["0"], CPU, seed=0)
    assert not block.linear.weight.any()
    assert block.linear.bias.all()


def test_tensors_that_nothing_initialises_are_named() -> None:
    with torch.device("meta"):
        layers: dict[str, nn.Module] = {
            "neck": nn.Sequential(nn.Linear(1, 1), Scaled(None)),
            "head": Scaled(reset_partly),
        }
    with pytest.raises(ValueError, match="nothing initialises") as caught:
        materialize(layers, list(layers), CPU, seed=0)
    message = str(caught.value)
    for name in ("neck.1.scale", "neck.1.places", "neck.1.mask", "head.scale", "head.mask"):
        assert f"{name} (of a Scaled)" in message
    assert "neck.0" not in message
    assert "give the layer a reset_parameters() that sets all" in message
