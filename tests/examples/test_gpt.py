"""GPT: shapes, the order of its layers, and that no prediction depends on later tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from examples.models.gpt import gpt


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return gpt(vocab_size=11, num_layers=2, d_model=8, num_heads=2, context=6)


def test_the_layers_in_order() -> None:
    names = [name for name, _ in small().named_children()]
    assert names == [
        "embedding",
        *("attention0", "feed_forward0", "attention1", "feed_forward1"),
        *("norm", "head"),
    ]


@pytest.mark.parametrize("time", [1, 6])
def test_logits_for_every_place(time: int) -> None:
    assert small()(torch.randint(11, (3, time))).shape == (3, time, 11)


def test_a_prediction_depends_on_the_tokens_up_to_its_own_place() -> None:
    model, tokens = small(), torch.tensor([[1, 2, 3, 4, 5, 6]])
    changed = tokens.clone()
    changed[0, 3] = 9
    same = (model(tokens) == model(changed)).all(2)
    assert same.tolist() == [[True, True, True, False, False, False]]


def test_a_prediction_depends_on_the_places_of_the_tokens() -> None:
    logits = small()(torch.tensor([[7, 7]]))
    assert not logits[0, 0].equal(logits[0, 1])


def test_every_layer_adds_little_at_first() -> None:
    """The more layers there are, the less each adds."""
    torch.manual_seed(0)
    model = gpt(vocab_size=11, num_layers=8, d_model=64, num_heads=4, context=6)
    for name in ("attention3", "feed_forward3"):
        output = model.get_submodule(f"{name}.output")
        assert isinstance(output, nn.Linear)
        assert output.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.1)
        assert not output.bias.any()


@pytest.mark.parametrize("name", ["attention0", "feed_forward1"])
def test_layers_add_their_output_to_their_input(name: str) -> None:
    layer = small().get_submodule(name)
    nn.init.zeros_(layer.get_submodule("output").get_parameter("weight"))
    x = torch.randn(2, 6, 8)
    assert layer(x).equal(x)


def test_every_parameter_gets_a_gradient() -> None:
    model = small()
    model(torch.randint(11, (3, 6))).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_more_tokens_than_the_context_are_refused() -> None:
    with pytest.raises(ValueError, match="7 tokens, but the context is 6"):
        small()(torch.zeros(1, 7, dtype=torch.long))


def test_heads_that_do_not_divide_the_vector_are_refused() -> None:
    with pytest.raises(ValueError, match="d_model is 8: make it a multiple of num_heads, 3"):
        gpt(vocab_size=11, num_layers=2, d_model=8, num_heads=3, context=6)
