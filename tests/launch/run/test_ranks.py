"""How the ends of rank processes are noted."""

from __future__ import annotations

import os
import select
import signal
import subprocess

import pytest

from procpipe.launch.run import ranks as run_ranks
from procpipe.launch.run.failure import explain
from procpipe.launch.run.ranks import Attempt, Logs, Rank, Ranks
from tests.dist.script import run_forked

#: A launcher with an agent of one rank, which executes given code.
LAUNCHER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace
from procpipe.launch.run import job, ranks
from procpipe.launch.run.engine import JobOutcome

def run_job(_, begin):
    logs = ranks.Logs(0, Path("out"), Path("err"), Path("error"))
    begin([logs], 1, 0)
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": "error"}
    command = "until [ -e go ]; do sleep 0.01; done; exit 3"
    process = subprocess.Popen(["sh", "-c", command], env=environment)
    while process.poll() is None:
        time.sleep(0.1)
    return JobOutcome({})

%s
job.run_job = run_job
settings = SimpleNamespace(folder=Path.cwd(), grace_s=5, max_restarts=3)
run = job._Run(settings, "a-token-of-a-test", "off")
code = run.to_its_end()
print(code, *(rank.code for rank in run._ranks.attempt.ranks) if run._ranks.attempt else ())
"""

#: From when the rank is found until the end of the run, the thread that follows it gets no time.
SLOW_THREAD = """
def follow(ranks):
    while not (ranks.attempt and ranks.attempt.ranks[0].pid):
        ranks._look()
    open("go", "w").close()
    while not ranks._is_stopped:
        time.sleep(0.01)
    ranks._look()

ranks.Ranks._run = follow
"""

#: Attempts without processes: after the first a rank was killed, how the second ended is not known,
#: and the third and the fourth end because a host comes and another goes.
ATTEMPTS = """
def run_job(_, begin):
    logs = ranks.Logs(0, Path("out"), Path("err"), Path("error"))
    begin([logs], 2, 0)
    killed = run._ranks.attempt
    killed.ranks[0].code, killed.failed_s = -9, 1.0
    begin([logs], 2, 1)
    begin([logs], 2, 2)
    begin([logs], 4, 2)
    goes = run._ranks.attempt
    goes.ranks[0].code, goes.failed_s = 1, 1.0  # because of the host
    begin([logs], 2, 2)
    return JobOutcome({})
"""

EARLY_SIGNAL = """
set_handler = signal.signal

def set_and_raise(number, handler):
    before = set_handler(number, handler)
    if number == signal.SIGINT and callable(handler):
        signal.raise_signal(number)
    return before

signal.signal = set_and_raise
"""


@pytest.mark.dist
def test_a_rank_that_the_agent_reaps_before_the_thread_looks_has_an_exit_code():
    """Symptom: on a busy machine, a rank that had ended well was reported as the one that failed.

    Ranks that went on longer than the others' grace were killed.
    """
    assert run_forked(LAUNCHER % SLOW_THREAD).check().stdout == "0 3\n"


@pytest.mark.dist
def test_each_restart_has_its_reason():
    assert run_forked(LAUNCHER % ATTEMPTS).check().stderr.splitlines() == [
        "procpipe: restart 1 of 3, because rank 0 was killed by SIGKILL",
        "procpipe: restart 2 of 3, because a rank failed",
        "procpipe: restart with 4 ranks, because the set of hosts has changed",
        "procpipe: restart with 2 ranks, because the set of hosts has changed",
    ]


@pytest.mark.dist
def test_a_signal_before_the_agent_runs_ends_the_run():
    assert run_forked(LAUNCHER % EARLY_SIGNAL).check().stdout == f"{128 + signal.SIGINT}\n"


def test_a_rank_that_ends_while_others_are_looked_at_is_not_the_first(monkeypatch, tmp_path):
    """Symptom: a rank was killed, and the launcher reported another, which the agent had ended.

    The launcher had looked at the first one just before it was killed, and at the other, on a busy
    machine, after the agent had ended that by SIGTERM.
    """
    signals = signal.SIGKILL, signal.SIGTERM
    processes = [subprocess.Popen(["sleep", "1000"]) for _ in signals]
    watch = Ranks(grace_s=30.0)
    is_ended = run_ranks._has_ended
    has_looked = False

    def end_both_after_the_first_look(descriptor):
        nonlocal has_looked
        if has_looked:
            return is_ended(descriptor)
        has_looked = True
        for process, signum, rank in zip(processes, signals, found, strict=True):
            process.send_signal(signum)
            select.select([rank.descriptor], [], [], 20.0)
        return False

    with watch._lock:
        found = [
            Rank(Logs(rank, *(tmp_path / str(rank) / name for name in ("out", "err", "error"))))
            for rank in range(2)
        ]
        for rank, process in zip(found, processes, strict=True):
            rank.pid, rank.descriptor = process.pid, os.pidfd_open(process.pid)
            watch._poller.register(rank.descriptor, select.POLLIN)
        watch.attempt = Attempt(2, tuple(found))
        monkeypatch.setattr(run_ranks, "_has_ended", end_both_after_the_first_look)
        watch._look()
    watch.stop()

    assert [rank.code for rank in found] == [-signum for signum in signals]
    assert explain(found).exit_code == 128 + signal.SIGKILL
    for process in processes:
        process.wait()
