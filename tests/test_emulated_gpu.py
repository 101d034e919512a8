"""The hazards of the emulated GPU: without one of them, faulty programs would pass the other tests.

What other tests need in order to pass has no test of its own. Run on emulated GPUs only (``make
test-gpu``). Each test calls CUDA's C interface in processes with their own settings, each of which
runs one of the functions below.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
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
LONG_MS = 100_000
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


def copy(to, source, stream, num_bytes: int = 8) -> None:
    check("cudaMemcpyAsync", to, source, ctypes.c_size_t(num_bytes), 4, stream)


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


# ---- memory --------------------------------------------------------------------------------------


def read_new_memory():
    return list(at(new_memory()))


def test_new_memory_is_garbage(tmp_path):
    assert run(read_new_memory, folder=tmp_path) == [POISON] * 8


def read_in_stream_order():
    source, target, first = filled(1), new_memory(), new_stream()
    gate = hold(first)
    copy(target, source, first)
    second = new_stream()
    fill(source, 2, second)
    check("cudaStreamSynchronize", second)
    before = list(at(target))
    let_go(gate)
    check("cudaStreamSynchronize", first)
    return [before, list(at(target))]


def test_copies_read_and_write_in_stream_order(tmp_path):
    assert run(read_in_stream_order, folder=tmp_path) == [[POISON] * 8, [2] * 8]


def write_behind():
    memory = new_memory(5000)
    ctypes.memset((memory.value + 5000) // 4096 * 4096 + 4096, 1, 1)  # after the block's pages


def use_after_free():
    memory = new_memory()
    check("cudaFree", memory)
    assert new_memory().value != memory.value
    at(memory)


@pytest.mark.parametrize("function", [write_behind, use_after_free])
def test_wrong_addresses_end_the_process(tmp_path, function):
    assert Process(function, folder=tmp_path).exit_code() == -signal.SIGSEGV


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
