"""Who is let in: the handshake between ranks that know the job's key, and strangers."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import psutil
import pytest

from procpipe.channel import handshake
from procpipe.channel.handshake import accept_peers, connect_to
from procpipe.channel.wire import Address, host_identity, listen
from procpipe.errors import WaitTimeoutError

KEY = b"k" * 32


@pytest.fixture(params=["unix", "tcp"])
def listener(request):
    """One listening socket, of either kind, with its address."""
    sockets, address = listen("127.0.0.1")
    unix, tcp = sockets
    if request.param == "unix":
        yield [unix], Address(address.host, address.unix, ("", 0))
    else:
        yield [tcp], Address("another host", "", address.tcp)
    for sock in sockets:
        sock.close()


@pytest.fixture
def short_handshakes(monkeypatch):
    monkeypatch.setattr(handshake, "_HANDSHAKE_TIMEOUT_S", 0.1)


class Acceptor:
    """Rank 0 accepting in a thread."""

    def __init__(self, listeners, expected=(1,), timeout_s=5.0, key=KEY, check=lambda: None):
        self.peers = {}
        self.error = None
        self._options = {
            "rank": 0,
            "key": key,
            "deadline_s": time.monotonic() + timeout_s,
            "check": check,
        }
        self._thread = threading.Thread(target=self._run, args=(listeners, set(expected)))
        self._thread.start()

    def _run(self, listeners, expected):
        try:
            self.peers = accept_peers(listeners, expected, **self._options)
        except BaseException as error:
            self.error = error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait_end()
        for sock in self.peers.values():
            sock.close()

    def wait_end(self):
        self._thread.join(10.0)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


def connect(address, rank=1, key=KEY, timeout_s=5.0, check=lambda: None, peer=0):
    deadline_s = time.monotonic() + timeout_s
    return connect_to(peer, address, rank=rank, key=key, deadline_s=deadline_s, check=check)


def stranger(address):
    """Connect without a word."""
    if address.unix:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"\0{address.unix}")
        return sock
    return socket.create_connection(address.tcp)


def test_ranks_that_know_the_key_meet(listener):
    sockets, address = listener
    with Acceptor(sockets, expected=(1, 2, 3)) as acceptor:
        links = {rank: connect(address, rank) for rank in (3, 1, 2)}
        acceptor.wait_end()

        assert acceptor.peers.keys() == {1, 2, 3}
        for rank, link in links.items():
            assert not link.getblocking()
            assert not acceptor.peers[rank].getblocking()
            link.send(bytes([rank]))
            acceptor.peers[rank].setblocking(True)
            assert acceptor.peers[rank].recv(10) == bytes([rank])
            link.close()


def test_tcp_does_not_delay_small_messages():
    sockets, address = listen("127.0.0.1")
    with Acceptor(sockets) as acceptor:
        link = connect(Address("another host", address.unix, address.tcp))
        acceptor.wait_end()
        for sock in (link, acceptor.peers[1]):
            assert sock.family == socket.AF_INET
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        link.close()
    for sock in sockets:
        sock.close()


def test_an_impostor_rank_is_turned_away_and_keeps_nobody_out(listener):
    sockets, address = listener
    with Acceptor(sockets):
        with pytest.raises((ConnectionError, OSError)):
            connect(address, key=b"x" * 32)
        connect(address).close()


def test_a_listener_that_does_not_know_the_key_is_left(listener, short_handshakes):
    sockets, address = listener
    with (
        pytest.raises(WaitTimeoutError),
        Acceptor(sockets, key=b"x" * 32, timeout_s=0.5),
        pytest.raises(ConnectionRefusedError, match="rank 0 does not know the job's key"),
    ):
        connect(address)


@pytest.mark.parametrize("rank", [0, 2, 2**31])
def test_a_rank_that_is_not_expected_is_turned_away(listener, rank):
    sockets, address = listener
    with Acceptor(sockets):
        with pytest.raises(WaitTimeoutError, match=r"closed the connection|reset"):
            connect(address, rank=rank, timeout_s=0.2)
        connect(address).close()


def test_a_rank_comes_once(listener):
    sockets, address = listener
    with Acceptor(sockets, expected=(1, 2)) as acceptor:
        first = connect(address, 1)
        with pytest.raises(WaitTimeoutError, match=r"closed the connection|reset"):
            connect(address, 1, timeout_s=0.2)
        second = connect(address, 2)
        acceptor.wait_end()
        for sock in (first, second):
            sock.close()


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"G",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b" " * 100,
        b"procpipe2",
        b"procpipe2" + bytes(100),
        os.urandom(1 << 16),
    ],
    ids=["nothing", "a byte", "http", "half a hello", "a hello of rank 0", "noise"],
)
@pytest.mark.parametrize("closes", [True, False])
def test_a_stranger_keeps_no_peer_out(listener, short_handshakes, words, closes):
    sockets, address = listener
    with stranger(address) as unknown, Acceptor(sockets) as acceptor:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            unknown.sendall(words)  # it may be turned away in the middle
        if closes:
            unknown.close()
        connect(address).close()
        acceptor.wait_end()

    assert acceptor.peers.keys() == {1}


def test_a_stranger_that_repeats_what_it_overheard_is_turned_away(listener, short_handshakes):
    """The acceptor's challenge is new each time, so an old proof proves nothing."""
    sockets, address = listener
    hello = handshake._HELLO.pack(handshake._MAGIC, 1, b"c" * 32)
    with Acceptor(sockets) as acceptor:
        with stranger(address) as unknown:
            unknown.sendall(hello + b"p" * 32)
            # Its own proof sent back to it is no proof either: the roles differ.
        with stranger(address) as unknown:
            unknown.sendall(hello)
            unknown.settimeout(5.0)
            answer = unknown.recv(64, socket.MSG_WAITALL)
            unknown.sendall(answer[32:])
            assert unknown.recv(1) == b""
        connect(address).close()
        acceptor.wait_end()


def test_waiting_for_peers_ends(listener):
    sockets, _ = listener
    with (
        pytest.raises(WaitTimeoutError, match="rank 0 waited in vain for ranks 1, 3 to connect"),
        Acceptor(sockets, expected=(1, 3), timeout_s=0.0),
    ):
        pass


def test_waiting_for_an_answer_ends(listener):
    _, address = listener  # which nobody serves

    with pytest.raises(WaitTimeoutError, match="rank 2 connected to rank 0, which did not answer"):
        connect(address, rank=2, timeout_s=0.0)


def test_waiting_is_given_up_when_the_start_is(listener):
    sockets, address = listener

    def check():
        raise KeyError("another rank failed")

    with pytest.raises(KeyError), Acceptor(sockets, check=check):
        pass
    with pytest.raises(KeyError):
        connect(address, check=check)


def test_nothing_listens_on_the_network_where_nobody_needs_it():
    sockets, address = listen(None)

    assert address.tcp == ("", 0)
    assert [sock.family for sock in sockets] == [socket.AF_UNIX]
    listening = psutil.Process().net_connections(kind="inet")
    ours = {sock.fileno() for sock in sockets}
    assert not [c for c in listening if c.fd in ours]
    # In the abstract namespace: no file, nothing to remove, nothing to guess.
    assert sockets[0].getsockname() == f"\0{address.unix}".encode()
    assert len(address.unix) > 32
    for sock in sockets:
        sock.close()


def test_one_host_is_one_host():
    assert host_identity() == host_identity()
    sockets, address = listen(None)
    assert address.host == host_identity()
    sockets[0].close()
