"""One run from start to end: warden, ranks, view and agent together, and the report at the end.

    1  the warden is started: from now on no process of the run can outlive the launcher
    2  the agent runs the ranks; the view shows them
    3  what is left of the run is ended
    4  the view stops, and the last line or the report is written

The agent passes a first SIGINT, SIGTERM or SIGHUP on to the ranks, which have a few seconds to end;
a second one kills everything at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from types import FrameType
from typing import Any, TextIO

from rich.rule import Rule
from rich.text import Text

from procpipe.launch.run.engine import Job, JobOutcome, Stopped, run_job
from procpipe.launch.run.failure import Failure, explain, out_of_memory_kills, short_path
from procpipe.launch.run.ranks import Logs, Ranks
from procpipe.launch.run.rows import summary
from procpipe.launch.run.view import View, time_text
from procpipe.launch.run.warden import TOKEN, Process, Warden, end_family

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_PR_SET_CHILD_SUBREAPER = 36

#: How long processes that ranks left behind may take to end after SIGTERM.
_LEFTOVER_GRACE_S = 2.0


def run(job: Job, token: str, view_mode: str) -> int:
    """Run a job to its end, in the main thread; return the exit code (see ``command.py``).

    The token is unique to the run, and goes into the environment of all its processes.
    """
    sys.stdout, sys.stderr = _writable(sys.stdout), _writable(sys.stderr)
    os.environ[TOKEN] = ":".join(filter(None, (os.environ.get(TOKEN), token)))
    # Orphaned descendants become children of this process, so that all can be found.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return _Run(job, token, view_mode).to_its_end()


class _Run:
    def __init__(self, job: Job, token: str, view_mode: str) -> None:
        self._job = job
        self._token = token
        self._num_oom_kills = out_of_memory_kills()  # of earlier runs
        self._warden = Warden(token)
        self._ranks = Ranks(job.grace_s)
        self._view = View(self._ranks, view_mode, f"logs in {short_path(job.folder)}")
        self._signal: signal.Signals | None = None
        self._can_stop = True
        self._num_restarts = 0

    def to_its_end(self) -> int:
        """Run and report; return the exit code."""
        outcome = JobOutcome({}, "it was stopped")
        previous: dict[signal.Signals, Any] = {}
        try:
            for signum in _SIGNALS:
                previous[signum] = signal.signal(signum, self._stop)
            previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._look)
            outcome = run_job(self._job, self._begin)
            self._can_stop = False  # a signal that comes just before is caught below
        except Stopped as stopped:
            self._signal = stopped.sigval
        finally:
            self._can_stop = False
            leftovers = self._end_family(_LEFTOVER_GRACE_S if self._signal is None else 0.0)
            self._ranks.stop()
            self._view.stop(is_failed=not outcome.is_good)
            self._warden.dismiss()
            for signum, handler in previous.items():
                signal.signal(signum, handler)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        if self._signal is not None:
            self._print(f"procpipe: ended by {_name(self._signal)} after {self._summary()}")
            return 128 + self._signal
        if not outcome.is_good:
            return self._report(outcome)
        if leftovers:
            names = ", ".join(map(str, leftovers))
            self._print(f"procpipe: ended what the run had left behind: {names}")
        if not self._view.is_off:
            self._print(f"procpipe: done in {self._summary()}")
        return 0

    def _begin(self, logs: Sequence[Logs], num_ranks: int, number: int) -> None:
        """Begin an attempt of the agent; show the reason, if it is not the first."""
        last = self._ranks.attempt
        if last is not None:
            why = f"restart with {num_ranks} ranks, because the set of hosts has changed"
            has_failed = last.failed_s is not None and last.num_ranks == num_ranks
            if has_failed or number > self._num_restarts:
                headline = explain(last.ends()).headline if has_failed else "a rank failed"
                why = f"restart {number} of {self._job.max_restarts}, because {headline}"
            self._view.print(f"procpipe: {why}")
        self._num_restarts = number
        self._ranks.begin(logs, num_ranks)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: the first ends the run, the second kills its processes."""
        del frame
        if self._signal is None and self._can_stop:
            self._signal = signal.Signals(number)
            self._ranks.expect_end()
            self._view.hide_stderr()
            again = "; again to kill them" if self._signal is signal.SIGINT else ""
            self._view.print(f"procpipe: {_name(self._signal)}: ending all processes{again}")
            raise Stopped(number)
        self._view.print("procpipe: killing all processes")
        self._end_family(0.0)  # the agent waits for them, so this ends its wait

    def _look(self, number: int, frame: FrameType | None) -> None:
        """Handle the end of a child."""
        del number, frame
        self._ranks.look_before_agent()

    def _end_family(self, grace_s: float) -> list[Process]:
        return list(end_family(self._token, grace_s, os.getpid(), {self._warden.pid}))

    def _report(self, outcome: JobOutcome) -> int:
        """Write the report of a failure, also into the run's folder; return the exit code."""
        attempt = self._ranks.attempt
        if outcome.error or attempt is None:
            failure = Failure(
                f"torch's agent could not run the ranks: {outcome.error}",
                f"Logs: {short_path(self._job.folder)}/launcher.log",
                1,
            )
        else:
            num_oom_kills = out_of_memory_kills() - self._num_oom_kills
            failure = explain(attempt.ends(outcome.codes), num_oom_kills)
        with contextlib.suppress(OSError):
            report = f"{failure.headline}\n\n{failure.body}\n"
            (self._job.folder / "report.txt").write_text(report, encoding="utf-8")
        if self._view.console.is_terminal:
            self._print(Rule("procpipe: the run failed", style="red"))
        self._print(Text(f"procpipe: {failure.headline}", style="bold red"))
        self._print(f"\n{failure.body}")
        self._print(f"\nExit code {failure.exit_code} after {self._time()}")
        return int(failure.exit_code)

    def _summary(self) -> str:
        steps = summary(self._ranks.attempt) if self._ranks.attempt is not None else ""
        parts = [self._time(), steps, f"logs in {short_path(self._job.folder)}"]
        return ", ".join(part for part in parts if part)

    def _time(self) -> str:
        seconds = self._view.elapsed_s
        return f"{seconds:.1f} s" if seconds < 60 else time_text(seconds)

    def _print(self, text: str | Text | Rule) -> None:
        """Write to the console; if that fails, the exit code must still be right."""
        with contextlib.suppress(OSError):
            if self._view.console.is_terminal:
                self._view.console.print(text, soft_wrap=True)
            else:
                print(text, file=sys.stderr, flush=True)


def _writable(stream: TextIO | None) -> TextIO:
    """Return the stream, made to accept any text; /dev/null if it was closed at the start."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


def _name(number: signal.Signals) -> str:
    return "Ctrl-C" if number is signal.SIGINT else number.name
