"""Ends waits for a device, in native code, when a peer has failed.

A transfer whose peer has failed never ends, and what waits for the device, ``loss.item()`` in the
user's script for instance, would wait for ever: it reads no socket.

    caller's thread    loss.item()  …  …  …  …  …  …  …  …  ─> RemoteStageError, raised there
    this thread        now and then: has it moved?        │
                       a transfer is not over, and        │
                       a peer has failed: (1) have it     │
                       raised, (2) end all transfers ─────┘

(1) comes first, so that Python sees none of the values that are computed after (2): the interpreter
raises as soon as native code returns. Where transfers cannot be ended the process is, with its
story. Without a failure the thread reports stalls, and after ``timeout_s`` that is a failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from procpipe.channel.base import DeviceTransfers
from procpipe.channel.mesh import Mesh, WaitReports
from procpipe.errors import PeerLostError, ProcpipeError, WaitTimeoutError
from procpipe.job.endings import end_at_once, line_of
from procpipe.notes import write_note

#: How often the thread looks, at most.
_LOOK_EVERY_S = 0.2

#: How long the caller's thread may stay where it is after a failure, before that counts as stuck;
#: and where a peer has only left, whose part is done, while this device may have much to compute
#: before its own is.
_STUCK_AFTER_S, _LEFT_AFTER_S = 0.5, 30.0


class DeviceWaits:
    """A thread that ends waits for a device after a peer's failure.

    Args:
        mesh: this rank's sockets.
        transports: what has transfers on the device.
        caller: returns the thread that makes the calls of the pipeline.
        reports: gets reports of waits and stalls.
        timeout_s: how long a wait may last before it is an error.
        stall_timeout_s: how long until it is called a stall.
    """

    def __init__(
        self,
        mesh: Mesh,
        transports: Sequence[DeviceTransfers],
        caller: Callable[[], threading.Thread],
        reports: WaitReports,
        *,
        timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        self._mesh = mesh
        self._transports = transports
        self._caller = caller
        self._reports = reports
        self._timeout_s = timeout_s
        self._stall_timeout_s = self._next_stall_s = stall_timeout_s
        self._is_closed = threading.Event()
        self._seen: Any = None
        self._since_s = 0.0
        self._raising = threading.Lock()
        self._has_raised_in: int | None = None
        every_s = min(_LOOK_EVERY_S, stall_timeout_s / 4, timeout_s / 4)
        self._thread = threading.Thread(
            target=self._run, args=(every_s,), name="procpipe device waits", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread, soon; what it was about to raise is not raised any more."""
        with self._raising:
            self._is_closed.set()
            if self._has_raised_in == threading.get_ident():
                _raise_in(self._has_raised_in, None)

    def _run(self, every_s: float) -> None:
        while not self._is_closed.wait(every_s):
            ahead = self._mesh.look_ahead()
            if ahead is None:  # the caller's thread reads itself
                self._seen = None
                continue
            failure, left = ahead
            peers = self._stuck_with()
            if not peers:
                continue
            waited_s = time.monotonic() - self._since_s
            error: ProcpipeError | None = failure
            if failure is None:
                error = self._fault(peers, left.intersection(peers), waited_s)
            elif waited_s < _STUCK_AFTER_S:
                error = None
            if error is not None:
                self._end_wait(error)
                return

    def _stuck_with(self) -> list[int]:
        """Return with whom transfers are not over, while the caller's thread has not moved."""
        thread = self._caller()
        frame = sys._current_frames().get(thread.ident or 0)
        if frame is None:
            return []
        peers = sorted({peer for each in self._transports for peer in each.busy_with()})
        seen = id(frame), frame.f_lasti, self._mesh.num_looks, peers
        del frame  # it would keep what the function there has
        if seen != self._seen:
            if self._next_stall_s > self._stall_timeout_s:
                self._reports.end_wait()
            self._seen, self._since_s = seen, time.monotonic()
            self._next_stall_s = self._stall_timeout_s
        return peers

    def _fault(self, peers: list[int], left: set[int], waited_s: float) -> ProcpipeError | None:
        """Return what is wrong although no peer has failed, if anything; report a stall."""
        rank, what = self._mesh.rank, f"its device, in transfers with ranks {peers}"
        if left and waited_s >= _LEFT_AFTER_S:
            peer = min(left)
            return PeerLostError(
                peer,
                f"rank {peer} has left the pipeline (its script ended, or closed its stage) while "
                f"rank {rank} waits for {what}: every rank must make the same calls",
            )
        if waited_s >= self._timeout_s:
            return WaitTimeoutError(
                f"rank {rank} has waited {waited_s:.1f} s for {what}; if that is not a fault, give "
                "Stage a larger timeout_s"
            )
        if waited_s >= self._next_stall_s:
            self._next_stall_s *= 2
            self._reports.start_wait(what, self._since_s)
            self._reports.stalled(what, waited_s)
        return None

    def _end_wait(self, error: ProcpipeError) -> None:
        """Have an error raised where the caller's thread waits, and end what it waits for."""
        ident = self._caller().ident
        assert ident is not None, "the thread has called"
        with self._raising:
            if self._is_closed.is_set():
                return
            self._has_raised_in = ident
            _raise_in(ident, error)
        if abort_all(self._transports):
            return
        rank = self._mesh.rank
        write_note(line_of(rank, error) or f"procpipe: rank {rank} ends, because {error}")
        end_at_once(f"rank {rank}")


def abort_all(transports: Sequence[DeviceTransfers]) -> bool:
    """End the transfers of all transports at once, as those of one may wait for another's.

    Returns:
        Whether the device is free of them, once it has run the compute that was queued, or after
        half a minute.
    """
    transports = tuple(transports)  # a thread that closes them meanwhile empties the list
    freed: list[bool] = []

    def abort(transport: DeviceTransfers) -> None:
        with contextlib.suppress(RuntimeError):  # of CUDA, after a fault of the device
            freed.append(transport.abort())

    threads = [threading.Thread(target=abort, args=(each,), daemon=True) for each in transports[1:]]
    for thread in threads:  # no pool's threads: those do not start any more as Python ends
        thread.start()
    for each in transports[:1]:
        abort(each)
    for thread in threads:
        thread.join()
    return all(freed) and len(freed) == len(transports)


def _raise_in(ident: int, error: ProcpipeError | None) -> None:
    """Have a thread raise an error as soon as it runs Python; None takes it back.

    The interpreter takes a class, and makes the exception itself.
    """
    kind: Any = None
    if error is not None:
        kind = type(type(error).__name__, (type(error),), {"__init__": _constructor(error)})
        kind.__module__ = type(error).__module__
        kind.__qualname__ = type(error).__qualname__
    argument = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), argument)


def _constructor(error: ProcpipeError) -> Callable[[Any], None]:
    """Return the constructor of a class whose exceptions are like this one."""

    def construct(self: Any) -> None:
        self.__dict__.update(error.__dict__)
        Exception.__init__(self, *error.args)

    return construct
