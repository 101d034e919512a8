"""How the ranks of a pipeline find and connect to one another: ``Stage()`` waits for it.

Each rank listens, connects to all lower ranks, once for data and once for alarms, then accepts all
higher ones; so no two wait for each other. Only where a rank listens differs:

    all ranks on one host   on an abstract unix socket, whose name every rank of the job can make:
                            no addresses, no key. The kernel shows both sides the other's user,
                            which must be their own.
    several hosts           on TCP, too. The address is in the launcher's store, which rank 0 holds
                            where there is no launcher. Rank 0 adds a key, unless PROCPIPE_KEY is
                            set. Ranks of one host use unix sockets here, too.

    connector                                          acceptor
    rank, data or alarm  [files]               ──────>
    over TCP: challenge A                      <─────> over TCP: challenge B
              HMAC(key, B)                     <─────>           HMAC(key, A)
                                               <────── welcome  [files]

Over a unix socket both sides pass descriptors of their files: the board, and the shared memory of
messages. An entry of the store may be older than this round of a restarted job: where it leads,
nothing listens or another key is known. So what fails is tried again until the deadline; reports of
the wait have the newest error. A process of another user, another key than the user's and an
address of another host are errors at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from procpipe.channel.mesh import Mesh
from procpipe.errors import PeerLostError, WaitTimeoutError
from procpipe.job.grid import Grid

if TYPE_CHECKING:
    from torch.distributed import Store

#: The job's key, where the user gives one; and this host's address for its peers.
_KEY_VARIABLE, _ADDRESS_VARIABLE = "PROCPIPE_KEY", "PROCPIPE_ADDRESS"

#: Rank, what the connection is for.
_HELLO = struct.Struct("!IB")
_DATA, _ALARM = 0, 1
_WELCOME = b"+"
_PROOF_BYTES = 32

#: How long the other side may take for its part of the handshake, once it has begun.
_HANDSHAKE_TIMEOUT_S = 5.0

#: Until the next attempt, and how long one waits for the other side before the mesh is polled.
_PAUSE_S, _LOOK_EVERY_S = 0.005, 0.02

#: A host that no longer answers (power, network) is treated as dead after about this time.
_VANISHED_AFTER_S = 20

_BUFFER_BYTES = 4 << 20

#: An address of no host (RFC 5737).
_ELSEWHERE = "192.0.2.1"

#: The job's store where rank 0 holds it, until the process ends: others may come early for the next
#: pipeline, and would lose it with this one.
_held: list[Store] = []


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one pipeline meet.

    Attributes:
        name: of this pipeline of this job, among all of the host.
        is_on_one_host: whether all ranks are.
        store: where they meet otherwise, or None to open the launcher's when it is needed.
    """

    name: str
    is_on_one_host: bool = True
    store: Store | None = None

    @classmethod
    def from_environment(cls, numbers: Sequence[int] | None, number: int) -> Meeting:
        """Return the meeting of a job's pipeline; ``numbers`` are its ranks, if not all are."""
        names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        job = [os.environ.get(name, "") for name in names]
        if not all(job[:2]):
            raise ValueError(
                "RANK and WORLD_SIZE are set: set MASTER_ADDR and MASTER_PORT, too, the address "
                "and a free port of rank 0's host"
            )
        is_on_one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
        members = "" if numbers is None else ",".join(map(str, numbers))
        # Each agent of torchrun counts its own restarts: names differ, where there are several.
        name = "/".join([members or "all", str(number), *job, str(os.geteuid())])
        return cls(name, is_on_one_host)


class Start:
    """One rank's part in connecting a pipeline's ranks, whose sockets the mesh gets.

    ``files`` are descriptors that each rank of the same host gets of this one.

    Attributes:
        files_of: by each other rank of this host, descriptors of its files.
        host: the address on which this rank listens for those of other hosts.
    """

    def __init__(self, mesh: Mesh, grid: Grid, meeting: Meeting, files: Sequence[int]) -> None:
        self.files_of: dict[int, list[int]] = {}
        self.host = "127.0.0.1"
        self._mesh = mesh
        self._grid = grid
        self._meeting = meeting
        self._files = files
        self._listeners: list[socket.socket] = []
        self._links: dict[tuple[int, int], socket.socket] = {}
        self._store: Store | None = None  # where all ranks are on one host
        self._users_key = os.environ.get(_KEY_VARIABLE, "")
        self._key = self._users_key or (secrets.token_hex(32) if grid.rank == 0 else "")

    def connect(self) -> None:
        """Connect to every other rank; every rank calls it, and it waits for all of them.

        Raises:
            RemoteStageError: another rank failed.
            WaitTimeoutError: a rank did not come within the timeout.
            PermissionError: another user's process listens for a rank of this host.
            ValueError: this rank's PROCPIPE_KEY is not that of a lower rank, or PROCPIPE_ADDRESS is
                of another host.
        """
        self._mesh.monitor.start()
        try:
            self._listen()
            for peer in range(self._grid.rank):
                for kind in (_DATA, _ALARM):
                    self._wait(partial(self._connect, peer, kind), partial(self._of, [peer]))
            self._wait(self._accept_higher, lambda: self._of(self._missing()))
        except WaitTimeoutError as error:
            error.add_note(
                "procpipe: did every process reach its Stage(), and can the hosts reach one "
                f"another (a firewall; {_ADDRESS_VARIABLE} gives a host's address)?"
            )
            raise
        finally:
            for link in (*self._listeners, *self._links.values()):
                link.close()

    # -- where the ranks listen -----------------------------------------------------------------

    def _listen(self) -> None:
        """Open this rank's listeners, and write into the store where they are."""
        name = self._unix_name(self._grid.rank)
        self._listen_on(socket.AF_UNIX, name)
        if not self._meeting.is_on_one_host:
            address = own_address()
            tcp = self._listen_on(_family(address), (address, 0)).getsockname()[:2]
            self.host = tcp[0]
            key = "" if self._users_key else self._key
            entry = [host_identity(), name, *tcp, key]
            self._store = self._meeting.store or self._open_store()
            self._store.set(self._entry_name(self._grid.rank), json.dumps(entry))

    def _listen_on(self, family: socket.AddressFamily, address: Any) -> socket.socket:
        listener = socket.socket(family, socket.SOCK_STREAM)
        self._listeners.append(listener)
        if family == socket.AF_UNIX:  # an older process of this job may still have the name
            self._wait(partial(listener.bind, address), lambda: f"its address {address!r}")
        else:
            try:
                listener.bind(address)
            except OSError as error:
                raise ValueError(
                    f"{address[0]} is not an address of this host ({error}): set "
                    f"{_ADDRESS_VARIABLE} to one that `ip address` lists and the other hosts can "
                    "reach"
                ) from error
        listener.listen(4 * self._grid.num_ranks)
        listener.setblocking(False)
        return listener

    def _address_of(self, peer: int) -> tuple[socket.AddressFamily, Any]:
        """Return where a lower rank listens; ``OSError`` if it has not written that yet."""
        if self._store is None:
            return socket.AF_UNIX, self._unix_name(peer)
        entry = self._entry_name(peer)
        try:
            is_there = self._store.check([entry])
        except RuntimeError as error:
            story = "rank 0, or its launcher, which holds the job's store, ended during the start"
            raise PeerLostError(0, story) from error
        if not is_there:
            raise FileNotFoundError("it has written no address yet")
        host, name, *tcp, key = json.loads(self._store.get(entry))
        if peer == 0:
            self._key = self._users_key or key
        if host == host_identity():
            return socket.AF_UNIX, name
        return _family(tcp[0]), tuple(tcp)

    def _unix_name(self, rank: int) -> str:
        name = hashlib.sha256(self._meeting.name.encode()).hexdigest()[:32]
        return f"\0procpipe-{name}-{rank}"

    def _entry_name(self, rank: int) -> str:
        members, number, *_ = self._meeting.name.split("/")
        return f"procpipe/{members}/{number}/address/{rank}"

    def _open_store(self) -> Store:
        """Connect to the launcher's store; without one, rank 0 holds it."""
        from torch.distributed import TCPStore

        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        holds = os.environ["RANK"] == "0" and not is_launchers
        if not holds:  # torch's own wait ignores signals and prints a lot
            self._wait(
                lambda: socket.create_connection(address, _HANDSHAKE_TIMEOUT_S).close(),
                lambda: f"the job's store at {address[0]} port {address[1]}",
            )
        # The user's group may use it, too.
        store = TCPStore(*address, is_master=holds, wait_for_workers=False, multi_tenant=True)
        if holds:
            _held[:] = [store]  # they share one server
        return store

    # -- connecting -----------------------------------------------------------------------------

    def _connect(self, peer: int, kind: int) -> bool:
        """Connect to another rank as far as possible without waiting for it.

        Returns whether that is done; ``OSError`` if it does not listen yet, or is not of this job.
        """
        link = self._links.get((peer, kind))
        try:
            if link is None:
                family, address = self._address_of(peer)
                link = self._links[peer, kind] = socket.socket(family, socket.SOCK_STREAM)
                link.settimeout(_HANDSHAKE_TIMEOUT_S)
                link.connect(address)
                self._check_user(link)
                hello = _HELLO.pack(self._grid.rank, kind)
                socket.send_fds(link, [hello], self._files_for(link, kind))
            if not wait([link], _LOOK_EVERY_S):  # it may be busy with other ranks
                return False
            self._check_key(link, self._grid.rank, peer)
            _, files = self._read(link, len(_WELCOME))
        except OSError:
            if link is not None:
                self._links.pop((peer, kind)).close()
            raise
        self._keep(peer, kind, link, files)
        return True

    def _accept_higher(self) -> bool:
        """Accept what connects now; return whether all higher ranks have."""
        while self._missing() and (ready := wait(self._listeners, _LOOK_EVERY_S)):
            for listener in ready:
                assert isinstance(listener, socket.socket), "they are listeners"
                with contextlib.suppress(BlockingIOError):  # it has gone
                    link, _ = listener.accept()
                    try:
                        self._accept(link)
                    except OSError:  # not of this job
                        link.close()
        return not self._missing()

    def _accept(self, link: socket.socket) -> None:
        """Accept a connection that has come; ``OSError`` if it is not of this job."""
        link.settimeout(_HANDSHAKE_TIMEOUT_S)
        self._check_user(link)
        hello, files = self._read(link, _HELLO.size)
        peer, kind = _HELLO.unpack(hello)
        if not self._grid.rank < peer < self._grid.num_ranks or kind > _ALARM:
            raise ConnectionRefusedError("not of this job")
        self._check_key(link, peer, self._grid.rank)
        socket.send_fds(link, [_WELCOME], self._files_for(link, kind))
        self._keep(peer, kind, link, files)

    def _missing(self) -> list[int]:
        return [
            peer
            for peer in range(self._grid.rank + 1, self._grid.num_ranks)
            if peer not in self._mesh.peers
        ]

    def _check_user(self, link: socket.socket) -> None:
        """Check that the process at the other end of a unix socket is of this one's user."""
        if link.family == socket.AF_UNIX and _other_end(link)[1] != os.geteuid():
            raise PermissionError(
                f"a process of another user (number {_other_end(link)[1]}) has the socket of a "
                "rank of this job: run all ranks of a host as one user"
            )

    def _check_key(self, link: socket.socket, connector: int, acceptor: int) -> None:
        """Check that both sides of a TCP connection know the key."""
        if link.family == socket.AF_UNIX:
            return
        other = connector + acceptor - self._grid.rank
        text = f"{self._entry_name(acceptor)} from {connector}, known to"
        challenge = secrets.token_bytes(_PROOF_BYTES)
        link.sendall(challenge)
        theirs, _ = self._read(link, _PROOF_BYTES)
        link.sendall(self._proof(f"{text} {self._grid.rank}", theirs))
        proof, _ = self._read(link, _PROOF_BYTES)
        if not hmac.compare_digest(proof, self._proof(f"{text} {other}", challenge)):
            # A key that rank 0 made may be of an older round, one of the user's not.
            is_final = connector == self._grid.rank and (self._users_key or not self._key)
            raise (ValueError if is_final else ConnectionRefusedError)(
                f"what listens for rank {self._grid.numbers[other]} does not know the key of rank "
                f"{self._grid.job_rank}: give every rank of the job the same {_KEY_VARIABLE}, or "
                "none"
            )

    def _proof(self, text: str, challenge: bytes) -> bytes:
        return hmac.digest(self._key.encode(), text.encode() + challenge, "sha256")

    def _files_for(self, link: socket.socket, kind: int) -> Sequence[int]:
        return self._files if link.family == socket.AF_UNIX and kind == _DATA else ()

    def _keep(self, peer: int, kind: int, link: socket.socket, files: list[int]) -> None:
        """Keep one connection of a peer, and its files; the mesh gets both together."""
        if files:
            self.files_of[peer] = files
        if link.family != socket.AF_UNIX:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _notice_vanished_host(link)
        # An alarm must be taken at once; for data over TCP the system finds a size by itself.
        if kind == _ALARM or link.family == socket.AF_UNIX:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        link.setblocking(False)
        self._links[peer, kind] = link
        if (peer, 1 - kind) in self._links:
            data, alarm = self._links.pop((peer, _DATA)), self._links.pop((peer, _ALARM))
            self._mesh.add(peer, data, alarm, _open_process(data))

    def _read(self, link: socket.socket, size: int) -> tuple[bytes, list[int]]:
        """Read bytes of the other side, and descriptors; ``OSError`` if it ends or is late."""
        data, files = b"", list[int]()
        while len(data) < size:
            part, passed, _, _ = socket.recv_fds(
                link, size - len(data), len(self._files), socket.MSG_CMSG_CLOEXEC
            )
            if not part:
                raise ConnectionResetError("the other side closed the connection")
            data, files = data + part, files + passed
        return data, files

    def _wait(self, attempt: Callable[[], bool | None], what: Callable[[], str]) -> None:
        """Wait until an attempt neither returns False nor fails; reports have the newest error.

        ``PermissionError`` is raised.
        """
        newest = ""

        def ready() -> bool:
            nonlocal newest
            try:
                return attempt() is not False
            except PermissionError:
                raise
            except OSError as error:
                newest = f" ({error})"
                return False

        self._mesh.wait(ready, lambda: f"{what()}{newest}", every_s=_PAUSE_S)

    def _of(self, ranks: Sequence[int]) -> str:
        numbers = ", ".join(str(self._grid.numbers[rank]) for rank in ranks)
        return f"rank{'s' if len(ranks) > 1 else ''} {numbers} to start"


def host_identity() -> str:
    """Return a text that is equal for two processes iff abstract sockets connect them.

    Processes that were given different PROCPIPE_ADDRESS count as on different hosts.
    """
    given = os.environ.get(_ADDRESS_VARIABLE, "")
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{given}"


def own_address() -> str:
    """Return this host's address for its peers: PROCPIPE_ADDRESS, or the one towards rank 0.

    Where rank 0 runs, its host's name may lead to the loopback interface (127.0.1.1 on Debian); so
    there the way out of the host counts, if there is one.
    """
    if given := os.environ.get(_ADDRESS_VARIABLE):
        return given
    ours = _address_on_the_way_to(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    if ipaddress.ip_address(ours.partition("%")[0]).is_loopback:
        with contextlib.suppress(OSError):
            return _address_on_the_way_to(_ELSEWHERE)
    return ours


def _address_on_the_way_to(host: str) -> str:
    """Return the local address of packets from here to there; nothing is sent."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _other_end(link: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a unix socket."""
    credentials = struct.Struct("3i")
    data = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    process, user, _ = credentials.unpack(data)
    return process, user


def _open_process(link: socket.socket) -> int | None:
    """Open the process at the other end (a pidfd); None where that fails, or on another host.

    The descriptor becomes readable when the process ends.
    """
    if link.family == socket.AF_UNIX:
        with contextlib.suppress(OSError):  # in another PID namespace, its number is 0
            return os.pidfd_open(_other_end(link)[0])
    return None


def _notice_vanished_host(link: socket.socket) -> None:
    """End an idle connection when the other host no longer answers; the system's limit is hours.

    Alarm sockets are always idle, so this is seen although data waits to be acknowledged.
    """
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _VANISHED_AFTER_S // 4)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _VANISHED_AFTER_S // 4)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
