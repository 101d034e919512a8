"""Sockets between the processes of one job: addresses, listening, options.

Ranks on one host connect through unix-domain sockets in Linux's abstract namespace, which
disappear with their process; ranks on different hosts through TCP with TCP_NODELAY. A TCP listener
is opened only where the job spans hosts, bound to the address that leads to its peers. How both
ends of a connection prove who they are is in ``handshake.py``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import struct
from dataclasses import dataclass

from procpipe.processes import boot_id

#: From Linux's struct tcp_info: tcpi_retransmits and tcpi_probes (unanswered), tcpi_last_ack_recv.
_TCP_INFO = struct.Struct("=2xBB52xI")

#: Socket option: a descriptor of the process at the other end (Linux 6.5; not in Python 3.11).
_SO_PEERPIDFD = 77

#: The credentials of a unix socket's peer: process, user, group.
_CREDENTIALS = struct.Struct("3i")

#: A host that no longer answers (power, network) is treated as dead after about this time.
_VANISHED_AFTER_S = 20

#: The user's choice of this host's address for its peers.
_ADDRESS_VARIABLE = "PROCPIPE_ADDRESS"

_BUFFER_BYTES = 4 << 20

#: Connections that a listener keeps until they are accepted, at most; the system may keep fewer.
_BACKLOG = 4096


@dataclass(frozen=True)
class Address:
    """Where a rank listens."""

    host: str  # see host_identity
    unix: str  # name in the abstract namespace
    tcp: tuple[str, int]  # numeric address and port, or ("", 0)


def host_identity() -> str:
    """Return a text that is equal for two processes iff abstract sockets connect them.

    Processes that were given different PROCPIPE_ADDRESS count as on different hosts.
    """
    given = os.environ.get(_ADDRESS_VARIABLE, "")
    try:
        return f"{boot_id()}/{os.stat('/proc/self/ns/net').st_ino}/{given}"
    except OSError:
        return f"{socket.gethostname()}/{given}"


def own_address() -> str:
    """Return this host's address for its peers: PROCPIPE_ADDRESS, or the one towards rank 0."""
    given = os.environ.get(_ADDRESS_VARIABLE)
    if not given:
        return _address_on_the_way_to(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    try:
        family, _, _, _, target = socket.getaddrinfo(given, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(
            f"{_ADDRESS_VARIABLE}={given!r} is not an address of this host ({error}): give one "
            "that `ip address` lists and the other hosts can reach, or unset it"
        ) from None


def address_towards(rank: int, hosts: list[tuple[str, str]]) -> str | None:
    """Return the address this rank listens on for ranks on other hosts; None if there are none.

    ``hosts`` holds each rank's host identity and own address. Where rank 0 runs, its host's name
    may lead to the loopback interface (127.0.1.1 on Debian), so there the way to another host
    counts.
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
    """Return the local address of packets from here to there; nothing is sent."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def listen(tcp_host: str | None) -> tuple[list[socket.socket], Address]:
    """Open this rank's listening sockets; over TCP only if a local address is given."""
    unix, tcp = f"procpipe-{secrets.token_hex(16)}", ("", 0)
    local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    local.bind(f"\0{unix}")
    sockets = [local]
    if tcp_host is not None:
        family = socket.AF_INET6 if ":" in tcp_host else socket.AF_INET
        remote = socket.socket(family, socket.SOCK_STREAM)
        remote.bind((tcp_host, 0))
        tcp = (tcp_host, remote.getsockname()[1])
        sockets.append(remote)
    for listener in sockets:
        listener.listen(_BACKLOG)
    return sockets, Address(host_identity(), unix, tcp)


def is_of_this_user(link: socket.socket) -> bool:
    """Return whether the process at the other end of a unix socket has this process's user.

    The kernel noted its effective user when it connected or began to listen. The superuser counts
    as another user. Over TCP this is True: there only the key proves anything.
    """
    if link.family != socket.AF_UNIX:
        return True
    _, user = peer_credentials(link)
    return user == os.geteuid()


def peer_credentials(link: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a unix socket."""
    data = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(data)
    return process, user


def prepared(link: socket.socket) -> socket.socket:
    """Set the options of a proven connection, and return it."""
    if link.family != socket.AF_UNIX:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_vanished_host(link)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        link.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    link.setblocking(False)
    return link


def _notice_vanished_host(link: socket.socket) -> None:
    """End an idle connection when the other host no longer answers; the system's limit is hours.

    TCP_USER_TIMEOUT would also end a busy one whose reader is stopped.
    """
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _VANISHED_AFTER_S // 4)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _VANISHED_AFTER_S // 4)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def has_vanished(link: socket.socket) -> bool:
    """Return whether the other host has not acknowledged sent data for long.

    A process that is stopped or computes does not matter: its system answers.
    """
    if link.family == socket.AF_UNIX:
        return False
    info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    retransmits, probes, last_answer_ms = _TCP_INFO.unpack(info)
    return bool(retransmits + probes) and last_answer_ms > _VANISHED_AFTER_S * 1000


def open_process(link: socket.socket) -> int | None:
    """Open the process at the other end (a pidfd); None where that fails, or on another host.

    The descriptor becomes readable when the process ends. The caller closes it.
    """
    if link.family != socket.AF_UNIX:
        return None
    with contextlib.suppress(OSError):  # from Linux 6.5 on: never another process of that number
        return link.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    with contextlib.suppress(OSError):
        pid, _ = peer_credentials(link)
        if pid > 0:  # else it is in another PID namespace
            process = os.pidfd_open(pid)
            if _is_open(link):  # so it had not ended, and its number was not reused
                return process
            os.close(process)
    return None


def _is_open(link: socket.socket) -> bool:
    """Return whether the other end has not closed a connection; reads nothing."""
    try:
        return link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
