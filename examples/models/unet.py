"""U-Net of any depth and width, in sequential form.

    encode0                                                       decode0   head
       └──────────────────────── skip ───────────────────────────────┘
        encode1                                           decode1
           └──────────────────── skip ───────────────────────┘
                ...                                 ...
                         bottleneck (half the size at every level)

Instance norm in place of batch norm: it works on micro-batches of any size, one included.

Source: Ronneberger, Fischer, Brox, "U-Net" (2015), https://arxiv.org/abs/1505.04597; (B, C) as in
Kim et al., "torchgpipe" (2020), https://arxiv.org/abs/2004.09910, Section 4.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe.skip import Namespace, pop, skippable, stash


def unet(
    depth: int = 5,
    num_convs: int = 5,
    base_channels: int = 64,
    in_channels: int = 3,
    out_channels: int = 1,
) -> nn.Sequential:
    """Build a U-Net.

    Input: ``(batch, in_channels, height, width)`` float. Output: ``(batch, out_channels, height,
    width)`` float. Any size from ``2 ** depth`` on is allowed, if one side has twice that: instance
    norm needs two pixels at the bottleneck.

    Args:
        depth: levels of down- and of up-sampling.
        num_convs: B, convolution blocks in each cell; a level has two cells, the bottleneck one.
        base_channels: C, channels of the first convolution, doubled at every level; even.
        in_channels: channels of the image.
        out_channels: channels of the result: classes, or 1 for a mask.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = [base_channels << level for level in range(depth + 1)]
    skips = [Namespace() for _ in range(depth)]

    wide = in_channels
    for level in range(depth):
        name = f"encode{level}"
        layers.update(_cell(name, wide, channels[level], channels[level], num_convs))
        layers[f"{name}_stash"] = Stash().isolate(skips[level])  # type: ignore[operator]
        layers[f"{name}_pool"] = nn.MaxPool2d(2)
        wide = channels[level]

    layers.update(_cell("bottleneck", wide, channels[depth], wide, num_convs))

    for level in reversed(range(depth)):
        name = f"decode{level}"
        narrow = channels[level] // 2
        layers[f"{name}_upsample"] = nn.Upsample(scale_factor=2)
        layers[f"{name}_pop"] = PopConcat().isolate(skips[level])  # type: ignore[operator]
        layers.update(_cell(name, channels[level + 1], narrow, narrow, num_convs))

    layers["head"] = nn.Conv2d(base_channels // 2, out_channels, 1, bias=False)
    return nn.Sequential(layers)


def _cell(
    name: str, in_channels: int, mid_channels: int, out_channels: int, num_convs: int
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of ``num_convs`` blocks: in -> mid -> ... -> mid -> out channels."""
    channels = [in_channels, *[mid_channels] * (num_convs - 1), out_channels]
    for block in range(num_convs):
        before, after = channels[block : block + 2]
        yield f"{name}_{block}_conv", nn.Conv2d(before, after, 3, padding=1, bias=False)
        yield f"{name}_{block}_dropout", nn.Dropout2d(0.1)
        yield f"{name}_{block}_norm", nn.InstanceNorm2d(after)
        yield f"{name}_{block}_relu", nn.LeakyReLU(0.01)


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Stashes what passes through it: ``(batch, channels, height, width)`` float."""

    def forward(self, input: Tensor) -> Generator[stash, None, Tensor]:
        """Pass the input on."""
        yield stash("skip", input)
        return input


@skippable(pop=["skip"])
class PopConcat(nn.Module):
    """Pads its input to the skip tensor's size, and puts the skip tensor's channels before it."""

    def forward(self, input: Tensor) -> Generator[pop, Tensor, Tensor]:
        """Concatenate: a skip tensor whose side was odd is one larger than what comes back up."""
        skip = yield pop("skip")
        missing_height, missing_width = (skip.size(d) - input.size(d) for d in (2, 3))
        if missing_height or missing_width:
            input = F.pad(input, (0, missing_width, 0, missing_height))
        return torch.cat((skip, input), dim=1)
