"""Where ranks on several hosts listen, and hosts that do not answer."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

from procpipe.channel import handshake, sockets
from procpipe.channel.handshake import Joiner, connect_to
from procpipe.channel.sockets import (
    Address,
    address_towards,
    has_vanished,
    host_identity,
    listen,
    own_address,
)
from procpipe.errors import WaitTimeoutError


@pytest.fixture(autouse=True)
def _no_address_variables(monkeypatch):
    monkeypatch.delenv("PROCPIPE_ADDRESS", raising=False)


@pytest.fixture
def few_last_checks(monkeypatch):
    monkeypatch.setattr(handshake, "_LAST_CHECKS", 2)
    monkeypatch.delenv("MASTER_ADDR", raising=False)


def connect(tcp, timeout_s=20.0):
    address = Address("another host", "", tcp)
    return connect_to(3, address, Joiner(4, b"k", time.monotonic() + timeout_s, lambda: None))


# -- which address -------------------------------------------------------------------------------


def test_by_default_the_address_is_the_one_towards_rank_0(monkeypatch):
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.9")
    assert own_address() == "127.0.0.1"


def test_the_users_address_is_used(monkeypatch):
    monkeypatch.setenv("PROCPIPE_ADDRESS", "127.0.0.7")
    assert own_address() == "127.0.0.7"
    assert address_towards(0, [("a", "127.0.0.7"), ("b", "192.0.2.1")]) == "127.0.0.7"


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host."])
def test_an_address_of_another_host_is_refused(monkeypatch, host):
    monkeypatch.setenv("PROCPIPE_ADDRESS", host)

    with pytest.raises(ValueError, match=f"PROCPIPE_ADDRESS='{host}' is not an address of this ho"):
        own_address()


def test_processes_given_different_addresses_are_on_different_hosts(monkeypatch):
    default = host_identity()
    monkeypatch.setenv("PROCPIPE_ADDRESS", "127.0.0.2")
    given = host_identity()
    monkeypatch.setenv("PROCPIPE_ADDRESS", "127.0.0.3")

    assert len({default, given, host_identity()}) == 3


def test_nothing_listens_if_all_ranks_are_on_one_host():
    assert address_towards(1, [("a", "127.0.0.1"), ("a", "127.0.0.1")]) is None


def test_an_address_that_reaches_peers_is_kept():
    hosts = [("a", "192.0.2.1"), ("b", "192.0.2.2"), ("b", "192.0.2.2")]

    assert [address_towards(rank, hosts) for rank in range(3)] == [address for _, address in hosts]


def test_a_loopback_address_of_rank_0_is_replaced(monkeypatch):
    """As on Debian, where /etc/hosts has 127.0.1.1 for the host's own name."""
    monkeypatch.setattr(sockets, "_address_on_the_way_to", lambda host: f"towards {host}")

    found = address_towards(0, [("a", "127.0.1.1"), ("a", "127.0.1.1"), ("b", "192.0.2.2")])

    assert found == "towards 192.0.2.2"


def test_ipv6():
    assert sockets._is_loopback("::1")
    assert not sockets._is_loopback("fe80::1%eth0")
    if not socket.has_ipv6 or not can_bind("::1"):
        pytest.skip("this host has no IPv6")
    listeners, address = listen("::1")
    assert listeners[-1].family == socket.AF_INET6
    assert address.tcp[0] == "::1"
    for sock in listeners:
        sock.close()


def can_bind(address):
    with socket.socket(socket.AF_INET6) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            return False
    return True


# -- hosts that do not answer --------------------------------------------------------------------


def test_a_port_without_a_listener(few_last_checks):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # and does not listen
        port = sock.getsockname()[1]
        with pytest.raises(ConnectionError) as caught:
            connect(("127.0.0.1", port))

    text = str(caught.value)
    assert text.startswith(f"rank 4 cannot reach rank 3 at 127.0.0.1 port {port} (")
    assert "refused" in text
    assert "firewall" in text
    assert "PROCPIPE_ADDRESS" in text


@pytest.mark.parametrize("limit", ["reach", "deadline"])
def test_a_host_that_does_not_answer(monkeypatch, limit):
    if limit == "reach":
        monkeypatch.setattr(handshake, "_REACH_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = [silent(full.getsockname()) for _ in range(4)]
        with pytest.raises(WaitTimeoutError, match=r"rank 4 cannot reach rank 3 at .* \(timed out"):
            connect(full.getsockname(), timeout_s=20.0 if limit == "reach" else 0.05)
        for sock in waiting:
            sock.close()


def silent(address):
    """Begin to connect to a listener that does not accept, which fills its queue."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex(address)
    return sock


def test_a_rank_of_this_host_that_has_ended(few_last_checks):
    listeners, address = listen(None)
    listeners[0].close()

    with pytest.raises(ConnectionError, match=r"rank 4 cannot reach rank 3 on this host .*ended"):
        connect_to(3, address, Joiner(4, b"k", time.monotonic() + 5, print))


# -- hosts that vanish ---------------------------------------------------------------------------


@pytest.fixture
def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with sockets.prepared(ours), sockets.prepared(theirs):
        yield ours, theirs


def test_an_idle_connection_is_probed(tcp_pair):
    for link in tcp_pair:
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, count = (
            link.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}"))
            for name in ("IDLE", "INTVL", "CNT")
        )
        assert idle + interval * count == sockets._VANISHED_AFTER_S


def test_a_host_that_never_answers_has_vanished(monkeypatch):
    monkeypatch.setattr(sockets, "_VANISHED_AFTER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = [silent(full.getsockname()) for _ in range(4)]
        wait_until(lambda: has_vanished(waiting[-1]))
        assert not has_vanished(waiting[0])  # the queue had room for it
        for sock in waiting:
            sock.close()


def test_a_reader_that_is_stopped_has_not_vanished(monkeypatch, tcp_pair):
    """Its kernel keeps answering that the receive buffer is full."""
    monkeypatch.setattr(sockets, "_VANISHED_AFTER_S", 0.0)
    ours, _ = tcp_pair
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(1 << 20))

    wait_until(lambda: not has_vanished(ours))  # the last bytes may not be acknowledged yet


def wait_until(condition):
    deadline_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_sockets_within_a_host_do_not_vanish():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not has_vanished(ours)
