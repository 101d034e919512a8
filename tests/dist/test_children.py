"""Processes that a rank forks: they are not part of the pipeline, and do not hide a rank's end."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from procpipe import Stage
from procpipe.channel.link import INLINE_BYTES
from procpipe.state import save
from tests.dist.report import Failure
from tests.dist.script import run_forked

#: Every rank must have ended by then.
SOON_S = 5.0

WIDTH = 4
CHUNKS = 2

#: Samples of a mini-batch whose micro-batches are too large to travel inside a token.
BULK = 8 * CHUNKS * INLINE_BYTES // (4 * WIDTH)

#: A child that outlives its parent ends after this time.
CHILD_S = 30


def stage_of(world, faulty: nn.Module | None = None, transport: str | None = None, **options):
    world.transport = transport
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(world.num_ranks)]
    if faulty is not None:
        layers[-1] = faulty
    model = nn.Sequential(*layers)
    return Stage(
        model, [1] * len(layers), chunks=CHUNKS, loss_fn=F.mse_loss, world=world, **options
    )


def batch(size=6):
    return torch.ones(size, WIDTH), torch.zeros(size, WIDTH)


def in_child(act: Callable[[], object]) -> int:
    """Run something in a forked child; return its exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except SystemExit as end:
            os._exit(int(end.code or 0))
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# -- children that end ---------------------------------------------------------------------------

CHILDREN_END = """
    import os, sys
    import torch, torch.nn.functional as F
    from torch import nn
    from procpipe import Stage
    from procpipe.job.world import World

    hows, size, transport = sys.argv[1].split(), int(sys.argv[2]), sys.argv[3]
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    balance = [1, 1] if "RANK" in os.environ else [2]
    World.transport = transport
    stage = Stage(model, balance, chunks=2, loss_fn=F.mse_loss)

    def end(how):
        if how == "raise":
            raise ValueError("boom")
        if how == "close":
            stage.close()
        if how == "call":
            stage.step(torch.ones(size, 4), torch.zeros(size, 4))
        sys.exit(0)

    losses, codes = [], []
    for how in (None, *hows, None):
        losses.append(float(stage.step(torch.ones(size, 4), torch.zeros(size, 4))))
        if how is None:
            continue
        pid = os.fork()
        if pid == 0:
            end(how)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    if stage.rank == 0:
        print(*codes, set(losses) == {losses[0]})
"""

#: How the children end, each after a step of its own, and their exit codes.
HOWS = {"exit": 0, "raise": 1, "close": 0, "call": 1}


def check_children(hows, transport, **options):
    size = 8 * 2 * INLINE_BYTES // 16
    args = [" ".join(hows), str(size), transport]
    done = run_forked(CHILDREN_END, num_ranks=2, args=args, **options).check()

    assert done.stdout == " ".join(str(HOWS[how]) for how in hows) + " True\n"
    # Each rank's traceback has it in the source line and in the message.
    assert done.stderr.count("boom") == (4 if "raise" in hows else 0)
    assert done.stderr.count("ValueError") == (4 if "raise" in hows else 0)
    assert done.stderr.count("that one can use its stage") == (2 if "call" in hows else 0)
    num_failed = sum(HOWS[how] for how in hows)
    assert done.stderr.count("Traceback (most recent call last)") == 2 * num_failed, done.stderr


@pytest.mark.parametrize("transport", ["shm", "sockets"])
def test_a_child_of_each_rank_ends(transport):
    check_children([*HOWS], transport)


def test_a_child_frees_all_modules_at_its_end():
    check_children(["exit"], "shm", tears_down=True)


def test_a_child_cannot_use_the_stage_without_a_launcher():
    done = run_forked(CHILDREN_END, args=["call", "6", "shm"]).check()

    assert done.stdout == "1 True\n"
    assert "StageClosedError: step() cannot run: this process (" in done.stderr


class Forks(nn.Linear):
    """Forks in its second forward; the child ends there, or continues the call."""

    def __init__(self, how):
        super().__init__(WIDTH, WIDTH)
        self.how = how
        self.num_forward = 0
        self.is_child = False
        self.code = None

    def forward(self, x):
        self.num_forward += 1
        if self.num_forward == 2:
            pid = os.fork()
            self.is_child = pid == 0
            if self.is_child and self.how == "exit":
                sys.exit(7)
            if not self.is_child:
                self.code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return super().forward(x)


def forks_in_a_layer(world, how, size, transport):
    layer = Forks(how)
    stage = stage_of(world, layer, transport=transport)
    try:
        losses = [float(stage.step(*batch(size))) for _ in range(2)]
    except BaseException as error:
        if layer.is_child:
            is_refused = "that one can use its stage" in str(error)
            os._exit(9 if is_refused else 7 if isinstance(error, SystemExit) else 1)
        raise
    return losses[0] == losses[1], layer.code


@pytest.mark.parametrize(
    ("transport", "size"), [("shm", 6), ("shm", BULK), ("sockets", BULK)], ids=str
)
@pytest.mark.parametrize(("how", "code"), [("exit", 7), ("continue", 9)])
def test_a_layer_forks(ranks, how, code, transport, size):
    outcomes = ranks(2).run(forks_in_a_layer, how, size, transport)

    assert outcomes.values() == [(True, None), (True, code)]


def test_a_child_cannot_continue_a_call_without_a_launcher():
    layer = Forks("continue")
    stage = Stage(nn.Sequential(layer), [1], chunks=CHUNKS, loss_fn=F.mse_loss)
    text = ""
    try:
        stage.step(*batch())
    except BaseException as error:
        if not layer.is_child:
            raise
        text = str(error)
    if layer.is_child:
        os._exit(9 if "that one can use its stage" in text else 1)

    stage.close()
    assert layer.code == 9


class Keeps(nn.Linear):
    """Keeps its input."""

    def forward(self, x):
        self.kept = x
        return super().forward(x)


def child_releases_a_tensor(world):
    """A child drops a tensor that its parent still has: the sender must not reuse its memory."""
    layer = Keeps(WIDTH, WIDTH)
    stage = stage_of(world, layer, transport="shm")
    with torch.no_grad():
        stage(torch.ones(BULK, WIDTH))
        code = in_child(lambda: vars(layer).pop("kept", None))
        kept = vars(layer).get("kept", torch.empty(0))
        before = kept.clone()
        for value in (2.0, 3.0, 4.0):
            stage(torch.full((BULK, WIDTH), value))
    return code, torch.equal(kept, before)


def test_memory_that_a_child_releases_is_not_reused(ranks):
    assert ranks(2).run(child_releases_a_tensor).values() == [(0, True), (0, True)]


def saves_in_the_background(world, folder):
    stage = stage_of(world)
    stage.step(*batch())
    saving = save(folder, stage, asynchronous=True)
    code = in_child(saving.wait)
    saving.wait()
    return code, saving.path.is_dir()


def test_a_child_cannot_wait_for_a_save_of_its_parent(ranks, tmp_path):
    outcomes = ranks(2).run(saves_in_the_background, str(tmp_path))

    assert outcomes.values() == [(1, True)] * 2
    for outcome in outcomes:
        assert "only that one can wait for it" in outcome.output


def reads_with_workers(world):
    stage = stage_of(world)
    samples = TensorDataset(torch.ones(12, WIDTH), torch.zeros(12, WIDTH))
    losses = []
    for _ in range(2):  # the workers of the first end before those of the second start
        loader = DataLoader(samples, batch_size=6, num_workers=2)
        losses += [float(stage.step(*item)) for item in stage.batches(loader)]
    return len(losses), len(set(losses))


def test_workers_of_a_loader(ranks):
    assert ranks(2).run(reads_with_workers).values() == [(4, 1)] * 2


# -- children that outlive a rank ----------------------------------------------------------------


def by_python():
    if os.fork() == 0:
        time.sleep(CHILD_S)
        os._exit(0)


def by_native_code():
    if ctypes.CDLL(None).fork() == 0:
        ctypes.CDLL(None).sleep(CHILD_S)
        os._exit(0)


class LeavesAChild(nn.Linear):
    """Forks a child in its third forward, then kills its own process."""

    def __init__(self, fork):
        super().__init__(WIDTH, WIDTH)
        self.fork = fork
        self.num_forward = 0

    def forward(self, x):
        self.num_forward += 1
        if self.num_forward == 3:
            self.fork()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def is_killed_with_a_child(world, fork, size, transport):
    stage = stage_of(world, LeavesAChild(fork), transport=transport)
    for _ in range(3):
        stage.step(*batch(size))


@pytest.mark.parametrize(
    ("fork", "size", "transport"),
    [
        (by_python, 6, "shm"),
        (by_native_code, 6, "shm"),
        (by_python, BULK, "shm"),
        (by_python, BULK, "sockets"),
    ],
)
@pytest.mark.parametrize("n", [2, 3])
def test_a_killed_rank_is_reported_while_its_child_lives(ranks, n, fork, size, transport):
    outcomes = ranks(n).run(is_killed_with_a_child, fork, size, transport)

    for outcome in outcomes[:-1]:
        assert isinstance(outcome.error, Failure), str(outcome)
        assert outcome.error.type == "PeerLostError", str(outcome)
        assert f"rank {n - 1} ended without a message" in outcome.error.text, str(outcome)
        assert outcome.duration_s < SOON_S, str(outcome)
