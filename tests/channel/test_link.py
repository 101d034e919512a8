"""Links, beyond the cases of all transports: failing transports, and large messages without one."""

from __future__ import annotations

import contextlib
import gc
import threading
import tracemalloc
import weakref
from typing import Any

import pytest
import torch

from procpipe.channel.link import INLINE_BYTES, Receiver, Sender
from procpipe.errors import OverwrittenError, RemoteStageError
from procpipe.tree import Flat

LARGE_BYTES = 1 << 24
BIG = torch.zeros(INLINE_BYTES + 1, dtype=torch.uint8)


class Broken:
    """A transport whose transfers fail, as when the peer's process has ended."""

    holds_device = False
    inline_bytes = INLINE_BYTES
    has_sent = False

    def wait(self):
        pass

    def is_done(self):
        return False

    def post_send(self, tensors, peer, kind):
        if self.has_sent:
            raise RuntimeError("Socket closed")
        self.has_sent = True
        return self, b""

    def post_receive(self, meta, peer, kind, note):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:12345")


@pytest.fixture
def meshes(net):
    return net(2, timeout_s=60.0)


def ends(meshes, ours: Any = None, theirs: Any = None):
    """Return both ends of a channel from rank 0 to rank 1, by default without a transport."""
    sender = Sender(meshes[0], 1, 1, ours, "activation")
    return sender, Receiver(meshes[1], 0, 1, theirs, "x")


@contextlib.contextmanager
def taken(receiver):
    """Take a message in another thread, which must end; return a list that it is put into."""
    messages: list[Flat] = []
    receiver.expect()
    thread = threading.Thread(target=lambda: messages.append(receiver.take()))
    thread.start()
    yield messages
    thread.join()


# -- transports ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["receive", "send"])
@pytest.mark.parametrize("is_reported", [True, False])
def test_a_transfer_that_fails_names_the_failed_rank(meshes, monkeypatch, fails, is_reported):
    """The transport's own error comes first, without the cause; the peer's report comes later."""
    monkeypatch.setattr("procpipe.channel.mesh._FAILURE_TIMEOUT_S", 20.0 if is_reported else 0.05)
    sender, receiver = ends(meshes, Broken(), Broken())
    sender.send(Flat.of(BIG))
    receiver.expect()
    meshes[1].poll()
    if is_reported:
        meshes[fails == "send"].fail(RemoteStageError(3, "the story"))

    with pytest.raises(RuntimeError) as caught:
        receiver.take() if fails == "receive" else sender.send(Flat.of(BIG))
    own = "Connection closed by peer" if fails == "receive" else "Socket closed"
    assert ("the story" if is_reported else own) in str(caught.value)


# -- large messages -------------------------------------------------------------------------------


def test_without_a_transport_a_large_message_is_kept_until_it_is_sent(meshes):
    """The sender waits for nothing, and keeps the tensors until its socket has taken them."""
    sender, receiver = ends(meshes)
    large = torch.arange(2 * LARGE_BYTES // 8 + 1)
    tracemalloc.start()
    sender.send(Flat.of([large, torch.ones(0), torch.tensor(True)]))
    sender.send(Flat.of(torch.tensor(7)))
    assert sender.reap() == 1

    with taken(receiver) as messages:
        sender.wait_reusable()
        large.zero_()
        assert sender.reap() == 0
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    receiver.expect()
    first, empty, flag = messages[0].tensors

    assert torch.equal(first, torch.arange(2 * LARGE_BYTES // 8 + 1))
    assert peak_bytes < LARGE_BYTES  # neither end makes a copy
    assert (empty.shape, flag.item(), receiver.take().value.item()) == ((0,), True, 7)


def test_a_large_message_is_sent_as_a_whole_while_its_receiver_reads(meshes, monkeypatch):
    """Symptom: it went on only after the sender's next task, for which the receiver waited."""
    monkeypatch.setattr("procpipe.channel.link._PAUSE_S", 20.0)
    sender, receiver = ends(meshes)

    with taken(receiver):
        sender.send(Flat.of(torch.zeros(2 * LARGE_BYTES)))
        has_unsent = meshes[0].has_unsent(1)
        sender.settle()

    assert not has_unsent


def test_a_tensor_that_changes_while_it_is_sent_is_an_error(meshes):
    sender, receiver = ends(meshes)
    large = torch.zeros(LARGE_BYTES)
    sender.send(Flat.of(large))
    large.add_(1)

    with (
        taken(receiver),
        pytest.raises(OverwrittenError, match="a tensor of activation was written to"),
    ):
        sender.wait_reusable()


def test_memory_is_kept_while_it_is_sent_though_the_ends_are_gone(meshes):
    """The mesh goes on to read and write after a stage is closed."""
    sender, receiver = ends(meshes)
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
