"""Models built on the meta device get the initial values that their layers say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from examples.models.amoebanet import amoebanetd
from examples.models.gpt import gpt
from examples.models.resnet import resnet101
from examples.models.unet import unet
from procpipe.model.cut import materialize

BUILDERS = {
    "unet": lambda: unet(depth=2, num_convs=3, base_channels=16),
    "amoebanetd": lambda: amoebanetd(10, num_layers=3, num_filters=64),
    "resnet101": lambda: resnet101(10),
    "gpt": lambda: gpt(vocab_size=50, num_layers=2, d_model=64, num_heads=4, context=32),
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_values_spread_as_in_a_model_built_with_memory(
    build: Callable[[], nn.Sequential],
) -> None:
    torch.manual_seed(0)
    expected = build().state_dict()
    with torch.device("meta"):
        model = build()
    materialize(dict(model.named_children()), torch.device("cpu"), first_index=0, seed=0)
    state = model.state_dict()
    assert list(state) == list(expected)
    for name, value in state.items():
        if value.numel() > 500:
            assert value.std().item() == pytest.approx(expected[name].std().item(), rel=0.2), name
        elif value.numel() and (expected[name] == expected[name].flatten()[0]).all():
            assert value.equal(expected[name]), name
