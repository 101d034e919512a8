"""A script of four ranks, two pipelines with FSDP2, under ``procpipe run``."""

from __future__ import annotations

import re
import signal
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.launch.started import started

pytestmark = pytest.mark.dist

#: Trains for a number of steps; each pipeline has mini-batches of its own.
TRAINING = """
import os, sys
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from procpipe import Stage

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
torch.manual_seed(1)
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
stage = Stage(
    model, balance=[2, 2], mesh=mesh["pp"], chunks=3, schedule="1f1b", loss_fn=F.mse_loss
)
for layer in stage:
    fully_shard(layer, mesh=mesh["dp"])
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    generator = torch.Generator().manual_seed(2 * step + mesh["dp"].get_local_rank())
    input = torch.randn(6, 8, generator=generator)
    loss = stage.step(input, input)
    optimizer.step()
    optimizer.zero_grad()
    if step < 3:
        # In one write, also if output is not buffered: other ranks write to the same pipe.
        line = f"rank {os.environ['RANK']}, step {step}: {loss.item():.6f}\\n"
        print(line, end="", flush=True)
stage.close()
dist.destroy_process_group()
"""


def losses_of_plain():
    """Return the losses of the first pipeline's mini-batches, by step."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        parts = []
        for k in range(2):
            generator = torch.Generator().manual_seed(2 * step + k)
            parts.append(torch.randn(6, 8, generator=generator))
        losses = torch.stack([F.mse_loss(model(part), part) for part in parts])
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(losses[0].item())
    return found


def assert_losses(text):
    """Check what rank 0 has printed: the losses of its pipeline."""
    found = re.findall(r"^rank 0, step (\d): ([\d.]+)$", text, re.MULTILINE)
    assert len(found) == 3, text
    expected = losses_of_plain()
    for step, loss in found:
        assert float(loss) == pytest.approx(expected[int(step)], abs=2e-6), text


def test_a_killed_rank_of_a_mesh_ends_all_pipelines_and_is_named():
    with started("-n", "4", script=(TRAINING, str(10**9)), num_forked=4) as run:
        run.wait_for("rank 0, step 2")
        victim = run.rank(2)
        start_s = time.monotonic()
        victim.send_signal(signal.SIGKILL)
        ended = run.wait()

    # Long before the timeouts of torch.distributed and of procpipe.
    assert time.monotonic() - start_s < 30.0
    assert ended.code == 128 + signal.SIGKILL, ended
    assert ended.left == ()
    assert "procpipe: stage 0 (rank 2) was killed by SIGKILL " in ended.err, ended
    for rank, stage in ((0, 0), (1, 1), (3, 1)):
        assert f"\n  stage {stage} (rank {rank}) was " in ended.err, ended
    assert_losses(ended.out)
