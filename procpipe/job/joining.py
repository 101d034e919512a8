"""How the processes of a job connect to one another.

    0  agree on who takes part            (see rollcall.py)
    1  announce the host                  host/<rank>      (are TCP listeners needed?)
    2  listen, and announce where         address/<rank>
    3  connect to every lower rank, accept every higher one; the job's key proves both sides

All of it goes through the job's store, which the launcher or rank 0 holds (``store.py``). A rank
that cannot come leaves a note there, so that the others do not wait for it. Without a launcher,
``attendance.py`` detects the end of a process that left none.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from procpipe.channel.handshake import Joiner, accept_peers, connect_to
from procpipe.channel.sockets import Address, address_towards, host_identity, listen, own_address
from procpipe.errors import PeerLostError, RemoteStageError
from procpipe.job.attendance import Announcement, Attendance
from procpipe.job.grid import IN_ORDER
from procpipe.job.keys import given_key
from procpipe.job.rollcall import (
    Notes,
    agree_on_round,
    has_launchers_store,
    not_started,
    wait_until,
)
from procpipe.limits import check_file_limit

if TYPE_CHECKING:
    from torch.distributed import Store

    from procpipe.job.store import JobStore

#: The usual purpose of connecting.
FIRST_CALL = "first call"

#: How long a rank that fails tries to reach the store.
_NOTE_TIMEOUT_S = 3.0

#: How long a failing rank keeps the store it holds open, for the others to read why it ends.
_HOLD_STORE_S = 0.7

#: Files that a rank opens for each peer: a socket, its board, its process, its shared memory or
#: gloo's socket, the store's socket on rank 0; and others: its own shared memory, listeners, the
#: store, and files that are open only for a moment.
_FILES_PER_PEER, _MORE_FILES = 5, 12

#: Numbers the pipelines of the same ranks, which first call them in the same order.
_connected: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


class Start:
    """One pipeline's start on one rank.

    ``store`` is one that all ranks share, or None to open the launcher's when it is needed.
    ``numbers`` holds each rank's number in the job, if the pipeline has some of its ranks.
    ``network_address`` is where this rank listens for ranks on other hosts, once that is known;
    None if there are none.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        store: Store | None,
        timeout_s: float,
        numbers: Sequence[int] = IN_ORDER,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.numbers = numbers
        self.network_address: str | None = None
        self._store = store
        self._timeout_s = timeout_s
        self._opened: _OpenedStore | None = None
        self._round: JobStore | None = None
        self._serves_store = False

    def connect(self, purpose: str) -> dict[int, socket.socket]:
        """Return a proven connection to every other rank; waits for all of them.

        ``purpose`` says what the ranks connect for; it must be the same on every rank.
        """
        from torch.distributed import DistError

        try:
            return self._connect_sockets(purpose)
        except RemoteStageError:
            self._hold_store()
            raise
        except DistError as error:
            raise self._lost_store(error) from error
        finally:
            if self._opened is not None:
                self._opened.attendance.close()

    def leave_note(self, story: str) -> None:
        """Leave a note for the others that this rank failed; raises if the store is unreachable."""
        if self._opened is None:
            try:
                key = given_key()
            except ValueError:  # perhaps why it failed; the others show the note as unproven
                key = None
            self._opened = self._newly_opened(key, _NOTE_TIMEOUT_S)
        self._opened.notes.leave(self.numbers[self.rank], story)
        self._hold_store()

    def close(self) -> None:
        """Drop the store."""
        if self._opened is not None:
            self._opened.attendance.close()
        self._store = self._opened = self._round = None

    def shared_store(self) -> JobStore:
        """Return the store of this round of the job; the first call waits for all ranks."""
        if self._round is None:
            num_files = (self.num_ranks - 1) * _FILES_PER_PEER + _MORE_FILES
            check_file_limit(num_files, f"the connections of one of {self.num_ranks} ranks")
            store = self._open_store().store
            name = agree_on_round(
                store,
                self.rank,
                self.num_ranks,
                timeout_s=self._timeout_s,
                check=self._check_for_failure,
                numbers=self.numbers,
            )
            self._round = store.under(f"{name}/")
        return self._round

    def _connect_sockets(self, purpose: str) -> dict[int, socket.socket]:
        store = self.shared_store()
        deadline_s = time.monotonic() + self._timeout_s
        ranks = range(self.num_ranks)
        if self.rank == 0 and store.key is None:
            store.set("key", secrets.token_hex(32))
        store.set(f"host/{self.rank}", json.dumps([host_identity(), own_address(), purpose]))  # 1
        announced = [
            json.loads(self._wait_for_key(f"host/{rank}", rank, deadline_s)) for rank in ranks
        ]
        _check_purpose(self.rank, [theirs for _, _, theirs in announced], self.numbers)
        hosts = [(host, address) for host, address, _ in announced]
        _check_hosts([host for host, _ in hosts], self.numbers)
        self.network_address = address_towards(self.rank, hosts)
        listeners, ours = listen(self.network_address)  # 2
        store.set(f"address/{self.rank}", json.dumps([ours.host, ours.unix, *ours.tcp]))
        key = store.key_for("sockets")
        if key is None:
            key = bytes.fromhex(self._wait_for_key("key", 0, deadline_s))
        us = Joiner(self.rank, key, deadline_s, self._check_for_failure, self.numbers)
        sockets: dict[int, socket.socket] = {}
        try:
            for peer in range(self.rank):  # 3
                where = self._wait_for_key(f"address/{peer}", peer, deadline_s)
                host, unix, tcp_host, tcp_port = json.loads(where)
                sockets[peer] = connect_to(peer, Address(host, unix, (tcp_host, tcp_port)), us)
            sockets |= accept_peers(listeners, set(range(self.rank + 1, self.num_ranks)), us)
        except BaseException:
            for sock in sockets.values():
                sock.close()
            raise
        finally:
            for listener in listeners:
                listener.close()
        return sockets

    def _open_store(self) -> _OpenedStore:
        """Return the job's store, which may be older than this round."""
        if self._opened is None:
            self._opened = self._newly_opened(given_key(), self._timeout_s)
        return self._opened

    def _newly_opened(self, key: bytes | None, timeout_s: float) -> _OpenedStore:
        from procpipe.job.store import JobStore, launchers_store

        def part_of(store: Store, prefix: str) -> JobStore:
            return JobStore(store, prefix, key=key, timeout_s=self._timeout_s)

        if self._store is not None:
            ours = part_of(self._store, "")
            return _OpenedStore(ours, Notes(ours, outlives_rounds=False), Attendance(ours, ()))
        launchers, is_older = launchers_store(timeout_s), has_launchers_store()
        in_job = [self.numbers[rank] for rank in range(self.num_ranks)]
        others = set(in_job) - {in_job[self.rank]}
        self._serves_store = in_job[self.rank] == 0 and not is_older
        name = "" if self.numbers is IN_ORDER else f"ranks-{'-'.join(map(str, in_job))}/"
        ours = part_of(launchers, f"procpipe/{name}{next(_connected[name])}/")
        return _OpenedStore(
            ours,
            Notes(ours, outlives_rounds=is_older),
            # A launcher monitors its processes.
            Attendance(part_of(launchers, "procpipe/"), () if is_older else others),
        )

    def _hold_store(self) -> None:
        """Wait while the others read why this process ends, if the store ends with it."""
        if self._serves_store:
            time.sleep(_HOLD_STORE_S)

    def _wait_for_key(self, key: str, peer: int, deadline_s: float) -> str:
        store, ours, theirs = self.shared_store(), self.numbers[self.rank], self.numbers[peer]
        wait_until(
            lambda: store.check([key]),
            check=self._check_for_failure,
            deadline_s=deadline_s,
            timed_out=lambda: not_started(ours, [theirs], self._timeout_s),
        )
        return store.get(key).decode()

    def _check_for_failure(self) -> None:
        """Raise if another rank has left a note, or its process has ended."""
        opened = self._open_store()
        opened.notes.check()
        try:
            opened.attendance.check()
        except PeerLostError as error:
            opened.notes.check()  # it may have left a note before it ended
            opened.notes.leave(error.rank, error.story, is_lost=True)
            raise

    def _lost_store(self, error: Exception) -> PeerLostError:
        holder = "the launcher of rank 0" if has_launchers_store() else "rank 0"
        where = f"{os.environ.get('MASTER_ADDR')} port {os.environ.get('MASTER_PORT')}"
        reason = str(error).partition("\n")[0]
        return PeerLostError(
            0,
            f"{holder}, which holds the job's store at {where}, ended while rank "
            f"{self.numbers[self.rank]} waited for the others to start ({reason})",
        )


@dataclass(frozen=True)
class _OpenedStore:
    """This pipeline's part of the store, and what is checked there while ranks start."""

    store: JobStore
    notes: Notes
    attendance: Attendance


@functools.cache
def _announced(pid: int, rank: int, timeout_s: float) -> Announcement:
    del pid  # a forked process has another
    return Announcement(rank, timeout_s)


def _check_purpose(rank: int, purposes: list[str], numbers: Sequence[int]) -> None:
    """Check that this rank connects for the same purpose as rank 0."""
    ours, first = purposes[rank], purposes[0]
    if ours != first:
        finding, found, other = (0, first, rank) if ours == FIRST_CALL else (rank, ours, 0)
        raise ValueError(
            f"rank {numbers[finding]} has arguments by which rank {numbers[0]} finds the {found}, "
            f"but rank {numbers[other]} has not: give every rank the same arguments"
        )


def _check_hosts(hosts: list[str], numbers: Sequence[int]) -> None:
    """Check that ranks which one launcher has started on one host are all there.

    Otherwise whoever can write into the store could make them use the network.
    """
    local, size = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    is_whole = numbers is IN_ORDER
    if local != size or (is_whole and size != str(len(hosts))) or len(set(hosts)) == 1:
        return
    other = next(rank for rank, host in enumerate(hosts) if host != hosts[0])
    raise ValueError(
        f"LOCAL_WORLD_SIZE={local} says that all ranks are on one host, but rank "
        f"{numbers[other]} is not where rank {numbers[0]} is (another network "
        "namespace, or PROCPIPE_ADDRESS): set LOCAL_WORLD_SIZE to the number of ranks on each host"
    )


def announce(rank: int, timeout_s: float) -> None:
    """Note in the store which process this is, unless a launcher monitors it; never blocks.

    A background thread waits for the store for ``timeout_s``.
    """
    if not has_launchers_store():
        _announced(os.getpid(), rank, timeout_s)
