"""Sockets between the processes of one job: addresses, listening, options.

Ranks on one host meet on unix-domain sockets in Linux's abstract namespace, which vanish with
their process; ranks on different hosts over TCP with TCP_NODELAY. A TCP listener is bound only
where the job spans hosts, to the address that leads to its peers. How both ends of a connection
prove who they are is in ``handshake.py``. Knows nothing of messages, stages or tensors.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import struct
import sys
from dataclasses import dataclass

#: Of Linux's struct tcp_info: tcpi_retransmits and tcpi_probes (unanswered), tcpi_last_ack_recv.
_TCP_INFO = struct.Struct("=2xBB52xI")

#: Returns a descriptor of the process at the other end (Linux 6.5; not in Python 3.11).
_SO_PEERPIDFD = 77

#: The credentials of a unix socket's peer: process, user, group.
_CREDENTIALS = struct.Struct("3i")

#: A host that has gone without a word (power, network) is taken for dead after about so long.
_VANISHED_AFTER_S = 20

#: The user's word on which of this host's addresses its peers should use.
_ADDRESS_VARIABLE = "PROCPIPE_ADDRESS"

_BUFFER_BYTES = 4 << 20

#: Connections that a listener keeps until they are accepted, at most; the system may keep fewer.
_BACKLOG = 4096


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
        listener.listen(_BACKLOG)
    return sockets, Address(host_identity(), unix, tcp)


def is_of_this_user(link: socket.socket) -> bool:
    """Say whether the process at the other end of a unix socket has this process's user.

    The kernel noted its effective user when it connected or began to listen. Not even the
    superuser counts as another: who has its rights needs no socket to end or read a process. Over
    TCP, and where the system does not tell, this is True: there only the key proves anything.
    """
    if link.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return True
    told = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(told)
    return bool(user == os.geteuid())


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
