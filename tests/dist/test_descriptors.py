"""Few open files with any number of micro-batches, and none after a stage is closed."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from torch import nn

from procpipe import Stage
from procpipe.channel.link import PIECE_BYTES
from tests.dist.script import run_forked, run_script
from tests.dist.stages import stage_of

NUM_STAGES = 12

#: More than fits into a token.
WIDTH = 3000

MANY_CHUNKS = """
import os, resource
import torch
from torch import nn
from procpipe import Stage
from procpipe.skip import pop, skippable, stash

@skippable(stash=["a", "b"])
class Stashes(nn.Module):
    def forward(self, x):
        yield stash("a", x * 1)
        yield stash("b", x * 2)
        return x

@skippable(pop=["a", "b"])
class Pops(nn.Module):
    def forward(self, x):
        a = yield pop("a")
        b = yield pop("b")
        return x + a + b

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
    def forward(self, x):
        return x * self.weight

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
torch.set_default_dtype(torch.float64)
model = nn.Sequential(Scale(), Stashes(), Pops(), Scale())
stage = Stage(model, [2, 2], chunks=100, loss_fn=torch.mean)
for _ in range(2):
    loss = stage.step(torch.ones(100, 3000)).item()
    assert abs(loss - 4.0) < 1e-9, loss
assert len(os.listdir("/proc/self/fd")) < 40, os.listdir("/proc/self/fd")
"""


def test_many_micro_batches_need_few_open_files():
    """Symptom: "Too many open files", as each slot took two open files of its sender."""
    run_forked(MANY_CHUNKS, num_ranks=2).check()


def run_stages(bare, transport, is_kept):
    """Return the number of open files after each stage, which was closed or failed."""
    model = nn.Sequential(nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1))
    kept, counts = [], []
    gc.collect()  # of earlier tests
    for k in range(NUM_STAGES):
        if k % 10 == 9:
            with pytest.raises(ValueError, match="chunks is 0"):
                Stage(model, [1, 1], chunks=0)
        options = {"transport": transport, "chunks": 2, "loss_fn": torch.mean}
        with stage_of(bare, f"stage {k}", model, [1, 1], **options) as stage:
            stage.step(torch.ones(8, 4))
        if is_kept:
            kept.append(stage)
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


@pytest.mark.parametrize("is_kept", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize("transport", ["shm", "sockets"])
def test_a_closed_stage_leaves_no_open_file(ranks, transport, is_kept):
    for counts in ranks(2).run(run_stages, transport, is_kept, world=False).values():
        assert counts[1:] == [counts[1]] * (NUM_STAGES - 1)


STAGES_IN_TURN = """
import os
import torch
from torch import nn
from procpipe import Stage

counts = []
for k in range({num_stages}):
    if {fails}:
        try:
            Stage(nn.Sequential(nn.ReLU(), nn.ReLU()), [1, 2])
        except ValueError:
            pass
    else:
        stage = Stage(nn.Sequential(nn.ReLU(), nn.ReLU()), [1, 1], chunks=2)
        with torch.no_grad():
            stage(torch.ones(4, 3000))
        stage.close()
    counts.append(len(os.listdir("/proc/self/fd")))
assert counts[1:] == [counts[1]] * (len(counts) - 1), counts
"""


def test_stages_in_turn_leave_no_open_file_under_a_launcher():
    """Each stage has its own connection to the launcher's store."""
    scripts = [STAGES_IN_TURN.format(num_stages=12, fails=fails) for fails in (False, True)]
    run_script("".join(scripts), nproc=2, num_forked=2).check()


@pytest.mark.parametrize("fails", [False, True], ids=["closed", "failed"])
def test_stages_in_turn_leave_no_open_file_without_a_launcher(fails):
    run_forked(STAGES_IN_TURN.format(num_stages=12, fails=fails)).check()


def fetch_large(world, num_bytes):
    """Return the peak of the process's memory during a fetch, without the value, in bytes."""
    stage = Stage(nn.Sequential(nn.ReLU(), nn.ReLU()), [1, 1], world=world)
    with torch.no_grad():
        stage(torch.ones(1))
    value = None
    if stage.rank == 0:
        value = [torch.arange(num_bytes // 8), torch.ones(0), torch.tensor([1.5]), "text"]
    reset_peak()
    before = peak_bytes()
    fetched = stage.fetch(value)
    taken = peak_bytes() - before
    assert torch.equal(fetched[0], torch.arange(num_bytes // 8))
    assert fetched[1].shape == (0,)
    assert fetched[2].item() == 1.5
    assert fetched[3] == "text"
    assert stage.fetch(torch.tensor(3.0)).item() == 3.0  # the next one is in order
    stage.close()
    return taken - (0 if value else num_bytes)


def reset_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak_bytes():
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def test_a_large_value_is_fetched_without_a_copy_of_it(ranks):
    """Symptom: one copy at each end, and struct.error from 4 GiB on."""
    num_bytes = 32 * PIECE_BYTES + 8

    for taken in ranks(2).run(fetch_large, num_bytes).values():
        assert taken < num_bytes // 2
