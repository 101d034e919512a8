"""Brings what every rank records to rank 0 as the run goes, and writes it as one file.

    every rank     after each step ── its record, as JSON ──▶  rank 0 keeps the first and the last
    connecting     rank 0 reads all clocks (clocks.py)
    closing        each rank sends a notice and waits; rank 0 reads the clocks again and writes
    failing        rank 0 writes what it has: all steps but the one that failed

Nothing is gathered at the end, so a failure loses little, and no rank waits. If rank 0 is killed,
there is no file. What is kept is bounded: the first ``FIRST`` steps and the last
``LAST``. Disks are not shared; only rank 0 writes.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from procpipe.channel.mesh import Mesh
from procpipe.errors import WaitTimeoutError
from procpipe.notes import write_note
from procpipe.plan.task import Plan
from procpipe.run.order import Order, decode, encode
from procpipe.timeline.chrome import to_chrome
from procpipe.timeline.clocks import ClockReading, Clocks
from procpipe.timeline.merging import merged
from procpipe.timeline.recording import Recording

#: How many steps are kept, from the beginning and from the end of a run.
FIRST, LAST = 5, 100

#: The mesh's channel for records; the flags of a frame say what it is.
TRACE = 49
_RECORD, _CLOSING, _RELEASED = range(3)

#: How long a rank that closes waits for rank 0 to close, too, and read its clock again.
_LINGER_S = 10.0

#: How often such a wait looks at the time.
_LOOK_EVERY_S = 0.1

#: The files that this process's stages write or have written.
_claimed: set[Path] = set()


def claimed(path: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
    """Check before a long run that its file can be written, and claim it for one stage.

    Raises:
        ValueError: there is no such folder, or another stage of this process writes the file or
            has written it, which would be lost.
    """
    if path is None:
        return None
    if Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
        raise ValueError(f"trace is {str(path)!r}, but must be a file in a folder that is there")
    whole = Path(path).resolve()
    if whole in _claimed:
        raise ValueError(
            f"trace is {str(path)!r}, but another stage of this process writes that file or has "
            "written it: give each stage a file of its own"
        )
    _claimed.add(whole)
    return path


class Kept:
    """The first and the last of many records."""

    def __init__(self) -> None:
        self.num_added = 0
        self._records: list[bytes] = []

    def add(self, record: bytes) -> None:
        """Add a record, and drop one in the middle if there are too many."""
        self.num_added += 1
        self._records.append(record)
        if len(self._records) > FIRST + LAST:
            del self._records[FIRST]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._records)


class Tracing:
    """One rank's part in the recording of a run; every rank makes one, and rank 0 writes the file.

    The facts are what the stages were made with; plain JSON, put into the file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mesh: Mesh,
        clocks: Clocks,
        facts: Mapping[str, Any],
        plan_of: Callable[[Order], Plan],
    ) -> None:
        self._path = Path(path)
        self._mesh = mesh
        self.clocks = clocks
        self._facts = {name: fact for name, fact in facts.items() if name != "trace"}
        self._plan_of = plan_of
        self._is_writer = mesh.rank == 0
        self._plans: dict[str, str] = {}
        self._readings: dict[int, list[ClockReading]] = {peer: [] for peer in mesh.peers}
        self._kept = {rank: Kept() for rank in (0, *mesh.peers)} if self._is_writer else {}
        self._closing: set[int] = set()
        self._is_released = self._is_closed = self._is_written = False
        for peer in mesh.peers if self._is_writer else (0,):
            if peer != mesh.rank:
                mesh.on(peer, TRACE, partial(self._heard, peer))

    def connected(self) -> None:
        """Compare all clocks, on rank 0; all other ranks must be waiting."""
        for peer, reading in self.clocks.read_all().items():
            self._readings[peer].append(reading)

    def end_step(self, order: Order, record: dict[str, Any]) -> None:
        """Send rank 0 what this rank recorded of the step; never blocks."""
        record |= {"call": order.call, "sizes": order.sizes, "plan": order.plan}
        has_plan = self._is_writer and order.sizes  # a replica may have no samples
        self.note(record, self._plan_of(order).to_text() if has_plan else "")

    def note(self, record: dict[str, Any], plan_text: str) -> None:
        """Keep a record on rank 0, or send it there.

        Args:
            record: see ``Recorder.last_record``, with the "call", "sizes" and "plan" of the step.
            plan_text: on rank 0, the plan.
        """
        encoded = encode(record)
        if self._is_writer:
            self._kept[0].add(encoded)
            self._plans.setdefault(record["plan"], plan_text)
        else:
            self._mesh.send(0, TRACE, _RECORD, 0, encoded)

    def finish(self) -> None:
        """Compare the clocks once more before a good end; waits for the other ranks.

        Rank 0 waits for the others to close, as long as for any peer. They wait for it for some
        seconds only, as all their records are sent.

        Raises:
            RemoteStageError: another rank failed.
        """
        mesh = self._mesh
        if self._is_writer:
            for peer in mesh.peers:
                self._finish_with(peer)
            self._is_closed = True
        elif mesh.is_connected(0):
            mesh.send(0, TRACE, _CLOSING, 0)
            deadline_s = time.monotonic() + _LINGER_S

            def is_over() -> bool:
                is_late = time.monotonic() > deadline_s
                return self._is_released or is_late or not mesh.is_connected(0)

            with suppress(WaitTimeoutError):  # the user's timeout_s is even shorter
                mesh.wait(is_over, lambda: "rank 0 to close, too", every_s=_LOOK_EVERY_S)

    def leave(self) -> None:
        """Write the file on rank 0, once; a file that cannot be written gives a note, no error.

        An error that ended the run may be propagating, and must be the one that is reported.
        """
        if not self._is_writer or self._is_written:
            return
        self._is_written = True
        unfinished = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            data = to_chrome(self._recording())
            unfinished.write_text(json.dumps(data, separators=(",", ":")))
            unfinished.replace(self._path)  # a reader sees a whole file or none
        except Exception as error:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            write_note(f"procpipe: the trace was not written: {error!r}")

    def _recording(self) -> Recording:
        written = datetime.now(UTC).isoformat(timespec="seconds")
        return merged(
            [[decode(record) for record in kept] for kept in self._kept.values()],
            [(), *self._readings.values()],
            plans=self._plans,
            facts={**self._facts, "python": platform.python_version(), "written": written},
            num_steps=min(kept.num_added for kept in self._kept.values()),
            is_closed=self._is_closed,
        )

    def _finish_with(self, peer: int) -> None:
        mesh = self._mesh
        with suppress(WaitTimeoutError):  # then its clock was read only once
            mesh.wait(
                lambda: peer in self._closing or not mesh.is_connected(peer),
                lambda: f"rank {mesh.ranks[peer]} to close its stage, too",
            )
        reading = self.clocks.read(peer) if peer in self._closing else None
        if reading is not None:
            self._readings[peer].append(reading)
        if mesh.is_connected(peer):
            mesh.send(peer, TRACE, _RELEASED, 0)

    def _heard(self, peer: int, sequence: int, flags: int, body: memoryview) -> None:
        if flags == _RECORD:
            self._kept[peer].add(bytes(body))
        elif flags == _CLOSING:
            self._closing.add(peer)
        else:
            self._is_released = True
