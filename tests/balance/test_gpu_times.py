"""Times measured on a GPU end when the device has done the work, not when it was queued."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from procpipe.balance.profile import seconds_of
from tests.held import hold_for

#: Longer than the host takes for a step on a busy machine.
HELD_S = 1.0


def hold_a_while() -> threading.Event:
    return hold_for(torch.cuda.current_stream(), HELD_S)


def measured(bare: Any) -> bool:
    """Return whether a measurement waited for a slow device."""
    holds: list[threading.Event] = []
    seconds_of(lambda: holds.append(hold_a_while()), bare.device, time.monotonic)
    return holds[0].is_set()


@pytest.mark.gpu
def test_a_measured_time_includes_the_devices_work(ranks: Any) -> None:
    assert ranks(2).run(measured, world=False).values() == [True, True]
