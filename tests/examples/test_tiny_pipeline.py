"""The pipeline in one file gives the loss and gradients of the real one, and those of the model.

Its schedules are those of ``procpipe.plan``.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.tiny_pipeline import TinyStage, gpipe, one_f_one_b
from procpipe.plan.schedules.gpipe import gpipe as plan_of_gpipe
from procpipe.plan.schedules.one_f_one_b import one_f_one_b as plan_of_1f1b
from tests.cases import for_each
from tests.dist.meshes import process_group
from tests.dist.script import run_by_torchrun
from tests.dist.stages import assert_same, assert_same_gradients, stage_of

FILE = Path(__file__).parents[2] / "examples/tiny_pipeline.py"
SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}

#: Layers of each stage; some have no parameters.
BALANCES = {2: [1, 9], 3: [3, 1, 6]}

#: Numbers of samples, and of micro-batches: even, a smaller last one, fewer than asked for, one.
SIZES = [(8, 4), (7, 3), (2, 6), (3, 1)]

#: Of the whole mini-batch, whose sums have another order.
TOLERANCE = 1e-12


def test_the_file_can_be_read_at_once():
    assert len(FILE.read_text().splitlines()) <= 300


@for_each(("schedule", "plan_of"), [(gpipe, plan_of_gpipe), (one_f_one_b, plan_of_1f1b)])
def test_a_schedule_has_the_tasks_of_the_plan(schedule, plan_of):
    for m in range(1, 7):
        for n in range(1, 6):
            planned = [task for cycle in plan_of(m, n).cycles for task in cycle]
            for j in range(n):
                expected = [(task.kind, task.i) for task in planned if task.j == j]
                assert schedule(m, n, j) == expected, (m, n, j)


def make_model():
    """Return a model of ten layers, between which tensors have 2, 3 and 4 dimensions."""
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Linear(16, 16), nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 3, 3), nn.Flatten(2)),
        *(nn.Linear(4, 5), nn.Flatten(), nn.Dropout(0.0)),
        *(nn.Linear(15, 6), nn.Tanh(), nn.Linear(6, 3)),
    ).double()


def compare_with_stage_and_model(bare, name, recompute):
    with process_group(bare):
        compare(bare, BALANCES[bare.num_ranks], name, recompute)


def compare(bare, balance, name, recompute):
    """Compare with the real stage to the last bit, and with the whole model in float64."""
    model = make_model()
    whole = copy.deepcopy(model)
    tiny = TinyStage(model, balance, F.cross_entropy, recompute)
    options = {"loss_fn": F.cross_entropy, "schedule": name}
    options["checkpoint"] = "always" if recompute else "never"
    for size, m in SIZES:
        what = f"{balance}, {size} samples in {m}"
        model.zero_grad()
        whole.zero_grad()
        generator = torch.Generator().manual_seed(size)
        input = torch.randn(size, 16, generator=generator, dtype=torch.float64)
        target = torch.randint(3, (size,), generator=generator)
        loss = tiny.step(input, target, m, SCHEDULES[name])

        with stage_of(bare, f"{what}, {name}", whole, balance, chunks=m, **options) as stage:
            assert_same(loss, stage.step(input, target), f"{what}: loss of the stage")
            assert_same_gradients(tiny.layers, stage, what)
        of_whole = F.cross_entropy(whole(input), target)
        of_whole.backward()
        assert_same(loss, of_whole.detach(), f"{what}: loss of the model", TOLERANCE)
        assert_same_gradients(tiny.layers, whole, what, TOLERANCE)


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks", BALANCES)
def test_loss_and_gradients_are_those_of_the_stage_and_of_the_model(
    ranks, num_ranks, name, recompute
):
    run = ranks(num_ranks).run(compare_with_stage_and_model, name, recompute, world=False)
    assert run.values() == [None] * num_ranks


@pytest.mark.dist
def test_the_script_trains_under_torchrun():
    done = run_by_torchrun(FILE, num_ranks=2).check()
    losses = re.findall(r"loss ([\d.]+), of the whole model ([\d.]+)\n", done.stdout)
    assert len(losses) == 9
    assert all(ours == expected for ours, expected in losses)
    assert losses[:3] == losses[3:6] == losses[6:]
    assert float(losses[2][0]) < float(losses[0][0])
    assert re.findall(r"held at most (\d)", done.stdout) == ["8", "2", "2"]
