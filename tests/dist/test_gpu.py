"""Pipelines on GPUs: NCCL, CUDA IPC, streams and random states, which differ from CPUs.

Each test is marked with the number of GPUs that it needs. Most other tests of this folder run on
GPUs too.
"""

from __future__ import annotations

import re

import pytest

from procpipe.job.devices import nccl_shares_gpus
from tests.dist.devices import num_gpus
from tests.dist.script import run_forked

TRAINING = """
import torch, torch.nn.functional as F
from torch import nn
from procpipe import Stage

def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout({dropout}), nn.Linear(32, 32),
        nn.ReLU(inplace=True), nn.Linear(32, 5), nn.Tanh(),
    ).double()

n = {n}
balance = {{1: [8], 2: [3, 5], 4: [1, 2, 2, 3], 8: [1] * 8}}[n]
torch.manual_seed(1)
input, target = torch.randn(11, 8).double(), torch.randint(5, (11,))
results = {{}}
for mode in ("never", "except_last", "always"):
    stage = Stage(
        build(), balance, chunks=4, devices={devices}, checkpoint=mode, loss_fn=F.cross_entropy
    )
    assert stage.device.type == "cuda", stage.device
    torch.manual_seed(2)
    loss = stage.step(input, target)
    loss += stage.step(input[:6], target[:6])
    # A stage without parameters has one empty parameter, for its optimizer.
    gradients = [parameter.grad for parameter in stage.parameters() if parameter.numel()]
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

AGAIN = """
import time, torch
from torch import nn
from procpipe import Stage

def used_bytes():
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free

used = []
for _ in range(4):
    model = nn.Sequential(nn.Identity(), nn.Identity())
    stage = Stage(model, [1, 1], chunks=4, devices=["cuda:0"] * 2)
    stage.eval()
    with torch.no_grad():
        stage(torch.zeros(4, 1 << 24))
    stage.close()
    used.append(used_bytes())
deadline_s = time.monotonic() + 10
while used_bytes() > used[0] + (64 << 20):  # the other rank may still run
    assert time.monotonic() < deadline_s, (used, used_bytes())
    time.sleep(0.05)
print("nothing is kept")
"""

#: Connects, and sends all messages of training; prints the names of the transports.
STEPS = """
import torch, torch.nn.functional as F
from torch import nn
from procpipe import Stage

model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
stage = Stage(
    model, [1, 1], chunks=4, schedule="1f1b", loss_fn=F.cross_entropy, devices={devices},
)
for _ in range(2):
    assert stage.step(torch.randn(8, 8), torch.randint(4, (8,))).isfinite()
stage.fetch(stage(torch.randn(8, 8)))
names = {{type(each).__name__ for each in stage._world.transports.opened}}
stage.close()
print(*names)
"""


#: As many ranks as there are GPUs: over NCCL, except with one GPU.
NUM_RANKS = max(n for n in (1, 2, 4, 8) if n <= max(1, num_gpus()))

#: Ranks that share GPUs use CUDA IPC, and NCCL too where there are two.
DEVICES = [
    pytest.param(None, marks=pytest.mark.gpu(every=True)),
    pytest.param(["cuda:0"] * 2, marks=pytest.mark.gpu(1)),
    pytest.param(["cuda:0"] * 8, marks=pytest.mark.gpu(1)),
    pytest.param(["cuda:0", "cuda:0", "cuda:1", "cuda:1"], marks=pytest.mark.gpu(2)),
    pytest.param(["cuda:0", "cuda:1", "cuda:0", "cuda:1"], marks=pytest.mark.gpu(2)),
]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("devices", DEVICES)
def test_parity_on_gpus(devices: list[str] | None, dropout: float) -> None:
    n = NUM_RANKS if devices is None else len(devices)
    script = TRAINING.format(n=n, dropout=dropout, devices=devices)
    done = run_forked(script, num_ranks=n if n > 1 else None).check()
    assert "parity holds" in done.stdout


@pytest.mark.gpu(2)
def test_no_warning_of_transfers_outside_of_a_batch() -> None:
    """Torch warns that such a transfer connects one more communicator, or waits for others."""
    done = run_forked(STEPS.format(devices=None), num_ranks=2).check()
    assert done.stdout.split() == ["NcclTransport"] * 2
    assert not re.search("unbatched|P2P", done.stderr), done


@pytest.mark.gpu
def test_parity_by_nccl_between_two_ranks_of_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    if not nccl_shares_gpus():
        pytest.skip("NCCL takes several ranks on one GPU from 2.30 on")
    for script in TRAINING, STEPS:
        code = script.format(n=2, dropout=0.0, devices=["cuda:0"] * 2)
        done = run_forked(code, num_ranks=2).check()
    assert done.stdout.split() == ["NcclTransport"] * 2


@pytest.mark.gpu(2)
def test_parity_where_kernels_load_late_and_all_streams_share_a_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks wait for their devices within tasks, and streams for one another; only emulated."""
    monkeypatch.setenv("EMULATED_GPU_CONNECTIONS", "1")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    script = TRAINING.format(n=2, dropout=0.0, devices=None)
    assert "parity holds" in run_forked(script, num_ranks=2).check().stdout


@pytest.mark.gpu
def test_a_closed_pipeline_frees_its_gpu_memory() -> None:
    done = run_forked(AGAIN, num_ranks=2).check()
    assert "nothing is kept" in done.stdout
