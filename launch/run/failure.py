"""Writes the report of a run that failed, from how each rank ended.

The report is about the rank that failed first. A failed rank is one of these:

    recorded    it recorded an exception of its own for torch's agent; failed at that file's time
    killed      by a signal that was not the agent's; failed when it ended
    ended       with an exit code, without naming another rank; failed when it ended
    victim      it ended because another rank failed, and names that rank; never the first
    sharer      it recorded that torch.distributed failed in its sharded layers, where it waited for
                another pipeline's rank; the first only if it can be nothing else

If there are only victims, the rank that they name left early, or is on another host. Pure, but for
``out_of_memory_kills``.
"""

from __future__ import annotations

import math
import os
import re
import signal
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from procpipe.job.grid import Grid
from procpipe.launch.run.ranks import Rank
from procpipe.launch.run.traceback_text import exception_line, folded, printed_traceback

#: A victim's line, written by procpipe.job.endings.
_VICTIM = re.compile(r"^procpipe: rank \d+(?: \([^)]*\))? ends, because (.*)$", re.MULTILINE)
#: A victim that printed its traceback.
_REMOTE = re.compile(
    r"^(?:procpipe\.errors\.)?(?:RemoteStageError|PeerLostError): (.*)", re.MULTILINE
)
_RANK = re.compile(r"\brank (\d+)")
#: Of a sharer's note, written by procpipe.sharded.layers.
_SHARES = "procpipe: the layers are sharded over ranks "
#: The note on an exception that says where it was raised.
_NOTE = re.compile(r"^procpipe: in (stage \d+[^(]* \(rank \d+\)), (.*)$", re.MULTILINE)
#: Durations of zero, which are left out.
_NO_TIME = re.compile(r", (?:for|last active) 0\.0 s(?: ago)?$")

_NUM_LAST_LINES = 12

#: A rank that is killed later than this after another failed was killed because of it.
_TOO_LATE_S = 1.0

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
class Failure:
    """The report of a failed attempt."""

    headline: str  # which rank failed first, and how, in one line
    body: str  # the rest: traceback, hints, what the others were doing, logs
    exit_code: int  # the launcher's: the first failed rank's, 128 + n if signal n ended it


def explain(ends: Sequence[Rank], num_oom_kills: int = 0) -> Failure:
    """Find out which rank of this host failed first, and report it."""
    failed = [end for end in ends if end.code != 0]
    origins = _origins(failed)
    causes = [cause for end in failed if (cause := _cause(end))]
    sharers = [end for end in origins if end.recorded is not None and _SHARES in end.stderr]
    numbers_of_sharers = {end.number for end in sharers}
    elsewhere = [cause for cause in causes if _number_in(cause) not in numbers_of_sharers]
    if len(sharers) < len(origins) or elsewhere:
        origins = [end for end in origins if end not in sharers]
    if not origins:
        return _explain_victims(ends, failed, [*elsewhere, *causes, "a rank failed"][0])
    return _explain_origins(ends, origins, num_oom_kills)


def signal_name(code: int) -> str:
    """Return the name of the signal of a negative exit code: "SIGKILL"."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def short_path(path: Path) -> str:
    """Return a path relative to the current folder, if it is below it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def out_of_memory_kills() -> int:
    """Return the out-of-memory kills in this process's control group; 0 if they are unknown."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        folder = next(line.partition("::")[2] for line in lines if "::" in line)
        events = Path("/sys/fs/cgroup", folder.lstrip("/"), "memory.events").read_text().split()
        return int(events[events.index("oom_kill") + 1])
    except (OSError, ValueError, StopIteration, IndexError):
        return 0


def _explain_origins(ends: Sequence[Rank], origins: Sequence[Rank], num_oom_kills: int) -> Failure:
    """Report the first of the ranks that failed by themselves."""
    # Of those that were seen to end at one time, the agent has ended some because of another.
    first = min(origins, key=lambda end: (_time_of(end), end.code == -signal.SIGTERM))
    trace = _traceback_of(first)
    error = exception_line(trace)
    same = [
        end
        for end in origins
        if end is not first and error and error == exception_line(_traceback_of(end))
    ]
    others = [end for end in ends if end is not first and end not in same]
    numbers = ", ".join(str(end.number) for end in same)
    return Failure(
        headline=_headline(first, trace),
        body=_joined(
            textwrap.indent(folded(trace), "  ") if trace else _last_lines(first),
            f"The same on rank{'s' * (len(same) > 1)} {numbers}." if same else "",
            _hint(first, num_oom_kills),
            _meanwhile(others),
            _where_logs(ends, first),
        ),
        exit_code=_exit_code(first.code),
    )


def _explain_victims(ends: Sequence[Rank], failed: Sequence[Rank], cause: str) -> Failure:
    """Report a failure of which all ranks of this host were only victims."""
    number = _number_in(cause)
    first = next((end for end in ends if end.number == number), None)
    if number is not None and first is None:
        cause += " (on another host, whose launcher reports more)"
    parts = [_meanwhile([end for end in ends if end is not first]), _where_logs(ends, first)]
    if first is not None:
        ended = f"{_name(first)} {_code_words(first.code)}." if first.code is not None else ""
        parts = [ended, _last_lines(first), *parts]
    codes = [end.code for end in failed if end.code is not None and end.code > 0]
    return Failure(cause, _joined(*parts), _exit_code(codes[0] if codes else 1))


def _origins(failed: Sequence[Rank]) -> list[Rank]:
    """Return those that are not victims of another rank."""
    first_s = min((end.at_s for end in failed if end.at_s is not None), default=0.0)
    return [end for end in failed if _is_origin(end, first_s)]


def _is_origin(end: Rank, first_s: float) -> bool:
    """Return whether a failed rank is not a victim of another one."""
    if end.recorded is not None:
        return True
    if end.code is None or end.code >= 0:
        return not _cause(end)
    late_s = 0.0 if end.at_s is None else end.at_s - first_s
    if end.code == -signal.SIGTERM:  # the agent ends all others so, within a tenth of a second
        return late_s <= 0 and not _cause(end)
    return late_s < _TOO_LATE_S


def _number_in(cause: str) -> int | None:
    """Return the rank that a victim names."""
    match = _RANK.search(cause)
    return int(match.group(1)) if match else None


def _cause(end: Rank) -> str:
    """Return what a victim names as the cause of its end; "" if it is not a victim."""
    for pattern in (_VICTIM, _REMOTE):
        found = pattern.findall(end.stderr)
        if found:
            return str(found[-1])
    return ""


def _time_of(end: Rank) -> float:
    at_s = end.at_s if end.recorded is None else end.recorded.at_s
    if at_s is not None:
        return float(at_s)
    # It ended too soon for the launcher to find it; unless the agent has ended it.
    return math.inf if end.code in (None, -signal.SIGTERM) else 0.0


def _traceback_of(end: Rank) -> str:
    """Return the traceback that ended a rank, with its causes; "" if there is none.

    The one on standard error begins in the user's script; the recorded one has the pipeline only.
    """
    printed: str = printed_traceback(end.stderr)
    if end.recorded is None:
        return printed
    kind = end.recorded.message.partition(":")[0]
    is_it = re.search(rf"^(?:[\w.]*\.)?{re.escape(kind)}\b", printed, re.MULTILINE)
    recorded: str = end.recorded.traceback
    return printed if is_it else recorded.rstrip()


def _headline(first: Rank, trace: str) -> str:
    code, reading = first.code, first.reading
    if code is not None and code < 0 and first.recorded is None:
        doing = f" {_where(first)}" if reading is not None else ""
        return f"{_name(first)} was killed by {signal_name(code)}{doing}"
    note = _NOTE.search(trace)
    failed = f"{note.group(1)} failed in {note.group(2)}" if note else f"{_name(first)} failed"
    text = first.recorded.message.partition("\n")[0] if first.recorded else exception_line(trace)
    if text:
        return f"{failed}: {text}"
    return f"{_name(first)} {_code_words(code)}" if code is not None else failed


def _name(end: Rank) -> str:
    if (reading := end.reading) is None:
        return f"rank {end.number}"
    return f"{Grid.of(reading).stage_name(reading.place)} (rank {end.number})"


def _where(end: Rank) -> str:
    assert end.reading is not None
    return _NO_TIME.sub("", end.reading.where())


def _last_lines(end: Rank) -> str:
    lines = end.stderr.rstrip().splitlines()[-_NUM_LAST_LINES:]
    if not lines:
        return ""
    return "\n  ".join(["Its last lines on standard error:", *lines])


def _hint(first: Rank, num_oom_kills: int) -> str:
    code = first.code
    if code is None or code >= 0 or first.recorded is not None:
        return ""
    hint = f"{signal_name(code)}: {_HINTS.get(-code, 'some process sent it')}."
    if first.rss_bytes:
        hint += f" It last had {first.rss_bytes / 2**30:.1f} GiB of memory."
    if code == -signal.SIGKILL and num_oom_kills:
        hint += (
            f" Meanwhile the kernel has killed {num_oom_kills} of this control group's processes, "
            "as memory ran out."
        )
    return hint


def _meanwhile(others: Sequence[Rank]) -> str:
    lines = (f"{_name(end)} {_was(end)}" for end in others)
    return "\n  ".join(["The others at that moment:", *lines]) if others else ""


def _was(end: Rank) -> str:
    if end.code == 0:
        return "ended well"
    return "had made no Stage yet" if end.reading is None else f"was {_where(end)}"


def _where_logs(ends: Sequence[Rank], first: Rank | None) -> str:
    if not ends:
        return ""
    stderr = (first or ends[0]).logs.stderr
    folder = stderr.parent.parent
    name = stderr.relative_to(folder)
    return f"Logs: {short_path(folder)}{os.sep} ({name}, and the other ranks')"


def _code_words(code: int) -> str:
    return f"was killed by {signal_name(code)}" if code < 0 else f"ended with exit code {code}"


def _exit_code(code: int | None) -> int:
    if not code:
        return 1
    return 128 - code if code < 0 else code


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)
