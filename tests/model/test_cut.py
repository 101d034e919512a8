"""A balance places every layer once; layers on the meta device get the same values everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from procpipe.errors import BalanceError
from procpipe.model.cut import (
    _seeded,
    check_balance,
    check_model,
    check_shared_parameters,
    layer_facts,
    materialize,
    split,
)

CPU = torch.device("cpu")


def a_model(device: str = "cpu") -> nn.Sequential:
    """A layer of every sort that initialisation must manage; no forward is run through it."""
    with torch.device(device):
        return nn.Sequential(
            nn.Linear(3, 4),
            nn.ReLU(),
            nn.Sequential(nn.Conv1d(2, 4, 1, bias=False), nn.BatchNorm1d(4)),
            nn.TransformerEncoderLayer(8, 2, dim_feedforward=4),
            nn.LSTM(2, 3),
            nn.Embedding(5, 2, padding_idx=0),
        )


def test_only_a_sequential_is_a_model() -> None:
    with pytest.raises(TypeError, match=r"a Linear: pass an nn\.Sequential"):
        check_model(nn.Linear(1, 1))
    check_model(a_model())


def test_an_empty_model_is_legal() -> None:
    check_model(nn.Sequential())
    assert check_balance([], 0) == ()
    assert split(nn.Sequential(), ()) == []


def test_duplicate_children_are_all_named() -> None:
    same, other = nn.Linear(1, 1), nn.ReLU()
    with pytest.raises(
        ValueError, match=r"duplicate children: .*'0' and '2' are one Linear; .*'1' and '4' are one"
    ):
        check_model(nn.Sequential(same, other, same, nn.ReLU(), other))


@pytest.mark.parametrize(
    "balance",
    [[2, 1, 3], (2, 1, 3), torch.tensor([2, 1, 3]), np.array([2, 1, 3]), iter([2, 1, 3])],
)
def test_balance_becomes_plain_integers(balance: Any) -> None:
    parts = check_balance(balance, 6)
    assert parts == (2, 1, 3)
    assert all(type(part) is int for part in parts)


@pytest.mark.parametrize(
    "balance",
    [
        *([True, 5], [1.0, 5], ["1", 5], [[1, 5]], [None, 6]),
        *(torch.tensor([1.0, 5]), torch.tensor([[6]]), torch.tensor([True]), np.array([True])),
    ],
    ids=repr,
)
def test_balance_of_other_types(balance: Any) -> None:
    with pytest.raises(TypeError, match="holds more than integers: pass the number of layers"):
        check_balance(balance, 6)


def test_balance_that_is_no_sequence() -> None:
    for balance in (6, None):
        with pytest.raises(TypeError, match=rf"the balance is {balance}: .* balance=\[6\]"):
            check_balance(balance, 6)  # type: ignore[arg-type]


@pytest.mark.parametrize("balance", [[2, 3], [6, 1], [], [7]])
def test_balance_of_wrong_sum(balance: list[int]) -> None:
    with pytest.raises(
        BalanceError, match=rf"places {sum(balance)} layers but the model has 6: .* add up to 6"
    ):
        check_balance(balance, 6)


@pytest.mark.parametrize("balance", [[6, 0], [7, -1], [0, 1]])
def test_balance_with_an_empty_partition(balance: list[int]) -> None:
    with pytest.raises(BalanceError, match="less than one layer: give each at least 1"):
        check_balance(balance, 6)


def test_split_keeps_the_names() -> None:
    model = nn.Sequential()
    for name in ("stem", "body", "norm", "head"):
        model.add_module(name, nn.ReLU())
    partitions = split(model, (1, 2, 1))
    assert [list(layers) for layers in partitions] == [["stem"], ["body", "norm"], ["head"]]
    assert [layer for layers in partitions for layer in layers.values()] == list(model)


class Shares(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)


def test_shared_parameters_are_all_named() -> None:
    embedding, head, table = nn.Embedding(5, 2), nn.Linear(2, 5, bias=False), torch.ones(1)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, Shares(table), nn.Sequential(head), Shares(table))

    check_shared_parameters(model, (4,))
    with pytest.raises(ValueError, match=r"0\.weight in partition 0 is 2\.0\.weight"):
        check_shared_parameters(model, (2, 2))
    with pytest.raises(
        ValueError,
        match=r"0\.weight in partition 0 is 2\.0\.weight in partition 2; "
        r"1\.table in partition 1 is 3\.table in partition 2: choose a balance",
    ):
        check_shared_parameters(model, (1, 1, 2))
    with pytest.raises(ValueError, match=r"1\.table in partition 0 is 3\.table in partition 1"):
        check_shared_parameters(model, (3, 1))


def test_layer_facts_do_not_depend_on_the_device() -> None:
    assert layer_facts(a_model("meta")) == layer_facts(a_model())
    model = nn.Sequential(nn.Linear(300, 4), nn.ReLU(), nn.Sequential(nn.Linear(2, 1)))
    assert layer_facts(model) == [
        "0: Linear, 1,204 parameters",
        "1: ReLU, 0 parameters",
        "2: Sequential, 3 parameters",
    ]


def materialized(balance: list[int], seed: int = 7) -> dict[str, Tensor]:
    model = a_model("meta")
    first_index = 0
    for layers in split(model, check_balance(balance, 6)):
        materialize(layers, CPU, first_index=first_index, seed=seed)
        first_index += len(layers)
    return model.state_dict()


def test_values_do_not_depend_on_the_balance() -> None:
    expected = materialized([6])
    assert list(expected) == list(a_model().state_dict())
    for balance in ([1, 1, 1, 1, 1, 1], [2, 4], [5, 1]):
        state = materialized(balance)
        assert all(torch.equal(state[key], expected[key]) for key in expected)
    other = materialized([6], seed=8)
    assert not torch.equal(other["0.weight"], expected["0.weight"])


def test_values_are_those_of_the_constructors() -> None:
    state = materialized([6])
    for key, built in a_model().state_dict().items():
        assert state[key].shape == built.shape
        if built.numel() == 0 or (built == built.flatten()[0]).all():
            assert torch.equal(state[key], built), key  # constants, as of norms and attention
        else:
            assert state[key].isfinite().all()
            assert state[key].std() < 4 * built.std() + 1
    assert not state["5.weight"][0].any()


def test_layers_and_seeds_draw_different_numbers() -> None:
    def weights(seed: int) -> list[Tensor]:
        model = nn.Sequential(*(nn.Linear(2, 2, device="meta") for _ in range(3)))
        materialize(split(model, (3,))[0], CPU, first_index=0, seed=seed)
        return [model[k].get_parameter("weight") for k in range(3)]

    drawn = [*weights(0), *weights(1)]
    assert len({tuple(weight.flatten().tolist()) for weight in drawn}) == 6


@pytest.mark.gpu(2)
def test_on_a_gpu_it_is_that_gpus_generator_that_is_seeded() -> None:
    device = torch.device("cuda", 1)
    drawn = []
    for seed in range(2):
        torch.cuda.manual_seed_all(seed)
        with _seeded(device, 0, 3):
            drawn.append(torch.rand(4, device=device))

    assert torch.cuda.current_device() == 0
    assert torch.equal(*drawn)


def test_the_callers_generator_is_untouched() -> None:
    before = torch.get_rng_state()
    materialized([6])
    assert torch.equal(torch.get_rng_state(), before)


def test_layers_with_memory_are_moved_and_keep_their_values() -> None:
    layer = nn.Linear(2, 2)
    weight = layer.weight.detach().clone()
    materialize({"0": layer}, CPU, first_index=0, seed=0)
    assert torch.equal(layer.weight, weight)
    materialize({"0": layer}, torch.device("meta"), first_index=0, seed=0)
    assert layer.weight.is_meta


def test_tied_weights_stay_tied() -> None:
    with torch.device("meta"):
        embedding, head = nn.Embedding(5, 2), nn.Linear(2, 5)
        head.weight = embedding.weight
    materialize({"0": embedding, "1": nn.Sequential(head)}, CPU, first_index=0, seed=0)
    assert head.weight is embedding.weight
    assert not head.weight.isnan().any()


def test_attributes_of_parameters_are_kept() -> None:
    layer = nn.Linear(2, 2, device="meta")
    layer.weight.requires_grad_(False)
    layer.weight.no_weight_decay = True  # type: ignore[attr-defined]
    materialize({"0": layer}, CPU, first_index=0, seed=0)
    assert layer.weight.no_weight_decay  # type: ignore[attr-defined]
    assert not layer.weight.requires_grad
    assert layer.bias.requires_grad


def test_a_recurrent_layer_runs() -> None:
    layer = nn.LSTM(2, 3, device="meta")
    materialize({"0": layer}, CPU, first_index=0, seed=0)
    layer(torch.ones(4, 1, 2))[0].sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


class Scaled(nn.Module):
    """Owns a parameter, an integer and a boolean buffer; resets what it is told to."""

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


def test_a_layer_of_ones_own_initialises_itself() -> None:
    with torch.device("meta"):
        layer = Scaled(reset_all)
    materialize({"0": layer}, CPU, first_index=0, seed=0)
    assert layer.scale.tolist() == [2.0, 2.0]
    assert layer.get_buffer("places").tolist() == [0, 1, 2]
    assert layer.get_buffer("mask").all()


def test_the_outer_module_has_the_last_word() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def reset_parameters(self) -> None:
            nn.init.zeros_(self.linear.weight)

    with torch.device("meta"):
        block = Block()
    materialize({"0": block}, CPU, first_index=0, seed=0)
    assert not block.linear.weight.any()
    assert block.linear.bias.all()


def test_what_nothing_initialises_is_named() -> None:
    with torch.device("meta"):
        layers: dict[str, nn.Module] = {
            "neck": nn.Sequential(nn.Linear(1, 1), Scaled(None)),
            "head": Scaled(reset_partly),
        }
    with pytest.raises(ValueError, match="nothing initialises") as caught:
        materialize(layers, CPU, first_index=0, seed=0)
    message = str(caught.value)
    for name in ("neck.1.scale", "neck.1.places", "neck.1.mask"):
        assert f"{name} (Scaled has no reset_parameters())" in message
    for name in ("head.scale", "head.places", "head.mask"):
        assert f"{name} (Scaled.reset_parameters() leaves it unset)" in message
    assert "neck.0" not in message
    assert "give the layer a reset_parameters() that sets all" in message
