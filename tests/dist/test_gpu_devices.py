"""Which GPU and which transport a rank uses, and which combinations are errors."""

from __future__ import annotations

import re

import pytest

from tests.dist.devices import is_emulated
from tests.dist.script import run_forked, run_script

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


def narrowed(*visible, devices=None, transport="NcclTransport"):
    return NARROWED.format(visible=list(visible), devices=devices, transport=transport)


@pytest.mark.gpu(2)
def test_each_process_sees_a_gpu_of_its_own():
    """As with Slurm's --gpus-per-task=1: both processes use cuda:0, on two GPUs."""
    done = run_script(narrowed("0", "1"), nproc=2)

    done.check()
    assert done.stdout.count("trained on") == 2


@pytest.mark.gpu
def test_processes_that_see_the_same_gpu_share_it_on_request():
    script = narrowed("0", "0", devices=["cuda:0"] * 2, transport="CudaIpcTransport")
    done = run_script(script, nproc=2)

    done.check()
    assert done.stdout.count("trained on") == 2


@pytest.mark.gpu
def test_processes_that_see_the_same_gpu_do_not_share_it_by_default():
    done = run_script(narrowed("0", "0"), nproc=2)

    assert done.returncode != 0
    assert "IndexError: ranks 0 and 1 see one GPU each, and it is the same (cuda:0, " in done.stderr
    assert "trained on" not in done.stdout
    assert not done.left_behind


@pytest.mark.gpu(2)
def test_gpus_without_peer_access(monkeypatch):
    """NCCL uses another path; CUDA IPC is used only between ranks of one GPU."""
    monkeypatch.setenv("EMULATED_GPU_PEER_ACCESS", "0")
    script = """
        import torch
        from torch import nn
        from procpipe import Stage

        stage = Stage(
            nn.Sequential(*[nn.Identity() for _ in range(3)]), [1, 1, 1],
            devices=["cuda:0", "cuda:0", "cuda:1"], loss_fn=torch.mean, chunks=2,
        )
        stage.eval()
        assert stage.step(torch.full((4, 1000), 3.0)).item() == 3.0
        print("there")
    """
    done = run_script(script, nproc=3)

    done.check()
    assert done.stdout.count("there") == 3


FULL = """
import os, subprocess, sys
if os.environ["RANK"] == "1":
    fill = (
        "import sys, torch; free, _ = torch.cuda.mem_get_info(1);"
        "kept = torch.empty(free - (64 << 20), dtype=torch.uint8, device='cuda:1');"
        "print('full', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    filler = subprocess.Popen([sys.executable, "-c", fill], **pipes)
    assert filler.stdout.readline() == b"full\\n"
import torch
from torch import nn
from procpipe import Stage

model = nn.Sequential(nn.Linear(2, 2), nn.Linear(1 << 13, 1 << 12, bias=False))  # of 128 MiB
Stage(model, [1, 1], devices=["cuda:0", "cuda:1"])(torch.randn(2, 2))
"""


@pytest.mark.gpu(2)
def test_a_gpu_that_another_process_fills(monkeypatch):
    monkeypatch.setenv("EMULATED_GPU_MEMORY_MIB", "512")
    done = run_script(FULL, nproc=2)

    assert done.returncode != 0
    assert "procpipe: out of memory on cuda:1: rank 1 " in done.stderr
    assert "rank 0 ends, because rank 1 failed in Stage: OutOfMemoryError" in done.stderr


SMALLER = """
import torch
from torch import nn
from procpipe import Stage

assert torch.cuda.get_device_properties(1).total_memory < 100 << 20

class Wide(nn.Module):
    def forward(self, x):
        return x.repeat(1, 1 << 21)  # 32 MiB a micro-batch

first = nn.Linear(2, 2)
{layer}
stage = Stage(nn.Sequential(first, layer), [1, 1], chunks=4, loss_fn=torch.sum)
stage.step(torch.randn(8, 2))
"""


@pytest.mark.gpu(2)
@pytest.mark.skipif(not is_emulated(), reason="real GPUs of one machine are seldom unequal")
@pytest.mark.parametrize(
    ("mib", "layer", "call", "lines"),
    [
        (
            64,
            "layer = nn.Linear(1 << 13, 1 << 12, bias=False)  # of 128 MiB",
            "Stage",
            [r"out of memory on cuda:1: rank 1 builds its stage\. Give the stage fewer layers"],
        ),
        (
            64,
            "layer = nn.Sequential(Wide(), nn.Tanh())",
            "step()",
            [
                r"in stage 1 \(rank 1\), task F\d@1 \(micro-batch \d\), layer '1' \(Sequential\)",
                r"procpipe: out of memory on cuda:1: stage 1 held \d+ micro-batches",
            ],
        ),
        (
            1,
            "layer = nn.Tanh()",
            "step()",
            [r"out of memory on cuda:1: rank 1 builds its stage\. Give the stage fewer layers"],
        ),
    ],
    ids=["weights", "activations", "connections"],
)
def test_a_stage_that_does_not_fit_on_the_smaller_gpu(
    monkeypatch, tmp_path, mib, layer, call, lines
):
    monkeypatch.setenv("EMULATED_GPU_MEMORY_MIB", f"8192,{mib}")
    # Its own emulated GPUs: other processes of this run may use memory on the common ones.
    monkeypatch.setenv("EMULATED_GPU_FOLDER", str(tmp_path))
    done = run_forked(SMALLER.format(layer=layer), num_ranks=2)

    assert done.returncode != 0
    assert not done.left_behind
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("\ntorch.OutOfMemoryError: ") == 1
    for line in lines:
        assert re.search(line, done.stderr), f"{line}\n{done.stderr}"
    assert f"rank 0 ends, because rank 1 failed in {call}: OutOfMemoryError" in done.stderr


QUEUES = """
import os
import torch
from torch import nn

found = []
is_available = torch.cuda.is_available

def noted():
    found.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
    return is_available()

torch.cuda.is_available = noted
from procpipe import Stage

Stage(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], devices=["cuda:0"] * 2)
print(found[0])
"""


@pytest.mark.gpu
@pytest.mark.parametrize(("chosen", "found"), [(None, "32"), ("1", "1")])
def test_ranks_ask_for_all_hardware_queues_before_cuda_starts(monkeypatch, chosen, found):
    if chosen is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    else:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", chosen)
    assert run_forked(QUEUES, num_ranks=2).check().stdout.split() == [found] * 2
