"""Calls of CUDA's driver, tested with a library of the same prototypes in its place.

Tested are arguments, contexts and errors; tests on a GPU cover the driver's behaviour.
"""

from __future__ import annotations

import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from procpipe.channel import gpu as gpu_module
from procpipe.channel.gpu import HANDLE_BYTES, Gpu

#: The prototypes are those of ``cuda.h``. Status 1 means that a call has wrong arguments.
SOURCE = r"""
#include <stdlib.h>
#include <string.h>

typedef unsigned long long Address;
typedef struct { char reserved[64]; } Handle;
typedef struct Stream *StreamPointer;
typedef struct Context *ContextPointer;

static ContextPointer context = (ContextPointer)0x123456789abc;
static int depth = 0, num_refused = 0;

#define STREAM ((StreamPointer)0xfedcba987654)
#define REQUIRE(truth) do { if (!(truth)) return 1; } while (0)

int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return 0; }
int cuDevicePrimaryCtxRetain(ContextPointer *found, int device)
{ REQUIRE(device == 43); *found = context; return 0; }
int cuCtxPushCurrent_v2(ContextPointer pushed) { REQUIRE(pushed == context); depth++; return 0; }
int cuCtxPopCurrent_v2(ContextPointer *popped) { depth--; *popped = context; return 0; }
int cuGetErrorString(int error, const char **text)
{ *text = error == 1 ? "invalid argument" : NULL; return *text ? 0 : 1; }

int cuMemAlloc_v2(Address *address, size_t size) {
    REQUIRE(depth == 1);
    if (size > (1ULL << 33)) return 2;  /* CUDA_ERROR_OUT_OF_MEMORY */
    if (size == (1ULL << 33) && num_refused++ == 0) return 2;  /* until torch's cache is freed */
    *address = (Address)calloc(1, size & 0xffff);
    return 0;
}
int cuMemFree_v2(Address address) { REQUIRE(depth == 1); free((void *)address); return 0; }

int cuIpcGetMemHandle(Handle *handle, Address address) {
    REQUIRE(depth == 1);
    for (int k = 0; k < 64; k++) handle->reserved[k] = (char)(3 * k);  /* begins with a 0 */
    memcpy(handle->reserved + 8, &address, 8);
    return 0;
}
int cuIpcOpenMemHandle_v2(Address *address, Handle handle, unsigned int flags) {
    REQUIRE(depth == 1 && flags == 1 && handle.reserved[63] == (char)(3 * 63));
    memcpy(address, handle.reserved + 8, 8);
    return 0;
}
int cuIpcCloseMemHandle(Address address) { REQUIRE(depth == 1 && address); return 0; }

int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t size, StreamPointer stream) {
    REQUIRE(depth == 1 && stream == STREAM);
    memcpy((void *)to, (void *)from, size);
    return 0;
}
int cuMemsetD8Async(Address at, unsigned char value, size_t size, StreamPointer stream) {
    REQUIRE(depth == 1 && stream == STREAM);
    memset((void *)at, value, size);
    return 0;
}
int cuStreamWriteValue64_v2(StreamPointer stream, Address at, unsigned long long value,
                            unsigned int flags) {
    REQUIRE(depth == 1 && stream == STREAM && flags == 0);
    *(unsigned long long *)at = value;
    return 0;
}
int cuStreamWaitValue64_v2(StreamPointer stream, Address at, unsigned long long value,
                           unsigned int flags) {
    REQUIRE(depth == 1 && stream == STREAM && flags == 0);
    if (value == 801) return 801;  /* CUDA_ERROR_NOT_SUPPORTED */
    REQUIRE((long long)(*(unsigned long long *)at - value) >= 0);
    return 0;
}
"""

STREAM = SimpleNamespace(cuda_stream=0xFEDCBA987654)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("driver")
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(SOURCE)
    command = [compiler, "-shared", "-fPIC", "-o", library, source]
    subprocess.run(command, check=True, timeout=60)
    return str(library)


@pytest.fixture
def gpu(library, monkeypatch):
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(gpu_module, "_LIBRARY", library)
    return Gpu(torch.device("cuda", 3))


@pytest.mark.dist
def test_memory_is_shared_by_its_handle(gpu):
    address = gpu.allocate(4096)

    handle = gpu.export(address)

    assert len(handle) == HANDLE_BYTES
    assert handle[0] == 0
    assert gpu.open(handle) == address
    gpu.close(address)
    gpu.free(address)


def test_copies_and_numbers_use_the_given_addresses(gpu):
    address = gpu.allocate(4096)
    tensor = torch.arange(100)

    gpu.copy(STREAM, address + 8, tensor.data_ptr(), 800)
    gpu.write(STREAM, address, 2**63 - 1)
    gpu.wait(STREAM, address, 2**63 - 1)
    gpu.wait(STREAM, address, 5)
    received = torch.zeros_like(tensor)
    gpu.copy(STREAM, received.data_ptr(), address + 8, 800)

    assert torch.equal(received, tensor)
    gpu.clear(STREAM, address + 16, 80)
    gpu.copy(STREAM, received.data_ptr(), address + 8, 800)
    assert torch.equal(received, torch.cat((tensor[:1], torch.zeros(10), tensor[11:])).long())
    with pytest.raises(RuntimeError):
        gpu.write(SimpleNamespace(cuda_stream=1), address, 0)
    gpu.free(address)


def test_a_call_that_fails_is_an_error_with_the_drivers_text(gpu):
    with pytest.raises(RuntimeError) as caught:
        gpu.close(0)
    text = str(caught.value)
    assert text.startswith("cuIpcCloseMemHandle failed on cuda:3: invalid argument (1); ranks")


def test_the_error_names_what_a_driver_may_lack(gpu):
    with pytest.raises(RuntimeError, match=r"an error without a text \(801\); ranks") as caught:
        gpu.wait(STREAM, 0, 801)
    assert str(caught.value).endswith("give each rank a GPU of its own")


def test_torchs_cache_is_emptied_before_memory_runs_out(gpu):
    assert gpu.allocate(1 << 33)
    with pytest.raises(torch.OutOfMemoryError, match="cuda:3 has no 16384 MiB for a message"):
        gpu.allocate(1 << 34)


def test_without_a_driver_there_is_a_clear_error(gpu, monkeypatch):
    monkeypatch.setattr(gpu_module, "_LIBRARY", "libcuda-that-is-not.so.1")
    with pytest.raises(RuntimeError, match=r"driver is missing, or too old \(libcuda-that"):
        Gpu(torch.device("cuda", 3))


def test_a_driver_without_one_of_the_calls_is_too_old(gpu, monkeypatch):
    monkeypatch.setattr(gpu_module, "_CALLS", {"cuFromTheFuture": ()})
    with pytest.raises(RuntimeError, match=r"too old \(.*cuFromTheFuture"):
        Gpu(torch.device("cuda", 3))
