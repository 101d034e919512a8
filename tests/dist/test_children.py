"""Processes that a rank forks: they are not part of the pipeline."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from procpipe import Stage
from procpipe.channel.link import INLINE_BYTES
from procpipe.state import save
from tests.dist.script import run_forked

WIDTH = 4
CHUNKS = 2

#: Samples of a mini-batch whose micro-batches are too large to travel inside a token.
BULK = 8 * CHUNKS * INLINE_BYTES // (4 * WIDTH)


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

#: How the children end, each after a step of its own.
HOWS = "exit", "raise", "close", "call"


def test_a_child_of_each_rank_ends():
    args = [" ".join(HOWS), str(BULK), "shm"]
    done = run_forked(CHILDREN_END, num_ranks=2, args=args, tears_down=True).check()

    assert done.stdout == "0 1 0 1 True\n"
    # Each rank's traceback has it in the source line and in the message.
    assert done.stderr.count("boom") == done.stderr.count("ValueError") == 4
    assert done.stderr.count("that one can use its stage") == 2
    assert done.stderr.count("Traceback (most recent call last)") == 4, done.stderr


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


@pytest.mark.parametrize("transport", ["shm", "sockets"])
@pytest.mark.parametrize(("how", "code"), [("exit", 7), ("continue", 9)])
def test_a_layer_forks(ranks, how, code, transport):
    outcomes = ranks(2).run(forks_in_a_layer, how, BULK, transport)

    assert outcomes.values() == [(True, None), (True, code)]


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
