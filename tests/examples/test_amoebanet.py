"""AmoebaNet-D: pairs of tensors between the layers, every tensor of its published size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from examples.models.amoebanet import FactorizedReduction, amoebanetd
from tests.cases import for_each


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return amoebanetd(num_classes=5, num_layers=3, num_filters=16)


def test_reductions_separate_three_sections_of_normal_cells() -> None:
    names = [name for name, _ in amoebanetd(5, 6, 16).named_children()]
    assert names == [
        *("stem", "reduction0"),
        *("reduction1", "normal1_0", "normal1_1"),
        *("reduction2", "normal2_0", "normal2_1"),
        *("reduction3", "normal3_0", "normal3_1"),
        "classifier",
    ]


def test_each_cell_passes_on_its_output_and_its_own_first_state() -> None:
    """The channels inside double with each reduction: 4 in the stem, then 8, 16, 32, 64."""
    x: Tensor | tuple[Tensor, ...] = torch.randn(2, 3, 64, 64)
    boundaries = []
    last = None
    for name, layer in small().named_children():
        x = layer(x)
        if isinstance(x, tuple):
            assert [type(part) for part in x] == [Tensor, Tensor]
            assert x[1] is last
            boundaries.append((name, *(tuple(part.shape[1:]) for part in x)))
        last = x[0] if isinstance(x, tuple) else x
    assert boundaries == [
        ("reduction0", (3 * 8, 16, 16), (4, 32, 32)),
        ("reduction1", (3 * 16, 8, 8), (3 * 8, 16, 16)),
        ("normal1_0", (4 * 16, 8, 8), (3 * 16, 8, 8)),
        ("reduction2", (3 * 32, 4, 4), (4 * 16, 8, 8)),
        ("normal2_0", (4 * 32, 4, 4), (3 * 32, 4, 4)),
        ("reduction3", (3 * 64, 2, 2), (4 * 32, 4, 4)),
        ("normal3_0", (4 * 64, 2, 2), (3 * 64, 2, 2)),
    ]


@for_each("size", [(32, 32), (33, 47), (1, 2)])
@for_each("is_training", [True, False])
def test_any_size_of_image_is_classified(size: tuple[int, int], is_training: bool) -> None:
    assert small().train(is_training)(torch.randn(2, 3, *size)).shape == (2, 5)


def test_the_last_cell_of_the_published_size_has_7_by_7_pixels() -> None:
    with torch.device("meta"):
        model = small()
        output, _ = model[:-1](torch.empty(2, 3, 224, 224))
    assert output.shape[2:] == (7, 7)


def test_every_parameter_gets_a_gradient() -> None:
    model = small()
    model(torch.randn(2, 3, 64, 64)).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_a_factorized_reduction_sees_every_pixel_on_a_diagonal() -> None:
    reduction = FactorizedReduction(1, 2).eval()
    for convolution in (reduction.even, reduction.odd):
        nn.init.ones_(convolution.weight)
    reduction.norm.eps = 1e-30  # nothing beside a variance of 1; torch 2.11 refuses 0
    image = torch.arange(25.0).reshape(1, 1, 5, 5)
    even, odd = reduction(image)[0]
    assert even.tolist() == [[0, 2, 4], [10, 12, 14], [20, 22, 24]]
    assert odd.tolist() == [[6, 8, 0], [16, 18, 0], [0, 0, 0]]


@pytest.mark.parametrize(("num_layers", "num_filters"), [(4, 16), (3, 12)])
def test_sizes_that_do_not_divide_are_refused(num_layers: int, num_filters: int) -> None:
    with pytest.raises(ValueError, match=rf"num_layers={num_layers}, num_filters={num_filters}"):
        amoebanetd(5, num_layers, num_filters)
