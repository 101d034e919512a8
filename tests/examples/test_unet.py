"""The U-Net as a plain ``nn.Sequential``: images of any size, and gradients through its skips.

image -> encode0 -> encode1 -> bottleneck -> decode1 -> decode0 -> head
            │          └──────── skip ──────────┘          │
            └─────────────────── skip ─────────────────────┘
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from examples.models.unet import PopConcat, unet
from procpipe.skip import verify_skippables
from tests.cases import for_each


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return unet(depth=2, num_convs=2, base_channels=4, in_channels=3, out_channels=2).double()


def names(model: nn.Sequential) -> list[str]:
    return [name for name, _ in model.named_children()]


def test_the_layers_in_order() -> None:
    block = ("conv", "dropout", "norm", "relu")

    def cell(name: str) -> list[str]:
        return [f"{name}_{i}_{module}" for i in range(2) for module in block]

    assert names(small()) == [
        *(*cell("encode0"), "encode0_stash", "encode0_pool"),
        *(*cell("encode1"), "encode1_stash", "encode1_pool"),
        *cell("bottleneck"),
        *("decode1_upsample", "decode1_pop", *cell("decode1")),
        *("decode0_upsample", "decode0_pop", *cell("decode0")),
        "head",
    ]


def test_channels_double_on_the_way_down_and_halve_on_the_way_up() -> None:
    model = unet(depth=2, num_convs=3, base_channels=4, in_channels=3, out_channels=2)
    convolutions = [layer for layer in model if isinstance(layer, nn.Conv2d)]
    assert [(layer.in_channels, layer.out_channels) for layer in convolutions] == [
        *((3, 4), (4, 4), (4, 4)),
        *((4, 8), (8, 8), (8, 8)),
        *((8, 16), (16, 16), (16, 8)),
        *((16, 4), (4, 4), (4, 4)),
        *((8, 2), (2, 2), (2, 2)),
        (2, 2),
    ]


@for_each(
    ("num_convs", "depth", "size", "is_training"),
    product([1, 2, 3], [1, 2, 3], [(16, 16), (17, 16), (23, 31), (8, 16)], [True, False]),
)
def test_the_result_has_the_size_of_the_image(
    num_convs: int, depth: int, size: tuple[int, int], is_training: bool
) -> None:
    model = unet(depth, num_convs, base_channels=2, in_channels=3, out_channels=5)
    verify_skippables(model)
    output = model.train(is_training)(torch.randn(2, 3, *size))
    assert output.shape == (2, 5, *size)


def test_the_published_size_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = unet(5, 5, 64, in_channels=3, out_channels=1)
        assert model(torch.empty(32, 3, 192, 192)).shape == (32, 1, 192, 192)


def test_a_smaller_input_is_padded_below_and_on_the_right() -> None:
    skip = torch.full((1, 1, 3, 3), 2.0)
    steps = PopConcat.forward.__wrapped__(PopConcat(), torch.ones(1, 1, 2, 2))  # type: ignore[attr-defined]
    next(steps)
    with pytest.raises(StopIteration) as end:
        steps.send(skip)
    assert end.value.value[0].tolist() == [
        [[2, 2, 2], [2, 2, 2], [2, 2, 2]],
        [[1, 1, 0], [1, 1, 0], [0, 0, 0]],
    ]


def test_each_level_passes_on_its_own_skip_tensor() -> None:
    model, image = small().eval(), torch.randn(1, 3, 13, 10, dtype=torch.float64)
    seen: dict[str, Tensor] = {}
    for name, layer in model.named_children():
        layer.register_forward_hook(lambda _, __, output, name=name: seen.update({name: output}))
    model(image)
    for level, channels in [(0, 4), (1, 8)]:
        across = seen[f"decode{level}_pop"][:, :channels]
        assert across.equal(seen[f"encode{level}_stash"])


def test_gradients_reach_the_encoder_through_the_skips_alone() -> None:
    """With the bottleneck's output detached, encode1 gets gradients by the skip of level 1."""
    model = small()
    model.get_submodule("bottleneck_0_conv").register_forward_hook(
        lambda _, __, output: output.detach()
    )
    model(torch.randn(2, 3, 16, 16, dtype=torch.float64)).square().sum().backward()
    untouched = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert untouched == ["bottleneck_0_conv.weight"]
    assert all(
        bool(parameter.grad.any()) for parameter in model.parameters() if parameter.grad is not None
    )


def test_gradients_are_those_of_finite_differences() -> None:
    model = small().eval()
    image = torch.randn(1, 3, 4, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model, (image,))
