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
from procpipe.job.attendance import Attendance
from procpipe.job.grid import Grid
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

#: Files that a rank opens for each peer: a socket, its board, its process, its shared memory, the
#: store's socket on rank 0; and others: its own shared memory, listeners, the
#: store, and files that are open only for a moment.
_FILES_PER_PEER, _MORE_FILES = 5, 12

#: Numbers the pipelines of the same ranks, which first call them in the same order.
_connected: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


class Start:
    """One pipeline's start on one rank.

    ``store`` is one that all ranks share, or None to open the launcher's when it is needed.
    ``network_address`` is where this rank listens for ranks on other hosts, once that is known;
    None if there are none.
    """

    def __init__(self, grid: Grid, store: Store | None, timeout_s: float) -> None:
        self.grid = grid
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
            holder = "the launcher of rank 0" if has_launchers_store() else "rank 0"
            where = f"{os.environ.get('MASTER_ADDR')} port {os.environ.get('MASTER_PORT')}"
            reason = str(error).partition("\n")[0]
            raise PeerLostError(
                0,
                f"{holder}, which holds the job's store at {where}, ended while rank "
                f"{self.grid.job_rank} waited for the others to start ({reason})",
            ) from error

    def leave_note(self, failure: RemoteStageError) -> None:
        """Leave a note for the others that this rank failed; raises if the store is unreachable."""
        try:
            key = given_key()
        except ValueError:  # perhaps why it failed; the others show the note as unproven
            key = None
        self._open_store(key, _NOTE_TIMEOUT_S).notes.leave(failure)
        self._hold_store()

    def close(self) -> None:
        """Drop the store."""
        self._store = self._opened = self._round = None

    def shared_store(self) -> JobStore:
        """Return the store of this round of the job; the first call waits for all ranks."""
        if self._round is None:
            num_ranks = self.grid.num_ranks
            num_files = (num_ranks - 1) * _FILES_PER_PEER + _MORE_FILES
            check_file_limit(num_files, f"the connections of one of {num_ranks} ranks")
            store = self._open_store(given_key(), self._timeout_s).store
            name = agree_on_round(
                store, self.grid, timeout_s=self._timeout_s, check=self._check_for_failure
            )
            self._round = store.under(f"{name}/")
        return self._round

    def _connect_sockets(self, purpose: str) -> dict[int, socket.socket]:
        store, grid = self.shared_store(), self.grid
        deadline_s = time.monotonic() + self._timeout_s
        if grid.rank == 0 and store.key is None:
            store.set("key", secrets.token_hex(32))
        store.set(f"host/{grid.rank}", json.dumps([host_identity(), own_address(), purpose]))  # 1
        announced = (
            json.loads(self._wait_for_key(f"host/{k}", k, deadline_s))
            for k in range(grid.num_ranks)
        )
        hosts, addresses, purposes = zip(*announced, strict=True)
        _check_purpose(grid, purposes)
        _check_hosts(grid, hosts)
        self.network_address = address_towards(grid.rank, list(zip(hosts, addresses, strict=True)))
        listeners, ours = listen(self.network_address)  # 2
        store.set(f"address/{grid.rank}", json.dumps([ours.host, ours.unix, *ours.tcp]))
        key = store.key_for("sockets")
        if key is None:
            key = bytes.fromhex(self._wait_for_key("key", 0, deadline_s))
        us = Joiner(grid.rank, key, deadline_s, self._check_for_failure, grid.numbers)
        sockets: dict[int, socket.socket] = {}
        try:
            for peer in range(grid.rank):  # 3
                where = self._wait_for_key(f"address/{peer}", peer, deadline_s)
                host, unix, tcp_host, tcp_port = json.loads(where)
                sockets[peer] = connect_to(peer, Address(host, unix, (tcp_host, tcp_port)), us)
            sockets |= accept_peers(listeners, set(range(grid.rank + 1, grid.num_ranks)), us)
        except BaseException:
            for sock in sockets.values():
                sock.close()
            raise
        finally:
            for listener in listeners:
                listener.close()
        return sockets

    def _open_store(self, key: bytes | None, timeout_s: float) -> _OpenedStore:
        """Return the job's store, which may be older than this round."""
        from procpipe.job.store import JobStore, launchers_store

        if self._opened is not None:
            return self._opened
        store, prefix, is_older, others = self._store, "", False, set[int]()
        if store is None:
            store, is_older = launchers_store(timeout_s), has_launchers_store()
            in_job = [self.grid.numbers[rank] for rank in range(self.grid.num_ranks)]
            self._serves_store = self.grid.job_rank == 0 and not is_older
            if not is_older:  # else the launcher monitors its processes
                others = set(in_job) - {self.grid.job_rank}
            name = "" if not self.grid.is_part else f"ranks-{'-'.join(map(str, in_job))}/"
            prefix = f"procpipe/{name}{next(_connected[name])}/"
        ours = JobStore(store, prefix, key=key, timeout_s=self._timeout_s)
        of_all = JobStore(store, "procpipe/", key=key, timeout_s=self._timeout_s)
        notes = Notes(ours, outlives_rounds=is_older)
        self._opened = _OpenedStore(ours, notes, Attendance(of_all, others))
        return self._opened

    def _hold_store(self) -> None:
        """Wait while the others read why this process ends, if the store ends with it."""
        if self._serves_store:
            time.sleep(_HOLD_STORE_S)

    def _wait_for_key(self, key: str, peer: int, deadline_s: float) -> str:
        store, ours, theirs = self.shared_store(), self.grid.job_rank, self.grid.numbers[peer]
        wait_until(
            lambda: store.check([key]),
            check=self._check_for_failure,
            deadline_s=deadline_s,
            timed_out=lambda: not_started(ours, [theirs], self._timeout_s),
        )
        return store.get(key).decode()

    def _check_for_failure(self) -> None:
        """Raise if another rank has left a note, or its process has ended."""
        opened = self._opened
        assert opened is not None, "it is checked while waiting for the store"
        opened.notes.check()
        try:
            opened.attendance.check()
        except PeerLostError as error:
            opened.notes.check()  # it may have left a note before it ended
            opened.notes.leave(error)
            raise


@dataclass(frozen=True)
class _OpenedStore:
    """This pipeline's part of the store, and what is checked there while ranks start."""

    store: JobStore
    notes: Notes
    attendance: Attendance


def _check_purpose(grid: Grid, purposes: Sequence[str]) -> None:
    """Check that this rank connects for the same purpose as rank 0."""
    rank, numbers = grid.rank, grid.numbers
    ours, first = purposes[rank], purposes[0]
    if ours != first:
        finding, found, other = (0, first, rank) if ours == FIRST_CALL else (rank, ours, 0)
        raise ValueError(
            f"rank {numbers[finding]} has arguments by which rank {numbers[0]} finds the {found}, "
            f"but rank {numbers[other]} has not: give every rank the same arguments"
        )


def _check_hosts(grid: Grid, hosts: Sequence[str]) -> None:
    """Check that ranks which one launcher has started on one host are all there.

    Otherwise a process that can write into the store could make them use the network.
    """
    local, size = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    if local != size or (not grid.is_part and size != str(len(hosts))) or len(set(hosts)) == 1:
        return
    other = next(rank for rank, host in enumerate(hosts) if host != hosts[0])
    raise ValueError(
        f"LOCAL_WORLD_SIZE={local} says that all ranks are on one host, but rank "
        f"{grid.numbers[other]} is not where rank {grid.numbers[0]} is (another network "
        "namespace, or PROCPIPE_ADDRESS): set LOCAL_WORLD_SIZE to the number of ranks on each host"
    )
