"""The emulated GPU itself: each property, and that it goes when it is switched off.

Run on emulated GPUs only (``make test-gpu``). Each test starts Python processes of its own, without
torch, with settings of their own; what they do there is one of the functions below, whose name says
it, and which calls CUDA by its C interface.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

CUDA = ctypes.CDLL(None)
EMULATED = hasattr(CUDA, "emulated_gpu_synchronizations")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not EMULATED, reason="tests the emulated GPU, which is not loaded"),
]

ROOT = Path(__file__).parents[1]
INVALID_VALUE, OUT_OF_MEMORY, NO_DEVICE, INVALID_DEVICE = 1, 2, 100, 101
INITIALIZATION_ERROR, INVALID_CONTEXT, PEER_ACCESS_UNSUPPORTED = 3, 201, 217
INVALID_HANDLE, NOT_READY, ILLEGAL_ADDRESS = 400, 600, 700
NON_BLOCKING, NO_TIMING = 1, 2
POISON = 0x7F
LONG_MS = 100_000


# ---- CUDA's calls --------------------------------------------------------------------------------


def call(name: str, *arguments: object) -> int:
    return int(getattr(CUDA, name)(*arguments))


def check(name: str, *arguments: object) -> None:
    error = call(name, *arguments)
    assert error == 0, f"{name}: {error}"


def made(name: str, *arguments: object) -> Any:
    """Call what returns a handle or an address by its first argument."""
    result = ctypes.c_void_p()
    check(name, ctypes.byref(result), *arguments)
    return result


def new_stream() -> Any:
    return made("cudaStreamCreateWithPriority", NON_BLOCKING, 0)


def new_memory(num_bytes: int = 4096) -> Any:
    return made("cudaMalloc", ctypes.c_size_t(num_bytes))


def at(address: Any, num_bytes: int = 8) -> bytes:
    """Read memory as only the emulator's host can."""
    return ctypes.string_at(address, num_bytes)


def fill(address: Any, value: int, stream: Any, num_bytes: int = 8) -> None:
    check("cudaMemsetAsync", address, value, ctypes.c_size_t(num_bytes), stream)


def copy(to, source, stream, num_bytes: int = 8) -> int:
    return call("cudaMemcpyAsync", to, source, ctypes.c_size_t(num_bytes), 4, stream)


def hold(stream: Any) -> Any:
    """Make a stream wait until ``let_go`` of what is returned."""
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


# ---- processes -----------------------------------------------------------------------------------


def start(function, *arguments: object, **settings: object) -> subprocess.Popen[str]:
    """Start a process that calls a function of this file and prints what it returns."""
    code = (
        "import faulthandler, json; faulthandler.dump_traceback_later(30, exit=True);"
        f"import {function.__module__} as tests;"
        f"print(json.dumps(tests.{function.__name__}(*{arguments!r})), flush=True)"
    )
    variables = {name.upper(): str(value) for name, value in settings.items()}
    for name in [name for name in variables if not name.startswith(("CUDA_", "RANK"))]:
        variables[f"EMULATED_GPU_{name}"] = variables.pop(name)
    calm = {"EMULATED_GPU_DELAY_US": "0", "EMULATED_GPU_STARVE_MS": "0", "EMULATED_GPU_COUNT": "2"}
    inherited = {name: os.environ[name] for name in os.environ if name != "CUDA_VISIBLE_DEVICES"}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=inherited | calm | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str], given: str = "") -> Any:
    out, errors = process.communicate(given, timeout=60)
    assert process.returncode == 0, (process.returncode, errors)
    return json.loads(out.splitlines()[-1])


def first_line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def run(function, *arguments: object, **settings: object) -> Any:
    return result(start(function, *arguments, **settings))


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


# ---- memory --------------------------------------------------------------------------------------


def read_new_memory():
    return list(at(new_memory()))


def test_new_memory_is_garbage(tmp_path):
    assert run(read_new_memory, folder=tmp_path) == [POISON] * 8
    assert run(read_new_memory, folder=tmp_path, poison=0) == [0] * 8


def read_in_stream_order():
    source, target, first, second = new_memory(), new_memory(), new_stream(), new_stream()
    fill(source, 1, second)
    check("cudaStreamSynchronize", second)
    gate = hold(first)
    assert copy(target, source, first) == 0
    fill(source, 2, second)
    check("cudaStreamSynchronize", second)
    before = list(at(target))
    let_go(gate)
    check("cudaStreamSynchronize", first)
    return [before, list(at(target))]


def test_copies_read_and_write_when_their_stream_gets_there(tmp_path):
    assert run(read_in_stream_order, folder=tmp_path) == [[POISON] * 8, [2] * 8]


def write_beside(where: int):
    check("cudaFree", None)
    size = 5000
    memory = new_memory(size)
    end = (memory.value + size) // 4096 * 4096 + 4096  # of the block's pages
    ctypes.memset(end if where > 0 else memory.value - 1, 1, 1)
    return call("cudaFree", memory)


def test_writing_behind_a_block_ends_the_process(tmp_path):
    process = start(write_beside, 1, folder=tmp_path)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGSEGV
    assert run(write_beside, 1, folder=tmp_path, guard=0) == 0


def test_writing_before_a_block_is_found_when_it_is_freed(tmp_path):
    assert run(write_beside, -1, folder=tmp_path) == ILLEGAL_ADDRESS
    assert run(write_beside, -1, folder=tmp_path, guard=0) == 0


def use_after_free():
    memory = new_memory()
    check("cudaFree", memory)
    other = new_memory()
    assert other.value != memory.value
    return list(at(memory))


def test_use_after_free_ends_the_process(tmp_path):
    process = start(use_after_free, folder=tmp_path)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGSEGV


def allocate(mib: int, device: int = 0):
    check("cudaSetDevice", device)
    error = call("cudaMalloc", ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(mib << 20))
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    check("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return [error, free.value >> 20, total.value >> 20]


def allocate_and_stay(mib: int):
    say(allocate(mib))
    input()
    return "end"


def test_memory_is_limited_over_all_processes_that_live(tmp_path):
    settings = {"folder": tmp_path, "memory_mib": 64}
    assert run(allocate, 40, **settings) == [0, 24, 64]
    other = start(allocate_and_stay, 40, **settings)  # what the first had is free again
    assert first_line(other) == [0, 24, 64]
    assert run(allocate, 40, **settings) == [OUT_OF_MEMORY, 24, 64]
    assert run(allocate, 40, 1, **settings) == [0, 24, 64]
    assert run(allocate, 40, **settings | {"memory_mib": 128}) == [0, 48, 128]
    other.kill()
    other.communicate()
    assert run(allocate, 40, **settings) == [0, 24, 64]


def test_gpus_may_have_unequal_memory(tmp_path):
    settings = {"folder": tmp_path, "memory_mib": "64,32"}
    assert run(allocate, 40, 0, **settings) == [0, 24, 64]
    assert run(allocate, 40, 1, **settings) == [OUT_OF_MEMORY, 32, 32]
    settings["cuda_visible_devices"] = "1"
    assert run(allocate, 40, 0, **settings) == [OUT_OF_MEMORY, 32, 32]


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
    """Queue something on twelve streams; return how many do nothing, and what one of these does."""
    memory, streams = new_memory(), [new_stream() for _ in range(12)]
    starved = [
        stream for number, stream in enumerate(streams) if not seeded(0x737461727665, number) % 3
    ]
    others = [stream for stream in streams if stream not in starved]
    assert starved
    assert others
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
    elif wait == "nobody":
        wait_until_done(starved)
    return [num_starved == len(starved), query(stream)]


@pytest.mark.parametrize(("wait", "end"), [("host", 0), ("stream", 0), ("not at all", NOT_READY)])
def test_some_streams_do_nothing_until_somebody_waits(tmp_path, wait, end):
    assert run(starve, wait, folder=tmp_path, starve_ms=LONG_MS) == [True, end]


def test_streams_starve_for_a_limited_time(tmp_path):
    assert run(starve, "nobody", folder=tmp_path, starve_ms=200)[1] == 0


def test_no_stream_starves_by_default(tmp_path):
    assert run(starve, "nobody", folder=tmp_path)[1] == 0


def copy_pageable():
    """Copy from and to memory that is not pinned, behind a slow operation; then from pinned."""
    stream, memory = new_stream(), new_memory()
    ours = ctypes.create_string_buffer(b"1" * 8)
    fill(memory, 2, stream)
    assert copy(ours, memory, stream) == 0  # to the host: there when the call returns
    arrived = list(at(ours))
    ours.raw = b"3" * 9
    assert copy(memory, ours, stream) == 0
    ours.raw = b"4" * 9  # from the host: it was read when the call returned
    check("cudaStreamSynchronize", stream)
    sent = list(at(memory))
    pageable = CUDA.emulated_gpu_synchronizations_of(b"pageable copy")
    gate = hold(stream)
    pinned = made("cudaHostAlloc", ctypes.c_size_t(8), 0)
    assert copy(memory, pinned, stream) == 0  # returns although its stream waits
    assert query(stream) == NOT_READY
    let_go(gate)
    check("cudaStreamSynchronize", stream)
    return [arrived, sent, pageable, CUDA.emulated_gpu_synchronizations_of(b"pageable copy")]


def test_pageable_copies_synchronize_and_pinned_ones_do_not(tmp_path):
    settings = {"folder": tmp_path, "delay_us": 50_000, "seed": 1}
    assert run(copy_pageable, **settings) == [[2] * 8, [ord("3")] * 8, 2, 2]


def count():
    stream, memory = new_stream(), new_memory()
    event = made("cudaEventCreateWithFlags", 0)
    kinds = ("stream", "event", "device", "pageable copy", "free")
    check("cudaEventRecord", event, stream)
    check("cudaStreamWaitEvent", stream, event, 0)
    call("cudaEventQuery", event)
    none = CUDA.emulated_gpu_synchronizations()
    for _ in range(2):
        check("cudaStreamSynchronize", stream)
    check("cudaEventSynchronize", event)
    check("cudaDeviceSynchronize")
    check("cudaFree", memory)
    counts = [CUDA.emulated_gpu_synchronizations_of(kind.encode()) for kind in kinds]
    total = CUDA.emulated_gpu_synchronizations()
    CUDA.emulated_gpu_reset_synchronizations()
    return [none, counts, total, CUDA.emulated_gpu_synchronizations()]


def test_synchronizations_of_the_host_are_counted(tmp_path):
    assert run(count, folder=tmp_path) == [0, [2, 1, 1, 0, 1], 5, 0]


def wait_for_events():
    first, second, third, memory = new_stream(), new_stream(), new_stream(), new_memory()
    event = made("cudaEventCreateWithFlags", NO_TIMING)
    never = [call("cudaEventQuery", event), call("cudaEventSynchronize", event)]
    check("cudaStreamWaitEvent", second, event, 0)  # never recorded: nothing to wait for
    check("cudaStreamSynchronize", second)
    gate = hold(first)
    check("cudaEventRecord", event, first)
    pending = [call("cudaEventQuery", event), call("cudaGetLastError"), call("cudaGetLastError")]
    check("cudaStreamWaitEvent", second, event, 0)
    check("cudaEventRecord", event, third)  # recorded again: a later wait is for this one
    check("cudaStreamSynchronize", third)
    again = [call("cudaEventQuery", event), query(second)]
    check("cudaEventDestroy", event)
    check("cudaStreamDestroy", first)  # what was queued is still done
    fill(memory, 5, second)
    gone = [call("cudaEventQuery", event), query(first), query(second)]
    let_go(gate)
    check("cudaStreamSynchronize", second)
    return [never, pending, again, gone, list(at(memory))]


def test_waiting_for_an_event_is_for_its_last_record(tmp_path):
    never, pending, again, gone, written = run(wait_for_events, folder=tmp_path)
    assert never == [0, 0]
    assert pending == [NOT_READY, NOT_READY, 0]  # noted as the last error, and no longer
    assert again == [0, NOT_READY]
    assert gone == [INVALID_HANDLE, INVALID_HANDLE, NOT_READY]
    assert written == [5] * 8


def time_events():
    stream = new_stream()
    first, second, untimed, never = (
        made("cudaEventCreateWithFlags", flags) for flags in (0, 0, NO_TIMING, 0)
    )
    check("cudaEventRecord", first, stream)
    check("cudaStreamSynchronize", stream)
    begun = time.monotonic()
    gate = hold(stream)
    for event in (second, untimed):
        check("cudaEventRecord", event, stream)
    ms = ctypes.c_float()

    def elapsed(event):
        return call("cudaEventElapsedTime", ctypes.byref(ms), first, event)

    pending = elapsed(second)
    while time.monotonic() - begun < 0.05:
        pass
    held_ms = (time.monotonic() - begun) * 1e3
    let_go(gate)
    check("cudaStreamSynchronize", stream)
    errors = [pending, elapsed(untimed), elapsed(never), elapsed(second)]
    check("cudaSetDevice", 1)
    other = call("cudaEventRecord", second, new_stream())
    return [errors, other, held_ms, ms.value]


def test_events_time_what_a_stream_did(tmp_path):
    errors, other_device, held_ms, ms = run(time_events, folder=tmp_path)
    assert errors == [NOT_READY, INVALID_HANDLE, INVALID_HANDLE, 0]
    assert other_device == INVALID_HANDLE
    assert ms >= held_ms


def order_with_default_stream():
    default, blocking = ctypes.c_void_p(), made("cudaStreamCreateWithFlags", 0)
    beside, memory = new_stream(), new_memory()
    gate = hold(default)
    fill(memory, 1, blocking)
    fill(memory, 2, beside)
    check("cudaStreamSynchronize", beside)
    before = query(blocking)
    let_go(gate)
    check("cudaStreamSynchronize", blocking)
    return [before, list(at(memory))]


def test_the_default_stream_waits_for_blocking_streams_only(tmp_path):
    assert run(order_with_default_stream, folder=tmp_path) == [NOT_READY, [1] * 8]


def end_while_busy():
    hold(new_stream())
    memory, stream = new_memory(), new_stream()
    for _ in range(10_000):
        fill(memory, 1, stream)
    return "end"


def test_a_process_ends_though_its_streams_are_busy(tmp_path):
    assert run(end_while_busy, folder=tmp_path, delay_us=1000) == "end"


# ---- CUDA IPC and stream memory operations -------------------------------------------------------


def own_memory(replaced: bool = False):
    """Print a handle, and what opening it here gives; stay until a line is read.

    Of memory that was freed since, and replaced by other memory, with ``replaced``.
    """
    memory, handle, stream = new_memory(), (ctypes.c_char * 64)(), new_stream()
    fill(memory, 7, stream)
    check("cudaStreamSynchronize", stream)
    check("cudaIpcGetMemHandle", handle, memory)
    opened = open_memory(bytes(handle).hex(), 0)
    if replaced:
        check("cudaFree", memory)
        memory = new_memory()
    say([opened, bytes(handle).hex()])
    input()
    return list(at(memory))


class Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


def open_memory(text: str, device: int):
    check("cudaSetDevice", device)
    handle, address = Handle.from_buffer_copy(bytes.fromhex(text)), ctypes.c_uint64()
    error = call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, 1)
    if error:
        return [error, None]
    seen = list(ctypes.string_at(address.value, 8))
    again = ctypes.c_uint64()
    check("cuIpcOpenMemHandle_v2", ctypes.byref(again), handle, 1)
    assert again.value == address.value
    stream = new_stream()
    ours = call("cuStreamWriteValue64_v2", stream, address, ctypes.c_uint64(9), 0)
    check("cudaStreamSynchronize", stream)
    for expected in (0, 0, INVALID_VALUE):
        assert call("cuIpcCloseMemHandle", address) == expected
    return [seen, ours]


def test_memory_is_shared_with_other_processes(tmp_path):
    owner = start(own_memory, folder=tmp_path)
    refused, handle = first_line(owner)
    assert refused == [INVALID_CONTEXT, None]  # by the process itself
    assert run(open_memory, handle, 0, folder=tmp_path) == [[7] * 8, 0]
    assert result(owner, "\n") == [9, *[0] * 7]
    assert run(open_memory, handle, 0, folder=tmp_path) == [INVALID_VALUE, None]


def test_a_handle_of_freed_memory_is_invalid(tmp_path):
    owner = start(own_memory, True, folder=tmp_path)
    _, handle = first_line(owner)
    assert run(open_memory, handle, 0, folder=tmp_path) == [INVALID_VALUE, None]
    assert result(owner, "\n") == [POISON] * 8


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [[7] * 8, INVALID_VALUE]),
        ({"cuda_visible_devices": "1"}, [[7] * 8, INVALID_VALUE]),
        ({"remote_writes": 1}, [[7] * 8, 0]),
        ({"peer_access": 0}, [PEER_ACCESS_UNSUPPORTED, None]),
    ],
)
def test_memory_of_another_gpu_needs_peer_access_and_streams_do_not_write_it(
    tmp_path, settings, expected
):
    owner = start(own_memory, folder=tmp_path)
    _, handle = first_line(owner)
    device = 0 if "cuda_visible_devices" in settings else 1
    assert run(open_memory, handle, device, folder=tmp_path, **settings) == expected
    result(owner, "\n")


def ask_peers():
    can = ctypes.c_int()
    check("cudaDeviceCanAccessPeer", ctypes.byref(can), 0, 1)
    return [can.value, *(call("cudaDeviceEnablePeerAccess", peer, 0) for peer in (1, 1, 0))]


def test_peers(tmp_path):
    assert run(ask_peers, folder=tmp_path) == [1, 0, 704, INVALID_DEVICE]
    assert run(ask_peers, folder=tmp_path, peer_access=0) == [0, 217, 217, INVALID_DEVICE]


def wait_for_values():
    """Return for each way to wait whether its stream waits, before and after the number changes."""
    found = []
    for flags, value, before, after in ((0, 5, 4, 6), (1, 5, 6, 5), (2, 5, 2, 4), (3, ~5, 5, 2)):
        stream, number = new_stream(), new_memory(8)
        cell = ctypes.c_uint64.from_address(number.value)
        cell.value = before if flags < 3 else 2**64 - 1
        check("cuStreamWaitValue64_v2", stream, number, ctypes.c_uint64(value), flags)
        waits = query(stream)
        cell.value = after
        check("cudaStreamSynchronize", stream)
        found.append(waits)
    bad = [ctypes.c_uint64(1 << 20), ctypes.c_uint64(number.value + 4)]
    refused = [call("cuStreamWaitValue64_v2", stream, a, ctypes.c_uint64(0), 0) for a in bad]
    return [found, refused]


def test_streams_wait_for_numbers(tmp_path):
    expected = [[NOT_READY] * 4, [INVALID_VALUE] * 2]
    assert run(wait_for_values, folder=tmp_path) == expected


# ---- processes, devices, errors ------------------------------------------------------------------


def use_in_forked_child(first: bool):
    if first:
        new_memory()
    child = os.fork()
    if child == 0:
        os._exit(call("cudaMalloc", ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(8)))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_cannot_use_what_its_parent_has_used(tmp_path):
    assert run(use_in_forked_child, True, folder=tmp_path) == INITIALIZATION_ERROR
    assert run(use_in_forked_child, False, folder=tmp_path) == 0


def addresses():
    count = ctypes.c_int()
    error = call("cudaGetDeviceCount", ctypes.byref(count))
    text = ctypes.create_string_buffer(20)
    found = []
    for device in range(count.value):
        check("cudaDeviceGetPCIBusId", text, 20, device)
        found.append(text.value.decode())
    return [error, found]


@pytest.mark.parametrize(
    ("visible", "physical"),
    [
        ("2", [2]),
        ("3,0", [3, 0]),
        ("1,7,2", [1]),
        ("1,-1,2", [1]),
        ("1,1", []),
        ("", []),
        ("GPU-656d756c-6174-6564-4750-550000000003,GPU-none,0", [3]),
    ],
)
def test_cuda_visible_devices(tmp_path, visible, physical):
    error, found = run(addresses, folder=tmp_path, count=4, cuda_visible_devices=visible)
    assert found == [f"0000:{0xE0 + number:02x}:00.0" for number in physical]
    assert error == (0 if physical else NO_DEVICE)


def use_driver_in_new_thread():
    """Return errors of the driver's calls in a thread without a context, then with one."""
    check("cudaSetDevice", 1)
    number, stream = new_memory(), new_stream()
    write = ("cuStreamWriteValue64_v2", stream, number, ctypes.c_uint64(1), 0)
    context, address, errors = made("cuDevicePrimaryCtxRetain", 1), ctypes.c_uint64(), []

    def work():
        device = ctypes.c_int(-1)
        errors.append(call(*write))
        errors.append(call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(8)))
        check("cuCtxPushCurrent_v2", context)
        check(*write)
        errors.append(call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(8)))
        check("cudaGetDevice", ctypes.byref(device))
        errors.append(device.value)
        check("cuCtxPopCurrent_v2", None)
        check("cudaGetDevice", ctypes.byref(device))
        errors.append(device.value)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return errors


def test_each_thread_has_contexts_of_its_own(tmp_path):
    assert run(use_driver_in_new_thread, folder=tmp_path) == [*[INVALID_CONTEXT] * 2, 0, 1, 0]


def go_on_after_a_failure():
    """Write beside a block; return the errors of calls that follow."""
    held, memory = new_stream(), new_memory(600)
    check("cudaSetDevice", 1)
    hold(made("cudaStreamCreateWithPriority", NON_BLOCKING, 0))
    check("cudaSetDevice", 0)
    ctypes.memset(memory.value - 1, 1, 1)
    errors = [call("cudaFree", memory), call("cudaStreamSynchronize", held)]
    return [*errors, call("cudaDeviceSynchronize"), *(call("cudaGetLastError") for _ in range(2))]


def test_after_a_failure_every_call_fails(tmp_path):
    assert run(go_on_after_a_failure, folder=tmp_path) == [ILLEGAL_ADDRESS] * 5


def launch_kernel():
    CUDA.cudaGetErrorString.restype = ctypes.c_char_p
    error = call("cudaLaunchKernel", ctypes.cast(CUDA.cudaMalloc, ctypes.c_void_p), None, None)
    return [error, CUDA.cudaGetErrorString(error).decode()]


def test_a_kernel_that_is_not_emulated_is_an_error_with_its_name(tmp_path):
    error, text = run(launch_kernel, folder=tmp_path)
    assert error == 98
    assert "kernel cudaMalloc is not emulated" in text
