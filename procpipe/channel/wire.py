"""Sockets between the processes of one job: listening, connecting, proving who one is.

Ranks on one host meet on unix-domain sockets in Linux's abstract namespace, which vanish with
their process; ranks on different hosts over TCP with TCP_NODELAY. A TCP listener is bound only
where the job spans hosts, to the address that leads to its peers.

Either side proves that it knows the job's key before anything else is read (HMAC-SHA256 over the
other's random challenge and both ranks), so a stranger is refused:

    connector                                acceptor
    magic, rank, challenge A          ->
                                      <-     challenge B, HMAC(key, "acceptor", A, ranks)
    HMAC(key, "connector", B, ranks)  ->     accepted

Knows nothing of messages, stages or tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from procpipe.errors import FileLimitError, WaitTimeoutError
from procpipe.limits import naming_file_limit

__all__ = [
    "Address",
    "accept_peers",
    "address_towards",
    "connect_to",
    "has_vanished",
    "host_identity",
    "listen",
    "open_process",
    "own_address",
]

_MAGIC = b"procpipe1"
_HELLO = struct.Struct("!9sI32s")
_PROOF_BYTES = 32

#: Of Linux's struct tcp_info: tcpi_retransmits and tcpi_probes (unanswered), tcpi_last_ack_recv.
_TCP_INFO = struct.Struct("=2xBB52xI")

#: Returns a descriptor of the process at the other end (Linux 6.5; not in Python 3.11).
_SO_PEERPIDFD = 77

#: The credentials of a unix socket's peer: process, user, group.
_CREDENTIALS = struct.Struct("3i")

_HANDSHAKE_TIMEOUT_S = 5.0

#: A host answers in milliseconds, whatever its processes do; a firewall never.
_REACH_TIMEOUT_S = 20.0

#: A host that has gone without a word (power, network) is taken for dead after about so long.
_VANISHED_AFTER_S = 20

#: The user's word on which of this host's addresses its peers should use.
_ADDRESS_VARIABLE = "PROCPIPE_ADDRESS"

_BUFFER_BYTES = 4 << 20

#: Connections that have not proved themselves, at most; the oldest makes room for one more.
_MAX_CALLERS = 256


@dataclass(frozen=True)
class Address:
    """Where a rank listens.

    Attributes:
        host: what two ranks on one host have in common (see :func:`host_identity`).
        unix: name in the abstract namespace, or "" where there is none.
        tcp: numeric address and port, or ("", 0).
    """

    host: str
    unix: str
    tcp: tuple[str, int]


def host_identity() -> str:
    """Return a text that is the same for two processes iff abstract sockets connect them.

    Processes that were told different addresses for themselves count as on different hosts.
    """
    told = os.environ.get(_ADDRESS_VARIABLE, "")
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{told}"
    except OSError:
        return f"{socket.gethostname()}/{told}"


def own_address() -> str:
    """Return this host's address for its peers: the one given, or the one towards rank 0.

    Raises:
        ValueError: the address given is not one of this host.
    """
    told = os.environ.get(_ADDRESS_VARIABLE)
    if not told:
        return _address_on_the_way_to(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    try:
        family, _, _, _, target = socket.getaddrinfo(told, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(
            f"{_ADDRESS_VARIABLE}={told!r} is not an address of this host ({error}): give one that "
            "`ip address` lists and the other hosts can reach, or unset it"
        ) from None


def address_towards(rank: int, hosts: list[tuple[str, str]]) -> str | None:
    """Return the address this rank listens on for ranks on other hosts; None if there are none.

    Where rank 0 runs, its host's name may lead to the loopback interface (127.0.1.1 on Debian):
    there, what counts is the way to another host.

    Args:
        rank: this rank.
        hosts: the host identity and own address of each rank.
    """
    identity, ours = hosts[rank]
    others = [address for host, address in hosts if host != identity]
    if not others:
        return None
    reachable = [address for address in others if not _is_loopback(address)]
    if _is_loopback(ours) and reachable and not os.environ.get(_ADDRESS_VARIABLE):
        return _address_on_the_way_to(reachable[0])
    return ours


def _address_on_the_way_to(host: str) -> str:
    """Return the address that packets from here to there carry; nothing is sent."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def listen(tcp_host: str | None) -> tuple[list[socket.socket], Address]:
    """Open this rank's listening sockets.

    Args:
        tcp_host: the local address to listen on over TCP, or None if no peer needs it.
    """
    sockets, unix, tcp = [], "", ("", 0)
    if sys.platform == "linux":
        unix = f"procpipe-{secrets.token_hex(16)}"
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.bind(f"\0{unix}")
        sockets.append(local)
    elif tcp_host is None:
        tcp_host = "127.0.0.1"
    if tcp_host is not None:
        family = socket.AF_INET6 if ":" in tcp_host else socket.AF_INET
        remote = socket.socket(family, socket.SOCK_STREAM)
        remote.bind((tcp_host, 0))
        tcp = (tcp_host, remote.getsockname()[1])
        sockets.append(remote)
    for listener in sockets:
        listener.listen(128)
    return sockets, Address(host_identity(), unix, tcp)


def connect_to(
    peer: int,
    address: Address,
    *,
    rank: int,
    key: bytes,
    deadline_s: float,
    check: Callable[[], None],
) -> socket.socket:
    """Connect to another rank's listener and prove who we are.

    Args:
        peer: the rank that listens.
        address: where it listens.
        rank: this rank.
        key: the job's key.
        deadline_s: ``time.monotonic()`` after which waiting ends.
        check: called about twice a second while waiting; raises if the start was given up.
    """
    if address.unix and address.host == host_identity():
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: str | tuple[str, int] = f"\0{address.unix}"
    else:
        link = socket.socket(
            socket.AF_INET6 if ":" in address.tcp[0] else socket.AF_INET, socket.SOCK_STREAM
        )
        target = address.tcp
    try:
        _reach(link, target, peer, rank=rank, deadline_s=deadline_s)
        link.settimeout(_HANDSHAKE_TIMEOUT_S)
        _introduce(link, peer, rank=rank, key=key, deadline_s=deadline_s, check=check)
    except BaseException:
        link.close()
        raise
    return _prepared(link)


def _reach(
    link: socket.socket,
    target: str | tuple[str, int],
    peer: int,
    *,
    rank: int,
    deadline_s: float,
) -> None:
    """Connect; say what to look at if that cannot be: the peer listens, or has ended."""
    link.settimeout(max(0.001, min(_REACH_TIMEOUT_S, deadline_s - time.monotonic())))
    try:
        link.connect(target)
    except OSError as error:
        if isinstance(target, str):
            where, advice = "on this host", "has its process ended?"
        else:
            where = f"at {target[0]} port {target[1]}"
            advice = (
                "has its process ended, is a firewall between the hosts (ranks use ports that the "
                f"system picks), or is that not the address to use ({_ADDRESS_VARIABLE})?"
            )
        text = f"rank {rank} cannot reach rank {peer} {where} ({error}): {advice}"
        if isinstance(error, TimeoutError):
            raise WaitTimeoutError(text) from None
        raise ConnectionError(text) from None


def _introduce(
    link: socket.socket,
    peer: int,
    *,
    rank: int,
    key: bytes,
    deadline_s: float,
    check: Callable[[], None],
) -> None:
    """Do the connector's side of the handshake."""
    challenge = secrets.token_bytes(_PROOF_BYTES)
    link.sendall(_HELLO.pack(_MAGIC, rank, challenge))
    while not _readable([link], 0.5):  # the peer may still be busy with its own connections
        if time.monotonic() > deadline_s:
            raise WaitTimeoutError(f"rank {rank} connected to rank {peer}, which did not answer")
        check()
    answer = _read(link, 2 * _PROOF_BYTES, time.monotonic() + _HANDSHAKE_TIMEOUT_S)
    theirs, proof = answer[:_PROOF_BYTES], answer[_PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"acceptor", challenge, rank, peer)):
        raise ConnectionRefusedError(f"what listens for rank {peer} does not know the job's key")
    link.sendall(_proof(key, b"connector", theirs, rank, peer))


def accept_peers(
    listeners: list[socket.socket],
    expected: set[int],
    *,
    rank: int,
    key: bytes,
    deadline_s: float,
    check: Callable[[], None],
) -> dict[int, socket.socket]:
    """Accept one proven connection from each expected rank; strangers are turned away.

    All who have connected are heard at the same time, so one that says nothing delays nobody.

    Args:
        listeners: this rank's listening sockets.
        expected: the ranks that will connect.
        rank: this rank.
        key: the job's key.
        deadline_s: ``time.monotonic()`` after which waiting ends.
        check: called about twice a second while waiting; raises if the start was given up.
    """
    peers: dict[int, socket.socket] = {}
    callers: dict[int, _Caller] = {}
    for listener in listeners:
        listener.setblocking(False)
    try:
        while missing := expected - peers.keys():
            if time.monotonic() > deadline_s:
                raise WaitTimeoutError(
                    f"rank {rank} waited in vain for {_ranks(missing)} to connect: did every "
                    "process reach its first step?"
                )
            check()
            waiting = [*listeners, *(caller.link for caller in callers.values())]
            for sock in _readable(waiting, 0.5):
                caller = callers.get(sock.fileno())
                if caller is None:
                    _pick_up(sock, callers)
                    continue
                try:
                    peer = caller.hear(rank=rank, key=key, expected=expected - peers.keys())
                except OSError:
                    _hang_up(caller, callers)
                    continue
                if peer is not None:
                    peers[peer] = _prepared(callers.pop(sock.fileno()).link)
            for caller in tuple(callers.values()):
                if time.monotonic() > caller.deadline_s:
                    _hang_up(caller, callers)
    except BaseException:
        for link in peers.values():
            link.close()
        raise
    finally:
        for caller in tuple(callers.values()):
            _hang_up(caller, callers)
    return peers


def _pick_up(listener: socket.socket, callers: dict[int, _Caller]) -> None:
    """Accept a connection, without a wait for what it has to say."""
    try:
        with naming_file_limit("a connection of another rank"):
            link, _ = listener.accept()
    except FileLimitError:
        if not callers:
            raise
        _hang_up(next(iter(callers.values())), callers)
        return
    except OSError:
        return
    if len(callers) == _MAX_CALLERS:
        _hang_up(next(iter(callers.values())), callers)
    callers[link.fileno()] = _Caller(link)


def _hang_up(caller: _Caller, callers: dict[int, _Caller]) -> None:
    del callers[caller.link.fileno()]
    caller.link.close()


class _Caller:
    """A connection whose other end has not proved itself yet, and never keeps another waiting."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self.link = link
        self.deadline_s = time.monotonic() + _HANDSHAKE_TIMEOUT_S
        self._said = b""
        self._rank: int | None = None
        self._challenge = b""

    def hear(self, *, rank: int, key: bytes, expected: set[int]) -> int | None:
        """Take what has come; return the caller's rank once it is proved.

        Raises:
            OSError: it is a stranger, or has gone.
        """
        size = _HELLO.size if self._rank is None else _PROOF_BYTES
        part = self.link.recv(size - len(self._said))
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        self._said += part
        if len(self._said) < size:
            return None
        said, self._said = self._said, b""
        if self._rank is None:
            magic, caller, challenge = _HELLO.unpack(said)
            if magic != _MAGIC or caller not in expected:
                raise ConnectionRefusedError("a stranger")
            self._rank, self._challenge = caller, secrets.token_bytes(_PROOF_BYTES)
            # An empty socket takes so little at once.
            self.link.sendall(self._challenge + _proof(key, b"acceptor", challenge, caller, rank))
            return None
        proof = _proof(key, b"connector", self._challenge, self._rank, rank)
        if self._rank not in expected or not hmac.compare_digest(said, proof):
            raise ConnectionRefusedError("a stranger")
        return self._rank


def _proof(key: bytes, role: bytes, challenge: bytes, connector: int, acceptor: int) -> bytes:
    ranks = struct.pack("!II", connector, acceptor)
    return hmac.new(key, role + challenge + ranks, hashlib.sha256).digest()


def _read(link: socket.socket, size: int, deadline_s: float) -> bytes:
    data = b""
    while len(data) < size:
        link.settimeout(max(0.001, deadline_s - time.monotonic()))  # not anew for each byte
        part = link.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        data += part
    return data


def _prepared(link: socket.socket) -> socket.socket:
    if link.family != socket.AF_UNIX:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_vanished_host(link)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        link.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    link.setblocking(False)
    return link


def _notice_vanished_host(link: socket.socket) -> None:
    """End an idle connection when the other host no longer answers; the system's limit is hours.

    Not TCP_USER_TIMEOUT for one that is not idle: it would also end one whose reader is stopped.
    """
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _VANISHED_AFTER_S // 4),
        ("TCP_KEEPINTVL", _VANISHED_AFTER_S // 4),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, name):  # Linux has all of them
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def has_vanished(link: socket.socket) -> bool:
    """Say whether the other host has left without an answer what was sent, for long.

    A process that is stopped or computes is no matter: its system answers.
    """
    if link.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return False
    info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    retransmits, probes, last_answer_ms = _TCP_INFO.unpack(info)
    return bool(retransmits + probes) and last_answer_ms > _VANISHED_AFTER_S * 1000


def open_process(link: socket.socket) -> int | None:
    """Open the process at the other end (a pidfd); None where it cannot be, or is on another host.

    The descriptor can be read once the process has ended. The caller closes it.
    """
    if link.family != socket.AF_UNIX or sys.platform != "linux":
        return None
    with contextlib.suppress(OSError):  # from Linux 6.5 on: never another process of that number
        return link.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    with contextlib.suppress(OSError):
        told = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, _, _ = _CREDENTIALS.unpack(told)
        if pid > 0:  # else it is in a container of its own
            process = os.pidfd_open(pid)
            if _is_open(link):  # so it had not ended, and its number is its own
                return process
            os.close(process)
    return None


def _is_open(link: socket.socket) -> bool:
    """Say whether the other end has not closed a connection; reads nothing."""
    try:
        return link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _readable(sockets: list[socket.socket], timeout_s: float) -> list[socket.socket]:
    poller = select.poll()
    for sock in sockets:
        poller.register(sock, select.POLLIN)
    ready = {descriptor for descriptor, _ in poller.poll(timeout_s * 1000)}
    return [sock for sock in sockets if sock.fileno() in ready]


def _ranks(ranks: set[int]) -> str:
    listed = ", ".join(str(rank) for rank in sorted(ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
