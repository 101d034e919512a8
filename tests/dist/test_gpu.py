"""Pipelines on GPUs: what differs from CPUs is NCCL, streams, and the device's random states.

Not yet run: no machine with a GPU was at hand. Each test says how many GPUs it needs.
"""

from __future__ import annotations

import pytest
import torch

from tests.dist.script import run_script

TRAINING = """
import torch, torch.nn.functional as F
from torch import nn
from procpipe import Stage

def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout({dropout}), nn.Linear(32, 32),
        nn.ReLU(inplace=True), nn.Linear(32, 5),
    ).double()

n = {n}
balance = {{1: [7], 2: [3, 4], 4: [1, 2, 2, 2]}}[n]
torch.manual_seed(1)
input, target = torch.randn(11, 8).double(), torch.randint(5, (11,))
results = {{}}
for mode in ("never", "except_last", "always"):
    stage = Stage(build(), balance, chunks=4, checkpoint=mode, loss_fn=F.cross_entropy)
    assert stage.device.type == "cuda", stage.device
    torch.manual_seed(2)
    loss = stage.step(input, target)
    loss += stage.step(input[:6], target[:6])
    gradients = [parameter.grad for parameter in stage.parameters()]
    results[mode] = [tensor.clone() for tensor in (loss, *gradients, *stage.buffers())]
    for ours, truth in zip(results[mode], results["never"], strict=True):
        assert torch.equal(ours, truth), (mode, stage.rank)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        stage.float()  # float64 is left alone by autocast
        assert torch.isfinite(stage.step(input.float(), target))
        stage.double()
    output = stage(input)
    F.cross_entropy(output, target.to(stage.device)).backward()
    stage.close()

plain = build().cuda()
if {dropout} == 0.0:
    total = 0.0
    for x, y in ((input, target), (input[:6], target[:6])):
        parts = list(zip(x.chunk(4), y.chunk(4)))
        losses = [F.cross_entropy(plain(a.cuda()), b.cuda()) * (len(a) / len(x)) for a, b in parts]
        for loss in reversed(losses):
            loss.backward()
        total += sum(losses)
    torch.testing.assert_close(results["always"][0], total.detach(), rtol=0, atol=1e-12)
print("parity holds")
"""

LARGE = """
import torch
from torch import nn
from procpipe import Stage

class Spin(nn.Module):
    def forward(self, x):
        for _ in range(20):
            x = x + 1
        return x

stage = Stage(nn.Sequential(*[Spin() for _ in range({n})]), [1] * {n}, chunks=4)
stage.eval()
for size in (1 << 22, 5, 1 << 20):
    x = torch.arange(4 * size, dtype=torch.float64).reshape(4, size)
    with torch.no_grad():
        output = stage.fetch(stage(x))
    assert torch.equal(output.cpu(), x + 20 * {n})
print("large messages arrive")
"""


def needs_gpus(count: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        torch.cuda.device_count() < count, reason=f"needs {count} GPUs with NCCL"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("n", [pytest.param(k, marks=needs_gpus(k)) for k in (1, 2, 4)])
def test_parity_on_gpus(n: int, dropout: float) -> None:
    done = run_script(TRAINING.format(n=n, dropout=dropout), nproc=n if n > 1 else None)
    done.check()
    assert "parity holds" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("n", [pytest.param(k, marks=needs_gpus(k)) for k in (2, 4)])
def test_large_and_changing_messages_over_nccl(n: int) -> None:
    done = run_script(LARGE.format(n=n), nproc=n)
    done.check()
    assert "large messages arrive" in done.stdout
