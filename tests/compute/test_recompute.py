"""Recomputation has the random numbers and autocast of the first forward; layers can detect it."""

from __future__ import annotations

import threading

import pytest
import torch

from procpipe.compute.recompute import (
    Ambient,
    checkpointing,
    is_checkpointing,
    is_recomputing,
    recomputing,
    without_autocast,
)
from tests.cases import for_each

CPU = torch.device("cpu")


def phases():
    return is_checkpointing(), is_recomputing(), torch.is_grad_enabled()


def test_a_layer_can_detect_its_phase():
    assert phases() == (False, False, True)
    with checkpointing():
        assert phases() == (True, False, False)
    with torch.no_grad(), recomputing(Ambient.now(CPU)):
        assert phases() == (False, True, True)
    with checkpointing(), recomputing(Ambient.now(CPU)):
        assert phases() == (False, True, True)
    assert phases() == (False, False, True)


def test_the_phase_ends_with_an_exception():
    for phase in (checkpointing(), recomputing(Ambient.now(CPU))):
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


def test_random_numbers_are_repeated_and_then_continue():
    torch.manual_seed(3)
    ambient = Ambient.now(CPU)
    first, second = torch.rand(4), torch.rand(4)
    torch.manual_seed(3)
    torch.rand(4)
    with recomputing(ambient):
        assert torch.equal(torch.rand(4), first)
        torch.rand(100)
    assert torch.equal(torch.rand(4), second)


def test_random_numbers_continue_after_an_exception():
    torch.manual_seed(3)
    ambient = Ambient.now(CPU)
    expected = torch.get_rng_state()

    def draw_and_fail():
        with ambient.restored():
            torch.rand(4)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        draw_and_fail()
    assert torch.equal(torch.get_rng_state(), expected)


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
        expected, ambient = autocast_now(), Ambient.now(CPU)
    with autocast(outside):
        before = autocast_now()
        with ambient.restored():
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


def test_without_autocast():
    with without_autocast(CPU):
        assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with without_autocast(CPU):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")
