"""Recomputation has the autocast of the first forward; layers can detect it."""

from __future__ import annotations

import threading

import pytest
import torch

from procpipe.compute.recompute import Autocast, is_checkpointing, is_recomputing
from tests.cases import for_each
from tests.compute.segments import Do, forward, received, segment_of

CPU = torch.device("cpu")


def phases():
    return is_checkpointing(), is_recomputing()


def test_a_layer_can_detect_its_phase():
    """Other threads see none."""
    seen, x = [], received(torch.ones(2))

    def see(x):
        seen.append(phases())
        thread = threading.Thread(target=lambda: seen.append(phases()))
        thread.start()
        thread.join()
        return x * 2 if len(seen) < 8 else x.fails

    segment = segment_of(Do(see))
    forward(segment, 0, x, keep=True, recompute=False)
    forward(segment, 1, x, keep=True, recompute=True)
    assert phases() == (False, False)
    segment.recompute(1)
    with pytest.raises(AttributeError, match="fails"):
        forward(segment, 2, x, keep=True, recompute=True)

    plain, first, again = (False, False), (True, False), (False, True)
    assert seen == [plain, plain, first, plain, again, plain, first, plain]
    assert phases() == plain


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
        expected, first = autocast_now(), Autocast(CPU)
    assert first.is_on == expected[0]
    with autocast(outside):
        before = autocast_now()
        with first.restored():
            assert autocast_now()[0] == expected[0]
            if expected[0]:
                assert autocast_now() == expected
        with Autocast(CPU).off():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert autocast_now() == before


def autocast(dtype, cache_enabled=True):
    """Autocast to a dtype, disabled (False), or none at all (None)."""
    if dtype is None:
        return torch.enable_grad()
    if dtype is False:
        return torch.autocast("cpu", enabled=False)
    return torch.autocast("cpu", dtype=dtype, cache_enabled=cache_enabled)
