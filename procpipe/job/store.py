"""The job's store, as one part of the job sees it: with a prefix, and sealed by the job's key.

The launcher's store, or rank 0's, is torch's and checks no client: whatever reaches its port can
read and write it. Where the job has a key that is not in the store, each value is stored with a
proof (HMAC-SHA256 over its name and itself), and a value without one is an error. Without such a
key values are stored as they are.

    launchers_store()                      torch's; one a process, for as long as that lives
      └─ JobStore("procpipe/0/")           of a pipeline
           └─ .under("<round>/")           of a round, see rollcall.py
                └─ .under("transport/")    what NCCL's processes exchange

A wait for a value also checks whether the start has failed, even inside gloo.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, DistStoreError, PrefixStore, Store, TCPStore

from procpipe.errors import WaitTimeoutError
from procpipe.forks import give_up_in_children, keep_for_ever
from procpipe.job.rollcall import has_launchers_store, wait_until

_SEAL = b"sealed1:"
_PROOF_DIGITS = 64

#: How much of an unproven value an error shows.
_SHOWN_BYTES = 300

#: How long it may take until it is known which process ended, when the store has.
_FAILURE_TIMEOUT_S = 1.0

#: How long a host may take to answer on the store's port, and the pause between two attempts.
_CONNECT_TIMEOUT_S = 2.0
_RETRY_S = 0.05


class JobStore(Store):  # type: ignore[misc, unused-ignore]
    """A part of the job's store, where all names have a prefix; torch uses it, too, from C++.

    ``key`` is the job's, if it is not in the store itself. ``check`` is called while waiting for a
    value; it raises if the start has failed.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        *,
        key: bytes | None,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.underlying_store = store
        self._prefix = prefix
        self.key = key
        self._check_start = check
        self._timeout_s = timeout_s

    def under(self, prefix: str, check: Callable[[], None] | None = None) -> JobStore:
        """Return a part of this part."""
        return JobStore(
            self.underlying_store,
            self._prefix + prefix,
            key=self.key,
            check=check or self._check_start,
            timeout_s=self._timeout_s,
        )

    def key_for(self, purpose: str) -> bytes | None:
        """Derive a key for another purpose in this part of the store; None without a key."""
        if self.key is None:
            return None
        text = b"key\0" + self._prefix.encode() + b"\0" + purpose.encode()
        return hmac.new(self.key, text, hashlib.sha256).digest()

    def bare(self) -> Store:
        """Return this part as torch's own store: unsealed, and usable in any thread of torch's."""
        return PrefixStore(self._prefix.rstrip("/"), self.underlying_store)

    def set(self, name: str, value: str | bytes) -> None:
        """Set a value."""
        self.underlying_store.set(self._prefix + name, self._sealed(name, value))

    def get(self, name: str) -> bytes:
        """Return a value, waiting until it is set; ``ValueError`` if its writer had another key."""
        self.wait([name])
        return self._opened(name, self.underlying_store.get(self._prefix + name))

    def check(self, names: Iterable[str]) -> bool:
        """Return whether all of these are set."""
        return bool(self.underlying_store.check([self._prefix + name for name in names]))

    def compare_set(self, name: str, expected: str, desired: str) -> bytes:
        """Replace the expected value; where there is none, expect ""."""
        return bytes(
            self.underlying_store.compare_set(
                self._prefix + name,
                self._sealed(name, expected) if expected else "",
                self._sealed(name, desired),
            )
        )

    def wait(self, names: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these are set; ``DistStoreError`` after the timeout."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        wait_until(
            lambda: self._has(names),
            check=self._check_start,
            deadline_s=time.monotonic() + timeout_s,
            timed_out=lambda: DistStoreError(
                f"{', '.join(names)}: not set within {timeout_s:.1f} s"
            ),
        )

    def _has(self, names: Iterable[str]) -> bool:
        """Return whether these are set; if the store has ended, raise why if known soon."""
        try:
            return self.check(names)
        except DistError:
            deadline_s = time.monotonic() + _FAILURE_TIMEOUT_S
            while time.monotonic() < deadline_s:
                self._check_start()
                time.sleep(_RETRY_S)
            raise

    def has_extended_api(self) -> bool:
        """Return False, so that torch uses only the methods above."""
        return False

    def _sealed(self, name: str, value: str | bytes) -> Any:
        data = value.encode() if isinstance(value, str) else bytes(value)
        if self.key is None:
            return data
        return _SEAL + self._proof(self.key, name, data) + data

    def _opened(self, name: str, stored: bytes) -> bytes:
        if self.key is None and not stored.startswith(_SEAL):
            return stored
        data = stored.removeprefix(_SEAL)
        proof, data = data[:_PROOF_DIGITS], data[_PROOF_DIGITS:]
        if (
            self.key is not None
            and stored.startswith(_SEAL)
            and hmac.compare_digest(proof, self._proof(self.key, name, data))
        ):
            return data
        shown = data if stored.startswith(_SEAL) else stored
        how = "another key" if self.key is not None else "a key, and this rank has none"
        raise ValueError(
            f"in the job's store, {name!r} was written with {how}: give every rank of the job the "
            "same PROCPIPE_KEY_FILE, or none of them; if they have it, another program writes into "
            f"the store. What is there, unproven: {shown[:_SHOWN_BYTES].decode(errors='replace')!r}"
        )

    def _proof(self, key: bytes, name: str, data: bytes) -> bytes:
        # No name holds a zero byte, so different pairs of name and data have different texts.
        text = b"store\0" + (self._prefix + name).encode() + b"\0" + data
        return hmac.new(key, text, hashlib.sha256).hexdigest().encode()


def launchers_store(timeout_s: float, is_given_up: Callable[[], bool] = lambda: False) -> Store:
    """Return this process's connection to the store; the first call opens it.

    Without a launcher rank 0 holds the store, and the others wait for rank 0 here. The connection
    stays for as long as the process: another rank may already connect for the next pipeline.
    ``is_given_up`` is called while waiting, and returns whether to stop.

    Raises:
        WaitTimeoutError: nothing answered where the store should be.
        DistError: it has ended.
        ValueError: the environment does not say where it is.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}: start the ranks with "
            "torchrun or procpipe run, or give each the address and a free port of rank 0's host"
        )
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    connection = _connections.setdefault((os.getpid(), address), _StoreConnection(address))
    return connection.get(timeout_s, is_given_up)


class _StoreConnection:
    """A process's connection to the store; on rank 0, without a launcher, the store itself."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._store: Store | None = None
        give_up_in_children(self)

    def give_up_in_child(self) -> None:
        """Never run the store's destructor in a forked child."""
        keep_for_ever(self._store)

    def get(self, timeout_s: float, is_given_up: Callable[[], bool]) -> Store:
        is_launchers = has_launchers_store()
        holds = os.environ["RANK"] == "0" and not is_launchers
        deadline_s = time.monotonic() + timeout_s
        while True:
            if not holds:
                self._wait_listening(deadline_s, is_given_up)
            with self._lock:
                if self._store is None:
                    try:
                        self._store = TCPStore(
                            *self._address,
                            is_master=holds,
                            timeout=timedelta(seconds=_CONNECT_TIMEOUT_S),  # it just listened
                            wait_for_workers=False,  # the roll call waits for them
                            multi_tenant=not is_launchers,  # the user's group may use it, too
                        )
                        self._store.set_timeout(timedelta(seconds=timeout_s))
                    except DistError:
                        if holds or not _is_listening(self._address):  # the store has ended
                            raise
                        continue
                return self._store

    def _wait_listening(self, deadline_s: float, is_given_up: Callable[[], bool]) -> None:
        """Wait until the store's port is open, or another thread has found it open.

        Torch's own wait ignores signals and prints a lot.
        """
        begun_s = time.monotonic()
        while self._store is None and not _is_listening(self._address):
            now_s = time.monotonic()
            if is_given_up() or now_s > deadline_s:
                raise WaitTimeoutError(
                    f"rank {os.environ.get('RANK')} waited {now_s - begun_s:.1f} s, but rank 0 did "
                    f"not start: nothing listens at {self._address[0]} port {self._address[1]}, "
                    "where the job's store should be; did every process reach its first step?"
                )
            time.sleep(_RETRY_S)


#: One of each process, by its number and the store's address.
_connections: dict[tuple[int, tuple[str, int]], _StoreConnection] = {}


def _is_listening(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
