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
import functools
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from types import FrameType
from typing import TextIO

from rich.rule import Rule
from rich.text import Text

from procpipe.launch.run.engine import Job, JobOutcome, Stopped, run_job
from procpipe.launch.run.failure import Failure, explain, out_of_memory_kills, short_path
from procpipe.launch.run.ranks import Attempt, Logs, Ranks
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
    _give_key(job)
    _adopt_orphans()
    num_oom_kills = out_of_memory_kills()
    warden = Warden(token)
    ranks = Ranks(job.grace_s)
    view = View(ranks, view_mode, f"logs in {short_path(job.folder)}")
    stopper = _Stopper(token, ranks, view, warden.pid)
    outcome = JobOutcome({}, "it was stopped")
    try:
        with stopper.installed():
            try:
                outcome = run_job(job, functools.partial(_begin, job, ranks, view))
            except Stopped as stopped:
                stopper.signal = stopped.sigval
            finally:
                stopper.is_armed = False
                grace_s = 0.0 if stopper.signal is not None else _LEFTOVER_GRACE_S
                leftovers = end_family(token, grace_s, os.getpid(), {warden.pid})
                ranks.stop()
                view.stop(is_failed=not outcome.is_good)
                warden.dismiss()
    finally:
        _reap()
    ending = _Ending(job, ranks.attempt, view, leftovers)
    if stopper.signal is not None:
        return ending.after_signal(stopper.signal)
    if outcome.is_good:
        return ending.after_success()
    return ending.after_failure(outcome, out_of_memory_kills() - num_oom_kills)


def _begin(
    job: Job, ranks: Ranks, view: View, logs: Sequence[Logs], num_ranks: int, number: int
) -> None:
    """Begin an attempt of the agent; show the reason, if it is not the first."""
    last = ranks.attempt
    if last is not None:
        if last.failed_s is not None and last.num_ranks == num_ranks:
            why = f"restart {number} of {job.max_restarts}, because {explain(last.ends()).headline}"
        else:
            why = f"restart with {num_ranks} ranks, because the set of hosts has changed"
        view.print(f"procpipe: {why}")
    ranks.begin(logs, num_ranks)


class _Stopper:
    """Handles signals: the first ends the run, the second kills all but the ``spared`` process."""

    def __init__(self, token: str, ranks: Ranks, view: View, spared: int) -> None:
        self.signal: signal.Signals | None = None
        self.is_armed = True
        self._token = token
        self._ranks = ranks
        self._view = view
        self._spared = spared

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals within the block."""
        previous = {signum: signal.signal(signum, self) for signum in _SIGNALS}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal is None and self.is_armed:
            self.signal = signal.Signals(number)
            self._ranks.expect_end()
            self._view.hide_stderr()
            again = "; again to kill them" if self.signal is signal.SIGINT else ""
            self._view.print(f"procpipe: {_name(self.signal)}: ending all processes{again}")
            raise Stopped(number)
        self._view.print("procpipe: killing all processes")
        # The agent waits for them, so this ends its wait.
        end_family(self._token, 0.0, os.getpid(), {self._spared})


@dataclass(frozen=True)
class _Ending:
    """Writes the end of a run; each method returns the exit code."""

    job: Job
    attempt: Attempt | None
    view: View
    leftovers: Sequence[Process]

    def after_success(self) -> int:
        if self.leftovers:
            names = ", ".join(map(str, self.leftovers))
            self._print(f"procpipe: ended what the run had left behind: {names}")
        if not self.view.is_off:
            self._print(f"procpipe: done in {self._summary()}")
        return 0

    def after_signal(self, number: signal.Signals) -> int:
        self._print(f"procpipe: ended by {_name(number)} after {self._summary()}")
        return 128 + number

    def after_failure(self, outcome: JobOutcome, num_oom_kills: int) -> int:
        """Write the report, also into the run's folder."""
        if outcome.error or self.attempt is None:
            failure = Failure(
                f"torch's agent could not run the ranks: {outcome.error}",
                f"Logs: {short_path(self.job.folder)}/launcher.log",
                1,
            )
        else:
            failure = explain(self.attempt.ends(outcome.codes), num_oom_kills)
        with contextlib.suppress(OSError):
            report = f"{failure.headline}\n\n{failure.body}\n"
            (self.job.folder / "report.txt").write_text(report, encoding="utf-8")
        if self.view.console.is_terminal:
            self._print(Rule("procpipe: the run failed", style="red"))
        self._print(Text(f"procpipe: {failure.headline}", style="bold red"))
        self._print(f"\n{failure.body}")
        self._print(f"\nExit code {failure.exit_code} after {self._time()}")
        code: int = failure.exit_code
        return code

    def _summary(self) -> str:
        steps = summary(self.attempt) if self.attempt is not None else ""
        parts = [self._time(), steps, f"logs in {short_path(self.job.folder)}"]
        return ", ".join(part for part in parts if part)

    def _time(self) -> str:
        seconds = self.view.elapsed_s
        return f"{seconds:.1f} s" if seconds < 60 else time_text(seconds)

    def _print(self, text: str | Text | Rule) -> None:
        """Write to the console; if that fails, the exit code must still be right."""
        with contextlib.suppress(OSError):
            if self.view.console.is_terminal:
                self.view.console.print(text, soft_wrap=True)
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


def _give_key(job: Job) -> None:
    """Make a key for the ranks, which then need not be in the launcher's store.

    Not on several hosts, whose launchers would make different keys; a user's file may have one.
    """
    os.environ.pop("PROCPIPE_KEY", None)  # of a run that has started this one
    if job.max_nodes == 1 and not os.environ.get("PROCPIPE_KEY_FILE"):
        os.environ["PROCPIPE_KEY"] = secrets.token_hex(32)


def _adopt_orphans() -> None:
    """Let orphaned descendants become children of this process, so that all can be found."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
