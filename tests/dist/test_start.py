"""How pipelines start: several in one script, beside torch.distributed, again after a failure."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import PrefixStore

from procpipe import Stage
from procpipe.run.world import World
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


def uses_another(bare, when):
    """Rank 1 calls another of two pipelines than rank 0 does."""
    pipelines = []
    for k in (0, 1):
        # As from torchrun's environment: pipelines meet in the order of their first calls.
        place = k if when == "later" else (k + bare.rank) % 2
        world = World(
            rank=bare.rank,
            num_ranks=bare.num_ranks,
            store=PrefixStore(str(place), bare.store),
            device=bare.device,
            number=k,
            timeout_s=bare.timeout_s,
        )
        model = nn.Sequential(*[nn.Linear(4 + k, 4 + k) for _ in range(2)])
        pipelines.append(Stage(model, [1, 1], loss_fn=F.mse_loss, world=world))
    try:
        if when == "later":
            for k, stage in enumerate(pipelines):
                stage.step(torch.ones(2, 4 + k), torch.ones(2, 4 + k))
        pipelines[bare.rank].step(torch.ones(2, 4 + bare.rank), torch.ones(2, 4 + bare.rank))
    except BaseException as error:
        for stage in pipelines:  # as at the end of a script
            stage._calls.fail("the script", error)
        raise


@pytest.mark.parametrize(
    ("when", "words"),
    [
        (
            "first",
            "rank 1 makes the first call of its pipeline 1 while rank 0 makes that of pipeli",
        ),
        ("later", "rank 1 is in step() of its pipeline 1 while rank 0 is in step() of pipeline 0"),
    ],
)
def test_pipelines_used_in_different_order(ranks, when, words):
    """Told as a disagreement about the model, if first; for the whole timeout not at all, if later.

    Each pipeline has sockets of its own, and both ranks waited.
    """
    outcomes = ranks(2).run(uses_another, when, world=False)

    failures = outcomes.errors()
    assert "CallMismatchError" in [failure.type for failure in failures]
    for outcome, failure in zip(outcomes, failures, strict=True):
        assert failure.type in ("CallMismatchError", "RemoteStageError"), str(outcome)
        assert words in failure.text, str(outcome)
        assert outcome.duration_s < 5.0


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
    assert "procpipe: rank 1 ends, because rank 0 failed" in done.stderr
    assert "ValueError: before the first call" in done.stderr
