"""AmoebaNet-D of any depth and width, in sequential form.

A cell reads the outputs of the two cells before it. So the layers pass on a pair,
``(output of the last cell, output of the one before)``, and no skip tensor is needed:

    image ─> stem ─> x ─> cell ─> (a, x) ─> cell ─> (b, a) ─> cell ─> (c, b) ─> ... ─> classifier

Source: Real et al., "Regularized Evolution for Image Classifier Architecture Search" (2019),
https://arxiv.org/abs/1802.01548, and its TensorFlow code, where the normal cell's output differs
from the paper's text; (L, D) as in Huang et al., "GPipe" (2019),
https://arxiv.org/abs/1811.06965.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Operation = Callable[[int, int], nn.Module]


def amoebanetd(
    num_classes: int = 1000, num_layers: int = 18, num_filters: int = 208
) -> nn.Sequential:
    """Build an AmoebaNet-D.

    Input: ``(batch, 3, height, width)`` float; 224 x 224 in the published experiments. Output:
    ``(batch, num_classes)`` float.

    Args:
        num_classes: number of classes.
        num_layers: L, normal cells; a multiple of 3.
        num_filters: D, 4 times the channels of the stem; a multiple of 8.

    Raises:
        ValueError: ``num_layers`` or ``num_filters`` is no such multiple.
    """
    if num_layers % 3 or num_filters % 8:
        raise ValueError(
            f"num_layers={num_layers}, num_filters={num_filters}: make the first a multiple of 3, "
            "for as many normal cells in each of 3 sections, and the second a multiple of 8"
        )
    channels = num_filters // 4
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        stem=nn.Sequential(*_relu_conv_norm(3, channels, 3, stride=2))
    )
    last = before_last = channels
    is_after_reduction = False
    for name, genes in _cells(num_layers):
        channels *= genes.stride
        cell = Cell(genes, last, before_last, channels, is_after_reduction)
        layers[name] = cell
        last, before_last = cell.out_channels, last
        is_after_reduction = genes is REDUCTION
    layers["classifier"] = Classifier(last, num_classes)
    return nn.Sequential(layers)


# -- operations, which keep the number of channels -------------------------------------------------


def none(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else FactorizedReduction(channels, channels)


def avg_pool_3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def max_pool_3(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def max_pool_2(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride, ceil_mode=True)  # rounds odd sizes up, as the others do


def conv_1x1(channels: int, stride: int) -> nn.Module:
    return nn.Sequential(*_relu_conv_norm(channels, channels, 1, stride))


def conv_3x3(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        *_relu_conv_norm(channels, narrow, 1),
        *_relu_conv_norm(narrow, narrow, 3, stride),
        *_relu_conv_norm(narrow, channels, 1),
    )


def conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        *_relu_conv_norm(channels, narrow, 1),
        *_relu_conv_norm(narrow, narrow, (1, 7), (1, stride)),
        *_relu_conv_norm(narrow, narrow, (7, 1), (stride, 1)),
        *_relu_conv_norm(narrow, channels, 1),
    )


# -- cells ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Genes:
    """What a cell computes from two states, 0 and 1.

    Attributes:
        pairs: state 2 and those after it, each as two (state, operation); they are added.
        output: the states that are concatenated.
        stride: 2 if the cell halves height and width, and doubles the channels.
    """

    pairs: tuple[tuple[tuple[int, Operation], tuple[int, Operation]], ...]
    output: tuple[int, ...]
    stride: int


NORMAL = Genes(
    pairs=(
        ((1, conv_1x1), (1, max_pool_3)),
        ((1, none), (0, conv_1x7_7x1)),
        ((0, conv_1x1), (0, conv_1x7_7x1)),
        ((2, max_pool_3), (2, none)),
        ((1, avg_pool_3), (5, conv_1x1)),
    ),
    output=(0, 3, 4, 6),
    stride=1,
)

REDUCTION = Genes(
    pairs=(
        ((0, max_pool_2), (0, max_pool_3)),
        ((2, none), (1, conv_3x3)),
        ((2, conv_1x7_7x1), (2, max_pool_3)),
        ((3, none), (1, max_pool_2)),
        ((2, avg_pool_3), (3, conv_1x1)),
    ),
    output=(4, 5, 6),
    stride=2,
)


class Cell(nn.Module):
    """Computes ``(output, s1)`` from ``(s1, s2)``, the outputs of the two cells before it.

    ``s1`` is ``(batch, s1_channels, height, width)`` float; ``s2`` is of that height and width, or
    twice that after a reduction. The first cell gets one tensor, which is both.

    Args:
        genes: what to compute.
        s1_channels: channels of ``s1``.
        s2_channels: channels of ``s2``.
        channels: channels of each state inside.
        is_after_reduction: whether the last cell was a reduction.
    """

    def __init__(
        self,
        genes: Genes,
        s1_channels: int,
        s2_channels: int,
        channels: int,
        is_after_reduction: bool,
    ) -> None:
        super().__init__()
        self.genes = genes
        self.out_channels = channels * len(genes.output)
        self.adapt1 = nn.Sequential(*_relu_conv_norm(s1_channels, channels, 1))
        self.adapt2: nn.Module
        if is_after_reduction:
            self.adapt2 = FactorizedReduction(s2_channels, channels)
        elif s2_channels != channels:
            self.adapt2 = nn.Sequential(*_relu_conv_norm(s2_channels, channels, 1))
        else:
            self.adapt2 = nn.Identity()
        self.operations = nn.ModuleList(
            operation(channels, genes.stride if state in (0, 1) else 1)
            for pair in genes.pairs
            for state, operation in pair
        )

    def forward(self, input: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Add a state for each pair of operations, and concatenate some."""
        s1, s2 = input if isinstance(input, tuple) else (input, input)
        states = [self.adapt1(s1), self.adapt2(s2)]
        operations = iter(self.operations)
        for (left, _), (right, _) in self.genes.pairs:
            states.append(next(operations)(states[left]) + next(operations)(states[right]))
        return torch.cat([states[state] for state in self.genes.output], dim=1), s1


class FactorizedReduction(nn.Module):
    """Halves height and width: half of the channels take the even pixels, half the odd ones.

    ``(batch, in_channels, height, width)`` float to ``(batch, out_channels, height / 2, width /
    2)``, rounded up.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        half = out_channels // 2
        self.even = nn.Conv2d(in_channels, half, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(in_channels, out_channels - half, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, input: Tensor) -> Tensor:
        """Reduce, after a ReLU."""
        input = F.relu(input)
        shifted = F.pad(input, (-1, 1, -1, 1))
        output: Tensor = self.norm(torch.cat((self.even(input), self.odd(shifted)), dim=1))
        return output


class Classifier(nn.Module):
    """Averages the last cell's output over the image, and computes the classes' scores.

    An image of 224 x 224 pixels is 7 x 7 here.
    """

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_channels, num_classes)

    def forward(self, input: tuple[Tensor, Tensor]) -> Tensor:
        """Return ``(batch, num_classes)`` float."""
        last, _ = input
        output: Tensor = self.linear(last.mean((2, 3)))
        return output


def _cells(num_layers: int) -> list[tuple[str, Genes]]:
    """List the cells: two reductions, then three normal sections with reductions between."""
    cells = [("reduction0", REDUCTION)]
    for section in range(1, 4):
        cells.append((f"reduction{section}", REDUCTION))
        cells += [(f"normal{section}_{cell}", NORMAL) for cell in range(num_layers // 3)]
    return cells


def _relu_conv_norm(
    in_channels: int,
    out_channels: int,
    kernel_size: int | tuple[int, int],
    stride: int | tuple[int, int] = 1,
) -> tuple[nn.Module, ...]:
    """Return the three modules; padded, so that only the stride makes the image smaller."""
    height, width = (kernel_size,) * 2 if isinstance(kernel_size, int) else kernel_size
    padding = (height // 2, width // 2)
    return (
        nn.ReLU(),
        nn.Conv2d(in_channels, out_channels, (height, width), stride, padding, bias=False),
        nn.BatchNorm2d(out_channels),
    )
