"""Training that is killed and started again ends with the weights of an undisturbed run.

The 20-fold version is ``python -m benchmarks.restarts``, with new processes. Here torchrun and all
ranks are forks, which start faster.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from benchmarks import restarts
from tests.dist.forks import fork_server
from tests.dist.script import run_forked

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]  # a busy machine

ARGS = ["--epochs", "2", "--save-every", "4"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return the folder in which one undisturbed process saved."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run_forked(restarts.SCRIPT, args=["--save", str(folder), *ARGS]).check()
    return folder


@pytest.fixture(scope="module")
def disturbed(expected, tmp_path_factory):
    """Return the folder and the outcome of two processes of which one was killed."""
    folder = tmp_path_factory.mktemp("disturbed") / "run"
    outcome = restarts.disturbed(
        folder, 2, ARGS, num_kills=1, seed=3, expected=expected, start=start_forked
    )
    return folder, outcome


def start_forked(argv, env, log):
    """Start torchrun and, in both attempts, its ranks as forks."""
    with open(os.devnull) as stdin:
        files = (stdin.fileno(), log.fileno(), log.fileno())
        return fork_server().start(argv, env=env, cwd=Path.cwd(), files=files, num_ranks=4)


def test_a_run_that_is_killed_at_a_random_time_ends_the_same(disturbed):
    _, outcome = disturbed

    assert outcome.num_kills == 1, outcome.output
    assert outcome.resumed_at, outcome.output
    assert outcome.differences == (), outcome.output
    assert outcome.num_left == 0


def test_a_run_resumes_with_one_process_less(disturbed, expected):
    folder, _ = disturbed
    *_, older, old, new = sorted(folder.iterdir())
    assert new.name.endswith("-step-46")
    shutil.rmtree(old)
    shutil.rmtree(new)
    done = run_forked(restarts.SCRIPT, num_ranks=1, args=["--save", str(folder), *ARGS]).check()

    assert f"resumed after {older.name.rpartition('-')[2]} steps" in done.stdout
    assert "balance [16]" in done.stdout
    assert restarts.differences(folder, expected) == ()
