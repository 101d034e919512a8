"""How two ranks prove to each other that they belong to one job, and strangers are turned away.

Either side proves that it knows the job's key before anything else is read (HMAC-SHA256 over the
other's random challenge and both ranks). On a unix socket the kernel tells the other side's user,
too, which must be this process's own, at both ends:

    connector                                acceptor
    its user is ours?                        its user is ours? else closed at once
    magic, rank, challenge A          ->
                                      <-     challenge B, HMAC(key, "acceptor", A, ranks)
    HMAC(key, "connector", B, ranks)  ->
                                      <-     welcome

A connector counts on the connection once it is welcome. If it was closed before that (strangers
in large numbers may push it out), or the listener's queue was full, it tries again, until the
deadline. Knows nothing of messages, stages or tensors.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable

from procpipe.channel.wire import Address, host_identity, is_of_this_user, prepared
from procpipe.errors import FileLimitError, WaitTimeoutError
from procpipe.limits import naming_file_limit

_MAGIC = b"procpipe2"
_HELLO = struct.Struct("!9sI32s")
_PROOF_BYTES = 32
_WELCOME = b"+"

#: How long a caller may take to prove itself.
_HANDSHAKE_TIMEOUT_S = 5.0

#: A host answers in milliseconds, whatever its processes do; a firewall never.
_REACH_TIMEOUT_S = 20.0

#: How often a wait looks whether the start was given up.
_CHECK_EVERY_S = 0.2

#: Until the next attempt to connect: at first, and at most.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05

#: Connections that have not proved themselves, at most; the oldest makes room for one more.
_MAX_CALLERS = 256

#: Connections that are accepted at a time, before those accepted are read from.
_MAX_ACCEPTED = 256

#: A listener's queue is full, or the other side closed a connection: neither tells what it is.
_TRY_AGAIN = (BlockingIOError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)


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
        check: called some times a second while waiting; raises if the start was given up.

    Raises:
        ConnectionRefusedError: what listens there is of another user, or does not know the key.
        ConnectionError: nothing listens there.
        WaitTimeoutError: the deadline has passed, or the host does not answer.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return _connected(peer, address, rank=rank, key=key, deadline_s=deadline_s, check=check)
        except _TRY_AGAIN as error:
            check()
            if time.monotonic() + pause_s > deadline_s:
                raise WaitTimeoutError(
                    f"rank {rank} could not connect to rank {peer} in time; the last attempt "
                    f"failed with: {error}"
                ) from None
        except ConnectionError:
            # Its process may have ended: the kernel closes its sockets a moment before it says so.
            for _ in range(20):
                check()
                time.sleep(0.01)
            raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _connected(
    peer: int,
    address: Address,
    *,
    rank: int,
    key: bytes,
    deadline_s: float,
    check: Callable[[], None],
) -> socket.socket:
    """Try once."""
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
        if not is_of_this_user(link):
            raise ConnectionRefusedError(
                f"what listens for rank {peer} on this host belongs to another user than rank "
                f"{rank}: run all ranks of a host as one user"
            )
        _introduce(link, peer, rank=rank, key=key, deadline_s=deadline_s, check=check)
    except BaseException:
        link.close()
        raise
    return prepared(link)


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
    """Do the connector's side of the handshake; the peer may be busy with other connections."""

    def read(size: int) -> bytes:
        data = b""
        while len(data) < size:
            while not _readable([link], _CHECK_EVERY_S):
                if time.monotonic() > deadline_s:
                    raise WaitTimeoutError(
                        f"rank {rank} connected to rank {peer}, which did not answer"
                    )
                check()
            part = link.recv(size - len(data))
            if not part:
                raise ConnectionResetError("the other side closed the connection")
            data += part
        return data

    challenge = secrets.token_bytes(_PROOF_BYTES)
    link.sendall(_HELLO.pack(_MAGIC, rank, challenge))
    theirs, proof = read(_PROOF_BYTES), read(_PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(key, b"acceptor", challenge, rank, peer)):
        raise ConnectionRefusedError(f"what listens for rank {peer} does not know the job's key")
    link.sendall(_proof(key, b"connector", theirs, rank, peer))
    read(len(_WELCOME))


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
        check: called some times a second while waiting; raises if the start was given up.
    """
    peers: dict[int, socket.socket] = {}
    callers: dict[int, _Caller] = {}
    checked_s = 0.0
    for listener in listeners:
        listener.setblocking(False)
    try:
        while missing := expected - peers.keys():
            if time.monotonic() > deadline_s:
                raise WaitTimeoutError(
                    f"rank {rank} waited in vain for {_ranks(missing)} to connect: did every "
                    "process reach its first step?"
                )
            if time.monotonic() > checked_s + _CHECK_EVERY_S / 2:  # strangers do not make it more
                check()
                checked_s = time.monotonic()
            waiting = [*listeners, *(caller.link for caller in callers.values())]
            ready = _readable(waiting, _CHECK_EVERY_S)
            for caller in [callers[sock.fileno()] for sock in ready if sock.fileno() in callers]:
                try:
                    peer = caller.hear(rank=rank, key=key, expected=expected - peers.keys())
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
    """Accept who has connected, without a wait for what they have to say; not other users."""
    for _ in range(_MAX_ACCEPTED):
        try:
            with naming_file_limit("a connection of another rank"):
                link, _ = listener.accept()
        except FileLimitError:
            if not callers:
                raise
            _hang_up(next(iter(callers.values())), callers)
            return
        except OSError:  # nobody is there, or has gone again
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
        self.link.sendall(_WELCOME)  # raises if it has gone meanwhile
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


def _ranks(ranks: set[int]) -> str:
    listed = ", ".join(str(rank) for rank in sorted(ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
