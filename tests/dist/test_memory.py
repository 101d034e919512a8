"""What is kept, and for how long: nothing outlives its mini-batch, and no open file its stage.

What a checkpoint mode recomputes: tests/plan. That no graph is kept meanwhile: tests/compute.
"""

from __future__ import annotations

import gc
import math
import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from procpipe import Stage, is_recomputing
from tests.dist.stages import num_held, stage_of

pytestmark = pytest.mark.on_gpus

NUM_STEPS = 16


def tensors_by_step(bare):
    """Count the live tensors after few and after many steps; nothing is held after any.

    Not those of earlier tests, some of which may be freed meanwhile.
    """
    gc.collect()
    gc.freeze()
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(6, 6, dtype=torch.float64) for _ in range(bare.num_ranks)))
    num_tensors = []
    options: Any = {"chunks": 4, "loss_fn": nn.functional.mse_loss}
    with stage_of(bare, "flat", model, [1] * bare.num_ranks, **options) as stage:
        optimizer = torch.optim.AdamW(stage.parameters())
        for k in range(NUM_STEPS):
            inputs, target = torch.randn(2, 20, 6, dtype=torch.float64)
            optimizer.zero_grad()
            stage.step(inputs, target)
            if k % 10 == 0:
                stage.eval()
                stage.step(inputs, target)
                stage.train()
            optimizer.step()
            assert num_held(stage) == 0
            if k in (2, NUM_STEPS - 1):
                num_tensors.append(count_tensors())
    gc.unfreeze()
    return num_tensors


def count_tensors():
    gc.collect()
    # Not isinstance, which would import torch's lazy modules.
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


class Watched(nn.Module):
    """Notes the memory of its inputs and outputs; counts what is in use as it recomputes."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float64))
        self.inputs: list[StorageWeakRef] = []
        self.outputs: list[StorageWeakRef] = []
        self.num_outputs: list[int] = []

    def __deepcopy__(self, memo):
        return Watched(len(self.weight))

    def forward(self, input):
        output = input * self.weight
        if is_recomputing():
            self.num_outputs.append(num_alive(self.outputs))
        else:
            self.outputs.append(StorageWeakRef(output.untyped_storage()))
        self.inputs.append(StorageWeakRef(input.untyped_storage()))
        return output


def num_alive(notes):
    return sum(not note.expired() for note in notes)


def alive_after(bare, mode, width):
    """Count a layer's inputs and outputs that outlive their mini-batch.

    The model's own input is alive on rank 0, as the test holds it. The garbage collector is off.
    """
    model = nn.Sequential(*(Watched(width) for _ in range(bare.num_ranks)))
    options: Any = {"chunks": 4, "checkpoint": mode, "loss_fn": torch.mean}
    with stage_of(bare, f"{mode} {width}", model, [1] * bare.num_ranks, **options) as stage:
        layer: Any = stage[0]
        alive = []
        gc.disable()
        try:
            for call in range(8):
                inputs = torch.randn(8, width, dtype=torch.float64)
                if call < 4:
                    stage.step(inputs)
                elif call < 6:
                    stage(inputs).sum().backward()
                elif call == 6:
                    stage(inputs)  # without backward
                    stage.step(inputs)
                else:
                    with torch.no_grad():
                        stage.step(inputs)
                del inputs
                # All ranks have ended the call, so that every acknowledgement is there.
                stage.clip_grad_norm_(math.inf)
                alive.append(num_alive(layer.inputs + layer.outputs))
        finally:
            gc.enable()
    return alive


def outputs_in_use(bare):
    """Count first outputs alive as the first recomputation begins, and before the second."""
    width = 5000
    model = nn.Sequential(*(Watched(width) for _ in range(bare.num_ranks)))
    options: Any = {"chunks": 4, "checkpoint": "always", "loss_fn": torch.mean}
    with stage_of(bare, "peek", model, [1] * bare.num_ranks, **options) as stage:
        stage.step(torch.randn(8, width, dtype=torch.float64))
        layer: Any = stage[0]
        return layer.num_outputs


@pytest.mark.only_on_cpus  # GPUs lag behind their hosts, and what they will still send is kept
def test_memory_is_flat_over_many_steps(ranks):
    for before, after in ranks(2).run(tensors_by_step, world=False).values():
        assert before == after


@pytest.mark.parametrize("width", [4, 5000], ids=["inside tokens", "behind tokens"])
@pytest.mark.only_on_cpus  # as above
@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_no_tensor_outlives_its_mini_batch(ranks, mode, width):
    for alive in ranks(2).run(alive_after, mode, width, world=False).values():
        assert alive == [0] * 8


def test_sent_tensors_are_freed_when_they_have_arrived(ranks):
    """Not with the next message, which may come only after the whole backward pass.

    Stage 0 recomputes its last micro-batch before it waits for a gradient, so an output may still
    be in transit; after the wait for the first gradient, all have been received.
    """
    first, _ = ranks(2).run(outputs_in_use, world=False).values()

    assert first[0] <= 4
    assert first[1:] == [0, 0, 0]


# -- open files -----------------------------------------------------------------------------------

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


@pytest.mark.only_on_cpus
@pytest.mark.parametrize(("transport", "is_kept"), [("shm", True), ("sockets", False)])
def test_a_closed_stage_leaves_no_open_file(ranks, transport, is_kept):
    for counts in ranks(2).run(run_stages, transport, is_kept, world=False).values():
        assert counts[1:] == [counts[1]] * (NUM_STAGES - 1)
