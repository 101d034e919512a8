"""A GPU with room for few transfers at once: steps are correct, or the stall is an error."""

from __future__ import annotations

import re

import pytest

from tests.dist.devices import is_emulated
from tests.dist.script import run_forked

#: One communicator per channel: between two stages, activations and targets go down, gradients and
#: losses up.
NUM_COMMUNICATORS = 2

#: Rank 0's device computes nothing until both hosts have queued a step. Its receives wait for no
#: compute, so they take the room first, before the peer can send what they receive.
SCRIPT = """
import copy
import time
import torch
import torch.nn.functional as F
from torch import nn
from procpipe import Stage
from tests.held import held

torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).double()
x, y = torch.randn(16, 64).double(), torch.randn(16, 64).double()
parts = list(zip(x.chunk(8), y.chunk(8)))
truth = sum(F.mse_loss(plain(a), b) / 8 for a, b in parts).item()
stage = Stage(
    plain, [1, 1], chunks=8, schedule="1f1b", checkpoint="never", loss_fn=F.mse_loss, timeout_s=15
)
# A warm-up: these are slow in a new process.
F.mse_loss(copy.deepcopy(plain).to(stage.device)(x.to(stage.device)), y.to(stage.device)).backward()
with torch.no_grad():
    stage(x)
torch.cuda.synchronize()
(transport,) = stage._world.transports.opened
assert len(transport._groups) == {num_communicators}
with held(torch.cuda.current_stream() if stage.rank == 0 else torch.cuda.Stream()):
    loss = stage.step(x, y)
    time.sleep(1.0)  # for the receives to begin: there is no way to query it
print("queued", flush=True)
assert abs(loss.item() - truth) < 1e-12, (loss, truth)
stage.close()
print("trained", flush=True)
"""

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.skipif(not is_emulated(), reason="real GPUs have room for more"),
]


def train(monkeypatch, room):
    monkeypatch.setenv("EMULATED_GPU_KERNEL_SLOTS", str(room))
    monkeypatch.setenv("EMULATED_GPU_STARVE_MS", "0")
    return run_forked(SCRIPT.format(num_communicators=NUM_COMMUNICATORS), num_ranks=2)


def test_room_for_each_communicator_is_enough(monkeypatch):
    done = train(monkeypatch, NUM_COMMUNICATORS).check()
    assert done.stdout.count("trained") == 2


def test_without_room_to_send_the_stall_is_an_error(monkeypatch):
    done = train(monkeypatch, 1)
    assert done.returncode != 0
    assert not done.left_behind
    assert done.stdout.split() == ["queued"] * 2
    # One rank may time out first, and the other end because of it.
    assert re.search(
        r"rank [01] has waited [\d.]+ s for its device, in transfers with ranks", done.stderr
    )
