"""The hazards of the emulated GPU: without one of them, faulty programs would pass the other tests.

What other tests need in order to pass has no test of its own. Run on emulated GPUs only (``make
test-gpu``). An operation that has not ended after a while is assumed never to end: others end
within milliseconds.
"""

from __future__ import annotations

import ast
import ctypes
import os
import re
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.script import run_forked
from tests.held import happens, hold

CUDA = ctypes.CDLL(None)
EMULATED = hasattr(CUDA, "emulated_gpu_synchronizations")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not EMULATED, reason="tests the emulated GPU, which is not loaded"),
]

NOT_READY = 600
NON_BLOCKING, NO_TIMING = 1, 2
UINT8, INT32 = 1, 2
LAUNCH_FAILURE = 719
LONG_MS = 100_000
WHILE_S = 0.3
LIMIT_S = 60


# ---- CUDA's and NCCL's calls ---------------------------------------------------------------------


def call(name: str, *arguments: object) -> int:
    return int(getattr(CUDA, name)(*arguments))


def check(name: str, *arguments: object) -> None:
    error = call(name, *arguments)
    assert error == 0, f"{name}: {error}"


def made(name: str, *arguments: object) -> Any:
    """Make a call that returns a handle or an address by its first argument."""
    result = ctypes.c_void_p()
    check(name, ctypes.byref(result), *arguments)
    return result


def new_stream() -> Any:
    return made("cudaStreamCreateWithPriority", NON_BLOCKING, 0)


def fill(stream: Any, memory: Any) -> None:
    check("cudaMemsetAsync", memory, 1, ctypes.c_size_t(8), stream)


def is_done(stream: Any) -> bool:
    return call("cudaStreamQuery", stream) != NOT_READY


# ---- processes with other settings, without torch's streams --------------------------------------


def found_by(
    monkeypatch, words: str, num_ranks: int | None = None, **settings: object
) -> list[Any]:
    """Return what an expression of functions of this file is in new processes."""
    for name, value in {"delay_us": 0, "starve_ms": 0, **settings}.items():
        monkeypatch.setenv(f"EMULATED_GPU_{name.upper()}", str(value))
    code = f"from tests.test_emulated_gpu import *\nprint({words})"
    done = run_forked(code, num_ranks=num_ranks).check()
    return [ast.literal_eval(line) for line in done.stdout.splitlines()]


def seeded(what: int, number: int) -> int:
    """Return the emulator's random number for something."""
    function = CUDA._ZN8emulated6seededEmm
    function.argtypes, function.restype = (ctypes.c_uint64, ctypes.c_uint64), ctypes.c_uint64
    return int(function(what, number))


def time_operations(num: int):
    stream, memory = new_stream(), made("cudaMalloc", ctypes.c_size_t(8))
    begun = time.monotonic()
    for _ in range(num):
        fill(stream, memory)
    check("cudaStreamSynchronize", stream)
    us = (time.monotonic() - begun) * 1e6
    return [[seeded(0, number) % 2_000 for number in range(num)], us]


def test_delays_depend_on_the_seed_and_the_rank_only(monkeypatch):
    def delays(seed):
        found = found_by(monkeypatch, "time_operations(10)", 2, delay_us=2_000, seed=seed)
        assert all(us >= sum(each) for each, us in found)
        return [each for each, _ in found]

    first, other_rank = delays(3)
    assert delays(3) == [first, other_rank]
    assert first not in (other_rank, *delays(4))


def starve(wait: str):
    """Queue work on streams; return whether all chosen ones starve, and whether one is done."""
    memory, streams = made("cudaMalloc", ctypes.c_size_t(8)), [new_stream() for _ in range(12)]
    starved: list[Any] = []
    others: list[Any] = []
    for number, stream in enumerate(streams):
        (others if seeded(0x737461727665, number) % 3 else starved).append(stream)
    for stream in streams:
        fill(stream, memory)
    assert happens(lambda: all(map(is_done, others)), LIMIT_S)
    are_starved = not any(map(is_done, starved))
    if wait == "host":
        check("cudaStreamSynchronize", starved[0])
    elif wait == "stream":
        event = made("cudaEventCreateWithFlags", NO_TIMING)
        check("cudaEventRecord", event, starved[0])
        check("cudaStreamWaitEvent", others[0], event, 0)
        assert happens(lambda: is_done(others[0]) and is_done(starved[0]), LIMIT_S)
    return [are_starved, is_done(starved[0])]


@pytest.mark.parametrize(("wait", "ends"), [("host", True), ("stream", True), ("no", False)])
def test_some_streams_do_nothing_until_they_are_waited_for(monkeypatch, wait, ends):
    found = found_by(monkeypatch, f"starve({wait!r})", starve_ms=LONG_MS, seed=0)
    assert found == [[True, ends]]


# ---- NCCL ----------------------------------------------------------------------------------------


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class Channel:
    """A communicator of two ranks, a stream, and memory that holds the rank's number and 1."""

    def __init__(self, bare: Any) -> None:
        self.memory = torch.full((8,), bare.rank + 1, dtype=torch.uint8, device=bare.device)
        torch.cuda.synchronize(bare.device)
        self.stream, self.peer = torch.cuda.Stream(bare.device), 1 - bare.rank
        name = UniqueId(bare.name.replace("/", " ").encode())
        self.communicator = made("ncclCommInitRank", 2, name, bare.rank)

    def queue(self, name: str, count: int = 8, dtype: int = UINT8) -> None:
        memory, stream = map(ctypes.c_void_p, (self.memory.data_ptr(), self.stream.cuda_stream))
        size = ctypes.c_size_t(count)
        check(name, memory, size, dtype, self.peer, self.communicator, stream)

    def ends(self) -> bool:
        """Return whether all queued work is done within ``WHILE_S``."""
        return happens(self.stream.query, WHILE_S)


def send_early(bare):
    channel, has_ended = Channel(bare), False
    if bare.rank == 0:
        channel.queue("ncclSend")
        has_ended = channel.ends()
        bare.store.set("looked", "")
    else:
        bare.store.wait(["looked"])
        channel.queue("ncclRecv")
    channel.stream.synchronize()
    return has_ended, channel.memory.tolist()[0]


@pytest.mark.gpu(2)
def test_a_send_does_not_end_before_its_receive_has_begun(ranks):
    assert ranks(2).run(send_early, world=False).values() == [(False, 1), (False, 1)]


def disagree(bare):
    """Print the error of both ends; such a device cannot be used again, and so its process ends."""
    channel = Channel(bare)
    if bare.rank == 0:
        channel.queue("ncclSend")
    else:
        channel.queue("ncclRecv", 2, INT32)
    error = call("cudaStreamSynchronize", ctypes.c_void_p(channel.stream.cuda_stream))
    CUDA.cudaGetErrorString.restype = ctypes.c_char_p
    value = ctypes.string_at(channel.memory.data_ptr(), 1)[0]  # possible only in the emulator
    text = CUDA.cudaGetErrorString(error).decode()
    print(error, value, call("cudaDeviceSynchronize"), text, flush=True)
    os._exit(0)


@pytest.mark.gpu(2)
def test_a_receive_must_fit_its_send(ranks):
    for rank, outcome in enumerate(ranks(2).run(disagree, world=False)):
        # Nothing is received, and every later call fails as well.
        assert f"{LAUNCH_FAILURE} {rank + 1} {LAUNCH_FAILURE} " in outcome.output
        assert "rank 0 sends 8 of uint8" in outcome.output
        assert "rank 1 receives 2 of int32" in outcome.output


def wait_for_a_dead_peer(bare):
    channel, error = Channel(bare), ctypes.c_int(-1)
    if bare.rank == 1:
        os._exit(0)
    channel.queue("ncclRecv")
    before = channel.ends()
    check("ncclCommGetAsyncError", channel.communicator, ctypes.byref(error))
    check("ncclCommAbort", channel.communicator)
    channel.stream.synchronize()
    return before, error.value, channel.memory.tolist()[0]


@pytest.mark.gpu(2)
def test_an_operation_with_a_dead_peer_ends_only_by_an_abort(ranks):
    assert ranks(2).run(wait_for_a_dead_peer, world=False)[0].value == (False, 0, 1)


def test_no_call_of_torch_reaches_the_real_nccl():
    library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    names = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True)
    needed = set(re.findall(r" U (p?nccl\w+)", names.stdout))
    driver = ctypes.CDLL("libcuda.so.1")
    assert "ncclSend" in needed
    assert {name for name in needed if not hasattr(driver, name)} == set()


# ---- torch's own streams, operators and allocator ------------------------------------------------


def test_a_query_hangs_while_another_thread_waits():
    """As it can on a real GPU: https://github.com/pytorch/pytorch/issues/104487."""
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    let_go, before = hold(stream), CUDA.emulated_gpu_synchronizations()
    waiting = threading.Thread(target=stream.synchronize)
    waiting.start()
    assert happens(lambda: CUDA.emulated_gpu_synchronizations() > before, LIMIT_S)
    querying = threading.Thread(target=is_done, args=[ctypes.c_void_p(other.cuda_stream)])
    querying.start()
    querying.join(WHILE_S)
    hangs = querying.is_alive()
    let_go()
    waiting.join()
    querying.join()
    assert hangs


@pytest.fixture
def _loaded():
    """Run each operator that a test runs while a stream is busy: its first run would wait."""
    a = torch.ones(600, 600, device="cuda")
    assert bool((((a @ a) + a + 1) * 1 == 602).all())
    a += a
    a += 1


def keep_busy(stream) -> None:
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
    keep_busy(main)
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
    keep_busy(side)
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
