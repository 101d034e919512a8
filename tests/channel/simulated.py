"""A simulated GPU that several processes share; it does work in any order that CUDA allows.

    Device           streams of all processes, and their common memory
    Process          the ``Gpu`` of one process

A process queues work on streams. The device repeatedly picks any stream whose first work is ready,
and does that work. New memory is filled with large numbers, and has another address in each process
that opens it. To use memory that is not open, or to free memory that is in use or open elsewhere,
is an error.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import threading
from collections import deque

import torch

from procpipe.channel.cuda_ipc import FLAGS_BYTES, CudaIpcTransport
from procpipe.channel.gpu import Gpu
from procpipe.channel.meta import allocate, elements

_GARBAGE = 0x7F


def transports_on(gpus):
    """Return a transport of each process, connected to those of all others."""
    files = {}
    for rank, _ in enumerate(gpus):
        files[rank] = os.memfd_create("flags")
        os.ftruncate(files[rank], FLAGS_BYTES)
    found = [CudaIpcTransport(gpu, files[rank], files) for rank, gpu in enumerate(gpus)]
    for file in files.values():
        os.close(file)
    return found


class Device:
    """The GPU.

    Args:
        chance: chooses the next work and its time; None does all ready work at once.

    Attributes:
        is_paused: whether work is done only when a host waits for it.
    """

    def __init__(self, chance: random.Random | None = None):
        self.lock = threading.RLock()
        self.blocks: dict[bytes, Block] = {}
        self.is_paused = False
        self._chance = chance
        self._streams: list[Stream] = []
        self._addresses = itertools.count(1 << 60, 1 << 44)
        self._handles = itertools.count(1)

    def new_stream(self):
        with self.lock:
            self._streams.append(Stream(self))
            return self._streams[-1]

    def new_address(self):
        return next(self._addresses)

    def new_block(self, num_bytes):
        handle = next(self._handles).to_bytes(64, "little")
        self.blocks[handle] = Block(handle, num_bytes)
        return self.blocks[handle]

    def queued(self):
        """Do some work, as chance has it; called for each new work."""
        if self.is_paused:
            return
        if self._chance is None:
            while self._do_one():
                pass
        elif self._chance.random() < 0.1:
            self._chance.shuffle(self._streams)  # the first ones have priority
            for _ in range(self._chance.choice((1, 5, 50))):
                self._do_one()

    def run_until(self, is_done):
        with self.lock:
            while not is_done():
                assert self._do_one(), "the device waits for work that no process has queued"

    def pending(self):
        return [work for stream in self._streams for work in stream.work]

    def _do_one(self):
        ready = [stream for stream in self._streams if stream.work and stream.work[0].is_ready()]
        if not ready:
            return False
        stream = ready[0]
        stream.work[0].do()
        stream.work.popleft()
        return True


class Block:
    def __init__(self, handle, num_bytes):
        self.handle = handle
        self.content = ctypes.create_string_buffer(num_bytes)
        ctypes.memset(self.content, _GARBAGE, num_bytes)
        self.num_open = 0


class Work:
    def __init__(self, do=lambda: None, is_ready=lambda: True, blocks=()):
        self.do = do
        self.is_ready = is_ready
        self.blocks = blocks


class Event:
    def __init__(self):
        self.is_over = False

    def query(self):
        return self.is_over

    def set(self):
        self.is_over = True


class Stream:
    def __init__(self, device):
        self.device = device
        self.work: deque[Work] = deque()

    def queue(self, work):
        with self.device.lock:
            self.work.append(work)
            self.device.queued()

    def record_event(self):
        event = Event()
        self.queue(Work(event.set))
        return event

    def wait_event(self, event):
        self.queue(Work(is_ready=event.query))

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def query(self):
        with self.device.lock:
            self.device.queued()  # time passes
            return not self.work

    def synchronize(self):
        self.device.run_until(lambda: not self.work)


class Process(Gpu):
    """One process's view of the GPU; replaces all of ``Gpu``."""

    def __init__(self, device: Device) -> None:
        self._shared = device
        self._streams: list[Stream] = []
        self._blocks: dict[int, Block] = {}
        self._compute = self.new_stream()

    def compute(self, function):
        """Queue a function on the current stream."""
        self._compute.queue(Work(function))

    def new_stream(self, *, is_urgent=False):
        self._streams.append(self._shared.new_stream())
        return self._streams[-1]

    def current_stream(self):
        return self._compute

    def new_tensors(self, meta, stream):
        tensors = allocate(meta, "cpu")
        for tensor in tensors:
            elements(tensor).view(torch.uint8).fill_(_GARBAGE)
        return tensors

    def keep_for(self, tensors, stream):
        assert all(tensor.device.type == "cpu" for tensor in tensors)

    def synchronize(self):
        self._shared.run_until(lambda: not any(stream.work for stream in self._streams))

    def allocate(self, num_bytes):
        with self._shared.lock:
            address = self._shared.new_address()
            self._blocks[address] = self._shared.new_block(num_bytes)
            return address

    def free(self, address):
        with self._shared.lock:
            block = self._blocks.pop(address)
            assert not block.num_open, "memory is freed that another process has open"
            assert not self._is_in_use(block), "memory is freed that is still used"
            del self._shared.blocks[block.handle]

    def export(self, address):
        return self._blocks[address].handle

    def open(self, handle):
        with self._shared.lock:
            block = self._shared.blocks[handle]
            assert block not in self._blocks.values(), "memory is opened in its own process"
            block.num_open += 1
            address = self._shared.new_address()
            self._blocks[address] = block
            return address

    def close(self, address):
        with self._shared.lock:
            block = self._blocks.pop(address)
            assert not self._is_in_use(block, by=self._streams), "memory in use is closed"
            block.num_open -= 1

    def copy(self, stream, to, source, num_bytes):
        ends = (self._find(to, num_bytes), self._find(source, num_bytes))
        blocks = [block for _, block in ends if block is not None]
        (target, _), (origin, _) = ends
        stream.queue(Work(lambda: ctypes.memmove(target, origin, num_bytes), blocks=blocks))

    def clear(self, stream, address, num_bytes):
        memory, block = self._find(address, num_bytes)
        stream.queue(Work(lambda: ctypes.memset(memory, 0, num_bytes), blocks=[block]))

    def write(self, stream, address, number):
        place, block = self._number_at(address)

        def do():
            place.value = number

        stream.queue(Work(do, blocks=[block]))

    def wait(self, stream, address, number):
        place, block = self._number_at(address)
        stream.queue(Work(is_ready=lambda: place.value >= number, blocks=[block]))

    def _number_at(self, address):
        place, block = self._find(address, 8)
        assert block is not None
        assert address % 8 == 0
        return ctypes.c_int64.from_address(place), block

    def _find(self, address, num_bytes):
        """Return the real address of memory, and its block; a tensor is in no block."""
        for start, block in self._blocks.items():
            if start <= address < start + (1 << 44):
                offset = address - start
                assert offset + num_bytes <= len(block.content), "memory is too small"
                return ctypes.addressof(block.content) + offset, block
        assert address < 1 << 60, "memory is used that is not open"
        return address, None

    def _is_in_use(self, block, by=None):
        pending = self._shared.pending()
        if by is not None:
            pending = [work for stream in by for work in stream.work]
        return any(block in work.blocks for work in pending)
