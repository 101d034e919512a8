"""The emulated GPU's collective operations: results, disagreeing ranks, calls that are refused.

Run on emulated GPUs only, like ``test_emulated_nccl.py``, which has the helpers.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tests.test_emulated_gpu import (
    CUDA,
    EMULATED,
    POISON,
    Process,
    at,
    call,
    check,
    new_memory,
    new_stream,
)
from tests.test_emulated_nccl import (
    INT32,
    INVALID_USAGE,
    LAUNCH_FAILURE,
    UINT8,
    connect,
    last_error,
    new_id,
    start,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not EMULATED, reason="tests the emulated GPU, which is not loaded"),
]

FLOAT32, FLOAT64, FLOAT8 = 7, 8, 10
SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE, CUSTOM = range(6)
CTYPES: dict[int, Any] = {INT32: ctypes.c_int32, FLOAT32: ctypes.c_float, FLOAT64: ctypes.c_double}

#: The inputs of three ranks.
GIVEN = [[1, -2, 6], [4, 5, -3], [4, 3, 0]]


def all_reduce(communicator, source, target, stream, op, dtype=UINT8, count=8) -> int:
    return call(
        "ncclAllReduce", source, target, ctypes.c_size_t(count), dtype, op, communicator, stream
    )


def reduce_numbers(rank, name, op, dtype, *, in_place):
    """Reduce this rank's numbers; in the emulator the host can access device memory."""
    communicator, stream = connect(name, rank, len(GIVEN)), new_stream()
    numbers = (CTYPES[dtype] * 3)(*GIVEN[rank])
    source = new_memory()
    ctypes.memmove(source, numbers, ctypes.sizeof(numbers))
    target = source if in_place else new_memory()
    assert all_reduce(communicator, source, target, stream, op, dtype, 3) == 0, last_error()
    check("cudaStreamSynchronize", stream)
    return list(type(numbers).from_buffer_copy(at(target, ctypes.sizeof(numbers))))


def reduce_in_place(rank, name, op, dtype):
    return reduce_numbers(rank, name, op, dtype, in_place=True)


def reduce_elsewhere(rank, name, op, dtype):
    return reduce_numbers(rank, name, op, dtype, in_place=False)


@pytest.mark.gpu(3)
@pytest.mark.parametrize("dtype", CTYPES)
@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (SUM, [9, 6, 3]),
        (PRODUCT, [16, -30, 0]),
        (MAXIMUM, [4, 5, 6]),
        (MINIMUM, [1, -2, -3]),
        (AVERAGE, [3, 2, 1]),
    ],
)
def test_all_ranks_get_the_reduced_numbers(tmp_path, op, dtype, expected):
    name, function = new_id(), reduce_in_place if dtype == FLOAT32 else reduce_elsewhere
    processes = [
        Process(function, rank, name, op, dtype, folder=tmp_path, count=3) for rank in range(3)
    ]
    assert [process.result() for process in processes] == [expected] * 3


def broadcast_and_gather(rank, name):
    """Copy rank 1's numbers to all, and gather these and each rank's number."""
    communicator, stream = connect(name, rank, 3), new_stream()
    memory, target = new_memory(), new_memory()
    ctypes.memmove(memory, bytes([rank] * 4), 4)
    count = ctypes.c_size_t(3)
    assert call("ncclBcast", memory, count, UINT8, 1, communicator, stream) == 0, last_error()
    count = ctypes.c_size_t(4)
    assert call("ncclAllGather", memory, target, count, UINT8, communicator, stream) == 0
    check("cudaStreamSynchronize", stream)
    return list(at(target, 12))


@pytest.mark.gpu(3)
def test_a_broadcast_and_what_is_gathered(tmp_path):
    name = new_id()
    processes = [Process(broadcast_and_gather, r, name, folder=tmp_path, count=3) for r in range(3)]
    assert [each.result() for each in processes] == [[1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 2]] * 3


def reduce_by_different_operators(rank, name, ops):
    communicator, stream, target = connect(name, rank), new_stream(), new_memory()
    assert all_reduce(communicator, new_memory(), target, stream, ops[rank]) == 0, last_error()
    error = call("cudaStreamSynchronize", stream)
    CUDA.cudaGetErrorString.restype = ctypes.c_char_p
    return [error, at(target)[0], CUDA.cudaGetErrorString(error).decode()]


def test_ranks_must_agree_on_the_operator(tmp_path):
    """Or on the operation: ranks may not gather in one and reduce in the other."""
    operators = SUM, MAXIMUM
    for process in start(reduce_by_different_operators, new_id(), operators, folder=tmp_path):
        error, value, text = process.result()
        assert (error, value) == (LAUNCH_FAILURE, POISON)
        assert "rank 0 reduces 8 of uint8 by sum" in text
        assert "rank 1 reduces 8 of uint8 by maximum" in text


def call_what_is_not_emulated(rank, name):
    communicator, stream, memory = connect(name, rank, 1), new_stream(), new_memory()
    scale, op = ctypes.c_float(0.5), ctypes.c_int()
    return [
        [all_reduce(communicator, memory, memory, stream, CUSTOM), last_error()],
        [all_reduce(communicator, memory, memory, stream, SUM, FLOAT8), last_error()],
        [
            call(
                "ncclRedOpCreatePreMulSum",
                ctypes.byref(op),
                ctypes.byref(scale),
                FLOAT32,
                0,
                communicator,
            ),
            last_error(),
        ],
        [
            call(
                "ncclReduce",
                memory,
                memory,
                ctypes.c_size_t(8),
                UINT8,
                SUM,
                0,
                communicator,
                stream,
            ),
            last_error(),
        ],
    ]


def test_reductions_that_are_not_emulated_are_errors(tmp_path):
    found = Process(call_what_is_not_emulated, 0, new_id(), folder=tmp_path).result()
    assert found == [
        [INVALID_USAGE, "a type or an operator that is not emulated"],
        [INVALID_USAGE, "a type or an operator that is not emulated"],
        [INVALID_USAGE, "the emulated NCCL has no ncclRedOpCreatePreMulSum"],
        [INVALID_USAGE, "the emulated NCCL has no ncclReduce"],
    ]
