"""Which GPU and which transport a rank uses, and which combinations are errors."""

from __future__ import annotations

import pytest

from tests.dist.devices import is_emulated
from tests.dist.script import run_by_torchrun, run_forked

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
