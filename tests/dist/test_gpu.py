"""Pipelines on GPUs: NCCL, CUDA IPC, streams and random states, which differ from CPUs.

Each test is marked with the number of GPUs that it needs. Most other tests of this folder run on
GPUs too.
"""

from __future__ import annotations

import re

import pytest

from procpipe.job.devices import nccl_shares_gpus
from tests.dist.devices import is_emulated, num_gpus
from tests.dist.script import run_by_torchrun, run_forked

#: Dropout draws from the GPU's generator, and every mode gives what the oracle on the CPU does.
PARITY = """
from tests.dist.test_parity import compare_in_a_script
compare_in_a_script({devices})
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


@pytest.mark.parametrize("devices", DEVICES)
def test_parity_on_gpus(devices: list[str] | None) -> None:
    num_ranks = NUM_RANKS if devices is None else len(devices)
    done = run_forked(PARITY.format(devices=devices), num_ranks=num_ranks).check()
    assert done.stdout.count("parity holds") == num_ranks


@pytest.mark.gpu(2)
def test_no_warning_of_transfers_outside_of_a_batch() -> None:
    """Torch warns that such a transfer connects one more communicator, or waits for others."""
    done = run_forked(STEPS.format(devices=None), num_ranks=2).check()
    assert done.stdout.split() == ["NcclTransport"] * 2
    assert not re.search("unbatched|P2P", done.stderr), done


@pytest.mark.gpu
def test_a_stage_without_a_launcher_is_on_a_gpu() -> None:
    made = "Stage(torch.nn.Sequential(torch.nn.Linear(2, 2)), loss_fn=torch.sum)"
    script = f"import torch\nfrom procpipe import Stage\nstage = {made}\n"
    done = run_forked(f"{script}print(stage.device, stage.step(torch.ones(1, 2)).device)").check()
    assert done.stdout.split() == ["cuda:0"] * 2


@pytest.mark.gpu
def test_parity_by_nccl_between_two_ranks_of_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    if not nccl_shares_gpus():
        pytest.skip("NCCL takes several ranks on one GPU from 2.30 on")
    for script in PARITY, STEPS:
        code = script.format(devices=["cuda:0"] * 2)
        done = run_forked(code, num_ranks=2).check()
    assert done.stdout.split() == ["NcclTransport"] * 2


@pytest.mark.gpu(2)
def test_parity_where_kernels_load_late_and_all_streams_share_a_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks wait for their devices within tasks, and streams for one another; only emulated."""
    monkeypatch.setenv("EMULATED_GPU_CONNECTIONS", "1")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "parity holds" in run_forked(PARITY.format(devices=None), num_ranks=2).check().stdout


@pytest.mark.gpu
def test_a_closed_pipeline_frees_its_gpu_memory() -> None:
    done = run_forked(AGAIN, num_ranks=2).check()
    assert "nothing is kept" in done.stdout


# -- which GPU and which transport a rank uses ----------------------------------------------------

#: Each process sees the GPUs that a launcher allows it, set before torch is imported.
NARROWED = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = {visible}[int(os.environ["LOCAL_RANK"])]
import torch, torch.nn.functional as F
from torch import nn
from procpipe import Stage

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
input, target = torch.randn(6, 8), torch.randint(4, (6,))
truth = F.cross_entropy(model(input), target).item()
stage = Stage(model, [2, 1], chunks=2, loss_fn=F.cross_entropy, devices={devices})
assert str(stage.device) == "cuda:0", stage.device
loss = stage.step(input, target).item()
assert abs(loss - truth) < 1e-5, (loss, truth)
names = {{type(each).__name__ for each in stage._world.transports.opened}}
assert names == {{"{transport}"}}, names
print("trained on", stage.devices)
"""


@pytest.mark.parametrize(
    ("visible", "devices", "transport"),
    [
        # As with Slurm's --gpus-per-task=1: both processes use cuda:0, on two GPUs.
        pytest.param("01", None, "NcclTransport", marks=pytest.mark.gpu(2)),
        pytest.param("00", ["cuda:0"] * 2, "CudaIpcTransport", marks=pytest.mark.gpu),
    ],
)
def test_each_process_sees_one_gpu(visible, devices, transport):
    script = NARROWED.format(visible=list(visible), devices=devices, transport=transport)

    assert run_by_torchrun(script, num_ranks=2).check().stdout.count("trained on") == 2


SMALLER = """
import torch
from torch import nn
from procpipe import Stage

assert torch.cuda.get_device_properties(1).total_memory < 100 << 20

stage = Stage(nn.Sequential(nn.Linear(2, 2), {layer}), [1, 1], chunks=4, loss_fn=torch.sum)
stage.step(torch.randn(8, 2))
"""


@pytest.mark.gpu(2)
@pytest.mark.skipif(not is_emulated(), reason="real GPUs of one machine are seldom unequal")
@pytest.mark.parametrize(
    ("mib", "layer", "call"),
    [
        (64, "nn.Linear(1 << 13, 1 << 12, bias=False)", "Stage"),  # weights of 128 MiB
        (1, "nn.Tanh()", "step()"),  # what a connection takes
    ],
)
def test_a_stage_that_does_not_fit_on_the_smaller_gpu(monkeypatch, tmp_path, mib, layer, call):
    monkeypatch.setenv("EMULATED_GPU_MEMORY_MIB", f"8192,{mib}")
    # Its own emulated GPUs: other processes of this run may use memory on the common ones.
    monkeypatch.setenv("EMULATED_GPU_FOLDER", str(tmp_path))
    done = run_forked(SMALLER.format(layer=layer), num_ranks=2)

    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("\ntorch.OutOfMemoryError: ") == 1
    line = "out of memory on cuda:1: rank 1 builds its stage. Give the stage fewer layers"
    assert line in done.stderr, done
    assert f"rank 0 ends, because rank 1 failed in {call}: OutOfMemoryError" in done.stderr
