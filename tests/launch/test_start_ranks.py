"""Starting ranks with a time limit: no process is left, and a failure has a reason."""

from __future__ import annotations

import pytest

from procpipe.launch.start_ranks import start_ranks
from tests.dist.jobs import job_of
from tests.launch.started import start_as_forks

pytestmark = pytest.mark.dist

FAILS = "import os\nif os.environ['RANK'] == '1': raise ValueError('a bad day')"

#: Rank 1 never makes its Stage.
HANGS = """
import os, time
from torch import nn
from procpipe import Stage
if os.environ["RANK"] == "1":
    time.sleep(1000)
Stage(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1])
"""


def result_of(code, timeout_s, tmp_path, monkeypatch):
    """Run a script on two ranks; no process may be left."""
    script = tmp_path / "script.py"
    script.write_text(code)
    start_as_forks(monkeypatch, 2)
    monkeypatch.chdir(tmp_path)
    result = start_ranks(2, [str(script)], timeout_s)
    assert not [process.cmdline() for process in job_of(tmp_path)]
    return result


def test_the_reason_is_the_report_of_a_rank_that_fails(tmp_path, monkeypatch):
    result = result_of(FAILS, 90.0, tmp_path, monkeypatch)

    assert result.value is None
    assert result.reason.startswith(
        "procpipe: rank 1 ended with exit code 1: ValueError: a bad day"
    )


def test_ranks_that_hang_are_ended_and_the_reason_says_where_they_were(tmp_path, monkeypatch):
    result = result_of(HANGS, 12.0, tmp_path, monkeypatch)

    assert result.value is None
    assert result.reason.startswith("no end within 12 s\n")
    assert "Stage()" in result.reason or "waits" in result.reason, result.reason
