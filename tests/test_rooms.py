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

#: Imports procpipe from a tree, in a fork of a process that has imported it from here.
IMPORT = """
import sys
import torch, torch.distributed
from torch import nn

tree, *optional = sys.argv[1:]
for name in [name for name in sys.modules if name.split(".")[0] == "procpipe"]:
    del sys.modules[name]
# An editable installation would add what the tree lacks.
sys.meta_path[:] = (f for f in sys.meta_path if not f.__module__.startswith("__editable__"))
sys.path.insert(0, tree)
import procpipe
assert procpipe.__file__.startswith(tree), procpipe.__file__
parts = {"procpipe." + part.removesuffix(".py").replace("/", ".") for part in optional}
assert parts.isdisjoint(sys.modules), parts.intersection(sys.modules)

def assert_lacks(what, call):
    try:
        call()
    except ModuleNotFoundError as error:
        assert f"No module named '{what}" in str(error), error
    else:
        raise AssertionError(f"no error without {what}")

def build_with(**options):
    return lambda: procpipe.Stage(nn.Sequential(nn.Linear(1, 1)), **options)
"""

STEP = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 1 << 16), nn.Linear(1 << 16, 1))  # too much for a token
options = {"loss_fn": nn.functional.mse_loss, "timeout_s": 60.0}
stage = procpipe.Stage(model, [1, 1], chunks=2, **options)
stage.step(torch.ones(4, 1), target=torch.zeros(4, 1))
assert all(parameter.grad.any() for parameter in stage.parameters())
assert_lacks("procpipe.timeline", stage.report)
stage.step(torch.ones(4, 1), target=torch.zeros(4, 1))  # the stage still works
stage.close()
"""

GONE = """
assert_lacks("procpipe.balance", build_with(balance="time", sample=torch.ones(2, 1)))
assert_lacks("procpipe.timeline", build_with(balance=[1], trace="run.json"))
cut = lambda: procpipe.sequential(nn.Linear(1, 1), torch.ones(1, 1))
assert_lacks("procpipe.cutting", cut)
"""

TWO_PARTITIONS = """
assert_lacks("procpipe.balance", build_with(schedule="zb-v"))
"""


@pytest.mark.dist
def test_a_step_runs_without_optional_parts(tmp_path):
    """It needs none of them, and an import loads none."""
    package = tmp_path / "procpipe"
    shutil.copytree(ROOT / "procpipe", package, ignore=shutil.ignore_patterns("launch"))
    shutil.copytree(ROOT / "launch", package / "launch")
    for path in map(package.joinpath, OPTIONAL):
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    for code, num_ranks in ((STEP, 2), (GONE, None), (TWO_PARTITIONS, 1)):
        arguments = [str(tmp_path), *OPTIONAL]
        run_forked(IMPORT + code, num_ranks=num_ranks, args=arguments).check()
