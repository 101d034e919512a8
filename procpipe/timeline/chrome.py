"""One rank's file in the Trace Event Format, whole after every step; and those of all ranks in one.

The files open in https://ui.perfetto.dev, also beside a profile of ``torch.profiler``, whose times
begin at the same zero. A rank is a process with these rows (threads), the last one only with
replicas:

    stage 0   steps      [──────────── step 0 (step) ────────────]
              tasks      [F0@0][F1@0]                 [B1@0][B0@0]
              waits                  [gradient 1: 1->0]
              sends           ─ ─     activation 0: 0->1
              all-reduce                                 [──── gradients 0 ────]

The event of a step also has what the rank recorded of it, in nanoseconds of the rank's own clock:
``"record"``, an entry that viewers ignore, and the only one that is read back. ``"otherData"`` has
the offset of that clock to wall time, and the arguments of the ``Stage``.

Source: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from procpipe.notes import write_note
from procpipe.timeline.steps import Clock, Record, Trace

#: The format of a file; the number increases when older readers cannot read it.
FORMAT = "procpipe timeline 4"

#: How many steps a file keeps, from the beginning and, at least, from the end of a run.
FIRST, LAST = 5, 100

#: The rows of a rank, in order from the top.
_ROWS = ("steps", "tasks", "waits", "sends", "all-reduce")
_STEPS, _TASKS, _WAITS, _SENDS, _SUMS = range(5)

#: The number of rank 0's process: larger than any of the kernel's, which torch's profiles have.
_FIRST_PID = 5_000_000

#: torch's profiles begin with such a part of a year, so that their times are exact as doubles.
_QUARTER_S = 7_889_238

_CLOSED = "closed"
_TAIL = b"\n]}\n"


def rank_path(path: str | os.PathLike[str], job_rank: int) -> Path:
    """Return the file of a rank: "run.3.json" for "run.json" and rank 3 of the job.

    Raises:
        ValueError: there is no such folder: an error before a long run, not after it.
    """
    path = Path(path)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"trace is {str(path)!r}, but must be a file in a folder that is there")
    return path.with_name(f"{path.stem}.{job_rank}{path.suffix}")


class TraceFile:
    """Writes a rank's file step by step: it is complete JSON at any time, even if killed.

    The first steps are kept and the last. What cannot be written gives one note, and no error. The
    newest stage with a path has the file: one that has it no longer stops, with a note.
    """

    def __init__(self, path: Path, rank: int, run: int, facts: Mapping[str, Any]) -> None:
        self._path = path
        self._rank = rank
        clock, base_ns = Clock.here(), _base_ns()
        self._shift_ns = clock.offset_ns - base_ns
        other = {
            "format": FORMAT,
            "rank": rank,
            "run": run,
            "clock": clock,
            "facts": dict(facts),
        }
        head = {"otherData": other, "displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns}
        names = ",\n".join(_names(rank, facts))
        self._head = f'{json.dumps(head)[:-1]},\n"traceEvents":[\n{names}'.encode()
        self._parts: list[bytes] = []  # a step each
        self._left: tuple[int, int] | None = None  # the file as it was left, or that it is lost
        self._write(self._write_whole)

    def add(self, record: Record) -> None:
        """Add what the rank recorded of a step: ``Recorder.last_record``."""
        self._add(_events(self._rank, record, self._shift_ns))

    def close(self) -> None:
        """Note that the run closed its stages."""
        now_ns = time.perf_counter_ns() + self._shift_ns
        self._add([_event("i", _CLOSED, self._rank, _STEPS, now_ns, ',"s":"p"')])

    def _add(self, events: Iterable[str]) -> None:
        if self._left is None:
            return
        self._parts.append("".join(f",\n{event}" for event in events).encode())
        if len(self._parts) > FIRST + 2 * LAST:
            del self._parts[FIRST:-LAST]
            self._write(self._write_whole)
        else:
            self._write(self._append)

    def _write(self, how: Callable[[], None]) -> None:
        try:
            if self._left is not None and self._left != self._present():
                raise FileExistsError("something else writes it now; give each stage its own path")
            how()
            self._left = self._present()
        except OSError as error:
            self._left = None
            write_note(f"procpipe: the trace {self._path} is not written on: {error!r}")

    def _write_whole(self) -> None:
        unfinished = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        unfinished.write_bytes(self._head + b"".join(self._parts) + _TAIL)
        unfinished.replace(self._path)  # a reader sees the old file or the new one

    def _append(self) -> None:
        with open(self._path, "r+b", buffering=0) as file:
            file.seek(-len(_TAIL), os.SEEK_END)
            file.write(self._parts[-1] + _TAIL)  # at once: the file is never without its tail

    def _present(self) -> tuple[int, int]:
        status = self._path.stat()
        return status.st_ino, status.st_size


def _base_ns() -> int:
    return time.time_ns() // 10**9 // _QUARTER_S * _QUARTER_S * 10**9


# -- reading ------------------------------------------------------------------------------------


def read(path: Path) -> Trace:
    """Read a rank's file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is something else, or damaged.
    """
    try:
        data = json.loads(path.read_bytes())
        other = data["otherData"]
        if other["format"] != FORMAT:
            raise ValueError(f"its form is {other['format']!r}, and not {FORMAT!r}")
        events = data["traceEvents"]
        return Trace(
            name=path.name,
            rank=other["rank"],
            run=other["run"],
            clock=Clock(*other["clock"]),
            facts=other["facts"],
            records=[event["record"] for event in events if "record" in event],
            is_closed=events[-1]["name"] == _CLOSED,
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} is no whole timeline of this version's Stage(trace=…) ({reason})"
        ) from error


# -- for viewers --------------------------------------------------------------------------------


def joined(paths: Sequence[Path]) -> str:
    """Return one file with the events of several; times count from the zero of the first."""
    whole, *others = (json.loads(path.read_bytes()) for path in paths)
    for other in others:
        later_us = (other["baseTimeNanoseconds"] - whole["baseTimeNanoseconds"]) / 1000
        for event in other["traceEvents"]:
            whole["traceEvents"].append(event | {"ts": event["ts"] + later_us})
    del whole["otherData"]  # it is of one rank
    return json.dumps(whole)


def _names(rank: int, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of a rank's process and rows."""
    num_replicas = facts["replicas"]
    replica, stage = divmod(rank, facts["the number of processes"] // num_replicas)
    of = f" of replica {replica}" if num_replicas > 1 else ""

    def meta(what: str, row: int, args: Mapping[str, Any]) -> str:
        return _event("M", what, rank, row, 0, f',"args":{json.dumps(args)}')

    yield meta("process_name", _STEPS, {"name": f"stage {stage}{of} (rank {rank})"})
    yield meta("process_sort_index", _STEPS, {"sort_index": rank})
    for row, name in enumerate(_ROWS if num_replicas > 1 else _ROWS[:_SUMS]):
        yield meta("thread_name", row, {"name": name})
        yield meta("thread_sort_index", row, {"sort_index": row})


def _event(phase: str, name: str, rank: int, row: int, at_ns: int, more: str = "") -> str:
    """Write an event; by hand, as ``json`` takes several times as long.

    The numbers of processes and threads are used once: for Perfetto, a thread with its process's
    number is the main thread.
    """
    pid = _FIRST_PID + rank
    return (
        f'{{"ph":"{phase}","name":"{name}","pid":{pid},"tid":{10 * pid + row},'
        f'"ts":{at_ns / 1000:.3f}{more}}}'
    )


def _events(rank: int, record: Record, shift_ns: int) -> Iterator[str]:
    """Yield the events of a step; ``shift_ns`` is the zero of a file less that of the record."""

    def box(row: int, name: str, start_ns: int, end_ns: int, more: str = "") -> str:
        more = f',"dur":{(end_ns - start_ns) / 1000:.3f}{more}'
        return _event("X", name, rank, row, start_ns + shift_ns, more)

    title = f"step {record['step']} ({record['call']})"
    whole = json.dumps(record, separators=(",", ":"))
    yield box(_STEPS, title, record["begin"], record["end"], f',"record":{whole}')
    for kind, i, j, *times_ns in record["tasks"]:
        yield box(_TASKS, f"{kind}{i}@{j}", *times_ns)
    for row, ends in ((_WAITS, "takes"), (_SENDS, "sends")):
        for payload, i, source, destination, size, start_ns, end_ns in record[ends]:
            name = f"{payload} {i}: {source}->{destination}"
            yield box(row, name, start_ns, end_ns, f',"args":{{"bytes":{size}}}')
    for what, size, begun_ns, asked_ns, taken_ns in record["sums"]:
        args = f',"args":{{"bytes":{size}}}'
        yield box(_WAITS, f"all-reduce {what}", asked_ns, taken_ns, args)
        # Several sums may be under way at a time, so they are asynchronous events.
        args += f',"cat":"all-reduce","id":"{rank}.{record["step"]}.{what}"'
        yield _event("b", what, rank, _SUMS, begun_ns + shift_ns, args)
        yield _event("e", what, rank, _SUMS, taken_ns + shift_ns, args)
