"""What is kept, and for how long: nothing outlives its mini-batch."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from procpipe import is_recomputing
from tests.dist.stages import MODES, num_held, stage_of

pytestmark = pytest.mark.on_gpus

NUM_STEPS = 30


def tensors_by_step(bare, mode):
    """Return counts of live tensors after some of many steps; nothing is held after any."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(6, 6, dtype=torch.float64) for _ in range(bare.num_ranks)))
    num_tensors = []
    options: Any = {"chunks": 4, "checkpoint": mode, "loss_fn": nn.functional.mse_loss}
    with stage_of(bare, mode, model, [1] * bare.num_ranks, **options) as stage:
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
            if k in (2, NUM_STEPS // 2, NUM_STEPS - 1):
                num_tensors.append(count_tensors())
    return num_tensors


def count_tensors():
    gc.collect()
    # Not isinstance, which would import torch's lazy modules.
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


class Keep(nn.Module):
    """Notes the memory of its inputs and outputs, and counts how much of it is in use."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float64))
        self.notes: list[StorageWeakRef] = []

    def __deepcopy__(self, memo):
        return Keep(len(self.weight))

    def forward(self, input):
        output = input * self.weight
        self.notes += [StorageWeakRef(each.untyped_storage()) for each in (input, output)]
        return output

    def num_alive(self):
        return sum(not note.expired() for note in self.notes)


def alive_after(bare, mode, width):
    """Count a layer's inputs and outputs that outlive their mini-batch.

    The model's own input is alive on rank 0, as the test holds it. The garbage collector is off.
    """
    model = nn.Sequential(*(Keep(width) for _ in range(bare.num_ranks)))
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
                alive.append(layer.num_alive())
        finally:
            gc.enable()
    return alive


class Peek(nn.Module):
    """Notes how many of its outputs are in use when its backward pass begins."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float64))
        self.notes: list[StorageWeakRef] = []
        self.num_alive: list[int] = []

    def __deepcopy__(self, memo):
        return Peek(len(self.weight))

    def forward(self, input):
        if is_recomputing():
            self.num_alive.append(sum(not note.expired() for note in self.notes))
        output = input * self.weight
        if not is_recomputing():
            self.notes.append(StorageWeakRef(output.untyped_storage()))
        return output


def outputs_in_use(bare):
    """Count first outputs alive as the first recomputation begins, and before the second."""
    width = 5000
    model = nn.Sequential(*(Peek(width) for _ in range(bare.num_ranks)))
    options: Any = {"chunks": 4, "checkpoint": "always", "loss_fn": torch.mean}
    with stage_of(bare, "peek", model, [1] * bare.num_ranks, **options) as stage:
        stage.step(torch.randn(8, width, dtype=torch.float64))
        layer: Any = stage[0]
        return layer.num_alive


@pytest.mark.only_on_cpus  # GPUs lag behind their hosts, and what they will still send is kept
@pytest.mark.parametrize("mode", MODES)
def test_memory_is_flat_over_many_steps(ranks, mode):
    for num_tensors in ranks(3).run(tensors_by_step, mode, world=False).values():
        assert num_tensors == [num_tensors[0]] * 3


@pytest.mark.parametrize("width", [4, 5000], ids=["inside tokens", "behind tokens"])
@pytest.mark.only_on_cpus  # as above
@pytest.mark.parametrize("mode", MODES)
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
