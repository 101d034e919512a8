"""Writes the report of a run that failed: which rank failed first, and how.

torch's agent lists the ranks that it saw fail first ahead of those that it ended because of them.
A rank that ends because another one failed notes that in a file beside its logs; it is never the
first. If there are only such ranks, the rank that they name left early, or is on another host.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from procpipe.job.board import Page
from procpipe.job.grid import Grid
from procpipe.launch.run.ranks import Rank

_NUM_LAST_LINES = 40

#: Frames in the folders of these packages, and between them, seldom help a user.
_OURS = ("/procpipe/", "/torch/", "/contextlib.py")
_FRAME = '  File "'

_HINTS: dict[int, str] = {
    signal.SIGKILL: "out of memory (see `dmesg`), a limit of the batch system, or `kill -9`",
    signal.SIGSEGV: "native code crashed; PYTHONFAULTHANDLER=1 shows where",
    signal.SIGBUS: "native code crashed, often because shared memory is full: `df -h /dev/shm`",
    signal.SIGABRT: "native code (CUDA, NCCL, gloo, an allocator) aborted",
    signal.SIGFPE: "native code divided by zero; PYTHONFAULTHANDLER=1 shows where",
    signal.SIGILL: "native code was built for another CPU",
    signal.SIGTERM: "the batch system, or `kill`",
    signal.SIGINT: "it was interrupted",
}


@dataclass(frozen=True)
class Report:
    """The report of a failed attempt."""

    headline: str  # which rank failed first, and how, in one line
    body: str  # the rest: traceback, hints, what the others were doing, logs
    exit_code: int  # the launcher's: the first failed rank's, 128 + n if signal n ended it


def report_on(
    ranks: Sequence[Rank], failures: Mapping[int, int], *, num_oom_kills: int = 0, shown: int = -1
) -> Report:
    """Report which rank of this host failed first.

    Args:
        ranks: those of this host.
        failures: the exit codes of those that failed, the first ones first.
        num_oom_kills: processes of this control group that the kernel has killed meanwhile.
        shown: the rank whose standard error is on the screen already.
    """
    by_number = {rank.number: rank for rank in ranks}
    failed = [by_number[number] for number in failures if number in by_number]
    notes = {rank.number: rank.victim_of() for rank in failed}
    causes = [note for note in notes.values() if "victim_of" in note]
    origins = [rank for rank in failed if "victim_of" not in notes[rank.number]]
    # Of sharded layers' ranks that waited for another pipeline's, only if it can be nothing else.
    sharers = [rank.number for rank in origins if notes[rank.number]]
    others = [rank for rank in origins if rank.number not in sharers]
    named = [note for note in causes if note["victim_of"] not in sharers]
    if named and not others:
        return _of_victims(ranks, failures, named[0])
    if not origins:
        return Report("a rank failed", _logs(ranks, None), 1)
    first = (others or origins)[0]
    code, what = failures[first.number], _what(first)
    same = [str(one.number) for one in origins if one is not first and what and what == _what(one)]
    body = (
        "" if first.number == shown else _last_lines(first),
        f"The same on rank{'s' * (len(same) > 1)} {', '.join(same)}." if same else "",
        _hint(first, code, num_oom_kills),
        _meanwhile([one for one in ranks if one is not first and str(one.number) not in same]),
        _logs(ranks, first),
    )
    return Report(_headline(first, code, what), _joined(*body), _exit_code(code))


def short_path(path: Path) -> str:
    """Return a path relative to the current folder, if it is below it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _of_victims(ranks: Sequence[Rank], failures: Mapping[int, int], note: dict[str, Any]) -> Report:
    """Report a failure of which all ranks of this host were only victims."""
    first = next((rank for rank in ranks if rank.number == note["victim_of"]), None)
    cause = str(note["because"])
    if first is None:
        cause += " (on another host, whose launcher reports more)"
    code = next((code for code in failures.values() if code > 0), 1)
    others = [rank for rank in ranks if rank is not first]
    ended = _last_lines(first) if first is not None else ""
    return Report(cause, _joined(ended, _meanwhile(others), _logs(ranks, first)), _exit_code(code))


def _what(rank: Rank) -> str:
    """Return the exception of a rank: as it recorded it, else its last line on standard error."""
    if message := rank.recorded().get("message"):
        return str(message).partition("\n")[0]
    return next(reversed(_end_of(rank.stderr)), "")


def _headline(first: Rank, code: int, what: str) -> str:
    reading = first.read()
    where = f" {_place(reading)}" if reading is not None else ""
    if code < 0 and not first.recorded():
        return f"{_name(first)} was killed by {_signal_name(code)}{where}"
    if first.recorded():
        return f"{_name(first)} failed{where}: {what}"
    return f"{_name(first)} ended with exit code {code}" + (f": {what}" if what else "")


def _name(rank: Rank) -> str:
    if (reading := rank.read()) is None:
        return f"rank {rank.number}"
    return f"{Grid.of(reading).stage_name(reading.place)} (rank {rank.number})"


def _place(reading: Page) -> str:
    """Describe where a rank failed."""
    if reading.task:
        return f"in {reading.task}" + (f", {reading.layer}" if reading.layer else "")
    return f"in {reading.call}()" if reading.call else "between calls"


def _last_lines(rank: Rank) -> str:
    lines = _folded(_end_of(rank.stderr))
    if not lines:
        return ""
    return "\n".join(["Its last lines on standard error:", *(f"  {line}" for line in lines)])


def _end_of(path: Path, num_bytes: int = 1 << 16) -> list[str]:
    """Return the last lines of a file, without those that are empty at its end."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - num_bytes))
            text = file.read().decode(errors="replace").rstrip()
    except OSError:
        return []
    # Of a progress bar, whose states overwrite one another, the last one.
    return [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n") if text]


def _folded(lines: Sequence[str]) -> list[str]:
    """Leave out frames of tracebacks in procpipe and torch, but for the last of several."""
    entries: list[tuple[bool, list[str]]] = []
    for line in lines:
        is_of_frame = bool(entries) and entries[-1][1][0].startswith(_FRAME)
        if line.startswith("    ") and is_of_frame:
            entries[-1][1].append(line)
        else:
            is_ours = line.startswith(_FRAME) and any(name in line for name in _OURS)
            entries.append((is_ours, [line]))
    found: list[str] = []
    for is_ours, group in groupby(entries, key=itemgetter(0)):
        texts = [text for _, text in group]
        if is_ours and len(texts) > 1:
            found.append(f"  … {len(texts) - 1} frames in procpipe and torch")
            texts = texts[-1:]
        found += chain(*texts)
    return found[-_NUM_LAST_LINES:]


def _signal_name(code: int) -> str:
    """Return the name of the signal of a negative exit code: "SIGKILL"."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _hint(first: Rank, code: int, num_oom_kills: int) -> str:
    if code >= 0 or first.recorded():
        return ""
    hint = f"{_signal_name(code)}: {_HINTS.get(-code, 'some process sent it')}."
    if code == -signal.SIGKILL and num_oom_kills:
        hint += (
            f" Meanwhile the kernel has killed {num_oom_kills} of this control group's processes, "
            "as memory ran out."
        )
    return hint


def _meanwhile(others: Sequence[Rank]) -> str:
    readings = [(rank, rank.read()) for rank in others]
    lines = [
        f"{_name(rank)} " + ("had made no Stage yet" if read is None else f"was {read.where()}")
        for rank, read in readings
    ]
    return "\n  ".join(["The others in the end:", *lines]) if lines else ""


def _logs(ranks: Sequence[Rank], first: Rank | None) -> str:
    folder = (first or ranks[0]).folder
    return f"Logs: {short_path(folder.parent)}/ ({folder.name}/stderr.log, and the other ranks')"


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)
