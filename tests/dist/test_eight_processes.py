"""Eight stages, as on a node with eight GPUs; the pool of processes has fewer ranks."""

from __future__ import annotations

import pytest

from tests.dist.script import run_forked

PARITY = """
import torch
import torch.nn.functional as F
from torch import nn
from procpipe import Stage
from tests.dist.stages import assert_same, assert_same_gradients

def build():
    torch.manual_seed(0)
    blocks = [layer for _ in range(12) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*blocks, nn.Linear(8, 3)).double()

torch.manual_seed(1)
x, y = torch.randn(13, 8, dtype=torch.float64), torch.randint(3, (13,))
stage = Stage(build(), [3] * 7 + [4], loss_fn=F.cross_entropy)
for chunks in (1, 3, 8):
    plain = build()
    parts = list(zip(x.chunk(chunks), y.chunk(chunks), strict=True))
    losses = [F.cross_entropy(plain(a), b) for a, b in parts]
    shares = [torch.tensor(len(a) / 13, dtype=torch.float64) for a, _ in parts]
    for loss, share in reversed(list(zip(losses, shares, strict=True))):
        loss.backward(share)
    total = sum(loss.detach() * share for loss, share in zip(losses, shares, strict=True))
    for mode in ("never", "except_last", "always"):
        stage.chunks, stage.checkpoint = chunks, mode
        stage.zero_grad()
        assert_same(stage.step(x, y), total, f"{chunks} {mode}")
        assert_same_gradients(stage, plain, f"{chunks} {mode}")
print("equal")
"""


@pytest.mark.dist
@pytest.mark.on_gpus(8)
def test_eight_stages_equal_the_plain_model() -> None:
    done = run_forked(PARITY, num_ranks=8)
    done.check()
    assert done.stdout.count("equal") == 8
