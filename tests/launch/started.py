"""Starts ``procpipe run`` as a user would, on a terminal or not.

with started("-n", "2", script=(CODE,), on_terminal=True) as run:
    run.wait_for("step 3")
    run.press("\\x03")
    ended = run.wait()
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest

from procpipe.launch import start_ranks
from tests.dist.forks import Forked, fork_server
from tests.dist.jobs import Job, Process

RUN = ("-m", "procpipe.launch", "run")


@contextlib.contextmanager
def started(
    *options: str,
    script: tuple[str, ...],
    on_terminal: bool = False,
    grace_s: int = 5,
    num_forked: int = 0,
) -> Iterator[Process]:
    """Start ``procpipe run <options> script.py <args>`` in an empty folder.

    Args:
        options: of ``procpipe run``.
        script: the code of the script, and its arguments.
        on_terminal: as for ``Job.start``.
        grace_s: how long ranks may take to end after a signal.
        num_forked: how many ranks are forks.
    """
    with Job() as job:
        job.write("script.py", script[0])
        yield job.start(
            [*RUN, *options, "script.py", *script[1:]],
            num_ranks=num_forked,
            on_terminal=on_terminal,
            TORCH_ELASTIC_SHUTDOWN_TIMEOUT=str(grace_s),
        )


def start_as_forks(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    """Let ``procpipe doctor`` and ``plan`` start their ranks, and the launcher, as forks."""

    server = fork_server()  # at once, before a test sets variables for its processes

    def start(words: Sequence[str], log: IO[str]) -> Forked:
        with open(os.devnull) as stdin:
            files = (stdin.fileno(), log.fileno(), log.fileno())
            env = {"OMP_NUM_THREADS": "1", **os.environ}
            return server.start(words, env=env, cwd=Path.cwd(), files=files, num_ranks=num_ranks)

    monkeypatch.setattr(start_ranks, "_start", start)
