"""Signal handlers that raise at any time, and errors whose ``str()`` raises."""

from __future__ import annotations

import signal
import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import Stage
from tests.dist.report import Failure

SOON_S = 5.0


class WokenError(Exception):
    """Raised by a signal handler."""


class BoomError(Exception):
    """Raised by a layer."""


class EvilError(Exception):
    """Its ``str()`` raises SystemExit."""

    def __str__(self):
        raise SystemExit(3)


class EvilOutOfMemoryError(RuntimeError):
    """The same, as a subclass of the type that torch raises when memory runs out."""

    __str__ = EvilError.__str__


class Storm:
    """Interrupts the main thread repeatedly; its handler raises while a failure is being sent."""

    def __init__(self, num_raises):
        self.num_left = num_raises
        signal.signal(signal.SIGALRM, self.on_alarm)
        signal.setitimer(signal.ITIMER_REAL, 1e-4)

    def on_alarm(self, number, frame):
        names = {each.f_code.co_qualname for each, _ in traceback.walk_stack(frame)}
        # One shot: on a busy machine a periodic signal would be pending when this one returns.
        signal.setitimer(signal.ITIMER_REAL, 2e-4)
        if self.num_left and "Calls.fail" in names:
            self.num_left -= 1
            raise WokenError


class Fails(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x):
        self.act()
        return x


def fails(world, act, *args):
    stage = Stage(
        nn.Sequential(nn.Linear(4, 4), Fails(lambda: act(*args))),
        [1, 1],
        chunks=2,
        loss_fn=F.mse_loss,
        world=world,
    )
    try:
        stage.step(torch.ones(6, 4), torch.zeros(6, 4))
    except (EvilError, EvilOutOfMemoryError):
        return "caught"  # otherwise the harness would call its str()
    except (BoomError, WokenError) as error:
        return type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "no error"


def boom_in_a_storm(num_raises):
    Storm(num_raises)
    raise BoomError("boom")


@pytest.mark.parametrize("num_raises", [1, 2, 20])
def test_handlers_raise_while_a_failure_is_reported(ranks, num_raises):
    victim, origin = ranks(2).run(fails, boom_in_a_storm, num_raises)

    assert origin.value in ("BoomError", "WokenError"), str(origin)
    assert isinstance(victim.error, Failure), str(victim)
    assert victim.error.type == "RemoteStageError", str(victim)
    assert "BoomError: boom" in victim.error.text, str(victim)
    assert victim.duration_s < SOON_S


def throw(error_type):
    raise error_type


@pytest.mark.parametrize("error_type", [EvilError, EvilOutOfMemoryError])
def test_an_error_whose_str_raises_system_exit(ranks, error_type):
    victim, origin = ranks(2).run(fails, throw, error_type)

    assert origin.value == "caught", str(origin)
    assert isinstance(victim.error, Failure)
    reason = "(what it says is not known: its __str__ raised SystemExit)"
    assert f"in step(): {error_type.__name__}: {reason}" in victim.error.text
    assert "task F0@1 (micro-batch 0), layer '1' (Fails)" in victim.error.text
