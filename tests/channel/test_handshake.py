"""The handshake accepts ranks with the job's key, and rejects all other processes."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
import warnings

import psutil
import pytest

from procpipe.channel import handshake
from procpipe.channel.handshake import Joiner, accept_peers, connect_to
from procpipe.channel.sockets import Address, host_identity, listen
from procpipe.errors import WaitTimeoutError

KEY = b"k" * 32


@pytest.fixture(params=["unix", "tcp"])
def listener(request):
    """One listening socket, Unix or TCP, with its address."""
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


@pytest.fixture
def frequent_checks(monkeypatch):
    monkeypatch.setattr(handshake, "_CHECK_EVERY_S", 0.01)


@pytest.fixture
def rare_checks(monkeypatch):
    """Let a rank that connects look at its deadline only once it has an answer, however late."""
    monkeypatch.setattr(handshake, "_CHECK_EVERY_S", 20.0)


@pytest.fixture
def few_last_checks(monkeypatch):
    monkeypatch.setattr(handshake, "_LAST_CHECKS", 2)


class Acceptor:
    """Rank 0 accepting in a thread."""

    def __init__(self, listeners, expected=(1,), timeout_s=5.0, key=KEY, check=lambda: None):
        self.peers = {}
        self.error = None
        self._us = Joiner(0, key, time.monotonic() + timeout_s, check)
        self._thread = threading.Thread(target=self._run, args=(listeners, set(expected)))
        self._thread.start()

    def _run(self, listeners, expected):
        try:
            self.peers = accept_peers(listeners, expected, self._us)
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
    return connect_to(peer, address, Joiner(rank, key, time.monotonic() + timeout_s, check))


def stranger(address):
    """Connect without sending anything."""
    if address.unix:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"\0{address.unix}")
        return sock
    return socket.create_connection(address.tcp)


def test_ranks_with_the_key_connect(listener):
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


def test_an_impostor_rank_is_rejected_and_blocks_no_peer(listener, few_last_checks):
    sockets, address = listener
    with Acceptor(sockets):
        with pytest.raises((ConnectionError, OSError)):
            connect(address, key=b"x" * 32)
        connect(address).close()


def test_a_listener_with_another_key_is_refused(listener, short_handshakes, few_last_checks):
    sockets, address = listener
    is_over = threading.Event()

    def check():
        if is_over.is_set():
            raise WaitTimeoutError("the test is over")

    acceptor = Acceptor(sockets, key=b"x" * 32, check=check)
    with pytest.raises(ConnectionRefusedError, match="rank 0 does not know the job's key"):
        connect(address)
    is_over.set()
    with pytest.raises(WaitTimeoutError):
        acceptor.wait_end()


@pytest.mark.parametrize("rank", [0, 2, 2**31])
def test_a_rank_that_is_not_expected_is_rejected(listener, rank, rare_checks):
    sockets, address = listener
    with Acceptor(sockets):
        with pytest.raises(WaitTimeoutError, match=r"closed the connection|reset"):
            connect(address, rank=rank, timeout_s=0.05)
        connect(address).close()


def test_a_rank_connects_once(listener, rare_checks):
    sockets, address = listener
    with Acceptor(sockets, expected=(1, 2)) as acceptor:
        first = connect(address, 1)
        with pytest.raises(WaitTimeoutError, match=r"closed the connection|reset"):
            connect(address, 1, timeout_s=0.05)
        second = connect(address, 2)
        acceptor.wait_end()
        for sock in (first, second):
            sock.close()


@pytest.mark.parametrize(
    "message",
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
def test_a_stranger_blocks_no_peer(listener, short_handshakes, message, closes):
    sockets, address = listener
    with stranger(address) as unknown, Acceptor(sockets) as acceptor:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            unknown.sendall(message)  # the listener may close it before all is sent
        if closes:
            unknown.close()
        connect(address).close()
        acceptor.wait_end()

    assert acceptor.peers.keys() == {1}


def test_a_replayed_handshake_is_rejected(listener, short_handshakes):
    """The acceptor's challenge is new each time, so an old proof is invalid."""
    sockets, address = listener
    hello = handshake._HELLO.pack(handshake._MAGIC, 1, b"c" * 32)
    with Acceptor(sockets) as acceptor:
        with stranger(address) as unknown:
            unknown.sendall(hello + b"p" * 32)
            # The acceptor's own proof is not accepted either, since the roles differ.
        with stranger(address) as unknown:
            unknown.sendall(hello)
            unknown.settimeout(5.0)
            answer = unknown.recv(64, socket.MSG_WAITALL)
            unknown.sendall(answer[32:])
            assert unknown.recv(1) == b""
        connect(address).close()
        acceptor.wait_end()


def test_connecting_to_a_full_queue_is_retried():
    """With a full queue, ``connect`` on a Unix socket does not wait but fails with EAGAIN."""
    sockets, address = listen(None)
    sockets[0].listen(0)
    waiting: list[socket.socket] = []
    while not waiting or waiting[-1].connect_ex(f"\0{address.unix}") == 0:
        waiting.append(socket.socket(socket.AF_UNIX))
        waiting[-1].setblocking(False)
    with pytest.raises(
        WaitTimeoutError, match=r"rank 1 could not connect to rank 0 in time; .*Resou"
    ):
        connect(address, timeout_s=0.1)
    with Acceptor(sockets) as acceptor:
        connect(address).close()
        acceptor.wait_end()
    for sock in (*waiting, *sockets):
        sock.close()


def test_a_peer_displaced_by_strangers_connects_again(listener, monkeypatch):
    """The acceptor closes the connection before it answers, as if all places were taken."""
    sockets, address = listener
    closed: list[int] = []
    pick_up = handshake._pick_up

    def displace_the_first(listening, callers):
        pick_up(listening, callers)
        if len(closed) < 3:
            closed.extend(callers)
            for caller in tuple(callers.values()):
                handshake._hang_up(caller, callers)

    monkeypatch.setattr(handshake, "_pick_up", displace_the_first)
    with Acceptor(sockets) as acceptor:
        connect(address).close()
        acceptor.wait_end()

    assert len(closed) == 3


def test_more_strangers_than_places_block_no_peer(listener, monkeypatch):
    sockets, address = listener
    monkeypatch.setattr(handshake, "_MAX_CALLERS", 4)
    strangers = [stranger(address) for _ in range(20)]
    with Acceptor(sockets, expected=(1, 2)) as acceptor:
        links = [connect(address, rank) for rank in (1, 2)]
        acceptor.wait_end()
        for sock in (*strangers, *links):
            sock.close()


# -- other users ---------------------------------------------------------------------------------

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can become another")


def as_nobody(act):
    """Run a function in another user's process; return "" or the exception that ended it."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():  # newer versions of Python warn of threads
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        text = ""
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            act()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write_end, text.encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as file:
        text = file.read().decode()
    os.waitpid(pid, 0)
    return text


@pytest.mark.dist
@needs_root
def test_another_user_with_the_key_is_rejected():
    """Every user of the host can read the key in a launcher's store."""
    sockets, address = listen(None)

    def attacks():
        vars(handshake)["is_of_this_user"] = lambda link: True  # an attacker does not check it
        connect(address, timeout_s=0.3)

    with Acceptor(sockets) as acceptor:
        error = as_nobody(attacks)
        assert "could not connect to rank 0 in time" in error
        assert not acceptor.peers
        connect(address).close()
        acceptor.wait_end()
    sockets[0].close()


@pytest.mark.dist
@needs_root
def test_a_listener_of_another_user_is_refused():
    """Its name may be from a store that every user of the host can write to."""
    name = f"procpipe-test-{os.getpid()}-{time.monotonic_ns()}"
    ready, wait = os.pipe(), os.pipe()

    def listens():
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(f"\0{name}")
            sock.listen()
            os.write(ready[1], b".")
            os.read(wait[0], 1)

    thread = threading.Thread(target=as_nobody, args=(listens,))
    thread.start()
    os.read(ready[0], 1)
    try:
        with pytest.raises(ConnectionRefusedError, match="rank 0 on this host belongs to another"):
            connect(Address(host_identity(), name, ("", 0)))
    finally:
        os.write(wait[1], b".")
        thread.join(10.0)
        for descriptor in (*ready, *wait):
            os.close(descriptor)


@pytest.mark.dist
@needs_root
def test_peers_connect_while_another_user_floods_them():
    """With enough connections to fill the listener's queue and all places."""
    stop = os.pipe()
    pairs = [listen(None) for _ in range(10)]

    def floods():
        while not select.select([stop[0]], [], [], 0)[0]:
            kept = []
            for _, address in pairs:
                for _ in range(100):
                    kept.append(socket.socket(socket.AF_UNIX))
                    kept[-1].setblocking(False)
                    if kept[-1].connect_ex(f"\0{address.unix}"):
                        break
            for sock in kept:
                sock.close()

    thread = threading.Thread(target=as_nobody, args=(floods,))
    thread.start()
    try:
        for sockets, address in pairs:
            with Acceptor(sockets, expected=(1, 2)) as acceptor:
                links = [connect(address, rank) for rank in (1, 2)]
                acceptor.wait_end()
            for sock in links:
                sock.close()
    finally:
        os.write(stop[1], b".")
        thread.join(10.0)
        for sockets, _ in pairs:
            sockets[0].close()
        for descriptor in stop:
            os.close(descriptor)


# -- waiting -------------------------------------------------------------------------------------


def test_waiting_for_peers_times_out(listener):
    sockets, _ = listener
    with (
        pytest.raises(WaitTimeoutError, match="rank 0 waited, but ranks 1, 3 did not connect"),
        Acceptor(sockets, expected=(1, 3), timeout_s=0.0),
    ):
        pass


def test_waiting_for_an_answer_times_out(listener, frequent_checks):
    _, address = listener  # without an acceptor

    with pytest.raises(WaitTimeoutError, match="rank 2 connected to rank 0, which did not answer"):
        connect(address, rank=2, timeout_s=0.0)


def test_waiting_ends_when_the_start_has_failed(listener, frequent_checks):
    sockets, address = listener

    def check():
        raise KeyError("another rank failed")

    with pytest.raises(KeyError), Acceptor(sockets, check=check):
        pass
    with pytest.raises(KeyError):
        connect(address, check=check)


def test_without_an_address_nothing_listens_on_the_network():
    sockets, address = listen(None)

    assert address.tcp == ("", 0)
    assert [sock.family for sock in sockets] == [socket.AF_UNIX]
    listening = psutil.Process().net_connections(kind="inet")
    ours = {sock.fileno() for sock in sockets}
    assert not [c for c in listening if c.fd in ours]
    # In the abstract namespace: no file to remove, and no name to guess.
    assert sockets[0].getsockname() == f"\0{address.unix}".encode()
    assert len(address.unix) > 32
    for sock in sockets:
        sock.close()


def test_a_host_has_one_identity():
    assert host_identity() == host_identity()
    sockets, address = listen(None)
    assert address.host == host_identity()
    sockets[0].close()


def test_silent_strangers_are_waited_for_at_the_same_time():
    """Rank 0 waits for the greetings of all connections together, not one after the other."""
    sockets, address = listen(None)
    with contextlib.ExitStack() as strangers:
        for _ in range(8):
            unknown = strangers.enter_context(socket.socket(socket.AF_UNIX))
            unknown.connect(f"\0{address.unix}")
        start_s = time.monotonic()
        with Acceptor(sockets, timeout_s=20.0) as acceptor:
            connect(address).close()
            acceptor.wait_end()

            assert time.monotonic() - start_s < handshake._HANDSHAKE_TIMEOUT_S
    for sock in sockets:
        sock.close()
