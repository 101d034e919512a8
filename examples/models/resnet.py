"""ResNets in sequential form: every module is a layer, so they can be cut inside a block too.

A skip tensor carries the input of a block past its convolutions:

    stash ─> conv1, norm1, relu1, conv2, norm2, relu2, conv3, norm3 ─> add ─> relu3
      └───────────────────────── identity ──────────────────────────────┘

Source: He et al., "Deep Residual Learning for Image Recognition" (2016),
https://arxiv.org/abs/1512.03385, Table 1; with the stride on the 3 x 3 convolution, as torchvision
has it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence

from torch import Tensor, nn

from procpipe.skip import Namespace, pop, skippable, stash

EXPANSION = 4  # output channels of a block over the channels within


def resnet101(num_classes: int = 1000) -> nn.Sequential:
    """Build a ResNet-101.

    Input: ``(batch, 3, height, width)`` float; 224 x 224 in the published experiments. Output:
    ``(batch, num_classes)`` float.

    Args:
        num_classes: number of classes.
    """
    return resnet(num_classes, (3, 4, 23, 3), 64)


def resnet(num_classes: int, num_blocks: Sequence[int], base_channels: int) -> nn.Sequential:
    """Build a ResNet of bottleneck blocks.

    Input: ``(batch, 3, height, width)`` float. Output: ``(batch, num_classes)`` float.

    Args:
        num_classes: number of classes.
        num_blocks: blocks in each section; a section has half the height and width of the one
            before, and twice the channels.
        base_channels: channels of the first convolution, and within the first section's blocks.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv=Convolution(3, base_channels, 7, stride=2),
        norm=nn.BatchNorm2d(base_channels),
        relu=nn.ReLU(),
        pool=nn.MaxPool2d(3, stride=2, padding=1),
    )
    in_channels = base_channels
    for section, num_blocks_here in enumerate(num_blocks, 1):
        channels = base_channels << (section - 1)
        for block in range(num_blocks_here):
            stride = 2 if block == 0 and section > 1 else 1
            name = f"block{section}_{block}"
            layers.update(_bottleneck(name, in_channels, channels, stride))
            in_channels = channels * EXPANSION
    layers["average"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["classifier"] = nn.Linear(in_channels, num_classes)
    return nn.Sequential(layers)


def _bottleneck(
    name: str, in_channels: int, channels: int, stride: int
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a block: in -> channels -> channels -> ``EXPANSION * channels``."""
    out_channels = channels * EXPANSION
    block = Namespace()
    yield f"{name}_stash", Stash().isolate(block)  # type: ignore[operator]
    yield f"{name}_conv1", Convolution(in_channels, channels, 1)
    yield f"{name}_norm1", nn.BatchNorm2d(channels)
    yield f"{name}_relu1", nn.ReLU()
    yield f"{name}_conv2", Convolution(channels, channels, 3, stride)
    yield f"{name}_norm2", nn.BatchNorm2d(channels)
    yield f"{name}_relu2", nn.ReLU()
    yield f"{name}_conv3", Convolution(channels, out_channels, 1)
    yield f"{name}_norm3", nn.BatchNorm2d(out_channels)
    yield f"{name}_add", PopAdd(in_channels, out_channels, stride).isolate(block)  # type: ignore[operator]
    yield f"{name}_relu3", nn.ReLU()


class Convolution(nn.Conv2d):
    """A convolution without bias, which batch norm would cancel, initialised for ReLUs."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1
    ) -> None:
        padding = kernel_size // 2
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, bias=False)

    def reset_parameters(self) -> None:
        """Keep the gradients' variance; called for a model built on the meta device too."""
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


@skippable(stash=["identity"])
class Stash(nn.Module):
    """Stashes what passes through it: ``(batch, channels, height, width)`` float."""

    def forward(self, input: Tensor) -> Generator[stash, None, Tensor]:
        """Pass the input on."""
        yield stash("identity", input)
        return input


@skippable(pop=["identity"])
class PopAdd(nn.Module):
    """Adds the block's input to its output, projected if they differ in shape."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.projection: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.projection = nn.Sequential(
                Convolution(in_channels, out_channels, 1, stride),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, input: Tensor) -> Generator[pop, Tensor, Tensor]:
        """Add: ``(batch, out_channels, height, width)`` float."""
        identity = yield pop("identity")
        projected: Tensor = self.projection(identity)
        return input + projected
