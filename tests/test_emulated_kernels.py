"""The hazards of streams, with torch's own operators and allocator.

That they compute what the CPU does, all tests of parity on emulated GPUs show.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

emulated = hasattr(ctypes.CDLL(None), "emulated_gpu_synchronizations")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not emulated, reason="tests the emulated GPU itself"),
]


@pytest.fixture
def _loaded():
    """Run each operator that a test runs while a stream is busy: its first run would wait."""
    a = torch.ones(600, 600, device="cuda")
    assert bool((((a @ a) + a + 1) * 1 == 602).all())
    a += a
    a += 1


def hold(stream: torch.cuda.Stream) -> None:
    """Keep a stream busy for a while, so that later work on it runs late."""
    with torch.cuda.stream(stream):
        a = torch.ones(600, 600, device="cuda")
        for _ in range(20):
            a @ a


@pytest.mark.usefixtures("_loaded")
@pytest.mark.parametrize("waits", [True, False])
def test_wait_for_a_producer(waits):
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    result = torch.zeros(100, device="cuda")
    torch.cuda.synchronize()
    hold(main)
    result += 1
    if waits:
        side.wait_stream(main)
    with torch.cuda.stream(side):
        seen = result * 1
    side.synchronize()
    with torch.cuda.stream(side):
        assert bool((seen == 1).all()) is waits


@pytest.mark.usefixtures("_loaded")
@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("records", [True, False])
def test_record_stream(records, writes):
    side = torch.cuda.Stream()
    given, result = torch.ones(100, device="cuda"), torch.zeros(100, device="cuda")
    torch.cuda.synchronize()
    hold(side)
    with torch.cuda.stream(side):
        if writes:
            given += 1  # without record_stream the memory belongs to another tensor by then
        else:
            result += given
    if records:
        given.record_stream(side)
    address = given.data_ptr()
    del given
    # Nothing else overwrites the memory: only the poison of freed memory changes the result.
    other = (torch.zeros if writes else torch.empty)(100, device="cuda")
    assert (other.data_ptr() == address) is not records
    torch.cuda.synchronize()
    good = bool((other == 0).all()) if writes else bool((result == 1).all())
    assert good is records
