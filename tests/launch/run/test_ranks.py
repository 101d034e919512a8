"""How the ends of rank processes are noted."""

from __future__ import annotations

import os
import select
import signal
import subprocess

from procpipe.launch.run import ranks as run_ranks
from procpipe.launch.run.failure import explain
from procpipe.launch.run.ranks import Attempt, Logs, Rank, Ranks


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
