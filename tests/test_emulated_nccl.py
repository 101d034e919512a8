"""The emulated GPU's NCCL: each rule that a pipeline can break, and that it goes when switched off.

Run on emulated GPUs only. Each test starts a process a rank, without torch; what it does there is
one of the functions below, whose first argument is the rank. That an operation does not end is seen
by waiting for a while: where it would end, it does so within milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import subprocess
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.dist.script import run_forked
from tests.test_emulated_gpu import (
    CUDA,
    EMULATED,
    NOT_READY,
    POISON,
    at,
    call,
    check,
    fill,
    first_line,
    hold,
    let_go,
    new_memory,
    new_stream,
    query,
    result,
    say,
    start,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not EMULATED, reason="tests the emulated GPU, which is not loaded"),
]

INVALID_ARGUMENT, INVALID_USAGE = 4, 5
UINT8, INT32, INT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 = 1, 2, 4, 6, 7, 8, 9
SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE = range(5)
LAUNCH_FAILURE = 719
NO_COLOR = -1
WHILE_S = 0.3


# ---- NCCL's calls --------------------------------------------------------------------------------


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


def new_id() -> str:
    return uuid.uuid4().hex


def initialize(name: str, rank: int, size: int = 2, gpu: int | None = None) -> tuple[int, Any]:
    check("cudaSetDevice", rank if gpu is None else gpu)
    communicator = ctypes.c_void_p()
    identity = UniqueId(name.encode())
    return call("ncclCommInitRank", ctypes.byref(communicator), size, identity, rank), communicator


def connect(name: str, rank: int, size: int = 2) -> Any:
    error, communicator = initialize(name, rank, size)
    assert error == 0, last_error()
    return communicator


def last_error() -> str:
    CUDA.ncclGetLastError.restype = ctypes.c_char_p
    return str(CUDA.ncclGetLastError(None), "ascii")


def send(communicator, data, peer, stream, count=8, dtype=UINT8) -> int:
    return call("ncclSend", data, ctypes.c_size_t(count), dtype, peer, communicator, stream)


def receive(communicator, data, peer, stream, count=8, dtype=UINT8) -> int:
    return call("ncclRecv", data, ctypes.c_size_t(count), dtype, peer, communicator, stream)


def ends(*streams: Any) -> bool:
    """Whether streams have nothing left to do, before a while is over."""
    until = time.monotonic() + WHILE_S
    while any(query(stream) == NOT_READY for stream in streams):
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def filled(value: int) -> Any:
    memory, stream = new_memory(), new_stream()
    fill(memory, value, stream)
    check("cudaStreamSynchronize", stream)
    return memory


def ranks(function, size, *arguments, tmp_path, **settings) -> list[Any]:
    """Run a function on ranks of one machine, and give what each returned."""
    settings = {"folder": tmp_path, "count": size, **settings}
    processes = [start(function, rank, *arguments, **settings) for rank in range(size)]
    return [result(process) for process in processes]


# ---- sends and receives --------------------------------------------------------------------------


def exchange(rank, name, grouped):
    communicator, stream = connect(name, rank), new_stream()
    mine, theirs = filled(rank + 1), new_memory()
    if grouped:
        check("ncclGroupStart")
    assert send(communicator, mine, 1 - rank, stream) == 0
    assert receive(communicator, theirs, 1 - rank, stream) == 0
    if grouped:
        check("ncclGroupEnd")
    ended = ends(stream)
    say(ended)
    input()  # until the other rank has looked too
    check("ncclCommAbort", communicator)
    check("cudaStreamSynchronize", stream)
    return at(theirs)[0]


@pytest.mark.parametrize(("grouped", "found"), [(True, [2, 1]), (False, [POISON, POISON])])
def test_sends_and_receives_of_a_group_progress_together(tmp_path, grouped, found):
    name = new_id()
    processes = [start(exchange, rank, name, grouped, folder=tmp_path) for rank in (0, 1)]
    assert [first_line(process) for process in processes] == [grouped, grouped]
    assert [result(process, "\n") for process in processes] == found


def send_early(rank, name):
    communicator, stream, memory = connect(name, rank), new_stream(), filled(rank + 1)
    if rank == 0:
        assert send(communicator, memory, 1, stream) == 0
        say(ends(stream))
    else:
        input()
        assert receive(communicator, memory, 0, stream) == 0
    check("cudaStreamSynchronize", stream)
    return at(memory)[0]


def test_a_send_does_not_end_before_its_receive_has_begun(tmp_path):
    name = new_id()
    processes = [start(send_early, rank, name, folder=tmp_path) for rank in (0, 1)]
    assert first_line(processes[0]) is False
    assert [result(process, "\n") for process in reversed(processes)] == [1, 1]


def receive_in_two_streams(rank, name):
    communicator, streams = connect(name, rank), [new_stream(), new_stream()]
    if rank == 1:
        for value in (1, 2):
            assert send(communicator, filled(value), 0, streams[0]) == 0
        check("cudaStreamSynchronize", streams[0])
        return None
    gate, targets = hold(streams[0]), [new_memory(), new_memory()]
    for target, stream in zip(targets, streams, strict=True):
        assert receive(communicator, target, 1, stream) == 0
    before = ends(streams[1])
    let_go(gate)
    for stream in streams:
        check("cudaStreamSynchronize", stream)
    return [before, *(at(target)[0] for target in targets)]


def test_operations_of_a_communicator_run_in_issue_order_over_streams(tmp_path):
    found = ranks(receive_in_two_streams, 2, new_id(), tmp_path=tmp_path)
    assert found[0] == [False, 1, 2]


def group_in_two_streams(rank, name):
    communicator, streams = connect(name, rank), [new_stream(), new_stream()]
    mine, theirs = filled(rank + 1), new_memory()
    gate = hold(streams[1])
    check("ncclGroupStart")
    assert send(communicator, mine, 1 - rank, streams[0]) == 0
    assert receive(communicator, theirs, 1 - rank, streams[1]) == 0
    check("ncclGroupEnd")
    before = ends(streams[0])
    let_go(gate)
    for stream in streams:
        check("cudaStreamSynchronize", stream)
    return [before, at(theirs)[0]]


def test_a_group_begins_after_what_is_in_all_its_streams(tmp_path):
    found = ranks(group_in_two_streams, 2, new_id(), tmp_path=tmp_path)
    assert found == [[False, 2], [False, 1]]


def disagree(rank, name, counts, dtypes):
    communicator, stream, memory = connect(name, rank), new_stream(), filled(rank + 1)
    operation = send if rank == 0 else receive
    assert operation(communicator, memory, 1 - rank, stream, counts[rank], dtypes[rank]) == 0
    return [call("cudaStreamSynchronize", stream), at(memory)[0]]


@pytest.mark.parametrize(
    ("counts", "dtypes", "error"),
    [
        ((8, 8), (UINT8, UINT8), None),
        ((8, 4), (UINT8, UINT8), "rank 0 sends 8 of uint8"),
        ((4, 8), (UINT8, UINT8), "rank 1 receives 8 of uint8"),
        ((8, 2), (UINT8, INT32), "rank 1 receives 2 of int32"),
    ],
)
def test_a_receive_must_fit_its_send(tmp_path, counts, dtypes, error):
    name = new_id()
    processes = [start(disagree, r, name, counts, dtypes, folder=tmp_path) for r in (0, 1)]
    outputs = [process.communicate(timeout=60) for process in processes]
    values = [[0, 1], [0, 1]] if error is None else [[LAUNCH_FAILURE, 1], [LAUNCH_FAILURE, 2]]
    assert [out.splitlines()[-1] for out, _ in outputs] == [str(value) for value in values]
    for _, errors in outputs:
        assert (error or "") in errors, errors


def use_wrongly(rank, name):
    communicator, other = connect(name, 0, 1), 1
    stream, memory = new_stream(), new_memory()
    check("cudaSetDevice", other)
    there, theirs, host = new_stream(), new_memory(), ctypes.create_string_buffer(8)
    return [
        [send(communicator, data, 0, where, 8, dtype), last_error()]
        for data, where, dtype in (
            (memory, there, UINT8),
            (theirs, stream, UINT8),
            (host, stream, UINT8),
            (memory, stream, 99),
        )
    ]


def test_streams_and_memory_of_others_are_refused(tmp_path):
    (found,) = ranks(use_wrongly, 1, new_id(), tmp_path=tmp_path, count=2)
    errors = [error for error, _ in found]
    assert errors == [INVALID_USAGE, INVALID_ARGUMENT, INVALID_ARGUMENT, INVALID_ARGUMENT]
    texts = ["stream of another GPU", "memory of GPU 1", "memory of no GPU", "not emulated"]
    for (_, text), part in zip(found, texts, strict=True):
        assert part in text


# ---- communicators -------------------------------------------------------------------------------


def connect_alone(rank, name):
    done = threading.Event()

    def initialise():
        errors.append(initialize(name, rank)[0])
        done.set()

    errors: list[int] = []
    thread = threading.Thread(target=initialise)
    thread.start()
    say(done.wait(WHILE_S))
    thread.join()
    return errors


@pytest.mark.parametrize("early", [0, 1])
def test_initialisation_blocks_until_all_ranks_came(tmp_path, early):
    name = new_id()
    first = start(connect_alone, early, name, folder=tmp_path)
    assert first_line(first) is False
    second = start(connect_alone, 1 - early, name, folder=tmp_path)
    assert [result(first), result(second)] == [[0], [0]]


def share_gpu(rank, name, allowed):
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = str(int(allowed))
    error, _ = initialize(name, rank, gpu=0)
    return [error, last_error()]


def test_two_ranks_on_one_gpu_are_refused_unless_allowed(tmp_path):
    for error, text in ranks(share_gpu, 2, new_id(), False, tmp_path=tmp_path):
        assert error == INVALID_USAGE
        assert text.startswith("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device")
    assert ranks(share_gpu, 2, new_id(), True, tmp_path=tmp_path) == [[0, ""]] * 2


def split(rank, name):
    whole, half = connect(name, rank, 4), ctypes.c_void_p()
    color = NO_COLOR if rank == 3 else rank % 2
    check("ncclCommSplit", whole, color, -rank, ctypes.byref(half), None)
    if half.value is None:
        return None
    size, place, stream = ctypes.c_int(), ctypes.c_int(), new_stream()
    check("ncclCommCount", half, ctypes.byref(size))
    check("ncclCommUserRank", half, ctypes.byref(place))
    mine, all_ = filled(rank), new_memory()
    check("ncclAllGather", mine, all_, ctypes.c_size_t(1), UINT8, half, stream)
    check("cudaStreamSynchronize", stream)
    return [size.value, place.value, list(at(all_, size.value))]


def test_split_communicators_are_ordered_by_key(tmp_path):
    found = ranks(split, 4, new_id(), tmp_path=tmp_path)
    assert found == [[2, 1, [2, 0]], [1, 0, [1]], [2, 0, [2, 0]], None]


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
    assert ranks(wait_for_a_dead_peer, 2, new_id(), tmp_path=tmp_path)[0] == [False, 0, POISON]


def abort(rank, names, grouped):
    communicators = [connect(name, rank) for name in names]
    if rank == 1:
        input()
        return None
    memory, streams = new_memory(), [new_stream() for _ in names]
    for communicator, stream in zip(communicators, streams, strict=True):
        assert receive(communicator, memory, 1, stream) == 0
    if grouped:
        check("ncclGroupStart")
        for communicator in communicators:
            check("ncclCommAbort", communicator)
        check("ncclGroupEnd")
        return ends(*streams)
    first = threading.Thread(target=check, args=("ncclCommAbort", communicators[0]))
    first.start()
    first.join(WHILE_S)
    hung = first.is_alive()
    check("ncclCommAbort", communicators[1])
    first.join()
    return hung


@pytest.mark.parametrize("grouped", [False, True])
def test_aborts_one_by_one_hang_and_in_a_group_or_together_do_not(tmp_path, grouped):
    names = [new_id(), new_id()]
    waiting, other = (start(abort, rank, names, grouped, folder=tmp_path) for rank in (0, 1))
    assert result(waiting) is True
    assert result(other, "\n") is None


def finalize(rank, name):
    communicator, stream, memory = connect(name, rank), new_stream(), filled(rank + 1)
    if rank == 1:
        input()
    assert (send if rank else receive)(communicator, memory, 1 - rank, stream) == 0
    finalizing = threading.Thread(target=check, args=("ncclCommFinalize", communicator))
    finalizing.start()
    if rank == 0:
        finalizing.join(WHILE_S)
        say(finalizing.is_alive())
    finalizing.join()
    check("ncclCommDestroy", communicator)
    return [at(memory)[0], send(communicator, memory, 1 - rank, stream), last_error()]


def test_finalizing_waits_for_operations(tmp_path):
    name = new_id()
    processes = [start(finalize, rank, name, folder=tmp_path) for rank in (0, 1)]
    assert first_line(processes[0]) is True
    after = [2, INVALID_ARGUMENT, "the communicator was closed"]
    assert [result(process, "\n") for process in reversed(processes)] == [after, after]


def post_ahead(rank, names):
    communicators, streams = [connect(name, rank) for name in names], [new_stream() for _ in names]
    memories = [filled(rank + 1) for _ in names]
    operation = send if rank == 1 else receive
    uses = list(zip(communicators, memories, streams, strict=True))
    if rank == 1:
        uses.insert(0, uses.pop())
    for i, (communicator, memory, stream) in enumerate(uses):
        if rank == 1 and i == 1:
            input()
        assert operation(communicator, memory, 1 - rank, stream) == 0
        if rank == 0 and i < 2:
            assert not ends(stream)  # so that it has its place before the next
    if rank == 0:
        say(ends(streams[2]))
    for stream in streams:
        check("cudaStreamSynchronize", stream)
    return [at(memory)[0] for memory in memories]


@pytest.mark.parametrize(("slots", "fits"), [(2, False), (3, True)])
def test_a_gpu_has_room_for_some_communicators(tmp_path, slots, fits):
    names = [new_id() for _ in range(3)]
    settings = {"folder": tmp_path, "kernel_slots": slots}
    receiver, sender = (start(post_ahead, rank, names, **settings) for rank in (0, 1))
    assert first_line(receiver) is fits
    assert [result(sender, "\n"), result(receiver)] == [[2, 2, 2], [2, 2, 2]]


# ---- collectives ---------------------------------------------------------------------------------

FORMATS = {INT32: "i", INT64: "q", FLOAT16: "e", FLOAT32: "f", FLOAT64: "d", UINT8: "B"}


def put(values, dtype):
    memory = new_memory()
    raw = b"".join(
        struct.pack("f", value)[2:] if dtype == BFLOAT16 else struct.pack(FORMATS[dtype], value)
        for value in values
    )
    ctypes.memmove(memory, raw, len(raw))
    return memory


def get(memory, count, dtype):
    if dtype == BFLOAT16:
        raw = at(memory, 2 * count)
        parts = [raw[i : i + 2] for i in range(0, len(raw), 2)]
        return [struct.unpack("f", b"\0\0" + part)[0] for part in parts]
    size = struct.calcsize(FORMATS[dtype])
    return list(struct.unpack(f"{count}{FORMATS[dtype]}", at(memory, size * count)))


def collect(rank, name, size):
    """Call each collective with values by which ranks and places can be told apart."""
    communicator, stream, found = connect(name, rank, size), new_stream(), {}

    def collective(function, count, results, *arguments, dtype=INT32):
        source = put([10 * rank + i for i in range(count * size)], dtype)
        target = put([0] * results, dtype)
        number = ctypes.c_size_t(count)
        check(function, source, target, number, dtype, *arguments, communicator, stream)
        check("cudaStreamSynchronize", stream)
        return get(target, results, dtype)

    for dtype in (INT32, INT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, UINT8):
        found[f"sum {dtype}"] = collective("ncclAllReduce", 2, 2, SUM, dtype=dtype)
    for op in (PRODUCT, MAXIMUM, MINIMUM, AVERAGE):
        found[f"operator {op}"] = collective("ncclAllReduce", 2, 2, op)
    found["reduce"] = collective("ncclReduce", 2, 2, SUM, 1)
    found["scatter"] = collective("ncclReduceScatter", 1, 1, SUM)
    found["broadcast"] = collective("ncclBroadcast", 2, 2, 1)
    found["gather"] = collective("ncclAllGather", 1, size)
    return found


def test_collectives(tmp_path):
    sums = {f"sum {d}": [30, 33] for d in (1, 2, 4, 6, 7, 8, 9)}
    operators = {"operator 1": [0, 231], "operator 2": [20, 21], "operator 3": [0, 1]}
    for rank, found in enumerate(ranks(collect, 3, new_id(), 3, tmp_path=tmp_path)):
        assert found == sums | operators | {
            "operator 4": [10, 11],
            "reduce": [30, 33] if rank == 1 else [0, 0],
            "scatter": [30 + 3 * rank],
            "broadcast": [10, 11],
            "gather": [0, 10, 20],
        }


# ---- what torch calls ----------------------------------------------------------------------------


def refuse_memory(rank):
    memory = ctypes.c_void_p()
    return [call("ncclMemAlloc", ctypes.byref(memory), ctypes.c_size_t(8)), last_error()]


def test_no_call_of_torch_reaches_the_real_nccl(tmp_path):
    import torch

    library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    names = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True)
    needed = set(re.findall(r" U (p?nccl\w+)", names.stdout))
    driver = ctypes.CDLL("libcuda.so.1")
    assert "ncclSend" in needed
    assert {name for name in needed if not hasattr(driver, name)} == set()
    (found,) = ranks(refuse_memory, 1, tmp_path=tmp_path)
    assert found == [INVALID_USAGE, "the emulated NCCL has no ncclMemAlloc"]


TORCH = """
from datetime import timedelta
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
options = dist.ProcessGroupNCCL.Options()
options._timeout = timedelta(seconds=60)
store = dist.PrefixStore("nccl", dist.distributed_c10d._get_default_store())
group = dist.ProcessGroupNCCL(store, rank, size, options)
group.eager_connect_single_device(device)
before, after = (rank - 1) % size, (rank + 1) % size
values = torch.arange(100_000, dtype=torch.float64)
for turn in range(4):
    sent = (values + rank + turn).to(device)
    came = torch.empty_like(sent)
    group._start_coalescing()
    group.send([sent], after, 0)
    group.recv([came], before, 0)
    group._end_coalescing().wait()
    assert torch.equal(came.cpu(), values + before + turn), (rank, turn)
    group.allreduce([came]).wait()
    assert torch.equal(came.cpu(), sum(values + r + turn for r in range(size))), (rank, turn)
group.shutdown()
dist.destroy_process_group()
print("agrees")
"""


@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=pytest.mark.gpu(size)) for size in (2, 4, 8)]
)
def test_torch_exchanges_and_reduces(size):
    done = run_forked(TORCH, num_ranks=size).check()
    assert done.stdout.count("agrees") == size


ABORT = """
import threading
from datetime import timedelta
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
store = dist.distributed_c10d._get_default_store()
groups = []
for name in ("a", "b"):
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=600)
    groups.append(dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, 2, options))
    groups[-1].eager_connect_single_device(device)
if rank == 0:
    come = [torch.empty(4, device=device) for _ in groups]
    works = [group.recv([tensor], 1, 0) for group, tensor in zip(groups, come)]
    aborts = [threading.Thread(target=group.abort) for group in groups]
    aborts[0].start()
    aborts[0].join(0.3)
    print("hangs", aborts[0].is_alive())
    aborts[1].start()
    for abort in aborts:
        abort.join()
    print("ended", all(work.is_completed() for work in works))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.gpu(2)
def test_torch_aborts_groups_together_only():
    done = run_forked(ABORT, num_ranks=2).check()
    assert done.stdout.splitlines() == ["hangs True", "ended True"]
