"""The handshake by which two ranks prove that they belong to one job; others are rejected.

Both sides prove that they know the job's key before anything else is read (HMAC-SHA256 over the
other's random challenge and both ranks). On a unix socket the kernel also shows each side the
other's user, which must be this process's own:

    connector                                acceptor
    other user: refuse                       other user: close at once
    magic, rank, challenge A          ->
                                      <-     challenge B, HMAC(key, "acceptor", A, ranks)
    HMAC(key, "connector", B, ranks)  ->
                                      <-     welcome

A connection counts for the connector after the welcome. If it was closed before that (a large
number of unknown callers may displace it), or the listener's queue was full, the connector tries
again until the deadline.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from procpipe.channel.sockets import Address, host_identity, is_of_this_user, prepared
from procpipe.errors import WaitTimeoutError

_MAGIC = b"procpipe2"
_HELLO = struct.Struct("!9sI32s")
_PROOF_BYTES = 32
_WELCOME = b"+"

#: How long a caller may take to prove itself.
_HANDSHAKE_TIMEOUT_S = 5.0

#: How long a host may take to answer; it does so in milliseconds, unless a firewall is in between.
_REACH_TIMEOUT_S = 20.0

#: How often a wait checks whether the start has failed.
_CHECK_EVERY_S = 0.2

#: How often, every 10 ms, a failed connection checks that before it is an error.
_LAST_CHECKS = 20

#: Until the next attempt to connect: at first, and at most.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05

#: Connections that have not proved themselves, at most; then the oldest is closed for a new one.
_MAX_CALLERS = 256

#: Connections that are accepted at a time, before those accepted are read from.
_MAX_ACCEPTED = 256

#: A listener's queue is full, or the other side closed a connection; it may work the next time.
_TRY_AGAIN = (BlockingIOError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)


@dataclass(frozen=True)
class Joiner:
    """What one rank needs for its handshakes."""

    rank: int
    key: bytes  # the job's
    deadline_s: float  # ``time.monotonic()`` at which waiting ends
    check: Callable[[], None]  # called while waiting; raises if the start has failed
    ranks: Sequence[int] = range(1 << 62)  # each rank's number in the job, for messages


def connect_to(peer: int, address: Address, us: Joiner) -> socket.socket:
    """Connect to another rank's listener, and do the connector's side of the handshake.

    Raises:
        ConnectionRefusedError: what listens there is of another user, or does not know the key.
        ConnectionError: nothing listens there.
        WaitTimeoutError: the deadline has passed, or the host does not answer.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return _connected(peer, address, us)
        except _TRY_AGAIN as error:
            us.check()
            if time.monotonic() + pause_s > us.deadline_s:
                raise WaitTimeoutError(
                    f"{_names(us, peer, 'could not connect to')} in time; the last attempt "
                    f"failed with: {error}"
                ) from None
        except ConnectionError:
            # Its process may have ended: the kernel closes its sockets before that can be seen.
            for _ in range(_LAST_CHECKS):
                us.check()
                time.sleep(0.01)
            raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _connected(peer: int, address: Address, us: Joiner) -> socket.socket:
    if address.host == host_identity():
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: str | tuple[str, int] = f"\0{address.unix}"
    else:
        family = socket.AF_INET6 if ":" in address.tcp[0] else socket.AF_INET
        link = socket.socket(family, socket.SOCK_STREAM)
        target = address.tcp
    try:
        _reach(link, target, peer, us)
        if not is_of_this_user(link):
            raise ConnectionRefusedError(
                f"what listens for rank {us.ranks[peer]} on this host belongs to another user than "
                f"rank {us.ranks[us.rank]}: run all ranks of a host as one user"
            )
        _introduce(link, peer, us)
    except BaseException:
        link.close()
        raise
    return prepared(link)


def _reach(link: socket.socket, target: str | tuple[str, int], peer: int, us: Joiner) -> None:
    """Connect; the error of a failure says what to check."""
    link.settimeout(max(0.001, min(_REACH_TIMEOUT_S, us.deadline_s - time.monotonic())))
    try:
        link.connect(target)
    except _TRY_AGAIN:
        raise
    except OSError as error:
        if isinstance(target, str):
            where, advice = "on this host", "has its process ended?"
        else:
            where = f"at {target[0]} port {target[1]}"
            advice = (
                "has its process ended, is a firewall between the hosts (ranks use ports that the "
                "system picks), or is that not the address to use (PROCPIPE_ADDRESS)?"
            )
        text = f"{_names(us, peer, 'cannot reach')} {where} ({error}): {advice}"
        error_type = WaitTimeoutError if isinstance(error, TimeoutError) else ConnectionError
        raise error_type(text) from None


def _introduce(link: socket.socket, peer: int, us: Joiner) -> None:
    """Do the connector's side of the handshake; the peer may be busy with other connections."""

    def read(size: int) -> bytes:
        data = b""
        while len(data) < size:
            while not _readable([link], _CHECK_EVERY_S):
                if time.monotonic() > us.deadline_s:
                    raise WaitTimeoutError(
                        f"{_names(us, peer, 'connected to')}, which did not answer"
                    )
                us.check()
            part = link.recv(size - len(data))
            if not part:
                raise ConnectionResetError("the other side closed the connection")
            data += part
        return data

    challenge = secrets.token_bytes(_PROOF_BYTES)
    link.sendall(_HELLO.pack(_MAGIC, us.rank, challenge))
    theirs, proof = read(_PROOF_BYTES), read(_PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(us.key, b"acceptor", challenge, us.rank, peer)):
        raise ConnectionRefusedError(
            f"what listens for rank {us.ranks[peer]} does not know the job's key"
        )
    link.sendall(_proof(us.key, b"connector", theirs, us.rank, peer))
    read(len(_WELCOME))


def accept_peers(
    listeners: list[socket.socket], expected: set[int], us: Joiner
) -> dict[int, socket.socket]:
    """Accept one proven connection from each expected rank; reject all others.

    All callers are read from at the same time, so one that sends nothing delays no other.

    Raises:
        WaitTimeoutError: the deadline has passed.
    """
    peers: dict[int, socket.socket] = {}
    callers: dict[int, _Caller] = {}
    checked_s = 0.0
    for listener in listeners:
        listener.setblocking(False)
    try:
        while missing := expected - peers.keys():
            if time.monotonic() > us.deadline_s:
                raise WaitTimeoutError(
                    f"rank {us.ranks[us.rank]} waited, but {_ranks(us, missing)} did not connect: "
                    "did every process reach its first step?"
                )
            if time.monotonic() > checked_s + _CHECK_EVERY_S / 2:  # however many callers there are
                us.check()
                checked_s = time.monotonic()
            waiting = [*listeners, *(caller.link for caller in callers.values())]
            ready = _readable(waiting, _CHECK_EVERY_S)
            for caller in [callers[sock.fileno()] for sock in ready if sock.fileno() in callers]:
                try:
                    peer = caller.read(us, expected - peers.keys())
                except OSError:
                    _hang_up(caller, callers)
                    continue
                if peer is not None:
                    peers[peer] = prepared(callers.pop(caller.link.fileno()).link)
            for listener in listeners:
                if listener in ready:
                    _pick_up(listener, callers)
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
    """Accept waiting connections of this user, without reading from them."""
    for _ in range(_MAX_ACCEPTED):
        try:
            link, _ = listener.accept()
        except OSError as error:  # no connection, or it was closed again
            if error.errno == errno.EMFILE:
                raise
            return
        if not is_of_this_user(link):
            link.close()
            continue
        if len(callers) == _MAX_CALLERS:
            _hang_up(next(iter(callers.values())), callers)
        callers[link.fileno()] = _Caller(link)


def _hang_up(caller: _Caller, callers: dict[int, _Caller]) -> None:
    del callers[caller.link.fileno()]
    caller.link.close()


class _Caller:
    """A connection whose other end has not proved itself yet; reading from it never blocks."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self.link = link
        self.deadline_s = time.monotonic() + _HANDSHAKE_TIMEOUT_S
        self._received = b""
        self._rank: int | None = None
        self._challenge = b""

    def read(self, us: Joiner, expected: set[int]) -> int | None:
        """Read what has come; return the caller's rank once it is proved.

        Raises:
            OSError: it does not belong to the job, or has closed the connection.
        """
        size = _HELLO.size if self._rank is None else _PROOF_BYTES
        part = self.link.recv(size - len(self._received))
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        self._received += part
        if len(self._received) < size:
            return None
        received, self._received = self._received, b""
        if self._rank is None:
            magic, caller, challenge = _HELLO.unpack(received)
            if magic != _MAGIC or caller not in expected:
                raise ConnectionRefusedError("not of this job")
            self._rank, self._challenge = caller, secrets.token_bytes(_PROOF_BYTES)
            reply = self._challenge + _proof(us.key, b"acceptor", challenge, caller, us.rank)
            self.link.sendall(reply)  # an empty socket takes this at once
            return None
        proof = _proof(us.key, b"connector", self._challenge, self._rank, us.rank)
        if self._rank not in expected or not hmac.compare_digest(received, proof):
            raise ConnectionRefusedError("not of this job")
        self.link.sendall(_WELCOME)  # raises if the connection was closed
        return self._rank


def _proof(key: bytes, role: bytes, challenge: bytes, connector: int, acceptor: int) -> bytes:
    ranks = struct.pack("!II", connector, acceptor)
    return hmac.new(key, role + challenge + ranks, hashlib.sha256).digest()


def _readable(sockets: list[socket.socket], timeout_s: float) -> list[socket.socket]:
    poller = select.poll()
    for sock in sockets:
        poller.register(sock, select.POLLIN)
    ready = {descriptor for descriptor, _ in poller.poll(timeout_s * 1000)}
    return [sock for sock in sockets if sock.fileno() in ready]


def _names(us: Joiner, peer: int, verb: str) -> str:
    return f"rank {us.ranks[us.rank]} {verb} rank {us.ranks[peer]}"


def _ranks(us: Joiner, ranks: set[int]) -> str:
    listed = ", ".join(str(us.ranks[rank]) for rank in sorted(ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
