"""Times measured on a GPU end when the device has done the work, not when it was queued."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from procpipe.balance.profile import seconds_of
from procpipe.launch.plan import measure as plan_measure
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
    return found


@pytest.mark.gpu
def test_a_measured_time_includes_the_devices_work(ranks: Any) -> None:
    found = ranks(2).run(measured, world=False).values()

    assert found == [dict.fromkeys(each, True) for each in found]
