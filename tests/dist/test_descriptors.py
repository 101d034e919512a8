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
