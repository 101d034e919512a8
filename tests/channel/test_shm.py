"""Slots of shared memory: read in place, used again, bounded in number, and freed completely."""

from __future__ import annotations

import errno
import os
import resource

import pytest
import torch

from procpipe.channel.meta import decode, encode
from procpipe.channel.shm import ShmTransport
from procpipe.tree import Flat
from tests.forked import in_child

KIND = 1


class Ends:
    """Both ends of the channels between two ranks, in one process."""

    def __init__(self):
        self.files = [os.memfd_create("procpipe-slots") for _ in range(2)]
        for file in self.files:
            os.ftruncate(file, 1 << 42)
        self.sender = ShmTransport(self.files[0], {1: self.files[1]})
        self.receiver = ShmTransport(self.files[1], {0: self.files[0]})

    def close(self):
        self.sender.close()
        self.receiver.close()
        while self.files:
            os.close(self.files.pop())

    def transfer(self, *tensors):
        pending, note = self.sender.post_send([*tensors], 1, KIND)
        return pending, self.receive(tensors, note)

    def receive(self, tensors, note):
        return self.receiver.post_receive(described(tensors), 0, KIND, note)[0]

    @property
    def slots(self):
        return [slot for slots in self.sender._slots.values() for slot in slots]


@pytest.fixture
def ends():
    made = Ends()
    yield made
    made.close()


def described(tensors):
    return decode(encode(Flat.of([*tensors]), tensors))


def numbers(size):
    return torch.arange(size, dtype=torch.float64)


def test_a_received_tensor_is_a_copy_inside_the_slot(ends):
    sent = numbers(1000)

    _, (flag, received) = ends.transfer(torch.tensor([True]), sent)
    sent.zero_()

    assert torch.equal(received, numbers(1000))
    assert flag.data_ptr() % 64 == received.data_ptr() % 64 == 0
    (slot,) = ends.slots
    # The second tensor's first element becomes 1.0.
    os.pwrite(ends.files[0], b"\0\0\0\0\0\0\xf0\x3f", slot.start + 320)
    ends.sender.close()  # it leaves the memory to the receiver
    assert received[0] == 1.0


def test_a_slot_is_used_again_once_all_its_tensors_are_gone(ends):
    _, received = ends.transfer(numbers(10), numbers(20))
    view = received[1][3:5]

    received.clear()
    ends.transfer(numbers(10), numbers(20))
    assert len(ends.slots) == 2  # a view keeps the first

    assert torch.equal(view, numbers(20)[3:5])
    del view
    for _ in range(3):  # as many slots as messages in use
        held = [ends.transfer(numbers(20 + k)) for k in range(8)]
        assert len(ends.slots) == 8
        del held


def test_a_slot_that_is_too_small_is_moved_and_leaves_no_memory(ends):
    for exponent in range(6):
        for _ in range(3):
            ends.transfer(numbers(1000 * 4**exponent))
        assert len(ends.slots) == 1

    largest = 8000 * 4**5
    ends.transfer(numbers(10))  # uses the large slot
    (slot,) = ends.slots
    assert largest <= 512 * os.fstat(ends.files[0]).st_blocks <= slot.num_bytes + (8 << 10)
    assert ends.sender._end <= 4 * largest


def test_a_slot_without_memory_is_a_clear_error(ends, monkeypatch):
    """``posix_fallocate`` fails then, before a write into the mapping could raise SIGBUS."""

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)

    with pytest.raises(MemoryError, match=r"no shared memory for a message of 8\.0 MiB \(No space"):
        ends.transfer(numbers(1 << 20))

    monkeypatch.undo()
    ends.transfer(numbers(1 << 20))


@pytest.mark.dist
def test_limited_addresses_are_a_clear_error():
    def transfer():
        resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))
        Ends().transfer(numbers(1000))

    error = in_child(transfer)
    assert "MemoryError: a file of messages cannot be mapped into memory (Cannot alloc" in error
    assert "ulimit -v unlimited" in error
