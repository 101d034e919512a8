"""The hazards of the emulated GPU: without one of them, faulty programs would pass the other tests.

What other tests need in order to pass has no test of its own. Run on emulated GPUs only (``make
test-gpu``). Most tests call CUDA's and NCCL's C interface in processes with settings of their own,
without torch, each of which runs one of the functions below; the first argument of those for NCCL
is the rank. An operation that has not ended after a while is assumed never to end: others end
within milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import re
import subprocess
import threading
import time
import uuid
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

CUDA = ctypes.CDLL(None)
EMULATED = hasattr(CUDA, "emulated_gpu_synchronizations")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not EMULATED, reason="tests the emulated GPU, which is not loaded"),
]

NOT_READY = 600
NON_BLOCKING, NO_TIMING = 1, 2
POISON = 0x7F
UINT8, INT32 = 1, 2
LAUNCH_FAILURE = 719
LONG_MS = 100_000
WHILE_S = 0.3
LIMIT_S = 60


# ---- processes -----------------------------------------------------------------------------------


class Process:
    """A process that calls a function; forked from one that has never used CUDA.

    Its function may ``report`` values to the test, and ``wait_for_test``.
    """

    def __init__(self, function, *arguments: object, **settings: object) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._connection, child_end = context.Pipe()
        variables = {"EMULATED_GPU_DELAY_US": "0", "EMULATED_GPU_STARVE_MS": "0"}
        for name, value in {"count": 2, **settings}.items():
            variables["RANK" if name == "rank" else f"EMULATED_GPU_{name.upper()}"] = str(value)
        work_arguments = (child_end, variables, function, arguments)
        self._process = context.Process(target=_work, args=work_arguments, daemon=True)
        self._process.start()
        child_end.close()

    def next_report(self) -> Any:
        """Wait for the next value that its function reports or returns."""
        assert self._connection.poll(LIMIT_S), "no report"
        return self._connection.recv()

    def result(self) -> Any:
        """Continue the process if it waits, and return its result when it has ended."""
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._connection.send("continue")
        found = self.next_report()
        assert self.exit_code() == 0
        return found

    def exit_code(self) -> int | None:
        self._process.join(LIMIT_S)
        return self._process.exitcode


#: The connection of this process to its test.
_PARENT: list[Connection] = []


def _work(parent: Connection, variables: dict[str, str], function, arguments) -> None:
    _PARENT.append(parent)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ.update(variables)
    report(function(*arguments))
    CUDA.exit(0)  # as a program ends, with the exit functions of libraries


def report(value: object) -> None:
    _PARENT[0].send(value)


def wait_for_test() -> None:
    _PARENT[0].recv()


def run(function, *arguments: object, **settings: object) -> Any:
    return Process(function, *arguments, **settings).result()


# ---- CUDA's calls --------------------------------------------------------------------------------


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


def new_memory(num_bytes: int = 4096) -> Any:
    return made("cudaMalloc", ctypes.c_size_t(num_bytes))


def at(address: Any, num_bytes: int = 8) -> bytes:
    """Read device memory, which is possible only in the emulator."""
    return ctypes.string_at(address, num_bytes)


def fill(address: Any, value: int, stream: Any, num_bytes: int = 8) -> None:
    check("cudaMemsetAsync", address, value, ctypes.c_size_t(num_bytes), stream)


def filled(value: int) -> Any:
    memory, stream = new_memory(), new_stream()
    fill(memory, value, stream)
    check("cudaStreamSynchronize", stream)
    return memory


def hold(stream: Any) -> Any:
    """Make a stream wait until ``let_go`` of the returned gate."""
    gate = made("cudaHostAlloc", ctypes.c_size_t(8), 0)
    ctypes.memset(gate, 0, 8)
    check("cuStreamWaitValue64_v2", stream, gate, ctypes.c_uint64(1), 0)
    return gate


def let_go(gate: Any) -> None:
    ctypes.c_uint64.from_address(gate.value).value = 1


def query(stream: Any) -> int:
    return call("cudaStreamQuery", stream)


def wait_until_done(streams) -> None:
    while any(query(stream) == NOT_READY for stream in streams):
        time.sleep(0.001)


# ---- streams -------------------------------------------------------------------------------------


def seeded(what: int, number: int) -> int:
    """Return the emulator's random number for something."""
    function = CUDA._ZN8emulated6seededEmm
    function.argtypes, function.restype = (ctypes.c_uint64, ctypes.c_uint64), ctypes.c_uint64
    return int(function(what, number))


def time_operations(num: int):
    stream, memory = new_stream(), new_memory()
    begun = time.monotonic()
    for _ in range(num):
        fill(memory, 1, stream)
    check("cudaStreamSynchronize", stream)
    us = (time.monotonic() - begun) * 1e6
    return [[seeded(0, number) % 20_000 for number in range(num)], us]


def test_delays_depend_on_the_seed_and_the_rank_only(tmp_path):
    settings = {"folder": tmp_path, "delay_us": 20_000}
    first, us = run(time_operations, 10, **settings, seed=3)
    assert us >= sum(first)
    assert run(time_operations, 10, **settings, seed=3)[0] == first
    assert run(time_operations, 10, **settings, seed=4)[0] != first
    assert run(time_operations, 10, **settings, seed=3, rank=1)[0] != first


def starve(wait: str):
    """Queue work on streams; return whether all chosen ones starve, and the state of one.

    Streams are made until the seed has chosen some to starve and some not, and at least 12.
    """
    memory = new_memory()
    starved: list[Any] = []
    others: list[Any] = []
    while not (starved and others and len(starved) + len(others) >= 12):
        number = len(starved) + len(others)
        is_starved = not seeded(0x737461727665, number) % 3
        (starved if is_starved else others).append(new_stream())
    streams = [*starved, *others]
    for stream in streams:
        fill(memory, 1, stream)
    wait_until_done(others)
    num_starved = sum(query(stream) == NOT_READY for stream in starved)
    stream = starved[0]
    if wait == "host":
        check("cudaStreamSynchronize", stream)
    elif wait == "stream":
        event = made("cudaEventCreateWithFlags", NO_TIMING)
        check("cudaEventRecord", event, stream)
        check("cudaStreamWaitEvent", others[0], event, 0)
        wait_until_done([others[0], stream])
    return [num_starved == len(starved), query(stream)]


@pytest.mark.parametrize(("wait", "end"), [("host", 0), ("stream", 0), ("not at all", NOT_READY)])
def test_some_streams_do_nothing_until_they_are_waited_for(tmp_path, wait, end):
    assert run(starve, wait, folder=tmp_path, starve_ms=LONG_MS) == [True, end]


def query_while_a_thread_waits():
    stream, other = new_stream(), new_stream()
    gate, found = hold(stream), []
    before = CUDA.emulated_gpu_synchronizations()
    waiting = threading.Thread(target=check, args=("cudaStreamSynchronize", stream))
    waiting.start()
    while CUDA.emulated_gpu_synchronizations() == before:
        time.sleep(0.001)
    querying = threading.Thread(target=lambda: found.append(query(other)))
    querying.start()
    querying.join(0.3)
    hangs = querying.is_alive()
    let_go(gate)
    waiting.join()
    querying.join()
    return [hangs, found]


def test_a_query_hangs_while_another_thread_waits(tmp_path):
    """As it can on a real GPU: https://github.com/pytorch/pytorch/issues/104487."""
    assert run(query_while_a_thread_waits, folder=tmp_path) == [True, [0]]


# ---- NCCL's calls --------------------------------------------------------------------------------


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


def connect(name: str, rank: int) -> Any:
    """Connect two ranks, each with the GPU of its number."""
    check("cudaSetDevice", rank)
    return made("ncclCommInitRank", 2, UniqueId(name.encode()), rank)


def send(communicator, data, peer, stream, count=8, dtype=UINT8) -> int:
    return call("ncclSend", data, ctypes.c_size_t(count), dtype, peer, communicator, stream)


def receive(communicator, data, peer, stream, count=8, dtype=UINT8) -> int:
    return call("ncclRecv", data, ctypes.c_size_t(count), dtype, peer, communicator, stream)


def ends(*streams: Any) -> bool:
    """Return whether streams complete all their work within ``WHILE_S``."""
    until = time.monotonic() + WHILE_S
    while any(query(stream) == NOT_READY for stream in streams):
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def start(function, *arguments: object, **settings: object) -> list[Process]:
    """Start a function on two ranks."""
    return [Process(function, rank, *arguments, **settings) for rank in (0, 1)]


# ---- sends and receives --------------------------------------------------------------------------


def send_early(rank, name):
    communicator, stream, memory = connect(name, rank), new_stream(), filled(rank + 1)
    if rank == 0:
        assert send(communicator, memory, 1, stream) == 0
        report(ends(stream))
    else:
        wait_for_test()
        assert receive(communicator, memory, 0, stream) == 0
    check("cudaStreamSynchronize", stream)
    return at(memory)[0]


def test_a_send_does_not_end_before_its_receive_has_begun(tmp_path):
    sender, receiver = start(send_early, uuid.uuid4().hex, folder=tmp_path)
    assert sender.next_report() is False
    assert [receiver.result(), sender.result()] == [1, 1]


def disagree(rank, name):
    communicator, stream, memory = connect(name, rank), new_stream(), filled(rank + 1)
    if rank == 0:
        assert send(communicator, memory, 1, stream) == 0
    else:
        assert receive(communicator, memory, 0, stream, 2, INT32) == 0
    error = call("cudaStreamSynchronize", stream)
    CUDA.cudaGetErrorString.restype = ctypes.c_char_p
    text = CUDA.cudaGetErrorString(error).decode()
    return [error, at(memory)[0], call("cudaDeviceSynchronize"), text]


def test_a_receive_must_fit_its_send(tmp_path):
    for rank, process in enumerate(start(disagree, uuid.uuid4().hex, folder=tmp_path)):
        error, value, later, text = process.result()
        assert (error, value) == (LAUNCH_FAILURE, rank + 1)
        assert later == LAUNCH_FAILURE  # every later call fails as well
        assert "rank 0 sends 8 of uint8" in text
        assert "rank 1 receives 2 of int32" in text


# ---- communicators -------------------------------------------------------------------------------


def wait_for_a_dead_peer(rank, name):
    communicator, stream, memory = connect(name, rank), new_stream(), new_memory()
    if rank == 1:
        return None
    assert receive(communicator, memory, 1, stream) == 0
    before, error = ends(stream), ctypes.c_int(-1)
    check("ncclCommGetAsyncError", communicator, ctypes.byref(error))
    check("ncclCommAbort", communicator)
    check("cudaStreamSynchronize", stream)
    return [before, error.value, at(memory)[0]]


def test_an_operation_with_a_dead_peer_ends_only_by_an_abort(tmp_path):
    processes = start(wait_for_a_dead_peer, uuid.uuid4().hex, folder=tmp_path)
    assert [process.result() for process in processes] == [[False, 0, POISON], None]


# ---- what torch calls ----------------------------------------------------------------------------


def test_no_call_of_torch_reaches_the_real_nccl():
    import torch

    library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    names = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True)
    needed = set(re.findall(r" U (p?nccl\w+)", names.stdout))
    driver = ctypes.CDLL("libcuda.so.1")
    assert "ncclSend" in needed
    assert {name for name in needed if not hasattr(driver, name)} == set()


# ---- torch's own streams, operators and allocator ------------------------------------------------


@pytest.fixture
def _loaded():
    """Run each operator that a test runs while a stream is busy: its first run would wait."""
    import torch

    a = torch.ones(600, 600, device="cuda")
    assert bool((((a @ a) + a + 1) * 1 == 602).all())
    a += a
    a += 1


def keep_busy(stream) -> None:
    """Keep a stream busy for a while, so that later work on it runs late."""
    import torch

    with torch.cuda.stream(stream):
        a = torch.ones(600, 600, device="cuda")
        for _ in range(20):
            a @ a


@pytest.mark.usefixtures("_loaded")
@pytest.mark.parametrize("waits", [True, False])
def test_wait_for_a_producer(waits):
    import torch

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
    import torch

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
