"""CUDA IPC without CUDA: notes, slots and the order of work, on a simulated GPU.

``test_conformance.py`` and ``tests/dist/test_gpu.py`` test what needs a GPU.
"""

from __future__ import annotations

import os
import random
import threading
from collections import defaultdict, deque

import pytest
import torch

from procpipe.channel.gpu import HANDLE_BYTES
from procpipe.channel.meta import describe
from procpipe.tree import Flat
from tests.cases import for_each
from tests.channel.simulated import Device, Event, Process, transports_on

KIND = 1
MIB = 1 << 20


class Ends:
    """Two ends that share a simulated GPU, both in this process."""

    def __init__(self, chance=None):
        self.device = Device(chance)
        self.gpus = [Process(self.device), Process(self.device)]
        self.transports = transports_on(self.gpus)
        self.sender, self.receiver = self.transports

    def send(self, tensors, kind=KIND):
        return self.sender.post_send(tensors, 1, kind)

    def receive(self, tensors, note, kind=KIND):
        return self.receiver.post_receive(describe(Flat.of(tensors)), 0, kind, note)

    def transfer(self, tensors, kind=KIND):
        pending, note = self.send(tensors, kind)
        received, _ = self.receive(tensors, note, kind)
        return pending, received

    def drain(self):
        """Drain both at the same time."""
        threads = [threading.Thread(target=each.drain) for each in self.transports]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10.0)

    @property
    def slots(self):
        return [slot for slots in self.sender._slots.values() for slot in slots]

    @property
    def num_opened(self):
        return len(self.receiver._opened)


@pytest.fixture
def ends():
    return Ends()


def numbers(size, first=0):
    return torch.arange(first, first + size, dtype=torch.float64)


# -- slots --------------------------------------------------------------------------------------


def test_a_slot_is_used_again_once_the_receiver_has_queued_its_copies(ends):
    for k in range(5):
        _, (received,) = ends.transfer([numbers(10, k)])
        assert torch.equal(received, numbers(10, k))
    assert len(ends.slots) == ends.num_opened == 1

    _, note = ends.send([numbers(10)])
    ends.send([numbers(10)])
    assert len(ends.slots) == 2

    ends.receive([numbers(10)], note)
    ends.send([numbers(10)])
    assert len(ends.slots) == 2


def test_slots_are_used_in_turn(ends):
    """So that a copy into a slot waits for the copy that was queued the longest time ago."""
    notes = [ends.send([numbers(10)])[1] for _ in range(3)]
    for note in notes:
        ends.receive([numbers(10)], note)

    unpacked = []
    for _ in range(4):
        _, note = ends.send([numbers(10)])
        ends.receive([numbers(10)], note)
        unpacked.append(memoryview(note)[HANDLE_BYTES:].cast("Q").tolist())

    assert unpacked == [[0, 2], [1, 2], [2, 2], [0, 3]]


def test_slots_are_whole_granules(ends):
    """With a smaller slot the driver would also share other memory of the same block."""
    ends.transfer([numbers(1)])
    ends.transfer([torch.zeros(4 * MIB, dtype=torch.uint8)], kind=2)

    assert [len(block.content) for block in ends.device.blocks.values()] == [2 * MIB, 6 * MIB]


def test_slots_that_have_become_too_small_are_freed(ends):
    for size in (MIB, 3 * MIB, 5 * MIB):
        for k in range(3):
            sent = [torch.full((size,), k, dtype=torch.uint8)]
            assert torch.equal(ends.transfer(sent)[1][0], sent[0])
        assert len(ends.slots) == ends.num_opened == 1

    ends.transfer([numbers(1)])  # uses the large slot
    ends.sender._free_closed()
    assert [len(block.content) for block in ends.device.blocks.values()] == [6 * MIB]


def test_a_dropped_slot_is_closed_only_when_its_copies_are_done(ends):
    small, large = torch.zeros(MIB, dtype=torch.uint8), torch.zeros(3 * MIB, dtype=torch.uint8)
    ends.device.is_paused = True
    kept = [ends.transfer([small]), ends.transfer([large])]

    assert len(ends.receiver._closing) == 1
    ends.gpus[1].synchronize()
    kept.append(ends.transfer([large]))
    assert not ends.receiver._closing
    assert len(ends.device.blocks) == 2
    assert not ends.sender._free_closed()
    assert len(ends.device.blocks) == 1
    ends.gpus[1].synchronize()


def test_the_host_waits_only_when_a_slot_is_made(ends):
    ends.transfer([numbers(10)])
    ends.device.is_paused = True
    sent = numbers(10)

    pending, (received,) = ends.transfer([sent])
    pending.wait()

    assert not torch.equal(received, numbers(10))
    assert not pending.is_done()
    ends.gpus[1].synchronize()
    assert torch.equal(received, numbers(10))
    assert pending.is_done()


def test_a_message_does_not_wait_for_one_of_another_rank():
    device = Device()
    gpus = [Process(device) for _ in range(3)]
    transports = transports_on(gpus)
    never = Event()
    gpus[0].current_stream().wait_event(never)  # rank 0 still computes its message
    sent = [numbers(10)], [numbers(10, 1)]
    meta = describe(Flat.of(sent[0]))

    received = []
    for rank in (0, 1):
        _, note = transports[rank].post_send(sent[rank], 2, KIND)
        received.append(transports[2].post_receive(meta, rank, KIND, note))

    assert transports[2].queued_with() == [0, 1]
    transports[2]._look((1,))
    assert transports[2].queued_with() == [0]
    assert torch.equal(received[1][0][0], sent[1][0])


def test_a_send_is_done_when_the_receiver_has_copied_the_message(ends):
    pending, note = ends.send([numbers(10)])
    assert not pending.is_done()

    ends.receive([numbers(10)], note)
    assert pending.is_done()

    ends.send([numbers(10)])  # in the same slot
    assert len(ends.slots) == 1
    assert pending.is_done()


# -- endings ------------------------------------------------------------------------------------


def test_all_memory_is_freed_when_both_drain(ends):
    for k in range(3):
        ends.transfer([numbers(10)])
        ends.transfer([torch.zeros(3 * k * MIB, dtype=torch.uint8)], kind=2)
        _, note = ends.receiver.post_send([numbers(k)], 0, KIND)
        ends.sender.post_receive(describe(Flat.of([numbers(k)])), 1, KIND, note)
    assert len(ends.device.blocks) >= 3

    for transport in ends.transports:
        transport.drain()  # one ends long before the other
    for transport in ends.transports:
        transport.close()

    assert not ends.device.blocks


def test_memory_that_a_peer_has_open_is_not_freed(ends):
    """``cuMemFree`` would be undefined then; the end of the process frees the memory."""
    ends.transfer([numbers(10)])

    ends.sender.drain()
    ends.sender.close()

    assert len(ends.device.blocks) == 1


def test_nothing_is_freed_after_a_failure(ends):
    """Without ``drain``, other processes may still read the memory."""
    ends.transfer([numbers(10)])
    for transport in ends.transports:
        transport.close()

    assert [block.num_open for block in ends.device.blocks.values()] == [1]


def test_descriptors_are_closed_with_the_transports():
    descriptors = len(os.listdir("/proc/self/fd"))
    adds_names = []
    for _ in range(10):
        before = set(os.listdir("/dev/shm"))
        ends = Ends()
        ends.transfer([numbers(10)])
        ends.drain()
        del ends
        adds_names.append(set(os.listdir("/dev/shm")) != before)

    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not all(adds_names)  # other programs may use that folder too


# -- any order of work --------------------------------------------------------------------------


class RandomTransfers:
    """Two processes that send, take, compute and overwrite at random; records what arrives."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.ends = Ends(random.Random(seed))
        self.sent = defaultdict(list)
        self.under_way = defaultdict(deque)
        self.arrived = defaultdict(list)
        self.kept = []  # as a GPU's allocator keeps memory that a stream still uses

    def run(self, num_steps):
        for _ in range(num_steps):
            self.chance.choice((self.send, self.send, self.take))()
        while any(self.under_way.values()):
            self.take()
        for gpu in self.ends.gpus:
            gpu.synchronize()

    def send(self):
        source, kind = self.chance.randrange(2), self.chance.choice((1, 2))
        sizes = [self.chance.choice((0, 1, 33, 1000)) for _ in range(self.chance.randint(1, 3))]
        if self.chance.random() < 0.1:
            sizes.append(self.chance.choice((300_000, 600_000)))  # needs a larger slot
        values = [self.chance.randrange(1, 1 << 40) for _ in sizes]
        gpu = self.ends.gpus[source]
        tensors = [torch.zeros(size, dtype=torch.int64) for size in sizes]
        self.kept.append(tensors)
        gpu.compute(lambda: [t.fill_(value) for t, value in zip(tensors, values, strict=True)])
        pending, note = self.ends.transports[source].post_send(tensors, 1 - source, kind)
        self.sent[source, kind].append(list(zip(sizes, values, strict=True)))
        self.under_way[source, kind].append((describe(Flat.of(tensors)), note))
        if self.chance.random() < 0.5:
            pending.wait()
            gpu.compute(lambda: [tensor.fill_(-1) for tensor in tensors])

    def take(self):
        channels = [channel for channel, messages in self.under_way.items() if messages]
        if not channels:
            return
        source, kind = self.chance.choice(channels)
        meta, note = self.under_way[source, kind].popleft()
        gpu = self.ends.gpus[1 - source]
        tensors, wait = self.ends.transports[1 - source].post_receive(meta, source, kind, note)
        self.kept.append(tensors)
        arrived: list[tuple[int, int]] = []
        self.arrived[source, kind].append(arrived)
        wait()
        gpu.compute(lambda: arrived.extend((len(t), content(t)) for t in tensors))


def content(tensor):
    """Return the set of about 50 values of a tensor."""
    return set(tensor[:: max(1, len(tensor) // 50)].tolist())


@for_each("seed", range(20))
def test_messages_arrive_unchanged_in_any_order_of_work(seed):
    transfers = RandomTransfers(seed)

    transfers.run(60)

    for channel, sent in transfers.sent.items():
        for found, expected in zip(transfers.arrived[channel], sent, strict=True):
            assert found == [(size, {value} if size else set()) for size, value in expected]
    transfers.ends.drain()
    for transport in transfers.ends.transports:
        transport.close()
    assert not transfers.ends.device.blocks
