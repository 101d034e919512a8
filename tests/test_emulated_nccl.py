"""The emulated GPU's NCCL: rules that a pipeline can break.

Run on emulated GPUs only. Each test starts one process per rank, which runs one of the functions
below; the first argument is the rank. An operation that has not ended after a while is assumed
never to end: others end within milliseconds.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.test_emulated_gpu import (
    CUDA,
    EMULATED,
    NOT_READY,
    POISON,
    Process,
    at,
    call,
    check,
    filled,
    hold,
    let_go,
    made,
    new_memory,
    new_stream,
    query,
    report,
    wait_for_test,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not EMULATED, reason="tests the emulated GPU, which is not loaded"),
]

UINT8, INT32 = 1, 2
LAUNCH_FAILURE = 719
WHILE_S = 0.3


# ---- NCCL's calls --------------------------------------------------------------------------------


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


def new_id() -> str:
    return uuid.uuid4().hex


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


def exchange(rank, name, grouped):
    communicator, stream = connect(name, rank), new_stream()
    sent, received = filled(rank + 1), new_memory()
    if grouped:
        check("ncclGroupStart")
    assert send(communicator, sent, 1 - rank, stream) == 0
    assert receive(communicator, received, 1 - rank, stream) == 0
    if grouped:
        check("ncclGroupEnd")
    report(ends(stream))
    wait_for_test()  # until the other rank has reported too
    check("ncclCommAbort", communicator)
    check("cudaStreamSynchronize", stream)
    return at(received)[0]


@pytest.mark.parametrize(("grouped", "found"), [(True, [2, 1]), (False, [POISON, POISON])])
def test_sends_and_receives_of_a_group_progress_together(tmp_path, grouped, found):
    processes = start(exchange, new_id(), grouped, folder=tmp_path)
    assert [process.next_report() for process in processes] == [grouped, grouped]
    assert [process.result() for process in processes] == found


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
    sender, receiver = start(send_early, new_id(), folder=tmp_path)
    assert sender.next_report() is False
    assert [receiver.result(), sender.result()] == [1, 1]


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
    processes = start(receive_in_two_streams, new_id(), folder=tmp_path)
    assert [process.result() for process in processes] == [[False, 1, 2], None]


def disagree(rank, name, counts, dtypes):
    communicator, stream, memory = connect(name, rank), new_stream(), filled(rank + 1)
    operation = send if rank == 0 else receive
    assert operation(communicator, memory, 1 - rank, stream, counts[rank], dtypes[rank]) == 0
    error = call("cudaStreamSynchronize", stream)
    CUDA.cudaGetErrorString.restype = ctypes.c_char_p
    text = CUDA.cudaGetErrorString(error).decode()
    return [error, at(memory)[0], call("cudaDeviceSynchronize"), text]


@pytest.mark.parametrize(
    ("counts", "dtypes", "operations"),
    [
        ((8, 4), (UINT8, UINT8), ("rank 0 sends 8 of uint8", "rank 1 receives 4 of uint8")),
        ((8, 2), (UINT8, INT32), ("rank 0 sends 8 of uint8", "rank 1 receives 2 of int32")),
    ],
)
def test_a_receive_must_fit_its_send(tmp_path, counts, dtypes, operations):
    for rank, process in enumerate(start(disagree, new_id(), counts, dtypes, folder=tmp_path)):
        error, value, later, text = process.result()
        assert (error, value) == (LAUNCH_FAILURE, rank + 1)
        assert later == LAUNCH_FAILURE  # every later call fails as well
        assert operations[0] in text
        assert operations[1] in text


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
    processes = start(wait_for_a_dead_peer, new_id(), folder=tmp_path)
    assert [process.result() for process in processes] == [[False, 0, POISON], None]


def abort(rank, names, grouped):
    communicators = [connect(name, rank) for name in names]
    if rank == 1:
        wait_for_test()
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
def test_aborts_hang_unless_they_are_in_a_group_or_parallel(tmp_path, grouped):
    waiting, other = start(abort, [new_id(), new_id()], grouped, folder=tmp_path)
    assert waiting.result() is True
    assert other.result() is None


def post_ahead(rank, names):
    communicators, streams = [connect(name, rank) for name in names], [new_stream() for _ in names]
    memories = [filled(rank + 1) for _ in names]
    operation = send if rank == 1 else receive
    uses = list(zip(communicators, memories, streams, strict=True))
    if rank == 1:
        uses.insert(0, uses.pop())
    for i, (communicator, memory, stream) in enumerate(uses):
        if rank == 1 and i == 1:
            wait_for_test()
        assert operation(communicator, memory, 1 - rank, stream) == 0
        if rank == 0 and i < 2:
            assert not ends(stream)  # so that it has its slot before the next one
    if rank == 0:
        report(ends(streams[2]))
    for stream in streams:
        check("cudaStreamSynchronize", stream)
    return [at(memory)[0] for memory in memories]


@pytest.mark.parametrize(("slots", "fits"), [(2, False), (3, True)])
def test_a_gpu_has_room_for_some_communicators(tmp_path, slots, fits):
    names = [new_id() for _ in range(3)]
    receiver, sender = start(post_ahead, names, folder=tmp_path, kernel_slots=slots)
    assert receiver.next_report() is fits
    assert [sender.result(), receiver.result()] == [[2, 2, 2], [2, 2, 2]]


# ---- what torch calls ----------------------------------------------------------------------------


def test_no_call_of_torch_reaches_the_real_nccl(tmp_path):
    import torch

    library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    names = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True)
    needed = set(re.findall(r" U (p?nccl\w+)", names.stdout))
    driver = ctypes.CDLL("libcuda.so.1")
    assert "ncclSend" in needed
    assert {name for name in needed if not hasattr(driver, name)} == set()
