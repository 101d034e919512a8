"""The order in which a GPU does a transport's work: a test holds a stream, and queries the others.

Each case runs on both ends of two connected ranks, like those of ``conformance.py``, over CUDA IPC
and NCCL. A held stream gives a certain order, where a delay would only make it likely, for instance
that compute has not yet read a message when the next one arrives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from procpipe.tree import Flat
from tests.channel.test_conformance import check
from tests.held import happens, held, hold_for

#: The size of a block of torch's allocator that is used for nothing else.
SIZE = 12 << 20

#: Channels, the first of most cases.
KIND, SECOND_KIND = 1, 2
PATIENCE_S, TIMEOUT_S = 0.2, 40.0


# -- the cases ----------------------------------------------------------------------------------


def kernels_are_loaded(end: Any) -> None:
    """The first case: the host that first uses a kernel waits for its device, which others hold."""
    tensor = full(end, 1) + 1
    pinned(end).copy_(tensor, non_blocking=True)
    tensor.fill_(9)
    torch.cuda.synchronize(end.device)


def compute_waits_for_received_tensors(end: Any) -> None:
    if end.rank == 0:
        with held(compute(end)):
            send(end, 7)
            end.meet()  # the receiver has queued its part
            end.meet()
    else:
        result = pinned(end)
        received = take(end)
        result.copy_(received + 1, non_blocking=True)
        end.meet()
        assert not happens(compute(end).query, PATIENCE_S)
        assert 0 in end.transport.queued_with()
        end.meet()
        assert_all(result, 8)


def a_transfer_does_not_wait_for_the_receivers_compute(end: Any) -> None:
    if end.rank == 0:
        send(end, 7)
        end.sender().settle()
        assert happens(end.transport.are_over, TIMEOUT_S)
        end.meet()
    else:
        with held(compute(end)):
            received = take(end)
            assert happens(end.transport.are_over, TIMEOUT_S)
            end.meet()
        assert_all(received, 7)


def received_memory_is_kept_for_compute(end: Any) -> None:
    """The allocator may need several messages to detect that the transfer has ended."""
    num_later = 10
    if end.rank == 0:
        for k in range(1 + num_later):
            send(end, k)
        end.meet()
    else:
        received = take(end)
        torch.cuda.synchronize(end.device)
        with held(compute(end)):
            result = received + 1
            del received
            for _ in range(num_later):
                take(end)
                assert happens(end.transport.are_over, TIMEOUT_S)
            end.meet()
        assert_all(result, 1)


def memory_that_compute_still_reads_is_not_received_into(end: Any) -> None:
    if end.rank == 0:
        send(end, 7)
        end.meet()
    else:
        old = full(end, 3)
        torch.cuda.synchronize(end.device)
        with held(compute(end)):
            result = old + 1
            del old
            received = take(end)
            assert happens(end.transport.are_over, TIMEOUT_S)
            end.meet()
        assert_all(result, 4)
        assert_all(received, 7)


def assert_the_second_is_7(end: Any) -> None:
    take(end)
    received = take(end)
    end.meet()
    assert_all(received, 7)


def sent_memory_is_kept_until_it_has_been_read(end: Any) -> None:
    if end.rank == 0:
        with held_sends(end):
            send(end, 7)
            assert end.sender().reap() == 2
            later = [full(end, 9) for _ in range(2)]  # would reuse the message's memory if freed
            assert happens(compute(end).query, TIMEOUT_S)
        end.meet()
        del later
    else:
        assert_the_second_is_7(end)


def sent_memory_may_be_overwritten_by_later_work(end: Any) -> None:
    if end.rank == 0:
        with held_sends(end):
            tensor = full(end, 7)
            end.sender().send(Flat.of(tensor))
            end.sender().wait_reusable()
            tensor.fill_(9)
            assert not happens(compute(end).query, PATIENCE_S)
        end.meet()
    else:
        assert_the_second_is_7(end)


def a_slot_is_filled_without_the_receiver(end: Any) -> None:
    """Otherwise streams could deadlock, waiting for work that a host queues later."""
    if end.rank == 0:
        for k in range(2):
            send(end, k)
        assert happens(end.transport.are_over, TIMEOUT_S)
        end.meet()
    else:
        end.meet()
        for k in range(2):
            assert_all(take(end), k)


def a_slot_is_filled_again_only_when_it_was_read(end: Any) -> None:
    if end.rank == 0:
        send(end, 7)
        end.meet()  # the receiver has queued its part
        send(end, 9)
        assert not happens(end.transport.are_over, PATIENCE_S)
        end.meet()
    else:
        with held(end.transport._receiving[0, KIND]):
            received = take(end)
            end.meet()
            end.meet()
        assert_all(received, 7)
        assert_all(take(end), 9)


def a_message_waits_for_none_of_another_channel(end: Any) -> None:
    """Each has a stream: an activation may be computed for long while a gradient is ready."""
    if end.rank == 0:
        stream = torch.cuda.Stream(end.device)
        with held(stream):
            with torch.cuda.stream(stream):
                send(end, 1)
            send(end, 2, SECOND_KIND)
            end.meet()
            end.meet()
    else:
        end.meet()
        for kind in (KIND, SECOND_KIND):
            end.receiver(kind).expect()
        result = end.receiver(SECOND_KIND).take().value + 1
        assert happens(compute(end).query, TIMEOUT_S)
        assert 0 in end.transport.queued_with()
        end.meet()
        assert_all(result, 3)
        assert_all(end.receiver().take().value, 1)


def messages_that_grow_share_slots(end: Any) -> None:
    """A slot is larger than its first message, by a quarter at most."""
    if end.rank == 0:
        for k in range(9):
            send(end, k, SECOND_KIND, SIZE + k * SIZE // 8)
            end.meet()  # the receiver has queued its copy
        slots = [slot.size_bytes + 256 for slot in end.transport._slots[1, SECOND_KIND]]
        assert slots == [size << 20 for size in (14, 16, 20, 24, 28)]
    else:
        for k in range(9):
            assert take(end, SECOND_KIND)[-1] == k
            end.meet()


def only_closed_slots_are_freed(end: Any) -> None:
    """To free memory that another process has open is undefined."""
    transport = end.transport
    if end.rank == 0:
        send(end, 1)
        end.sender().settle()
        transport.drain()
        (slot,) = transport._slots[1, KIND]
        assert transport._flags[slot.number] == 0
        end.meet()
        end.meet()
        assert transport._flags[slot.number] == 2
    else:
        take(end)
        end.meet()
        transport.drain()
        end.meet()


def torch_runs_no_watchdog(end: Any) -> None:
    """Torch's watchdog would end the process, with its own error."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in names if "watchd" in name], names


def drain_waits_for_pending_transfers(end: Any) -> None:
    if end.rank == 0:
        hold_for(compute(end), PATIENCE_S)
        send(end, 7)
        end.transport.drain()
        assert not end.transport.queued_with()
    else:
        received = take(end)
        end.transport.drain()
        assert not end.transport.queued_with()
        assert_all(received, 7)


def a_send_is_done_while_a_receive_is_not(end: Any) -> None:
    """Otherwise a slow rank would delay what is known of others, and be blamed for them."""
    if end.rank == 1:
        with held(compute(end)):
            send(end, 7)
            end.meet()
            take(end)  # does not wait for compute
            end.meet()
    else:
        end.meet()
        end.receiver()._mesh.poll()  # reads the token
        end.receiver().expect()
        send(end, 9)
        assert happens(lambda: end.sender().reap() == 0, TIMEOUT_S)
        assert 1 in end.transport.queued_with()
        end.meet()
        assert_all(end.receiver().take().value, 7)


def a_device_may_be_waited_for_once_sends_are_posted(end: Any) -> None:
    """As a task does to load a kernel: with a send queued on both ranks, and no host to post it."""
    end.receiver().expect()
    send(end, end.rank)
    end.sender().wait_posted()
    torch.cuda.synchronize(end.device)
    assert_all(end.receiver().take().value, 1 - end.rank)


def a_receive_that_is_allowed_early_is_posted_in_its_turn(end: Any) -> None:
    """As with what ``forgo`` leaves: a pair has one communicator for all its channels."""
    if end.rank == 0:
        for kind in (KIND, SECOND_KIND):
            end.sender(kind).send(Flat.of(full(end, kind)))
        end.meet()
        end.sender(SECOND_KIND).settle()
    else:
        end.meet()
        end.receiver()._mesh.poll()  # reads the tokens
        for kind in (SECOND_KIND, KIND):
            end.receiver(kind).expect()
        for kind in (SECOND_KIND, KIND):
            assert_all(end.receiver(kind).take().value, kind)


CASES: tuple[Callable[[Any], None], ...] = (  # for both transports
    compute_waits_for_received_tensors,
    a_transfer_does_not_wait_for_the_receivers_compute,
    received_memory_is_kept_for_compute,
    memory_that_compute_still_reads_is_not_received_into,
    sent_memory_is_kept_until_it_has_been_read,
    sent_memory_may_be_overwritten_by_later_work,
    a_send_is_done_while_a_receive_is_not,
    drain_waits_for_pending_transfers,  # the last case, since it closes the slots
)
OF_SLOTS = (
    a_slot_is_filled_again_only_when_it_was_read,
    a_slot_is_filled_without_the_receiver,
    a_message_waits_for_none_of_another_channel,
    messages_that_grow_share_slots,
)
OF_PAIRS = (
    torch_runs_no_watchdog,
    a_receive_that_is_allowed_early_is_posted_in_its_turn,
    a_device_may_be_waited_for_once_sends_are_posted,
)


# -- parts of the cases -------------------------------------------------------------------------


@contextlib.contextmanager
def held_sends(end: Any) -> Iterator[None]:
    """Hold all sends in the block, but no compute: they are queued after a held message."""
    stream = torch.cuda.Stream(end.device)
    with held(stream):
        with torch.cuda.stream(stream):
            send(end, 0)
        yield


def compute(end: Any) -> torch.cuda.Stream:
    return torch.cuda.current_stream(end.device)


def full(end: Any, value: int, size: int = SIZE) -> Tensor:
    return torch.full((size,), value, dtype=torch.uint8, device=end.device)


def pinned(end: Any) -> Tensor:
    return torch.zeros(SIZE, dtype=torch.uint8, pin_memory=True)


def send(end: Any, value: int, kind: int = KIND, size: int = SIZE) -> None:
    end.sender(kind).send(Flat.of(full(end, value, size)))


def take(end: Any, kind: int = KIND) -> Tensor:
    end.receiver(kind).expect()
    tensor: Tensor = end.receiver(kind).take().value
    return tensor


def assert_all(tensor: Tensor, value: int) -> None:
    torch.cuda.synchronize(tensor.device if tensor.is_cuda else None)
    assert tensor.unique().tolist() == [value], tensor


@pytest.mark.gpu
def test_cuda_ipc(ranks: Any) -> None:
    check(ranks, "cuda_ipc", (kernels_are_loaded, *OF_SLOTS, *CASES))
    check(ranks, "cuda_ipc", (only_closed_slots_are_freed,))


@pytest.mark.gpu(2)
def test_nccl(ranks: Any) -> None:
    check(ranks, "nccl", (kernels_are_loaded, *OF_PAIRS, *CASES))
