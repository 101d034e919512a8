"""How pipelines start: several in one script, beside torch.distributed, again after a failure."""

from __future__ import annotations

import pytest

from tests.dist.script import run_forked, run_script

pytestmark = pytest.mark.dist

HEAD = """
import os, signal, sys
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
for stage in (a, b):
    try:
        stage.step(x, x)
    except Exception as error:
        sys.stdout.write(f"{type(error).__name__} {error}\\n")  # in one piece
"""),
        nproc=2,
        num_forked=2,
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


def test_torchrun_starts_again_after_a_failure():
    """What the first attempt left in the launcher's store must not affect the next one."""
    done = run_script(
        script("""
del os.environ["LOCAL_WORLD_SIZE"]  # so that the store is used
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
stage = build()
stage.step(x, x)
if attempt == "0" and RANK == 1:
    raise ValueError("only once")
sys.stdout.write(f"rank {RANK} attempt {attempt} {stage.step(x, x).item() > 0}\\n")  # in one piece
"""),
        nproc=2,
        num_forked=4,
        launcher_args=["--max-restarts=1"],
    ).check()

    lines = done.stdout.splitlines()
    assert sorted(lines) == ["rank 0 attempt 1 True", "rank 1 attempt 1 True"]


@pytest.mark.parametrize("uses_store", [False, True])
def test_pipelines_in_turn_without_a_launcher(uses_store):
    """Rank 0 holds the store until its last pipeline is closed."""
    done = run_forked(
        script(f"""
if {uses_store}:
    del os.environ["LOCAL_WORLD_SIZE"]
for _ in range(12):
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


#: Rank 1 ends before the others have connected, while they do, or before its first call.
ENDS = """
import procpipe.job.start as start

def end(*_):
    if WHAT == "raises":
        raise ValueError("boom")
    os.kill(os.getpid(), signal.SIGKILL)

WHAT, WHERE = sys.argv[1:]
if RANK == 1:
    if WHERE == "before":
        end()
    if WHERE == "half-way":
        start.Start._welcome = end  # rank 2 has connected to rank 0 then
layers = [nn.Linear(4, 4) for _ in range(3)]
stage = Stage(nn.Sequential(*layers), [1, 1, 1], loss_fn=F.mse_loss, timeout_s=TIMEOUT_S)
if RANK == 1:
    end()
stage.step(x, x)
"""


@pytest.mark.parametrize(
    ("what", "where", "timeout_s", "story"),
    [
        ("is killed", "half-way", 50, "because rank 1 ended without a message"),
        ("raises", "half-way", 50, "because rank 1 failed in Stage: ValueError: boom"),
        ("is killed", "after", 50, "because rank 1 ended without a message"),
        ("raises", "after", 50, "because rank 1 failed in the script: ValueError: boom"),
        # Without a launcher only the time limit shows that a rank will not come.
        ("is killed", "before", 1, "WaitTimeoutError: rank 0 waited 1.0 s for "),
    ],
)
def test_a_rank_ends_while_the_job_starts(what, where, timeout_s, story):
    body = ENDS.replace("TIMEOUT_S", str(timeout_s))
    done = run_forked(script(body), num_ranks=3, args=[what, where], timeout_s=40)

    assert done.returncode != 0
    assert done.duration_s < 20.0
    assert story in done.stderr, done
