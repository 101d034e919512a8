"""Scripts in fresh processes: their results are reported, and their processes all end."""

from __future__ import annotations

import re

import psutil
import pytest

from tests.dist.report import RanksHungError
from tests.dist.script import run_forked, run_script

pytestmark = pytest.mark.dist

HANG = """
    import os, sys, threading
    sys.stdout.write(f"pid {os.getpid()}\\n")
    sys.stdout.flush()

    def wait_for_ever():
        threading.Event().wait()

    wait_for_ever()
"""


def pids(text):
    return [int(pid) for pid in re.findall(r"pid (\d+)", text)]


def runs(pid):
    # In a container there may be no process that reaps orphans, which then stay as zombies.
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.on_gpus
def test_a_forked_process_writes_nothing_as_it_ends():
    """Also if Triton is installed, which the fork server must not import."""
    done = run_forked("import torch._dynamo").check()
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    ("run", "number", "limit_s"), [(run_script, "nproc", 8.0), (run_forked, "num_ranks", 2.0)]
)
def test_a_hang_ends_with_the_stacks_of_each_rank(run, number, limit_s):
    with pytest.raises(RanksHungError, match=rf"did not end in {limit_s} s") as caught:
        run(HANG, **{number: 2}, timeout_s=limit_s)

    text = str(caught.value)
    assert len(pids(text)) == 2
    assert not any(map(runs, pids(text)))
    for rank in range(2):
        _, _, stack = text.partition(f"--- rank {rank} (process ")
        assert "in wait_for_ever" in stack.partition("---")[0]
