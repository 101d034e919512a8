"""Few open files with any number of micro-batches, and none after a stage is closed."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from torch import nn

from procpipe import Stage
from tests.dist.stages import stage_of

NUM_STAGES = 12

#: More than fits into a token.
WIDTH = 3000


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


@pytest.mark.parametrize(("transport", "is_kept"), [("shm", True), ("sockets", False)])
def test_a_closed_stage_leaves_no_open_file(ranks, transport, is_kept):
    for counts in ranks(2).run(run_stages, transport, is_kept, world=False).values():
        assert counts[1:] == [counts[1]] * (NUM_STAGES - 1)


def fetch_large(world, num_bytes):
    """Return the peak of the process's memory during a fetch, without the value, in bytes."""
    stage = Stage(nn.Sequential(nn.ReLU(), nn.ReLU()), [1, 1], world=world)
    with torch.no_grad():
        stage(torch.ones(1))
    value = None
    if stage.rank == 0:
        value = torch.arange(num_bytes // 8)
    reset_peak()
    before = peak_bytes()
    fetched = stage.fetch(value)
    taken = peak_bytes() - before
    assert torch.equal(fetched, torch.arange(num_bytes // 8))
    stage.close()
    return taken - (0 if stage.rank == 0 else num_bytes)


def reset_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak_bytes():
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def test_a_large_value_is_fetched_without_a_copy_of_it(ranks):
    """Symptom: one copy at each end, and struct.error from 4 GiB on."""
    num_bytes = (1 << 29) + 8

    for taken in ranks(2).run(fetch_large, num_bytes).values():
        assert taken < num_bytes // 2
