"""Ends a process that waits for its device, in native code, after a peer's failure.

A transfer whose peer has failed never ends. What waits for the device, for instance
``loss.item()`` in the user's script, would wait for ever: it reads no socket. No thread can end
that wait safely: NCCL's abort may hang, as may any call of CUDA while the device is waited for.

    caller's thread    loss.item()  …  …  …  …  …  …  …  …
    this thread        now and then: has it moved?        │
                       a transfer may be under way, and   │
                       a peer has failed ─────────────────┴─> one line, and the process ends

Without a failure the thread reports stalls, and ends the process after ``timeout_s``.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from procpipe.channel.base import DeviceTransfers
from procpipe.channel.mesh import Mesh
from procpipe.errors import ProcpipeError, RemoteStageError
from procpipe.job.endings import end_at_once, line_of
from procpipe.notes import write_note

#: How often the thread looks, at most.
_LOOK_EVERY_S = 0.2

#: How long the caller's thread may stay where it is before that counts as stuck: after a failure;
#: and after a peer has only left (it is done, but this device may still have much to compute).
_STUCK_AFTER_S, _LEFT_AFTER_S = 1.0, 30.0


class DeviceWaits:
    """A thread that ends the process if it waits for its device after a peer's failure.

    ``caller`` returns the thread that makes the calls of the pipeline.
    """

    def __init__(
        self,
        mesh: Mesh,
        transports: Sequence[DeviceTransfers],
        caller: Callable[[], threading.Thread],
    ) -> None:
        self._mesh = mesh
        self._transports = transports
        self._caller = caller
        self._next_stall_s = mesh.stall_timeout_s
        self._is_closed = threading.Event()
        self._seen: Any = None
        self._since_s = 0.0
        every_s = min(_LOOK_EVERY_S, mesh.stall_timeout_s / 4, mesh.timeout_s / 4)
        self._thread = threading.Thread(
            target=self._run, args=(every_s,), name="procpipe device waits", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread soon."""
        self._is_closed.set()

    def _run(self, every_s: float) -> None:
        while not self._is_closed.wait(every_s):
            ahead = self._mesh.look_ahead()
            if ahead is None:  # the caller's thread reads itself
                self._seen = None
                continue
            failure, left = ahead
            peers = self._stuck_with()
            waited_s = time.monotonic() - self._since_s
            error: ProcpipeError | None = failure if waited_s >= _STUCK_AFTER_S else None
            if failure is None and peers:
                error = self._fault(peers, left.intersection(peers), waited_s)
            if peers and error is not None:
                self._end_wait(error)
                return

    def _stuck_with(self) -> list[int]:
        """Return the ranks with unfinished transfers; note since when the caller has not moved."""
        thread = self._caller()
        frame = sys._current_frames().get(thread.ident or 0)
        if frame is None:
            return []
        peers = sorted({peer for each in self._transports for peer in each.queued_with()})
        seen = id(frame), frame.f_lasti, self._mesh.num_looks, peers
        del frame  # it would keep that function's variables alive
        if seen != self._seen:
            if self._next_stall_s > self._mesh.stall_timeout_s:
                self._mesh.reports.end_wait()
            self._seen, self._since_s = seen, time.monotonic()
            self._next_stall_s = self._mesh.stall_timeout_s
        return peers

    def _fault(self, peers: list[int], left: set[int], waited_s: float) -> ProcpipeError | None:
        """Return what is wrong although no peer has failed, if anything; report a stall."""
        numbers = [self._mesh.ranks[peer] for peer in peers]
        what = f"its device, in transfers with ranks {numbers}"
        if left and waited_s >= _LEFT_AFTER_S:
            return self._mesh.failures.gone(min(left), f"waits for {what}")
        if waited_s >= self._mesh.timeout_s:
            return self._mesh.too_long(waited_s, what)
        if waited_s >= self._next_stall_s:
            self._next_stall_s *= 2
            self._mesh.reports.start_wait(what, self._since_s)
            self._mesh.reports.stalled(what, waited_s)
        return None

    def _end_wait(self, error: ProcpipeError) -> None:
        """Print an error, send it to the others if it is of this rank, and end the process."""
        if self._is_closed.is_set():
            return
        rank = self._mesh.ranks[self._mesh.rank]
        write_note(line_of(rank, error) or f"procpipe: rank {rank} ends, because {error}")
        if not isinstance(error, RemoteStageError):
            story = f"a process (rank {rank}), in a transfer: {type(error).__name__}: {error}"
            self._mesh.send_failure(RemoteStageError(rank, story))
        end_at_once(f"rank {rank}")
