"""Optional parts can be deleted: a GPipe step over shared memory needs none of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.dist.script import run_forked

ROOT = Path(__file__).parents[1]

OPTIONAL = (
    *("balance", "planner", "timeline", "replicas", "sharded", "state", "hf", "cutting"),
    *("launch/run", "launch/doctor", "launch/plan", "launch/timeline"),
    *("channel/nccl.py", "channel/cuda_ipc.py"),
)

#: Imports procpipe from a tree, with the whole job in forks of one process.
SCRIPT = """
import os, socket, sys, traceback
import torch, torch.distributed
from torch import nn

tree = sys.argv[1]

def forked(function, *args):
    pid = os.fork()
    if pid == 0:
        try:
            function(*args)
            code = 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stderr.flush()
        os._exit(code)
    return pid

def check_exit_codes(*pids):
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * len(pids)

def import_procpipe():
    for name in [name for name in sys.modules if name.split(".")[0] == "procpipe"]:
        del sys.modules[name]
    # An editable installation would add what the tree lacks.
    finders = (f for f in sys.meta_path if not f.__module__.startswith("__editable__"))
    sys.meta_path[:] = finders
    sys.path.insert(0, tree)
    import procpipe
    assert procpipe.__file__.startswith(tree), procpipe.__file__
    return procpipe

def set_rank(rank, num_ranks, port):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port}
    os.environ |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ["MASTER_ADDR"] = "127.0.0.1"

def assert_lacks(what, call):
    try:
        call()
    except ModuleNotFoundError as error:
        assert what in str(error), error
    else:
        raise AssertionError(f"no error without {what}")

def run_step(rank, port):
    set_rank(rank, "2", port)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1 << 16), nn.Linear(1 << 16, 1))  # too much for a token
    options = {"loss_fn": nn.functional.mse_loss, "timeout_s": 60.0}
    stage = procpipe.Stage(model, [1, 1], chunks=2, **options)
    stage.step(torch.ones(4, 1), target=torch.zeros(4, 1))
    assert all(parameter.grad.any() for parameter in stage.parameters())
    assert_lacks("procpipe.timeline", stage.report)
    stage.step(torch.ones(4, 1), target=torch.zeros(4, 1))  # the stage still works
    stage.close()

def build_with(**options):
    return lambda: procpipe.Stage(nn.Sequential(nn.Linear(1, 1)), **options)

def ask_for_what_is_gone(port):
    by_time = build_with(balance="time", sample=torch.ones(2, 1))
    assert_lacks("procpipe.balance", by_time)
    assert_lacks("procpipe.timeline", build_with(balance=[1], trace="run.json"))
    cut = lambda: procpipe.sequential(nn.Linear(1, 1), torch.ones(1, 1))
    assert_lacks("procpipe.cutting", cut)
    set_rank(0, "1", port)
    assert_lacks("procpipe.balance", build_with(schedule="zb-v"))  # two partitions

procpipe = import_procpipe()
parts = {"procpipe." + part.removesuffix(".py").replace("/", ".") for part in sys.argv[2:]}
assert parts.isdisjoint(sys.modules), parts.intersection(sys.modules)
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = str(probe.getsockname()[1])
check_exit_codes(*(forked(run_step, rank, port) for rank in range(2)))
check_exit_codes(forked(ask_for_what_is_gone, port))
"""


@pytest.mark.dist
def test_a_step_runs_without_optional_parts(tmp_path):
    """It needs none of them, and an import loads none."""
    package = tmp_path / "procpipe"
    shutil.copytree(ROOT / "procpipe", package, ignore=shutil.ignore_patterns("launch"))
    shutil.copytree(ROOT / "launch", package / "launch")
    for part in OPTIONAL:
        path = package / part
        assert path.exists(), part
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    run_forked(SCRIPT, args=[str(tmp_path), *OPTIONAL]).check()
