"""The emulated GPU's operators: refused arguments, and the hazards of streams.

That they compute what the CPU does, all tests of parity on emulated GPUs show.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch

emulated = hasattr(ctypes.CDLL(None), "emulated_gpu_synchronizations")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not emulated, reason="tests the emulated GPU itself"),
]


@pytest.mark.gpu(2)
def test_operators_refuse_tensors_of_several_devices():
    x = torch.ones(5, 6)
    with pytest.raises(RuntimeError, match="same device"):
        x.cuda() + x
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")


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


LAZY = """
import torch
from tests.held import happens, hold_for

x = torch.ones(3, device="cuda")
waited = []
for _ in range(2):
    may_go_on = hold_for(torch.cuda.Stream(), 0.3)
    y = x.neg()
    waited.append(may_go_on.is_set())
    assert happens(may_go_on.is_set, 10.0)
print(waited)
"""


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, [True, False]),
        ({"CUDA_MODULE_LOADING": "EAGER"}, [False, False]),
    ],
    ids=["lazy", "eager"],
)
def test_the_first_launch_of_an_operator_waits_for_the_device(settings, found):
    done = subprocess.run(
        [sys.executable, "-c", LAZY], env=os.environ | settings, stdout=subprocess.PIPE, check=True
    )
    assert done.stdout.decode().strip() == str(found)
