"""Optional parts can be deleted: a GPipe step over shared memory needs none of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.dist.script import run_script

ROOT = Path(__file__).parents[1]

OPTIONAL = (
    *("balance", "planner", "timeline", "replicas", "sharded", "state", "hf", "cutting"),
    *("launch/run", "launch/doctor", "launch/plan", "launch/timeline"),
    *("channel/nccl.py", "channel/cuda_ipc.py"),
)

#: Runs in a process that has imported torch: for each tree a fork that imports procpipe from it,
#: and two forks of that one, which are the ranks.
SCRIPT = """
import os, socket, sys, traceback
import torch, torch.distributed
from torch import nn

OPTIONS = {
    "balance": {"balance": "time", "sample": torch.ones(2, 1)},
    "timeline": {"trace": "run.json"},
}

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

def run_step(part, rank, port):
    import procpipe
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1 << 16), nn.Linear(1 << 16, 1))  # too much for a token
    options = {"loss_fn": nn.functional.mse_loss, "timeout_s": 60.0}
    stage = procpipe.Stage(model, [1, 1], chunks=2, **options)
    stage.step(torch.ones(4, 1), target=torch.zeros(4, 1))
    assert all(parameter.grad.any() for parameter in stage.parameters())
    if part == "timeline":
        try:
            stage.report()
        except ModuleNotFoundError as error:
            assert "report() needs procpipe.timeline" in str(error)
        stage.step(torch.ones(4, 1), target=torch.zeros(4, 1))  # the stage still works
    stage.close()

def build_with(options, part):
    import procpipe
    try:
        procpipe.Stage(nn.Sequential(nn.Linear(1, 1)), **options)
    except ModuleNotFoundError as error:
        assert f" needs procpipe.{part}, which this installation of procpipe lacks" in str(error)
    else:
        raise AssertionError(f"a stage was built without {part}")

def cut_any_module():
    import procpipe
    try:
        procpipe.sequential(nn.Linear(1, 1), torch.ones(1, 1))
    except ModuleNotFoundError as error:
        assert "procpipe.sequential needs procpipe.cutting, which this" in str(error)
    else:
        raise AssertionError("a module was cut without cutting")

def build_without_balance(port):
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    build_with({"schedule": "zb-v"}, "balance")  # two partitions

def plan_a_folder(tree):
    from procpipe.launch.main import main
    with open(f"{tree}/config.json", "w") as file:
        file.write("{}")
    try:
        main(["plan", "--hf", tree, "-n", "2"])
    except SystemExit as error:
        message = str(error.__cause__)
        assert "procpipe plan --hf needs procpipe.hf, which this installation" in message, message
    else:
        raise AssertionError("a folder was planned without hf")

def check(part, tree):
    # An editable installation would add what the tree lacks.
    finders = (f for f in sys.meta_path if not f.__module__.startswith("__editable__"))
    sys.meta_path[:] = finders
    sys.path.insert(0, tree)
    import procpipe
    assert procpipe.__file__.startswith(tree), procpipe.__file__
    loaded = {name.split(".")[1] for name in sys.modules if name.startswith("procpipe.")}
    assert loaded.isdisjoint(optional), loaded
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    check_exit_codes(*(forked(run_step, part, rank, port) for rank in range(2)))
    if part in OPTIONS:
        check_exit_codes(forked(build_with, {"balance": [1]} | OPTIONS[part], part))
    if part == "hf":
        check_exit_codes(forked(plan_a_folder, tree))
    if part == "cutting":
        check_exit_codes(forked(cut_any_module))
    if part == "balance":
        check_exit_codes(forked(build_without_balance, port))
    print(part, flush=True)

optional = sys.argv[1::2]
for part, tree in zip(optional, sys.argv[2::2], strict=True):
    check_exit_codes(forked(check, part, tree))
"""


@pytest.mark.dist
def test_a_step_runs_without_each_optional_part(tmp_path):
    arguments = []
    for number, part in enumerate(OPTIONAL):
        package = tmp_path / str(number) / "procpipe"
        shutil.copytree(ROOT / "procpipe", package)
        shutil.copytree(ROOT / "launch", package / "launch")
        gone = package / part
        assert gone.exists(), part
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        arguments += [part, str(package.parent)]

    done = run_script(SCRIPT, args=arguments).check()

    assert done.stdout.split() == [*OPTIONAL]
