"""Layers that use the skippables of another package are refused before anything runs."""

from __future__ import annotations

import pytest
from torch import nn

from procpipe import Stage
from tests.skip.layers import drawn

their_skip = pytest.importorskip("torchgpipe.skip")


@their_skip.skippable(stash=["a"])
class TheirStash(nn.Module):
    def forward(self, x):
        yield their_skip.stash("a", x)
        return x


@their_skip.skippable(pop=["a"])
class TheirPop(nn.Module):
    def forward(self, x):
        return x + (yield their_skip.pop("a"))


class OfOldTorch(nn.Module):
    """A skippable of torch.distributed.pipeline.sync.skip, which torch has removed."""

    __module__ = "torch.distributed.pipeline.sync.skip.skippable"


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            (TheirStash, TheirPop),
            "layer '0' (TheirStash) is a skippable of torchgpipe.skip; layer '1.0' (TheirPop) is",
        ),
        ((drawn("+a"), TheirPop), "layer '1.0' (TheirPop) is a skippable of torchgpipe.skip"),
        (
            (nn.ReLU, OfOldTorch),
            "layer '1.0' (OfOldTorch) is a skippable of torch.distributed.pipeline.sync.skip",
        ),
    ],
)
def test_skippables_of_torchgpipe_are_refused_before_anything_runs(layers, message):
    first, second = (layer() if isinstance(layer, type) else layer for layer in layers)
    with pytest.raises(TypeError) as info:
        Stage(nn.Sequential(first, nn.Sequential(second)), [2])
    assert message in str(info.value)
    assert "write `from procpipe.skip import skippable, stash, pop`" in str(info.value)
