"""Recomputation has the modes and autocast of the first forward; layers can detect it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from procpipe.compute.recompute import (
    Surroundings,
    checkpointing,
    is_checkpointing,
    is_recomputing,
    recomputing,
)
from tests.cases import for_each

CPU = torch.device("cpu")


def phases():
    return is_checkpointing(), is_recomputing(), torch.is_grad_enabled()


def test_a_layer_can_detect_its_phase():
    assert phases() == (False, False, True)
    with checkpointing():
        assert phases() == (True, False, False)
    with torch.no_grad(), recomputing():
        assert phases() == (False, True, True)
    with checkpointing(), recomputing():
        assert phases() == (False, True, True)
    assert phases() == (False, False, True)


def test_the_phase_ends_with_an_exception():
    for phase in (checkpointing(), recomputing()):
        with pytest.raises(ZeroDivisionError), phase:
            raise ZeroDivisionError
        assert phases() == (False, False, True)


def test_other_threads_have_phases_of_their_own():
    seen = []
    with checkpointing():
        thread = threading.Thread(target=lambda: seen.append(is_checkpointing()))
        thread.start()
        thread.join()
    assert seen == [False]


def autocast_now():
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


@for_each("outside", [None, False, torch.bfloat16, torch.float16], ids=str)
@for_each("inside", [None, False, torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_restored(inside, outside):
    with autocast(inside, cache_enabled=False):
        expected, surroundings = autocast_now(), Surroundings.now([], CPU)
    with autocast(outside):
        before = autocast_now()
        with surroundings.restored():
            assert autocast_now()[0] == expected[0]
            if expected[0]:
                assert autocast_now() == expected
            product = torch.ones(2, 2) @ torch.ones(2, 2)
            assert product.dtype == (expected[1] if expected[0] else torch.float32)
        assert autocast_now() == before


def autocast(dtype, cache_enabled=True):
    """Autocast to a dtype, disabled (False), or none at all (None)."""
    if dtype is None:
        return torch.enable_grad()
    if dtype is False:
        return torch.autocast("cpu", enabled=False)
    return torch.autocast("cpu", dtype=dtype, cache_enabled=cache_enabled)


def test_modes_are_restored():
    modules = [nn.Dropout(), nn.Dropout().eval()]
    surroundings = Surroundings.now(modules, CPU)
    modules[0].eval()

    def fail():
        with surroundings.restored():
            assert [module.training for module in modules] == [True, False]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [module.training for module in modules] == [False, False]


def test_without_autocast():
    with Surroundings.now([], CPU).without_autocast():
        assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with Surroundings.now([], CPU).without_autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")
