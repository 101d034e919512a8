"""What a user sees of jobs that fail, under the real torchrun, and of jobs that succeed.

One rank of the first job is a new process, the others are forks, which start faster.
"""

from __future__ import annotations

import re

import pytest

from tests.dist.script import run_forked, run_script

pytestmark = pytest.mark.dist

#: A job of two or three ranks: something happens in a layer of stage 1, or between steps.
JOB = """
import os, signal, sys
import torch, torch.nn.functional as F
from torch import nn
from procpipe import Stage

RANK, ILL = int(os.environ["RANK"]), 1

class Layer(nn.Linear):
    def forward(self, x):
        if step == 1:
            {layer}
        return super().forward(x)

model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Layer(4, 4), nn.Linear(4, 4))
balance = [1, 2, 1] if os.environ["WORLD_SIZE"] == "3" else [1, 3]
stage = Stage(model, balance, chunks=2, loss_fn=F.mse_loss)
x = torch.ones(1 << 14, 4)  # 128 KiB a micro-batch: in pieces
for step in range(3):
    stage.step(x, x)
    {between}
print(f"rank {{RANK}} is done")
"""


def job(layer="pass", between="pass"):
    return JOB.format(layer=layer, between=between)


def root_cause(stderr):
    """Return the rank that torchrun names as the first to fail, and its report."""
    _, _, report = stderr.partition("Root Cause (first observed failure):")
    match = re.search(r"rank      : (\d+)", report)
    assert match, stderr
    return int(match.group(1)), report


def check_failed(done, origin, *words):
    assert done.returncode == 1
    assert done.left_behind == ()
    assert "is done" not in done.stdout
    # Each of the two others prints it once, unless torchrun ends it before.
    assert done.stderr.count(f"Error: rank {origin} failed") <= 2, done.stderr
    assert done.stderr.count(" failed:\n") == done.stderr.count(f"rank {origin} failed:\n")
    assert root_cause(done.stderr)[0] == origin, done.stderr
    for word in words:
        assert word in done.stderr, f"{word!r} is missing\n{done}"
    assert "terminate called" not in done.stderr
    assert "Warning" not in done.stderr


def test_an_exception_in_a_layer():
    done = run_script(job(layer='raise KeyError("boom")'), nproc=3, num_forked=2)

    note = "procpipe: in stage 1 (rank 1), task F0@1 (micro-batch 0), layer '2' (Layer)"
    check_failed(done, 1, "KeyError: 'boom'", note)
    assert note in root_cause(done.stderr)[1]


def test_an_exception_in_the_users_code_between_two_steps():
    done = run_script(
        job(between='if RANK == ILL: raise ValueError("mine")'), nproc=2, num_forked=2
    )

    check_failed(done, 1, "ValueError: mine")
    assert "ValueError: mine" in root_cause(done.stderr)[1]


def test_a_killed_rank():
    done = run_script(job(layer="os.kill(os.getpid(), signal.SIGKILL)"), nproc=2, num_forked=2)

    check_failed(done, 1)
    assert "SIGKILL" in root_cause(done.stderr)[1]


def test_a_rank_that_ends_early_with_exit_code_0():
    done = run_script(job(between="if RANK == ILL: sys.exit(0)"), nproc=2, num_forked=2)

    assert done.returncode == 1
    assert done.left_behind == ()
    assert "procpipe: rank 0 ends, because rank 1 has left the pipeline" in done.stderr
    assert "rank 0 failed" not in done.stderr


#: One script runs several jobs, as forks. Every rank ends as a script does.
REPEATED = """
import os, socket, sys
import torch, torch.distributed, torch.nn.functional as F
from torch import nn
from procpipe import Stage

def run_rank():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    stage = Stage(model, [1, 2], chunks=4, loss_fn=F.mse_loss)
    x = torch.ones(4 * 4096, 8)  # 128 KiB a micro-batch: in pieces
    for _ in range(2):
        loss = stage.step(x, x)
    with torch.no_grad():
        output = stage(x)  # the last transfers are in transit when rank 0's script ends
    sys.exit(0)

def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])

def start(port, rank):
    pid = os.fork()
    if pid == 0:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=port)
        run_rank()
    return pid

os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
codes = []
for port in [free_port() for _ in range(int(sys.argv[1]))]:
    pids = [start(port, rank) for rank in (0, 1)]
    codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
print("codes", codes)
"""


def test_correct_jobs_end_well_every_time():
    """Gloo aborts processes whose interpreter ends before its transfers are dropped."""
    done = run_forked(REPEATED, args=["2"], tears_down=True).check()

    assert done.stdout == f"codes {[0] * 4}\n"
    assert done.stderr == ""
