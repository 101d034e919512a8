"""A run recorded on all stages: a file each, whose numbers equal those of the statistics."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import RemoteStageError, Stage
from procpipe.errors import DisagreementError
from procpipe.launch.plan.replay import usual
from procpipe.plan.schedules.gpipe import gpipe
from procpipe.timeline.chrome import read
from procpipe.timeline.split import split
from procpipe.timeline.steps import Recording, early_hops_s, merged
from tests.dist.stages import stage_of, world_of

pytestmark = pytest.mark.on_gpus


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))


class Boom(nn.Module):
    """Raises in its third micro-batch of the second mini-batch."""

    num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls == 7:
            raise KeyError("boom")
        return x


def traced(bare: Any, folder: str) -> Any:
    torch.manual_seed(0)
    batch = torch.randn(8, 4), torch.randn(8, 4)
    options: dict[str, Any] = {"chunks": 4, "loss_fn": F.mse_loss}
    results: dict[str, Any] = {}
    path = Path(folder)
    with stage_of(bare, "a run", make_model(), [2, 3], trace=path / "run.json", **options) as stage:
        stage.step(*batch)
        stage.eval()
        stage.step(*batch)
        stage.train()
        output = stage(batch[0])
        F.mse_loss(output, batch[1].to(stage.device)).backward()
        assert stage.statistics().split is None
        stage.step(*batch)
        results["report"] = stage.report()
        results["split"] = stage.statistics().split

    only_here: dict[str, Any] = {"trace": path / "one.json"} if bare.rank == 0 else {}
    stage = Stage(make_model(), [2, 3], world=world_of(bare, "one"), **only_here, **options)
    with pytest.raises(DisagreementError, match="trace is True on rank 0 and False on rank 1"):
        stage.step(*batch)

    model = nn.Sequential(nn.Linear(4, 4), Boom())
    options["checkpoint"] = "never"
    stage = Stage(model, [1, 1], world=world_of(bare, "boom"), trace=path / "boom.json", **options)
    stage.step(*batch)
    with pytest.raises((KeyError, RemoteStageError), match="boom"):
        stage.step(*batch)
    return results


def recording_in(folder: Path, name: str) -> Recording:
    return merged([read(path) for path in folder.glob(f"{name}.*.json")])


def test_a_run_and_a_failed_run_are_recorded(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(traced, str(tmp_path), world=False).values()
    names = ("boom.0.json", "boom.1.json", "run.0.json", "run.1.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names]
    recording = recording_in(tmp_path, "run")
    last = recording.step()

    calls = [(step.number, step.call, sum(map(len, step.rows))) for step in recording.steps]
    # F, R of all but the last micro-batch, and B, on 2 stages; forward; forward and backward.
    assert calls == [(0, "step", 22), (1, "step", 8), (2, "forward", 8), (3, "backward", 14),
                     (4, "step", 22)]  # fmt: skip
    assert last.number == 4
    assert len({step.plan for step in recording.steps}) == 3
    assert recording.is_closed
    assert usual(recording).plan == gpipe(4, 2, recompute={0, 1, 2})

    # 4 activations and gradients, and the loss. Each is posted before it is taken.
    assert len(last.hops) == 9
    assert early_hops_s(recording.steps) == {}
    assert {hop.num_bytes for hop in last.hops} == {2 * 4 * 4, 4}

    # The files' numbers equal those of the statistics.
    for results, recorded in zip((first, second), split(last), strict=True):
        assert results["split"] == recorded
    assert first["report"] == second["report"]
    assert "the last step:" in first["report"]

    failed = recording_in(tmp_path, "boom")
    assert not failed.is_closed
    assert [sum(map(len, step.rows)) for step in failed.steps] == [16]


def killed_first(bare: Any, folder: str) -> None:
    trace = Path(folder) / "run.json"
    options: dict[str, Any] = {"trace": trace, "loss_fn": F.mse_loss}
    with stage_of(bare, "killed", make_model(), [2, 3], **options) as stage:
        for _ in range(3):
            stage.step(torch.ones(8, 4), torch.ones(8, 4))
        stage.report()  # both ranks have ended the last step
        if bare.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        stage.report()


@pytest.mark.only_on_cpus
def test_the_steps_before_the_death_of_rank_0_are_recorded(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(killed_first, str(tmp_path), world=False)
    recording = recording_in(tmp_path, "run")

    assert [step.number for step in recording.steps] == [0, 1, 2]
    assert not recording.is_closed
