"""The published experiments: their published figures, their measurements and their tables."""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.published import ablation, figures, memory, resnet_accuracy, speed
from benchmarks.published.amoebanet_memory import EXPERIMENT as AMOEBANET_MEMORY
from benchmarks.published.amoebanet_speed import EXPERIMENT as AMOEBANET_SPEED
from benchmarks.published.experiment import BASELINE, Scale, Setting
from benchmarks.published.forecast import LayerCosts
from benchmarks.published.resnet_speed import EXPERIMENT as RESNET_SPEED
from benchmarks.published.switches import (
    SwitchedStage,
    _WaitingReceiver,
    _WaitingSender,
    carrying,
    unordered,
)
from benchmarks.published.training import measure_settings
from benchmarks.published.unet_memory import EXPERIMENT as UNET_MEMORY
from benchmarks.published.unet_speed import EXPERIMENT as UNET_SPEED
from benchmarks.published.waiting import BALANCE, waiting_unet
from examples.models.unet import unet
from procpipe.plan.routes import SKIP, Routes
from procpipe.plan.schedules.gpipe import recomputed
from procpipe.plan.task import Task
from procpipe.skip.skippable import declared
from procpipe.timeline.text import render_text
from tests.dist.stages import plain_step, world_of
from tests.dist.worker import BareWorld
from tests.examples.shapes import shapes_only
from tests.plan.proof import prove

SPEED = [UNET_SPEED, AMOEBANET_SPEED, RESNET_SPEED]
MEMORY = [UNET_MEMORY, AMOEBANET_MEMORY]


# -- what was published ---------------------------------------------------------------------------


@pytest.mark.parametrize("experiment", SPEED, ids=lambda e: e.part)
def test_published_speed_ups_are_ratios_of_published_throughputs(experiment):
    reference = experiment.figures[experiment.reference].samples_per_s

    for name, figure in experiment.figures.items():
        assert figure.speed_up == pytest.approx(figure.samples_per_s / reference, abs=1e-3), name


@pytest.mark.parametrize("experiment", SPEED, ids=lambda e: e.part)
def test_published_balances_are_of_the_published_model(experiment):
    with torch.device("meta"):
        num_layers = len(experiment.build(*experiment.published.size))

    assert {sum(setting.balance) for setting in experiment.settings} == {num_layers}
    for setting in experiment.settings:
        assert len(setting.balance) == setting.num_stages
        assert setting.name in experiment.figures


@pytest.mark.parametrize("experiment", MEMORY, ids=lambda e: e.part)
def test_published_models_have_the_published_numbers_of_layers_and_parameters(experiment):
    for setting in experiment.settings[:3]:  # the others take seconds
        figure = experiment.figures[setting.name]
        with shapes_only():
            model = experiment.meta_model(setting.size)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())

        assert figure.size == setting.size
        assert num_parameters == pytest.approx(figure.num_parameters, rel=2e-3)
        assert sum(setting.balance) in (len(model), 0)


def test_published_memory_is_the_sum_of_its_parts():
    for figure in figures.AMOEBANET_MEMORY.values():
        if figure.total_gib is not None:
            assert figure.model_gib is not None
            assert figure.activation_gib is not None
            assert figure.total_gib == pytest.approx(figure.model_gib + figure.activation_gib)


# -- speed ----------------------------------------------------------------------------------------


def test_settings_are_scaled_down_to_micro_batches_of_one_size():
    scale = Scale((1, 2), 32, micro_batch=3, max_micro_batches=10)

    assert scale.of(UNET_SPEED.settings[1]) == Setting("pipeline-2", 2, 10, 30)
    assert scale.of(UNET_SPEED.settings[0]) == Setting("pipeline-1", 1, 2, 6)
    assert UNET_SPEED.published.of(UNET_SPEED.settings[1]) is UNET_SPEED.settings[1]


def test_a_step_is_simulated_from_the_costs_of_layers():
    """The picture of ``procpipe.planner.simulate``: F takes 1 s, B 2 s; 9 s on 2 stages."""
    costs = LayerCosts([1.0, 2.0, 3.0], forward_share=1 / 3)

    assert costs.step_s([2, 1], 2, "never") == pytest.approx(9.0)
    assert costs.step_s([3], 2, "never") == pytest.approx(2 * 6.0)
    assert costs.step_s([3], 2, "except_last") == pytest.approx(2 * 6.0 + 2.0)


def test_measured_speed_ups_are_laid_out_beside_published_ones(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    scale = AMOEBANET_SPEED.small
    settings = [scale.of(AMOEBANET_SPEED.settings[k]) for k in (0, 2, 5)]
    baseline = Setting(BASELINE, 1, 4, 8)
    results = speed.Results(
        baseline,
        settings,
        absent=["n=8, m=32"],
        times={"n=2, m=1": [2.0, 2.0], "n=2, m=32": [16.0, 32.0], "n=4, m=32": [16.0, 32.0]},
        baseline_times={s.name: [4.0, 8.0] for s in settings},
        simulated={"n=2, m=1": 0.5, "n=2, m=32": 1.0, "n=4, m=32": 2.0},
    )

    table = speed.tabulate(AMOEBANET_SPEED, scale, results)

    # Speed-ups over one process: 0.5 and 1 in the rounds of the first; the table is relative to it.
    assert [row[0] for row in table.rows] == ["n=2, m=1", "n=2, m=32", "n=4, m=32", "n=8, m=32"]
    assert [row[4] for row in table.rows] == [1.0, pytest.approx(8 / 3), "2.67*", None]
    assert [row[5] for row in table.rows] == [1.0, 2.0, 4.0, None]
    assert [row[8] for row in table.rows] == [1.0, 1.773, 2.709, 4.953]
    assert "not run: n=8, m=32: too few GPUs" in table.notes
    assert "n=4, m=32" in table.to_text()


@pytest.fixture
def group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_steps_of_speed_run(group):
    scale = Scale((1, 2), 64, micro_batch=1)
    settings = [Setting(BASELINE, 1, 2, 2), Setting("pipeline-1", 1, 2, 2, balance=(65,))]

    times = measure_settings("unet_speed", vars(scale), list(map(vars, settings)), num_rounds=1)

    assert {name: len(seconds) for name, seconds in times.items()} == {BASELINE: 1, "pipeline-1": 1}


# -- memory ---------------------------------------------------------------------------------------


def test_memory_of_training_is_measured(group):
    alone = memory_of(memory.Setting(BASELINE, (1, 16), 1, 1))
    stage = memory_of(memory.Setting("pipeline-1", (1, 16), 1, 4, (65,)))

    assert alone["parameters"] == stage["parameters"] > 0
    assert alone["bytes"] > 8 * alone["parameters"]  # at least parameters and gradients


def memory_of(setting):
    [of_stage] = memory.measure("unet_memory", vars(setting), batch_size=4, image_size=64)
    return of_stage


def test_memory_is_laid_out_beside_what_was_published():
    stages = [{"parameters": 10**6, "bytes": 30 << 20}] * 2
    rows = [
        memory.Row(AMOEBANET_MEMORY.settings[2], stages, 542_734_840, 7 << 30),
        memory.Row(AMOEBANET_MEMORY.settings[4], None, 1_844_858_344, 23 << 30),
    ]

    here, published = memory.tabulate(AMOEBANET_MEMORY, rows, 16, 64)

    assert here.rows[0][2:5] == [2.0, 30.0, 60.0]
    assert here.rows[0][5] == pytest.approx(60 - 3 * 4 * 2e6 / 2**20)
    assert here.rows[1][2:] == [None] * 4
    assert here.notes[-1] == "not run: pipeline-8: too few GPUs"
    assert published.rows[0][4:] == [7.0, 9.46, 3.39, 8.11]


# -- accuracy -------------------------------------------------------------------------------------


def test_cifar10_is_read_from_its_binary_version(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="holds no data_batch"):
        resnet_accuracy.read_cifar10(tmp_path)
    image = bytes([7, *[184] * 1024, *[120] * 1024, *[56] * 1024])
    tmp_path.joinpath("data_batch_1.bin").write_bytes(image * 3)
    tmp_path.joinpath("test_batch.bin").write_bytes(image)

    data = resnet_accuracy.read_cifar10(tmp_path)

    assert data.classes.tolist() == [7, 7, 7]
    assert data.test_images.shape == (1, 3, 32, 32)
    assert data.test_images[0, :, 0, 0].tolist() == [1.0, 0.0, -1.0]


def test_errors_are_laid_out_beside_what_was_published():
    errors = [
        {"whole": 2.0, "pieces": 1.0, "pipeline": 1.0, "deferred": 3.0},
        {"whole": 4.0, "pieces": 2.0, "pipeline": 2.0, "deferred": 3.0},
    ]
    runs = [{"errors": of_seed, "difference": 1e-9 * k} for k, of_seed in enumerate(errors)]
    sizes = {"full": False, "cifar10": None, "epochs": 1, "batch_size": 64, "m": 4}

    table = resnet_accuracy.tabulate(runs, sizes)

    assert table.rows[0][1:] == ["3.00±1.41", None, "22.02±0.11"]
    assert table.rows[2][1:] == ["1.50±0.71", "-1.50±0.71", "21.99±0.13"]
    assert table.notes[0].endswith(": 1e-09")


# -- ablation -------------------------------------------------------------------------------------


def test_the_unordered_plan_of_two_micro_batches_on_three_stages():
    assert (
        render_text(unordered(2, 3, {0}))
        == """\
k    stage 0   stage 1   stage 2
0    F0
1    F1        F0
2              F1        F0
3                        F1
4                        R0
5                        B0
6              R0
7              B0        B1
8    R0
9    B0        B1
10   B1
"""
    )


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_unordered_plans_run_and_recompute_late(mode):
    for m in range(1, 5):
        for n in range(1, 5):
            plan = unordered(m, n, recomputed(mode, m))
            prove(plan, Routes(n))
            cycle_of = {task: k for k, cycle in enumerate(plan.cycles) for task in cycle}
            for (kind, i, j), k in cycle_of.items():
                assert kind != "R" or j == n - 1 or cycle_of[Task("B", i, j + 1)] < k


class Recorder:
    """An end of a channel that records its calls."""

    num_bytes = 8

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def note(*arguments: Any) -> str:
            self.calls.append((name, *arguments))
            return name

        return note


def test_waiting_ends_of_a_channel_do_nothing_beside():
    sender, receiver = Recorder(), Recorder()

    _WaitingSender(sender).send("x")
    waiting = _WaitingReceiver(receiver)
    waiting.expect()

    assert sender.calls == [("send", "x"), ("settle",)]
    assert receiver.calls == []
    assert waiting.take() == "take"
    assert receiver.calls == [("expect",), ("take",)]
    assert _WaitingSender(sender).num_bytes == 8


def small_unet() -> nn.Sequential:
    torch.manual_seed(0)
    model = unet(depth=2, num_convs=1, base_channels=4).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout2d):
            module.p = 0.0
    return model


def test_a_carrying_model_computes_the_same_without_skip_routes():
    model, x = small_unet(), torch.rand(2, 3, 16, 16, dtype=torch.float64)
    carried = carrying(copy.deepcopy(model))

    assert any(any(declared(layer)) for layer in model)
    assert not any(any(declared(layer)) for layer in carried)
    torch.testing.assert_close(carried(x), model(x), rtol=0, atol=0)
    assert len(list(carried.parameters())) == len(list(model.parameters()))


def test_all_variants_compute_the_same(ranks):
    outcomes = ranks(3).run(run_variants, world=False).values()

    for results in zip(*outcomes, strict=True):
        has_skips = [of_rank["sent a skip"] for of_rank in results]
        backward = [of_rank["backward"] for of_rank in results]
        is_first, is_last = results[0]["variant"] == 0, results[0]["variant"] == 3
        assert has_skips == ([True, False, False] if is_last else [False] * 3)
        assert backward == [[0, 1, 2] if is_first else [2, 1, 0]] * 3


def run_variants(bare: BareWorld) -> list[dict[str, Any]]:
    x = torch.rand(3, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.rand(3, 1, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain, balance = small_unet(), [8, 10, 11]
    loss = plain_step(plain, (x,), y, 3, F.mse_loss)
    truth = {name: parameter.grad for name, parameter in plain.named_parameters()}
    results = []
    for number, components in enumerate(ablation.VARIANTS.values()):
        world = world_of(bare, f"variant {number}")
        world.transport = "sockets"
        stage = SwitchedStage(
            small_unet(),
            balance,
            components,
            chunks=3,
            loss_fn=F.mse_loss,
            world=world,
        )
        torch.testing.assert_close(stage.step(x, y), loss)
        for name, parameter in stage.named_parameters():
            expected = truth[name.replace(".layer.", ".")]  # a carrying layer adds it
            torch.testing.assert_close(parameter.grad, expected)
        tasks = [timed.task for timed in stage.last_step()]
        results.append(
            {
                "variant": number,
                "sent a skip": SKIP in stage.statistics().sent_bytes,
                "backward": [task.i for task in tasks if task.kind == "B"],
            }
        )
        stage.close()
    return results


def test_the_waiting_model_is_cut_into_its_stages():
    model = waiting_unet(0.0)
    x = torch.ones(2, 4)

    assert len(model) == sum(BALANCE)
    model(x).mean().backward()
    torch.testing.assert_close(model(x), 3 * x)  # two skip tensors, each added
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_variants_are_laid_out_beside_the_published_ones():
    stage = {"busy": 0.5, "sent_bytes": 1 << 20, "memory_bytes": 2 << 20, "tasks": []}
    found = {
        name: {"times": [4.0 / (k + 1)] * 2, "loss": 1.0, "stages": [stage] * 4}
        for k, name in enumerate([*ablation.VARIANTS, ablation.SHARED_MEMORY])
    }
    parser = ablation_parser()

    table = ablation.tabulate(found, parser.parse_args(["--task-ms", "10"]))

    assert [row[2] for row in table.rows] == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0])
    assert table.rows[0][3:6] == [50.0, 4.0, 8.0]
    assert [row[7] for row in table.rows[:4]] == pytest.approx([1.0, 1.347, 1.8, 1.907], abs=1e-3)
    assert table.rows[4][6:] == [None] * 4
    # 11 forward, then 8 backward (twice as long) with 7 recomputations, and 3 backward to fill.
    assert table.notes[-1].endswith(f"{10 * (11 + 16 + 7 + 6)} ms (simulated)")


def ablation_parser():
    parser = argparse.ArgumentParser()
    ablation.configure(parser)
    return parser
