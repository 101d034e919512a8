"""A GPU that has room for few transfers at once: steps are right, or the stall is an error."""

from __future__ import annotations

import pytest

from tests.dist.devices import is_emulated
from tests.dist.script import run_forked

#: Both ranks have something to send while the other one sends.
SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn
from procpipe import Stage

torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).double()
x, y = torch.randn(16, 64).double(), torch.randn(16, 64).double()
truth = sum(F.mse_loss(plain(a), b) / 8 for a, b in zip(x.chunk(8), y.chunk(8))).item()
stage = Stage(plain, [1, 1], chunks=8, schedule="1f1b", loss_fn=F.mse_loss, timeout_s={timeout_s})
for _ in range(3):
    loss = stage.step(x, y).item()
    assert abs(loss - truth) < 1e-12, (loss, truth)
stage.close()
print("trained")
"""

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.skipif(not is_emulated(), reason="real GPUs have room for more"),
]


def test_as_many_transfers_at_once_as_channels_are_enough(monkeypatch):
    """Two stages have four: activations and targets down, gradients and losses up."""
    monkeypatch.setenv("EMULATED_GPU_KERNEL_SLOTS", "4")
    done = run_forked(SCRIPT.format(timeout_s=60), num_ranks=2).check()
    assert done.stdout.count("trained") == 2


def test_one_transfer_at_once_is_enough_or_the_stall_is_an_error(monkeypatch):
    """If both GPUs begin to send, neither has room to receive: only time tells."""
    monkeypatch.setenv("EMULATED_GPU_KERNEL_SLOTS", "1")
    done = run_forked(SCRIPT.format(timeout_s=8), num_ranks=2)
    assert not done.left_behind
    if done.returncode == 0:
        assert done.stdout.count("trained") == 2
    else:
        assert "WaitTimeoutError" in done.stderr
        assert "has waited" in done.stderr
