"""How pipelines start: several in one script, beside torch.distributed, again after a failure."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import PrefixStore

from procpipe import Stage
from procpipe.job.grid import Grid
from procpipe.job.world import World
from tests.dist.script import run_forked, run_script

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
        sys.stdout.write(f"{type(error).__name__} {error}\\n")  # in one piece
"""),
        nproc=2,
        num_forked=2,
    ).check()

    refused = "StageClosedError step() cannot run: the stage was closed"
    assert done.stdout.splitlines() == [refused] * 4
    assert done.stderr == ""
    assert done.duration_s < 60


def uses_another(bare, when):
    """Rank 1 calls one of two pipelines, rank 0 the other."""
    pipelines = []
    for k in (0, 1):
        # As from torchrun's environment: pipelines meet in the order of their first calls.
        place = k if when == "later" else (k + bare.rank) % 2
        world = World(
            Grid(bare.rank, bare.num_ranks),
            bare.devices,
            PrefixStore(str(place), bare.store),
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


def use_in_turn(bare):
    """Rank 0 is a call ahead, in another pipeline, when the other rank begins its call."""
    pipelines = []
    for k in range(2):
        world = World(
            Grid(bare.rank, bare.num_ranks),
            bare.devices,
            PrefixStore(f"{k}", bare.store),
            number=k,
            timeout_s=bare.timeout_s,
        )
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        pipelines.append(Stage(model, [1, 1], loss_fn=F.mse_loss, world=world))
    inputs = torch.ones(2, 4)
    for stage in pipelines * 2:  # in calls 1 and 2 rank 0 waits to compare its input
        stage(inputs)
    if bare.rank == 1:
        ahead = pipelines[1]._calls.pipeline
        assert ahead is not None
        while ahead.coordinator.waiting() is None:  # rank 0 has made both calls
            ahead.wires.mesh.wait(ahead.coordinator.waiting, lambda: "an order", every_s=0.01)
    for stage in pipelines:
        stage(inputs)
    for stage in pipelines:  # so that rank 0 cannot have left before the other rank looks
        stage.step(inputs, inputs)
    for stage in pipelines:
        stage.close()


def test_a_rank_may_be_ahead_in_another_pipeline(ranks):
    """Symptom: CallMismatchError, although both ranks made the same calls in the same order.

    The order of the later call was seen first, as each pipeline has its own sockets.
    """
    ranks(2).run(use_in_turn, world=False).values()


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
    """Symptom: at the first call, a report that the models differ; later, none until the timeout.

    Each pipeline has its own sockets, and both ranks waited.
    """
    outcomes = ranks(2).run(uses_another, when, world=False)

    failures = outcomes.errors()
    assert "CallMismatchError" in [failure.type for failure in failures]
    for outcome, failure in zip(outcomes, failures, strict=True):
        assert failure.type in ("CallMismatchError", "RemoteStageError"), str(outcome)
        assert words in failure.text, str(outcome)
        assert outcome.duration_s < 5.0


def test_torchrun_starts_again_after_a_failure():
    """Values of the first attempt in the launcher's store must not affect the next attempt."""
    done = run_script(
        script("""
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


def test_a_rank_that_fails_before_its_first_call_ends_the_others():
    done = run_script(
        script("""
if RANK == 0:
    stage = build()
    raise ValueError("before the first call")
build().step(x, x)
"""),
        nproc=2,
        num_forked=2,
    )

    assert done.returncode == 1
    assert "procpipe: rank 1 ends, because rank 0 failed" in done.stderr
    assert "ValueError: before the first call" in done.stderr


# -- without a launcher --------------------------------------------------------------------------


def test_pipelines_in_turn_where_rank_0_holds_the_store():
    """Rank 0's store ended with its pipeline, while another rank connected for the next one."""
    done = run_forked(
        script("""
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


#: A rank kills itself at a point of the job's start; by then all others have registered.
KILLED = """
import signal, sys, time
import torch.distributed
import procpipe.job.joining as starting, procpipe.channel.handshake as handshake
from procpipe.job.open_transports import OpenTransports
from procpipe.job.store import launchers_store
from procpipe.job.world import World

WHERE, VICTIM = sys.argv[1], int(sys.argv[2])

def die(*_, **__):
    store = launchers_store(20.0)
    names = [f"procpipe/process/{rank}" for rank in range(3)]
    while not store.check(names):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)

def build3(**options):
    layers = [nn.Linear(4, 4) for _ in range(3)]
    return Stage(nn.Sequential(*layers), chunks=2, loss_fn=F.mse_loss, timeout_s=50, **options)

options = {"balance": [1, 1, 1]}
if WHERE == "transport":
    World.transport = "shm"
if WHERE == "balance":
    options = {"balance": "size", "sample": x}
if RANK == VICTIM:
    if WHERE == "roll call":
        starting.agree_on_round = die
    if WHERE == "listening":
        starting.listen = die
    if WHERE == "connecting":
        starting.connect_to = starting.accept_peers = die
    if WHERE == "handshake":
        handshake._introduce = handshake._Caller.read = die
    if WHERE == "transport":
        OpenTransports._new = die
    if WHERE == "balance":
        import procpipe.balance.agreed
        procpipe.balance.agreed._found = World.agreed = die
stage = build3(**options)
if RANK == VICTIM and WHERE == "built":
    die()
stage.step(x, x)
"""


@pytest.mark.parametrize(
    ("where", "victim"),
    [
        *[("built", victim) for victim in (0, 1, 2)],
        *[("roll call", victim) for victim in (0, 2)],
        *[("balance", victim) for victim in (0, 1)],
        *[("listening", victim) for victim in (0, 1)],
        *[("connecting", victim) for victim in (0, 1, 2)],
        *[("handshake", victim) for victim in (0, 2)],
        *[("transport", victim) for victim in (0, 1)],
    ],
)
def test_a_rank_that_is_killed_while_the_job_starts(where, victim):
    """Symptom: the others waited for their whole timeout, and some for longer."""
    done = run_forked(script(KILLED), num_ranks=3, args=[where, str(victim)], timeout_s=40)

    assert done.duration_s < 20.0
    blamed = [line for line in done.stderr.splitlines() if f"because rank {victim}" in line]
    assert len(blamed) == 2 or "which holds the job's store" in done.stderr, str(done)
    assert done.stderr.count(" ends, because ") == 2, str(done)


def test_a_rank_that_ends_before_another_has_made_its_next_pipeline():
    """Rank 1's script ends after one pipeline; rank 0 makes a second one."""
    done = run_forked(
        script("""
stage = build(timeout_s=50)
stage.step(x, x)
stage.close()
if RANK == 0:
    build(timeout_s=50).step(x, x)
"""),
        num_ranks=2,
        timeout_s=40,
    )

    assert "rank 1 ended without a message before all ranks were connected" in done.stderr
    assert "or its script ended" in done.stderr


# -- keys ----------------------------------------------------------------------------------------

KEYED = """
import sys
from pathlib import Path

def key_file(name, content="k" * 40, mode=0o600):
    path = Path(f"{name}-{RANK}")
    path.write_text(content)
    path.chmod(mode)
    os.environ["PROCPIPE_KEY_FILE"] = str(path)
"""


def test_with_a_key_file_the_store_does_not_hold_the_key():
    done = run_forked(
        script(
            KEYED
            + """
key_file("same")
stage = build(timeout_s=30)
stage.step(x, x)
if RANK == 0:
    from procpipe.job.store import launchers_store
    store = launchers_store(5.0)
    round_ = stage._world.store._prefix
    assert store.check([round_ + "host/0", round_ + "address/1"])
    assert not store.check([round_ + "key"])
    assert store.get(round_ + "address/1").startswith(b"sealed1:")
    print("done")
stage.close()
"""
        ),
        num_ranks=2,
        timeout_s=60,
    ).check()

    assert done.stdout == "done\n"


@pytest.mark.parametrize(
    ("differs", "words"),
    [
        ('key_file("key", content=str(RANK) * 40)', "was written with another key"),
        ('RANK == 1 or key_file("key")', "was written with a key, and this rank has none"),
        ('key_file("key", mode=0o600 if RANK == 0 else 0o644)', "has mode 644"),
    ],
)
def test_ranks_with_different_keys_fail(differs, words):
    """Every rank fails soon."""
    body = f"{KEYED}\n{differs}\nbuild(timeout_s=50).step(x, x)\n"
    done = run_forked(script(body), num_ranks=2, timeout_s=40)

    assert done.returncode == 1
    assert done.duration_s < 20.0
    assert words in done.stderr
    assert done.stderr.count("ValueError: ") >= 2, str(done)


def test_ranks_of_one_local_launcher_do_not_connect_over_the_network():
    """Otherwise a process that writes to the store could make them do so, and act as a rank."""
    done = run_forked(
        script("""
import procpipe.job.joining
procpipe.job.joining.host_identity = lambda: f"host {RANK}"
build(timeout_s=50).step(x, x)
"""),
        num_ranks=2,
        timeout_s=40,
    )

    assert (
        "LOCAL_WORLD_SIZE=2 says that all ranks are on one host, but rank 1 is not" in done.stderr
    )
    assert done.duration_s < 20.0
