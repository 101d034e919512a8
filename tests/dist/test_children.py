"""Processes that a rank forks are not part of the pipeline, whatever they do with its stage.

That they may end at any time, or outlive their parent: tests/faults. A loader's workers:
tests/dist/test_stops.py.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import Stage
from procpipe.channel.link import INLINE_BYTES
from procpipe.state import save
from tests.dist.script import run_forked
from tests.test_forks import in_child

WIDTH = 4
CHUNKS = 2

#: Samples of a mini-batch whose micro-batches are too large to travel inside a token.
BULK = 8 * CHUNKS * INLINE_BYTES // (4 * WIDTH)


def stage_of(world, faulty: nn.Module | None = None):
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(world.num_ranks)]
    if faulty is not None:
        layers[-1] = faulty
    model = nn.Sequential(*layers)
    return Stage(model, [1] * len(layers), chunks=CHUNKS, loss_fn=F.mse_loss, world=world)


def batch(size=6):
    return torch.ones(size, WIDTH), torch.zeros(size, WIDTH)


CHILDREN_END = """
    import os, sys
    import torch, torch.nn.functional as F
    from torch import nn
    from procpipe import Stage

    size = int(sys.argv[1])
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    stage = Stage(model, [1, 1], chunks=2, loss_fn=F.mse_loss)

    def end(how):
        if how == "raise":
            raise ValueError("boom")
        if how == "close":
            stage.close()
        if how == "call":
            stage.step(torch.ones(size, 4), torch.zeros(size, 4))
        sys.exit(0)

    losses, codes = [], []
    for how in (None, "raise", "close", "call", None):
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


def test_children_raise_close_or_call():
    done = run_forked(CHILDREN_END, num_ranks=2, args=[str(BULK)], tears_down=True).check()

    assert done.stdout == "1 0 1 True\n"
    # Each rank's traceback has it in the source line and in the message.
    assert done.stderr.count("boom") == done.stderr.count("ValueError") == 4
    assert done.stderr.count("that one can use its stage") == 2
    assert done.stderr.count("Traceback (most recent call last)") == 4, done.stderr


class Forks(nn.Linear):
    """Forks in its second forward; the child continues the call."""

    num_forward, code, is_child = 0, None, False

    def forward(self, x):
        self.num_forward += 1
        if self.num_forward == 2:
            pid = os.fork()
            self.is_child = pid == 0
            if not self.is_child:
                self.code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return super().forward(x)


def forks_in_a_layer(world, transport):
    layer = Forks(WIDTH, WIDTH)
    world.transport = transport
    stage = stage_of(world, layer)
    try:
        losses = [float(stage.step(*batch(BULK))) for _ in range(2)]
    except BaseException as error:
        if layer.is_child:
            os._exit(9 if "that one can use its stage" in str(error) else 1)
        raise
    return losses[0] == losses[1], layer.code


@pytest.mark.parametrize("transport", ["shm", "sockets"])
def test_a_child_continues_its_parents_call(ranks, transport):
    outcomes = ranks(2).run(forks_in_a_layer, transport)

    assert outcomes.values() == [(True, None), (True, 9)]


def saves_in_the_background(world, folder):
    stage = stage_of(world)
    stage.step(*batch())
    saving = save(folder, stage, asynchronous=True)
    of_child = in_child(saving.wait)
    saving.wait()
    return "only that one can wait for it" in of_child, saving.path.is_dir()


def test_a_child_cannot_wait_for_a_save_of_its_parent(ranks, tmp_path):
    outcomes = ranks(2).run(saves_in_the_background, str(tmp_path))

    assert outcomes.values() == [(True, True)] * 2
