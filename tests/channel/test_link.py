"""Links, beyond the cases of all transports: tokens, allowances, failing transports."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref

import pytest
import torch

from procpipe.channel.link import INLINE_BYTES, Receiver, Sender
from procpipe.errors import OverwrittenError, PeerLostError, RemoteStageError, WaitTimeoutError
from procpipe.tree import Flat
from tests.channel.meshes import make_meshes

CPU = torch.device("cpu")
LARGE_BYTES = 1 << 24
BIG = torch.zeros(INLINE_BYTES + 1, dtype=torch.uint8)


class Slow:
    """A transport that sends nothing; a transfer is done when it has been queried three times."""

    holds_device = False
    inline_bytes = INLINE_BYTES

    def __init__(self):
        self.num_posted = 0

    def post_send(self, tensors, peer, kind):
        return Transfer(iter([False, False, True, True])), b""

    def post_receive(self, meta, peer, kind, note):
        self.num_posted += 1
        tensors = [torch.zeros(t.shape, dtype=t.dtype) for t in meta.tensors]
        return tensors, lambda: None

    def drain(self):
        pass

    def close(self):
        pass


class Transfer:
    def __init__(self, answers):
        self._answers = answers

    def wait(self):
        pass

    def is_done(self):
        return next(self._answers)


class Late(Slow):
    """A transport whose send ends some time after the receive."""

    def post_send(self, tensors, peer, kind):
        return Transfer(iter([False] * 20 + [True])), b""


class Broken(Slow):
    """A transport whose transfers fail, as when the peer's process has ended."""

    def post_send(self, tensors, peer, kind):
        if self.num_posted:
            raise RuntimeError("Socket closed")
        self.num_posted += 1
        return Transfer(iter([False, False, False])), b""

    def post_receive(self, meta, peer, kind, note):
        def wait():
            raise RuntimeError("Connection closed by peer [127.0.0.1]:12345")

        return [], wait


@pytest.fixture
def meshes():
    made = make_meshes(2, timeout_s=60.0)
    yield made
    for mesh in made:
        mesh.close()


def test_settling_a_silent_transport_does_not_wait_for_a_socket(meshes):
    """NCCL sends no message when a send ends: close() took stall_timeout_s and reported a stall."""
    sender = Sender(meshes[0], 1, 1, Slow(), CPU)
    sender.send(Flat.of(BIG))
    start = time.monotonic()

    sender.settle()

    assert time.monotonic() - start < 10.0  # 30 s (stall_timeout_s) if it waits


def test_sent_tensors_are_released_as_transfers_end(meshes):
    sender = Sender(meshes[0], 1, 1, Slow(), CPU)

    for _ in range(100):
        sender.send(Flat.of(BIG.clone()))

    assert len(sender._in_flight) < 60


def test_a_large_receive_is_posted_when_token_and_allowance_are_there(meshes):
    transport = Slow()
    sender = Sender(meshes[0], 1, 1, transport, CPU)
    receiver = Receiver(meshes[1], 0, 1, transport, "x")
    posted = []

    def send_three():
        for _ in range(3):
            sender.send(Flat.of(BIG))

    for act in (
        send_three,
        meshes[1].poll,
        receiver.expect,
        receiver.expect,
        receiver.expect,
        receiver.expect,
        lambda: sender.send(Flat.of(BIG)),
        meshes[1].poll,
    ):
        act()
        posted.append(transport.num_posted)

    assert posted == [0, 0, 1, 2, 3, 3, 3, 4]


def test_metadata_is_sent_only_when_it_changes(meshes):
    has_meta = []
    meshes[1].on(0, 1, lambda meta_size, flags, body: has_meta.append(int(meta_size > 0)))
    sender = Sender(meshes[0], 1, 1, None, CPU)
    t = torch.ones(2)

    for value in (t, t, t + 1, t[:1], t[:1], [t], [t], [t, 1], [t, True], [t, True], t):
        sender.send(Flat.of(value))
    meshes[1].poll()

    assert has_meta == [1, 0, 0, 1, 0, 1, 0, 1, 1, 0, 1]


def test_a_timeout_names_the_channel_and_the_message(meshes):
    meshes[1].timeout_s = 0.3
    receiver = Receiver(meshes[1], 0, 1, None, "activation from stage 0 (rank 0)")
    Sender(meshes[0], 1, 1, None, CPU).send(Flat.of(torch.ones(1)))
    receiver.expect()
    receiver.take()
    receiver.expect()

    with pytest.raises(WaitTimeoutError) as caught:
        receiver.take()

    words = r"rank 1 has waited 0\.[3-9] s for activation from stage 0 \(rank 0\)"
    assert re.search(words, str(caught.value))


def test_a_sender_that_has_left_is_named(meshes):
    receiver = Receiver(meshes[1], 0, 1, None, "activation from stage 0 (rank 0)")
    receiver.expect()
    meshes[0].leave()
    meshes[0].close()

    with pytest.raises(PeerLostError, match="waits for activation from stage 0") as caught:
        receiver.take()
    assert caught.value.rank == 0


def test_a_send_may_end_after_its_receiver_has_left(meshes):
    sender = Sender(meshes[0], 1, 1, Late(), CPU)
    sender.send(Flat.of(BIG))
    meshes[1].leave()
    meshes[1].close()

    sender.settle()

    assert sender.reap() == 0


def test_a_message_must_be_expected(meshes):
    receiver = Receiver(meshes[1], 0, 1, None, "x")

    with pytest.raises(AssertionError, match="never expected"):
        receiver.take()


def test_a_receive_that_fails_names_the_failed_rank(meshes):
    """The transport's own error comes first, without the cause; the peer's report comes later."""
    sender = Sender(meshes[0], 1, 1, Broken(), CPU)
    receiver = Receiver(meshes[1], 0, 1, Broken(), "x")
    sender.send(Flat.of(BIG))
    receiver.expect()
    meshes[1].poll()
    meshes[0].fail(RemoteStageError(0, "the story"))

    with pytest.raises(RemoteStageError, match="the story"):
        receiver.take()


def test_a_send_that_fails_names_the_failed_rank(meshes):
    sender = Sender(meshes[1], 0, 1, Broken(), CPU)
    sender.send(Flat.of(BIG))
    meshes[0].fail(RemoteStageError(0, "the story"))

    with pytest.raises(RemoteStageError, match="the story"):
        sender.send(Flat.of(BIG))


def test_a_transfer_that_fails_for_an_unknown_reason_keeps_its_error(meshes, monkeypatch):
    monkeypatch.setattr("procpipe.channel.mesh._FAILURE_TIMEOUT_S", 0.05)
    sender = Sender(meshes[0], 1, 1, Broken(), CPU)
    receiver = Receiver(meshes[1], 0, 1, Broken(), "x")
    sender.send(Flat.of(BIG))
    receiver.expect()

    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        receiver.take()


def test_without_a_transport_a_large_message_follows_its_token(meshes):
    """The sender waits for nothing, and keeps the tensors until its socket has taken them."""
    receiver = Receiver(meshes[1], 0, 1, None, "x")
    sender = Sender(meshes[0], 1, 1, None, CPU)
    large = torch.arange(2 * LARGE_BYTES // 8 + 1)
    values = [[large, torch.ones(0), torch.tensor(True)], torch.tensor([7])]

    for value in values:
        sender.send(Flat.of(value))
    assert sender.reap() == 1
    thread = threading.Thread(target=sender.settle)
    thread.start()
    receiver.expect()
    (first, empty, flag), _, _ = receiver.take()
    receiver.expect()
    (second,), _, _ = receiver.take()
    thread.join()

    assert torch.equal(first, large)
    assert (empty.shape, flag.item(), second.item()) == ((0,), True, 7)
    assert sender.reap() == 0


def test_a_large_message_is_sent_as_a_whole_while_its_receiver_reads(meshes, monkeypatch):
    """Symptom: it went on only after the sender's next task, for which the receiver waited."""
    monkeypatch.setattr("procpipe.channel.link._PAUSE_S", 20.0)
    receiver = Receiver(meshes[1], 0, 1, None, "x")
    sender = Sender(meshes[0], 1, 1, None, CPU)
    receiver.expect()
    thread = threading.Thread(target=receiver.take)
    thread.start()

    sender.send(Flat.of(torch.zeros(2 * LARGE_BYTES)))
    has_unsent = meshes[0].has_unsent(1)
    sender.settle()
    thread.join()

    assert not has_unsent


def test_a_tensor_that_changes_while_it_is_sent_is_an_error(meshes):
    receiver = Receiver(meshes[1], 0, 1, None, "x")
    sender = Sender(meshes[0], 1, 1, None, CPU, "activation")
    large = torch.zeros(LARGE_BYTES)
    sender.send(Flat.of(large))
    large.add_(1)
    receiver.expect()
    thread = threading.Thread(target=receiver.take)
    thread.start()

    with pytest.raises(OverwrittenError, match="a tensor of activation was written to"):
        sender.wait_reusable()
    thread.join()


def test_tensors_may_be_written_to_once_the_socket_has_taken_them(meshes):
    receiver = Receiver(meshes[1], 0, 1, None, "x")
    sender = Sender(meshes[0], 1, 1, None, CPU)
    large = torch.zeros(LARGE_BYTES)
    found: list[torch.Tensor] = []
    receiver.expect()
    thread = threading.Thread(target=lambda: found.extend(receiver.take().tensors))
    thread.start()

    sender.send(Flat.of(large))
    sender.wait_reusable()
    large.add_(1)
    thread.join()

    assert not found[0].any()


def test_memory_is_kept_while_it_is_sent_though_the_ends_are_gone(meshes):
    """The mesh goes on to read and write after a stage is closed."""
    receiver, sender = Receiver(meshes[1], 0, 1, None, "x"), Sender(meshes[0], 1, 1, None, CPU)
    message = Flat.of(torch.ones(LARGE_BYTES))
    gone = weakref.ref(message.tensors[0])
    sender.send(message)
    del message
    meshes[1].poll()

    del sender, receiver
    gc.collect()

    assert gone() is not None
    meshes[0].close()
    meshes[1].close()
    gc.collect()
    assert gone() is None


def test_a_message_that_stops_halfway_times_out(meshes):
    for mesh in meshes:
        mesh.timeout_s = 0.1
    receiver = Receiver(meshes[1], 0, 1, None, "x")
    sender = Sender(meshes[0], 1, 1, None, CPU)
    receiver.expect()
    sender.send(Flat.of(torch.zeros(3 * LARGE_BYTES, dtype=torch.uint8)))

    with pytest.raises(WaitTimeoutError, match="rank 1 to read a value"):
        sender.wait_reusable()
    with pytest.raises(WaitTimeoutError, match="for x"):
        receiver.take()
    meshes[1].close()  # or rank 0 would wait until its frames are read
