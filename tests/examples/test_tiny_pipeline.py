"""The pipeline in one file gives the loss and gradients of the real one, and those of the model.

Its schedules are those that it draws, and those of ``procpipe.plan``.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.tiny_pipeline import TinyStage, clock_cycles, gpipe, one_f_one_b
from procpipe.plan.schedules.gpipe import gpipe as plan_of_gpipe
from procpipe.plan.schedules.one_f_one_b import one_f_one_b as plan_of_1f1b
from tests.cases import for_each
from tests.dist.meshes import process_group
from tests.dist.script import run_script
from tests.dist.stages import assert_same, assert_same_gradients, plain_step, stage_of, zero_grad

FILE = Path(__file__).parents[2] / "examples/tiny_pipeline.py"
SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}

#: Layers of each stage; some have no parameters.
BALANCES = {2: [[4, 6], [1, 9]], 3: [[3, 4, 3], [1, 1, 8]]}

#: Numbers of samples, and of micro-batches: even, a smaller last one, fewer than asked for, one.
SIZES = [(8, 4), (7, 3), (5, 4), (2, 6), (3, 1)]

#: Of the whole mini-batch, whose sums have another order.
TOLERANCE = 1e-12


def test_the_file_can_be_read_at_once():
    assert len(FILE.read_text().splitlines()) <= 300


# -- Schedules -------------------------------------------------------------------------------------


def test_the_clock_cycles_are_those_of_the_table():
    drawn = re.findall(r"^ *\d +(\(.*\))$", str(clock_cycles.__doc__), re.MULTILINE)
    cells = [re.findall(r"\((\d),(\d)\)", line) for line in drawn]
    cycles = [[(int(i), int(j)) for i, j in line] for line in cells]
    assert cycles[2] == [(2, 0), (1, 1), (0, 2)]
    assert list(clock_cycles(3, 3)) == cycles


@for_each("schedule", [gpipe, one_f_one_b])
def test_a_schedule_is_the_one_that_it_draws(schedule):
    rows = re.findall(r"^ *stage (\d)  ( *[FB].*)$", schedule.__doc__, re.MULTILINE)
    times: dict[str, list[int]] = {}
    for j, row in rows:
        found = list(re.finditer(r"([FB])(\d)", row))
        assert [(task[1], int(task[2])) for task in found] == schedule(4, 3, int(j))
        for match in found:
            times.setdefault(match[0], []).append(match.start() // 4)
    assert len(times) == 8
    for name, of_stages in times.items():  # each stage's input is made before
        assert of_stages == sorted(set(of_stages), reverse=name.startswith("B"))


@for_each(("schedule", "plan_of"), [(gpipe, plan_of_gpipe), (one_f_one_b, plan_of_1f1b)])
def test_a_schedule_has_the_tasks_of_the_plan(schedule, plan_of):
    for m in range(1, 7):
        for n in range(1, 6):
            planned = [task for cycle in plan_of(m, n).cycles for task in cycle]
            for j in range(n):
                expected = [(task.kind, task.i) for task in planned if task.j == j]
                assert schedule(m, n, j) == expected, (m, n, j)


# -- Numbers ---------------------------------------------------------------------------------------


def make_model(dropout):
    """Return a model of ten layers, between which tensors have 2, 3 and 4 dimensions."""
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Linear(16, 16), nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 3, 3), nn.Flatten(2)),
        *(nn.Linear(4, 5), nn.Flatten(), nn.Dropout(dropout)),
        *(nn.Linear(15, 6), nn.Tanh(), nn.Linear(6, 3)),
    ).double()


def make_batch(size):
    generator = torch.Generator().manual_seed(size)
    input = torch.randn(size, 16, generator=generator, dtype=torch.float64)
    return input, torch.randint(3, (size,), generator=generator)


def compare_with_stage_and_model(bare, name, recompute):
    with process_group(bare):
        for balance in BALANCES[bare.num_ranks]:
            compare(bare, balance, name, recompute, dropout=0.0)
        compare(bare, balance, name, recompute, dropout=0.5)


def compare(bare, balance, name, recompute, dropout):
    model = make_model(dropout)
    parts, whole = copy.deepcopy(model), copy.deepcopy(model)
    tiny = TinyStage(model, balance, F.cross_entropy, recompute)
    options = {"loss_fn": F.cross_entropy, "schedule": name}
    options["checkpoint"] = "always" if recompute else "never"
    for size, m in SIZES:
        what = f"{balance}, {size} samples in {m}, dropout {dropout}"
        zero_grad([model, parts, whole])
        input, target = make_batch(size)
        torch.manual_seed(2)
        loss = tiny.step(input, target, m, SCHEDULES[name])

        with stage_of(bare, f"{what}, {name}", parts, balance, chunks=m, **options) as stage:
            torch.manual_seed(2)
            assert_same(loss, stage.step(input, target), f"{what}: loss of the stage")
            assert_same_gradients(stage, model, what)
        if not dropout:
            is_reversed = name == "gpipe"
            of_parts = plain_step(
                parts, (input,), target, m, F.cross_entropy, is_backward_reversed=is_reversed
            )
            of_whole = F.cross_entropy(whole(input), target)
            of_whole.backward()
            assert_same(loss, of_parts, f"{what}: loss of the micro-batches")
            assert_same(loss, of_whole.detach(), f"{what}: loss of the model", TOLERANCE)
            assert_same_gradients(tiny.layers, parts, what)
            assert_same_gradients(tiny.layers, whole, what, TOLERANCE)


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks", BALANCES)
def test_loss_and_gradients_are_those_of_the_stage_and_of_the_model(
    ranks, num_ranks, name, recompute
):
    run = ranks(num_ranks).run(compare_with_stage_and_model, name, recompute, world=False)
    assert run.values() == [None] * num_ranks


def step_with_large_tensors(bare):
    """Run 1F1B with messages that no socket holds, so that a blocking send would wait."""
    with process_group(bare):
        model = nn.Sequential(nn.Linear(1, 1 << 20), nn.Identity(), nn.Linear(1 << 20, 1))
        tiny = TinyStage(model, [1] * bare.num_ranks, F.mse_loss, recompute=False)
        tiny.step(torch.ones(6, 1), torch.zeros(6, 1), 6, one_f_one_b)
        return tiny.max_held


def test_1f1b_with_large_tensors_ends_and_holds_few_micro_batches(ranks):
    assert ranks(3).run(step_with_large_tensors, world=False).values() == [3, 2, 1]


@pytest.mark.dist
def test_the_script_trains_under_torchrun():
    done = run_script(FILE, nproc=2).check()
    losses = re.findall(r"loss ([\d.]+), of the whole model ([\d.]+)\n", done.stdout)
    assert len(losses) == 9
    assert all(ours == expected for ours, expected in losses)
    assert losses[:3] == losses[3:6] == losses[6:]
    assert float(losses[2][0]) < float(losses[0][0])
    assert re.findall(r"held at most (\d)", done.stdout) == ["8", "2", "2"]
