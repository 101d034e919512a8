"""Writes the report of a run that failed: which rank failed first, and how.

torch's agent lists the ranks that it saw fail first ahead of those that it ended because of them.
A rank that ends because another one failed notes that in a file beside its logs; it is never the
first. If there are only such ranks, the rank that they name left early, or is on another host.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from procpipe.launch.run.ranks import Rank

_NUM_LAST_LINES = 40

#: Frames of tracebacks in procpipe and torch that other frames follow: they seldom help a user.
_OUR_FRAMES = re.compile(
    r'(?:  File "[^"]*/(?:procpipe/|torch/|contextlib\.py).*\n(?:    .*\n)*)+(?=  File ")'
)

_HINTS: dict[int, str] = {
    signal.SIGKILL: "out of memory (see `dmesg`), a limit of the batch system, or `kill -9`",
    signal.SIGSEGV: "native code crashed; PYTHONFAULTHANDLER=1 shows where",
    signal.SIGBUS: "native code crashed, often because shared memory is full: `df -h /dev/shm`",
    signal.SIGABRT: "native code (CUDA, NCCL, gloo, an allocator) aborted",
}


@dataclass(frozen=True)
class Report:
    """The report of a failed attempt."""

    headline: str  # which rank failed first, and how, in one line
    body: str  # the rest: traceback, hints, what the others were doing, logs
    exit_code: int  # the launcher's: the first failed rank's, 128 + n if signal n ended it


def report_on(ranks: Sequence[Rank], failed: Sequence[Rank], *, num_oom_kills: int = 0) -> Report:
    """Report which rank of this host failed first.

    Args:
        ranks: those of this host.
        failed: those of them that failed, the first ones first.
        num_oom_kills: processes of this control group that the kernel has killed meanwhile.
    """
    notes = {rank: rank.note() for rank in failed}
    origins = [rank for rank in failed if "victim_of" not in notes[rank]]
    # Sharded layers that waited for another pipeline's fail first only if it can be nothing else.
    sharers = [rank.number for rank in origins if notes[rank]]
    others = [rank for rank in origins if not notes[rank]]
    victims = [note for note in notes.values() if "victim_of" in note]
    causes = [note for note in victims if note["victim_of"] not in sharers]
    first: Rank | None
    if causes and not others:
        number, headline = causes[0]["victim_of"], str(causes[0]["because"])
        first = next((rank for rank in ranks if rank.number == number), None)
        if first is None:
            headline += " (on another host, whose launcher reports more)"
        code = next((rank.code for rank in failed if rank.code > 0), 1)
    elif origins:
        first = (others or origins)[0]
        headline, code = _headline(first), first.code
    else:
        first, headline, code = None, "a rank failed", 1
    folder = (first or ranks[0]).folder
    body = (
        _last_lines(first),
        _hint(first, num_oom_kills),
        _meanwhile([rank for rank in ranks if rank is not first]),
        f"Logs: {short_path(folder.parent)}/ ({folder.name}/stderr.log, and the other ranks')",
    )
    # The code is not known (0) if the agent failed before it said how its ranks ended.
    exit_code = 128 - code if code < 0 else code or 1
    return Report(headline, "\n\n".join(filter(None, body)), exit_code)


def short_path(path: Path) -> str:
    """Return a path relative to the current folder, if it is below it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _headline(first: Rank) -> str:
    reading, exception = first.read(), first.exception().partition("\n")[0]
    where = ""
    if reading is not None and reading.task:
        where = f" in {reading.task}" + (f", {reading.layer}" if reading.layer else "")
    elif reading is not None and (reading.call or reading.device):  # else before its first call
        where = f" in {reading.call}()" if reading.call else " between calls"
    if exception:
        return f"{first.name} failed{where}: {exception}"
    if first.code < 0:
        return f"{first.name} was killed by {_signal_name(first.code)}{where}"
    last = _end_of(first.stderr).rpartition("\n")[2]
    return f"{first.name} ended with exit code {first.code}" + (f": {last}" if last else "")


def _last_lines(first: Rank | None) -> str:
    if first is None or first.number == 0:  # the standard error of rank 0 is on the screen
        return ""
    lines = _OUR_FRAMES.sub("  … frames in procpipe and torch\n", _end_of(first.stderr))
    shown = [f"  {line}" for line in lines.split("\n")[-_NUM_LAST_LINES:] if line]
    return "\n".join(["Its last lines on standard error:", *shown]) if shown else ""


def _end_of(path: Path, num_bytes: int = 1 << 16) -> str:
    """Return the end of a file; of a progress bar, whose states overwrite one another, the last."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - num_bytes))
            text = file.read().decode(errors="replace").rstrip()
    except OSError:
        return ""
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"signal {-code}"


def _hint(first: Rank | None, num_oom_kills: int) -> str:
    if first is None or first.code >= 0 or first.exception():
        return ""
    hint = f"{_signal_name(first.code)}: {_HINTS.get(-first.code, 'some process sent it')}."
    if first.code == -signal.SIGKILL and num_oom_kills:
        hint += f" The kernel counted {num_oom_kills} out-of-memory kills here during the run."
    return hint


def _meanwhile(others: Sequence[Rank]) -> str:
    lines = ["The others in the end:"]
    for rank in others:
        page = rank.read()
        lines.append(
            f"{rank.name} {'had made no Stage yet' if page is None else f'was {page.where()}'}"
        )
    return "\n  ".join(lines) if others else ""
