"""Times measured on a GPU end when the device has done the work, not when it was queued."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from procpipe import Stage
from procpipe.balance.profile import seconds_of
from procpipe.launch.plan import measure as plan_measure
from procpipe.launch.plan import trial as plan_trial
from tests.dist.stages import world_of
from tests.held import hold_for

#: Longer than the host takes for a step on a busy machine.
HELD_S = 1.0


def hold_a_while() -> threading.Event:
    return hold_for(torch.cuda.current_stream(), HELD_S)


def measured(bare: Any) -> dict[str, bool]:
    """Return which measurements waited for a slow device."""
    found = {}
    holds: list[threading.Event] = []
    seconds_of(lambda: holds.append(hold_a_while()), bare.device, time.monotonic)
    found["a layer"] = holds[0].is_set()

    source = torch.ones(1 << 20, device=bare.device)
    may_go_on = hold_a_while()
    plan_measure._seconds(lambda: torch.empty_like(source).copy_(source), bare.device)
    found["a copy"] = may_go_on.is_set()

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    stage = Stage(model, [1, 1], chunks=2, loss_fn=torch.mean, world=world_of(bare, "step"))
    inputs = [torch.randn(4, 8)]
    for _ in range(3):  # the first steps wait, to check that recomputation repeats the forward pass
        plan_trial._step(stage, inputs, None)
    may_go_on = hold_a_while()
    plan_trial._step(stage, inputs, None)
    found["a step"] = may_go_on.is_set()
    stage.close()
    return found


@pytest.mark.gpu
def test_a_measured_time_includes_the_devices_work(ranks: Any) -> None:
    found = ranks(2).run(measured, world=False).values()

    assert found == [dict.fromkeys(each, True) for each in found]
