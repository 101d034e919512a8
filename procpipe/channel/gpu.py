"""The memory of one GPU that processes share, as ``cuda_ipc`` uses it.

Torch's own sharing of tensors does not fit: it counts users in a file of /dev/shm, which stays when
a process is killed, and shares whole blocks of its allocator, with expandable segments in a way
that not every system allows. So shared memory comes from CUDA's driver, through the few calls that
torch does not offer.

The driver keeps interprocess events in files of /dev/shm, too. Order between processes comes from
numbers in the shared memory instead ("stream memory operations"): a stream writes a number when it
gets there, and another process's stream waits for it.
"""

from __future__ import annotations

import ctypes

import torch

#: Size of what names memory to other processes (``CU_IPC_HANDLE_SIZE``).
HANDLE_BYTES = 64

_LIBRARY = "libcuda.so.1"
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_LAZY_ENABLE_PEER_ACCESS = 1  # the only flag there is to open memory with
_WAIT_UNTIL_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
_WRITE_AFTER_ALL_BEFORE = 0  # CU_STREAM_WRITE_VALUE_DEFAULT


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


_Address = ctypes.c_uint64
_Pointer = ctypes.c_void_p
_AddressOut = ctypes.POINTER(_Address)
_PointerOut = ctypes.POINTER(_Pointer)
_MemoryOperation = (_Pointer, _Address, ctypes.c_uint64, ctypes.c_uint)

#: The calls and the types of their arguments, as in ``cuda.h``; each returns an error's number.
_CALLS = {
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_PointerOut, ctypes.c_int),
    "cuCtxPushCurrent_v2": (_Pointer,),
    "cuCtxPopCurrent_v2": (_PointerOut,),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuMemAlloc_v2": (_AddressOut, ctypes.c_size_t),
    "cuMemFree_v2": (_Address,),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), _Address),
    "cuIpcOpenMemHandle_v2": (_AddressOut, _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_Address,),
    "cuMemcpyDtoDAsync_v2": (_Address, _Address, ctypes.c_size_t, _Pointer),
    "cuStreamWriteValue64_v2": _MemoryOperation,
    "cuStreamWaitValue64_v2": _MemoryOperation,
}

#: What a driver, or the container it runs in, may lack.
_ADVICE = (
    "ranks that share a GPU need CUDA IPC and 64-bit stream memory operations; if these are not "
    "available here, give each rank a GPU of its own"
)


class Gpu:
    """A GPU of this process; work on a stream is queued, and the host goes on.

    Raises ``RuntimeError`` if NVIDIA's driver is missing or too old.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        self.device = device
        self._driver = _loaded_driver()
        number, context = ctypes.c_int(), _Pointer()
        self._check("cuDeviceGet", self._driver.cuDeviceGet(ctypes.byref(number), device.index))
        # Torch's own context, which the thread that calls may not have made current yet.
        status = self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
        self._check("cuDevicePrimaryCtxRetain", status)
        self._context = context

    # -- shared memory --------------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> int:
        """Return the address of new memory, which other processes can open as a whole.

        If there is none, torch empties its cache before this raises ``torch.OutOfMemoryError``.
        """
        address = _Address()
        status = self._status("cuMemAlloc_v2", ctypes.byref(address), num_bytes)
        if status == _OUT_OF_MEMORY:
            torch.cuda.empty_cache()
            status = self._status("cuMemAlloc_v2", ctypes.byref(address), num_bytes)
        if status == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(
                f"{self.device} has no {num_bytes / 2**20:.0f} MiB for a message to a rank that "
                "shares it: give smaller micro-batches (chunks), or fewer ranks a GPU"
            )
        self._check("cuMemAlloc_v2", status)
        return address.value

    def free(self, address: int) -> None:
        """Free memory that no process has open any more; may wait for the GPU."""
        self._call("cuMemFree_v2", address)

    def export(self, address: int) -> bytes:
        """Return the handle by which another process can open memory of this one."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Return the address here of another process's memory."""
        address = _Address()
        theirs = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), theirs, _LAZY_ENABLE_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        """Close memory of another process; may wait for the GPU."""
        self._call("cuIpcCloseMemHandle", address)

    def copy(self, stream: torch.cuda.Stream, to: int, source: int, num_bytes: int) -> None:
        """Copy within the GPU."""
        self._call("cuMemcpyDtoDAsync_v2", to, source, num_bytes, stream.cuda_stream)

    def write(self, stream: torch.cuda.Stream, address: int, number: int) -> None:
        """Write an 8-byte number once the work queued on the stream before is done."""
        self._call(
            "cuStreamWriteValue64_v2", stream.cuda_stream, address, number, _WRITE_AFTER_ALL_BEFORE
        )

    def wait(self, stream: torch.cuda.Stream, address: int, number: int) -> None:
        """Make a stream wait until the 8-byte number at an address is at least this one."""
        self._call(
            "cuStreamWaitValue64_v2", stream.cuda_stream, address, number, _WAIT_UNTIL_AT_LEAST
        )

    # -- calls ----------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, self._status(name, *arguments))

    def _status(self, name: str, *arguments: object) -> int:
        """Make a call in the GPU's context, whatever this thread's current device is."""
        driver = self._driver
        self._check("cuCtxPushCurrent_v2", driver.cuCtxPushCurrent_v2(self._context))
        try:
            return int(getattr(driver, name)(*arguments))
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(_Pointer()))

    def _check(self, name: str, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            story = text.value.decode() if text.value else "an error without a text"
            raise RuntimeError(f"{name} failed on {self.device}: {story} ({status}); {_ADVICE}")


def _loaded_driver() -> ctypes.CDLL:
    """Return the driver's library, the one that torch has loaded, with its calls declared."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        for name, types in _CALLS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, ctypes.c_int
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"NVIDIA's driver is missing, or too old ({error}): {_ADVICE}") from None
    return library
