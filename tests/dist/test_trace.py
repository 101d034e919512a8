"""A run recorded on all stages: one file, whose numbers equal those of the statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import RemoteStageError, Stage
from procpipe.errors import DisagreementError
from procpipe.timeline.chrome import from_chrome
from procpipe.timeline.idle import split
from tests.dist.devices import is_on_gpus
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
    if bare.rank == 0:
        results["file"] = json.loads((path / "run.json").read_text())

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
    if bare.rank == 0:
        results["failed"] = json.loads((path / "boom.json").read_text())
    return results


def test_a_run_and_a_failed_run_are_recorded(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(traced, str(tmp_path), world=False).values()
    recording = from_chrome(first["file"])
    last = recording.step()

    calls = [(step.number, step.call, len(step.tasks)) for step in recording.steps]
    # F, R of all but the last micro-batch, and B, on 2 stages; forward; forward and backward.
    assert calls == [(0, "step", 22), (1, "step", 8), (2, "forward", 8), (3, "backward", 14),
                     (4, "step", 22)]  # fmt: skip
    assert last.number == 4
    assert len({step.plan for step in recording.steps}) == len(recording.plans) == 3
    assert recording.is_closed
    assert len(recording.layer_s) == (0 if is_on_gpus() else 5)  # host times
    assert all(seconds > 0 for seconds in recording.layer_s)

    # 4 activations and gradients, and the loss. Each is posted before it is taken, within the error
    # of the clocks.
    assert len(last.hops) == 9
    error_s = recording.clock_error_s
    assert 0 < error_s < 0.1
    assert all(hop.posted_s <= hop.taken_s + error_s for hop in last.hops)
    assert {hop.num_bytes for hop in last.hops} == {2 * 4 * 4, 4}

    # The file's numbers equal those of the statistics, except for a later reading of the clocks.
    for results, recorded in zip((first, second), split(last), strict=True):
        assert results["split"].stage == recorded.stage
        assert results["split"].busy_s == pytest.approx(recorded.busy_s, abs=1e-6)
        assert results["split"].step_s == pytest.approx(recorded.step_s, abs=4 * error_s)
        assert results["split"].bubble_s == pytest.approx(recorded.bubble_s, abs=1e-6)
    assert first["report"] == second["report"]
    assert "the last step:" in first["report"]

    failed = from_chrome(first["failed"])
    assert not failed.is_closed
    assert [len(step.tasks) for step in failed.steps] == [16]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["boom.json", "run.json"]
