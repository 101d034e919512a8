"""How pipelines start: several in one script, beside torch.distributed, again after a failure."""

from __future__ import annotations

import pytest

from tests.dist.script import run_script

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


def test_two_pipelines_take_turns_beside_a_process_group_of_the_users():
    done = run_script(
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
if RANK == 0:
    print("done")
"""),
        nproc=2,
    ).check()

    assert done.stdout == "done\n"
    assert done.stderr == ""


def test_pipelines_used_in_different_order():
    """Not a disagreement about the model, as it was told in development."""
    done = run_script(
        script("""
pipelines = [build(), build(8)]
pipelines[RANK].step(x, x)
"""),
        nproc=2,
    )

    assert done.returncode == 1
    assert "CallMismatchError: rank 1 makes the first call of its pipeline 1" in done.stderr
    assert "DisagreementError" not in done.stderr


def test_pipelines_used_in_another_order_later():
    """Each has sockets of its own: both ranks waited for the whole timeout (in development)."""
    done = run_script(
        script("""
pipelines = [build(), build()]
for stage in pipelines:
    stage.step(x, x)
pipelines[RANK].step(x, x)
"""),
        nproc=2,
    )

    assert done.returncode == 1
    assert "rank 1 is in step() of its pipeline 1 while rank 0 is in step() of pipeline 0" in (
        done.stderr
    )
    assert "PeerLostError" not in done.stderr
    assert done.duration_s < 30


def test_a_pipeline_that_is_closed_or_never_called():
    done = run_script(
        script("""
never = build()
closed = build()
closed.close()
closed.close()
used = build()
used.step(x, x)
used.close()
for stage in (closed, used):
    try:
        stage.step(x, x)
    except Exception as error:
        print(type(error).__name__, error)
"""),
        nproc=2,
    ).check()

    refused = "StageClosedError step() cannot run: the stage was closed"
    assert done.stdout.splitlines() == [refused] * 4
    assert done.stderr == ""
    assert done.duration_s < 30


def test_torchrun_starts_again_after_a_failure():
    """What an attempt left in the launcher's store must not meet the next."""
    done = run_script(
        script("""
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
stage = build()
stage.step(x, x)
if attempt == "0" and RANK == 1:
    raise ValueError("only once")
print(f"rank {RANK} attempt {attempt}", stage.step(x, x).item() > 0)
"""),
        nproc=2,
        launcher_args=["--max-restarts=1"],
    ).check()

    lines = done.stdout.splitlines()
    assert sorted(lines) == ["rank 0 attempt 1 True", "rank 1 attempt 1 True"]


def test_a_rank_that_fails_before_its_first_call_keeps_nobody_waiting():
    done = run_script(
        script("""
if RANK == 0:
    stage = build()
    raise ValueError("before the first call")
build().step(x, x)
"""),
        nproc=2,
    )

    assert done.returncode == 1
    assert "RemoteStageError: rank 0 failed" in done.stderr
    assert "ValueError: before the first call" in done.stderr
