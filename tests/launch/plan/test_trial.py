"""Proposals in real pipelines, and their calibration; recorded runs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from procpipe.launch.main import main
from procpipe.launch.plan import replay, trial
from procpipe.launch.plan.replay import Usual
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import gpipe
from procpipe.plan.verify import verify
from procpipe.planner.costs import Machine
from procpipe.planner.simulation import simulate
from tests.cases import for_each
from tests.dist.script import run_forked
from tests.launch.started import start_as_forks

MYMODEL = """
import os
import torch
import torch.nn.functional as F
from torch import nn

build = lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
sample = torch.rand(16, 64), torch.rand(16, 64)
loss = F.mse_loss

class Fails(nn.Linear):
    def forward(self, x):
        if "RANK" in os.environ:
            raise RuntimeError("not in a pipeline")
        return super().forward(x)

fails = lambda: nn.Sequential(Fails(64, 64), Fails(64, 64))
"""

WORDS = ("--sample", "mymodel:sample", "--loss", "mymodel:loss", "-n", "2", "--chunks", "4")


@for_each("kinds", ["BF", "BFR", "BFIW", "BFIRW", "FIW", "BFIW"])
def test_a_calibration_has_every_kind_of_task(kinds: str) -> None:
    for m, n in ((6, 1), (12, 2), (18, 3), (5, 4)):
        plan = trial.mixed_plan(m, n, kinds)
        verify(plan, Routes(n))
        assert {task.kind for task in plan.tasks()} == {*kinds}


@pytest.mark.dist
def test_if_they_cannot_be_run_the_estimates_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start_as_forks(monkeypatch, 2)

    assert main(["plan", "mymodel:fails", *WORDS, "--check"]) == 1

    printed = capsys.readouterr()
    assert "the proposals could not be run: " in printed.err
    assert "RuntimeError: not in a pipeline" in printed.err
    assert "the best of each, estimated" in printed.out
    assert "\nstage = Stage(model, balance=[" in printed.out


# -- recorded runs --------------------------------------------------------------------------------


LAYERS = ["a: Linear, 999 parameters", "b: Block, 2,999 parameters", "c: X, 0 parameters"]


def recorded(**changes: Any) -> Usual:
    """Return a run of 4 micro-batches of 2 samples on 2 stages, of 2 and 1 layers."""
    given: dict[str, Any] = {
        "plan": gpipe(4, 2),
        "samples": (2, 2, 2, 2),
        "facts": {"balance": [2, 1], "replicas": 1, "layers": LAYERS,
                  "schedule": "gpipe", "checkpoint": "never"},
        "num_steps": 3,
        "step_s": 0.100,
        "task_s": {("F", 0): 0.004, ("B", 0): 0.008, ("F", 1): 0.002, ("B", 1): 0.005},
        "machine": Machine(host_s=0.0005, send_s=1e-6, hop_s=0.0005, step_s=0.01),
        "message_bytes": {("activation", 0, 1): 2000, ("gradient", 1, 0): 1000},
    }  # fmt: skip
    return Usual(**given | changes)


def test_a_recorded_run_fills_the_table_of_layers() -> None:
    run = recorded()

    table = replay.table_of([run], 2)
    machine = replay.machine_of(run, table)

    assert [(la.name, la.output_bytes) for la in table.layers] == [
        ("a", 2000), ("b", 2000), ("c", 2000),
    ]  # fmt: skip
    assert [la.seconds["F"] for la in table.layers] == pytest.approx([0.001, 0.003, 0.002])
    assert [la.seconds["B"] for la in table.layers] == pytest.approx([0.002, 0.006, 0.005])
    assert replace(machine, host_s=0.0005) == run.machine
    # What the replay of its own plan lacks is in each of its tasks.
    assert simulate(run.plan, table.costs([2, 1], machine)).total_s == pytest.approx(
        0.100, abs=2e-5
    )

    larger = replay.table_of([run], 3)
    assert [la.output_bytes for la in larger.layers] == [3000] * 3
    assert [la.seconds["F"] for la in larger.layers] == pytest.approx([0.0015, 0.0045, 0.003])

    short = recorded(step_s=0.0)
    assert replay.machine_of(short, table) == short.machine


def test_runs_with_other_sizes_give_what_is_not_in_proportion() -> None:
    """On stage 0 a forward takes 1 ms and 1.5 ms a sample; beyond 4 samples, 2 ms a sample."""
    sizes = {8: 0.015, 4: 0.007}
    others = [recorded(samples=(k,), task_s={("F", 0): s, ("F", 1): s}) for k, s in sizes.items()]

    found = [replay.table_of([recorded(), *others], k).layers for k in (1, 2, 3, 4, 6, 8, 10)]

    forward_s = [sum(layer.seconds["F"] for layer in layers[:2]) for layers in found]
    assert forward_s == pytest.approx([0.0025, 0.004, 0.0055, 0.007, 0.011, 0.015, 0.019])
    backward_s = [sum(layer.seconds["B"] for layer in layers[:2]) for layers in found]
    assert backward_s == pytest.approx([0.004, 0.008, 0.012, 0.016, 0.024, 0.032, 0.040])
    # On stage 1 4 samples took 3.5 times as long as 2: on that line 1 would take less than nothing.
    assert found[0][2].seconds["F"] == pytest.approx(0.001)


RECORDED = """
import torch
from torch import nn
from procpipe import Stage

model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(5)))
stage = Stage(model, [1, 4], chunks=2, loss_fn=nn.functional.mse_loss, trace=TRACE)
for _ in range(4):
    stage.step(torch.rand(64, 256), torch.rand(64, 256))
stage.close()
"""


@pytest.mark.dist
def test_a_recorded_run_is_replayed_with_other_settings(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = RECORDED.replace("TRACE", repr(str(folder / "run.json")))
    run_forked(script, num_ranks=2).check()
    run_forked(
        script.replace("run.", "other.").replace("chunks=2", "chunks=8"), num_ranks=2
    ).check()
    files, others = ([str(p) for p in sorted(folder.glob(f"{k}.*.json"))] for k in ("run", "other"))

    assert main(["plan", "--costs", *files, *others, "-n", "2", "--chunks", "2,8"]) == 0
    printed = capsys.readouterr().out
    assert "balance [1, 4], 8 micro-batches of 8 samples" in printed
    assert "seconds of micro-batches of other sizes are on a line through those of" in printed
    assert main(["plan", "--costs", *files, "-n", "2", "--chunks", "2,8"]) == 0

    printed = capsys.readouterr().out
    assert "seconds of micro-batches of other sizes are in proportion, so small" in printed
    assert "a recorded run: gpipe, balance [1, 4], 2 micro-batches of 32 samples" in printed
    assert re.search(r"\* +2 +never +[28] ", printed), printed  # it has recomputed
    assert re.search(r"\nstage = Stage\(model, balance=\[\d, \d\], ", printed), printed
    with pytest.raises(SystemExit):
        main(["plan", "--costs", files[0], "-n", "2"])
    printed = capsys.readouterr().err
    assert f"--costs {files[0]}: these are the files of ranks 0: give" in printed
    run_forked(script.replace("[1, 4]", "[2, 3]"), num_ranks=2).check()
    with pytest.raises(SystemExit):
        main(["plan", "--costs", *files, *others, "-n", "2"])
    assert "the runs differ in their balance: give runs that are" in capsys.readouterr().err
