"""The examples' models: the published sizes, images and texts of any size, and what each computes.

They are plain ``nn.Sequential``: as pipelines they are trained in tests/dist and by the examples.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn

from examples.models.amoebanet import amoebanetd
from examples.models.gpt import gpt
from examples.models.resnet import resnet, resnet101
from examples.models.unet import unet
from procpipe.skip import verify_skippables
from tests.cases import for_each

#: Each would run its formula on the meta device, for every parameter.
_INITIALIZE = ("kaiming_normal_", "kaiming_uniform_", "normal_", "uniform_", "ones_", "zeros_")


@for_each(
    ("build", "sizes", "expected", "num_layers"),
    [
        (unet, (5, 5, 64), 232_687_328, 241),
        (amoebanetd, (1000, 18, 208), 81_505_540, 24),
        (amoebanetd, (1000, 72, 512), 1_844_858_344, 78),
        (resnet101, (1000,), 44_549_160, 370),
        # The small GPT-2, whose head has a matrix of its own here.
        (gpt, (50_257, 12, 768, 12, 1_024), 124_439_808 + 50_257 * 768, 27),
    ],
)
def test_published_sizes_have_the_published_numbers_of_parameters(
    build, sizes, expected, num_layers
):
    replaced: dict[str, Any] = {name: lambda tensor, *_, **__: tensor for name in _INITIALIZE}
    with torch.device("meta"), mock.patch.multiple(nn.init, **replaced):
        model = build(*sizes)
    verify_skippables(model)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == expected
    assert len(model) == num_layers


def small(build, *sizes) -> nn.Sequential:
    torch.manual_seed(0)
    model: nn.Sequential = build(*sizes)
    return model


@for_each(
    ("model", "input_shape", "output_shape"),
    [
        (small(unet, 2, 2, 4, 3, 5), (2, 3, 23, 31), (2, 5, 23, 31)),
        (small(unet, 3, 1, 2, 3, 5), (2, 3, 8, 16), (2, 5, 8, 16)),
        (small(amoebanetd, 5, 3, 16), (2, 3, 33, 47), (2, 5)),
        (small(resnet, 5, (1, 2, 1, 1), 4), (2, 3, 33, 40), (2, 5)),
    ],
)
def test_images_of_any_size_go_through_and_every_parameter_gets_a_gradient(
    model, input_shape, output_shape
):
    output = model(torch.randn(input_shape))
    assert output.shape == output_shape
    output.square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_a_gpts_prediction_depends_on_the_tokens_up_to_its_own_place():
    model, tokens = small(gpt, 11, 2, 8, 2, 6), torch.tensor([[1, 2, 3, 4, 5, 6]])
    changed = tokens.clone()
    changed[0, 3] = 9
    same = (model(tokens) == model(changed)).all(2)
    assert same.tolist() == [[True, True, True, False, False, False]]
    logits = model(torch.tensor([[7, 7]]))
    assert not logits[0, 0].equal(logits[0, 1])
