"""What a user sees under the real torchrun.

That torchrun names the rank that failed first, and is left by all ranks in time: tests/faults.
"""

from __future__ import annotations

import pytest

from tests.dist.script import run_script

pytestmark = pytest.mark.dist

SCRIPT = """
    import torch, torch.nn.functional as F
    from torch import nn
    from procpipe import Stage

    class Layer(nn.Linear):
        def forward(self, x):
            if step == 1:
                raise KeyError("boom")
            return super().forward(x)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Layer(4, 4), nn.Linear(4, 4))
    stage = Stage(model, [1, 3], chunks=2, loss_fn=F.mse_loss)
    x = torch.ones(4, 4)
    for step in range(2):
        stage.step(x, x)
"""


def test_torchrun_shows_the_traceback_and_the_place_of_an_exception():
    done = run_script(SCRIPT, nproc=2)

    _, _, report = done.stderr.partition("Root Cause (first observed failure):")
    assert done.returncode == 1
    assert "KeyError: 'boom'" in report, done
    assert "procpipe: in stage 1 (rank 1), task F0@1 (micro-batch 0), layer '2' (Layer)" in report
    assert "Warning" not in done.stderr
    assert "terminate called" not in done.stderr
