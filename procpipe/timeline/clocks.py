"""How far other ranks' clocks are ahead of rank 0's, measured over their sockets.

Each process uses ``time.perf_counter_ns()``, whose zero differs from host to host. Rank 0
requests the time of a waiting rank, several times, and uses the quickest answer:

    rank 0    t0 ───ping──▶ · ◀──pong─── t1          offset = t - (t0 + t1) / 2
    rank 1                  t                        off by (t1 - t0) / 2 at most

One reading at the start of a run and one at its end also show how the clocks drift, which is
corrected linearly in between. On one host the clock is shared; then an offset that is smaller than
its error counts as 0.

A rank answers wherever it waits or polls, so it must only be waiting for something.

Source: RFC 5905 (Network Time Protocol version 4), Section 8.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from procpipe.channel.mesh import Mesh

#: The mesh's channel for requests of the time, and answers.
CLOCK = 48

#: Requests to a rank for one reading.
_NUM_PINGS = 12

_TIME = struct.Struct("<q")


class ClockReading(NamedTuple):
    """One comparison of a rank's clock with rank 0's, in nanoseconds."""

    at_ns: int  # when, on the rank's own clock
    offset_ns: int  # how far that clock is ahead of rank 0's
    error_ns: int  # how far off the offset may be

    @classmethod
    def of(cls, pings: Sequence[tuple[int, int, int]]) -> ClockReading:
        """Take the quickest of several questions.

        Args:
            pings: for each, when rank 0 asked, the rank's time, and when the answer came.
        """
        asked_ns, at_ns, answered_ns = min(pings, key=lambda ping: ping[2] - ping[0])
        error_ns = -(-(answered_ns - asked_ns) // 2)
        offset_ns = at_ns - (asked_ns + answered_ns) // 2
        if abs(offset_ns) <= error_ns:  # no evidence that the clocks differ
            return cls(at_ns, 0, error_ns + abs(offset_ns))
        return cls(at_ns, offset_ns, error_ns)


def offset_at(readings: Sequence[ClockReading], at_ns: int) -> int:
    """Return how far a clock is ahead at one of its times, from one reading or two."""
    first, last = readings[0], readings[-1]
    span_ns = last.at_ns - first.at_ns
    if span_ns <= 0:
        return first.offset_ns
    passed_ns = min(max(at_ns - first.at_ns, 0), span_ns)
    return first.offset_ns + (last.offset_ns - first.offset_ns) * passed_ns // span_ns


def drift_ppm(readings: Sequence[ClockReading]) -> float | None:
    """Return how much faster a clock runs than rank 0's, in millionths.

    Returns:
        0 if the readings differ by no more than their errors; None if there is only one.
    """
    first, last = readings[0], readings[-1]
    span_ns, change_ns = last.at_ns - first.at_ns, last.offset_ns - first.offset_ns
    if span_ns <= 0:
        return None
    return change_ns / span_ns * 1e6 if abs(change_ns) > first.error_ns + last.error_ns else 0.0


class Clocks:
    """One rank's part in comparing clocks; every rank makes one."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._answers: dict[int, tuple[int, int]] = {}
        if mesh.rank != 0:
            mesh.on(0, CLOCK, self._answer)
            return
        for peer in mesh.peers:
            mesh.on(peer, CLOCK, partial(self._heard, peer))

    def read(self, peer: int) -> ClockReading | None:
        """Compare a rank's clock with this one's, on rank 0; the rank must be waiting.

        Returns:
            The reading; None if the rank has left.

        Raises:
            RemoteStageError: a rank failed.
            WaitTimeoutError: it did not answer.
        """
        mesh, answers = self._mesh, self._answers
        pings = []
        for sequence in range(_NUM_PINGS):
            if not mesh.is_connected(peer):
                return None
            answers.pop(peer, None)
            asked_ns = time.perf_counter_ns()
            mesh.send(peer, CLOCK, 0, sequence)
            mesh.wait(
                lambda: peer in answers or not mesh.is_connected(peer),
                lambda: f"the time of rank {mesh.ranks[peer]}",
            )
            if peer in answers:
                at_ns, answered_ns = answers[peer]
                pings.append((asked_ns, at_ns, answered_ns))
        return ClockReading.of(pings) if pings else None

    def read_all(self) -> dict[int, ClockReading]:
        """Compare the clocks of all other ranks, on rank 0; all must be waiting."""
        readings = {peer: self.read(peer) for peer in self._mesh.peers}
        return {peer: reading for peer, reading in readings.items() if reading is not None}

    def _answer(self, sequence: int, flags: int, body: memoryview) -> None:
        self._mesh.send(0, CLOCK, 0, sequence, _TIME.pack(time.perf_counter_ns()))

    def _heard(self, peer: int, sequence: int, flags: int, body: memoryview) -> None:
        self._answers[peer] = _TIME.unpack(body)[0], time.perf_counter_ns()
