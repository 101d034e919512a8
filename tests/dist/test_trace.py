"""A run recorded on all stages: a file each, whose numbers equal those of the statistics.

That the files of a run that fails are whole: tests/timeline/test_chrome.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import Stage
from procpipe.errors import DisagreementError
from procpipe.launch.plan.replay import usual
from procpipe.plan.schedules.gpipe import gpipe
from procpipe.timeline.chrome import read
from procpipe.timeline.split import split
from procpipe.timeline.steps import early_hops_s, merged
from tests.dist.stages import stage_of, world_of

pytestmark = pytest.mark.on_gpus


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))


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
    return results


def test_a_run_is_recorded(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(traced, str(tmp_path), world=False).values()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.0.json", "run.1.json"]
    recording = merged([read(path) for path in tmp_path.iterdir()])
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
