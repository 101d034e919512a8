"""Pipelines in scripts: several in one, in turn, beside torch.distributed, under torchrun.

That a rank may end or raise: tests/faults. Again after a failure: tests/launch/run/test_hosts.py.
"""

from __future__ import annotations

import pytest

from tests.dist.script import run_by_torchrun, run_forked

pytestmark = pytest.mark.dist

HEAD = """
import os, sys
import torch, torch.nn.functional as F
from torch import nn
from procpipe import Stage

RANK = int(os.environ["RANK"])

def build(width=4, **options):
    torch.manual_seed(0)
    layers = [nn.Linear(width, width) for _ in range(3)]
    return Stage(nn.Sequential(*layers), [1, 2], chunks=2, loss_fn=F.mse_loss, **options)

x = torch.ones(6, 4)
"""


def script(body):
    return HEAD + body


def test_pipelines_under_one_launcher():
    """Two run in turn beside a user's process group; others are closed or never called."""
    done = run_by_torchrun(
        script("""
import torch.distributed as dist
dist.init_process_group("gloo")
a, b, unused = build(), build(8), build()
y = torch.ones(6, 8)
losses = []
for _ in range(3):
    losses.append(a.step(x, x).item())
    losses.append(b.step(y, y).item())
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
same = [None, None]
dist.all_gather_object(same, losses)
assert same[0] == same[1], same
a.close()
a.close()
b.step(y, y)
b.close()
dist.barrier()
dist.destroy_process_group()
for stage in (a, b):
    try:
        stage.step(x, x)
    except Exception as error:
        sys.stdout.write(f"{type(error).__name__} {error}\\n")  # in one piece
"""),
        num_ranks=2,
    ).check()

    refused = "StageClosedError step() cannot run: the stage was closed"
    assert done.stdout.splitlines() == [refused] * 4
    assert done.stderr == ""
    assert done.duration_s < 60


def test_a_failure_in_a_pipeline_ends_the_others_of_its_ranks():
    """Symptom: rank 2 blamed rank 0, which had only left, for the failure of rank 1."""
    done = run_forked(
        script("""
from procpipe.job.world import World
layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
stages = [
    Stage(layers, [1, 1], world=World.from_environment(None, (0, other)))
    for other in (1, 2) if RANK in (0, other)
]
if RANK == 1:
    raise KeyError("origin")
for stage in stages:
    stage(x)
"""),
        num_ranks=3,
    )

    for rank in (0, 2):
        line = f"rank {rank} ends, because rank 1 failed in the script: KeyError: 'origin'"
        assert line in done.stderr, str(done)


def test_pipelines_in_turn_without_a_launcher():
    """Rank 0 holds the store until its last pipeline is closed."""
    done = run_forked(
        script("""
del os.environ["LOCAL_WORLD_SIZE"]  # so that the store is used
for _ in range(4):
    stage = build(timeout_s=30)
    stage.step(x, x)
    stage.close()
print("done")
"""),
        num_ranks=2,
        timeout_s=60,
    ).check()

    assert done.stdout.splitlines() == ["done"] * 2
    assert done.stderr == ""
