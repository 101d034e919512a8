"""Processes that a rank forks are not part of the pipeline, whatever they do with its stage.

That they may end at any time, or outlive their parent: tests/faults. A loader's workers:
tests/dist/test_stops.py.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import Stage
from procpipe.channel.link import INLINE_BYTES
from procpipe.state import save
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


def uses_in_children(world, folder):
    stage = stage_of(world)
    losses = [float(stage.step(*batch()))]
    saving = save(folder, stage, asynchronous=True)
    found = [
        in_child(act)
        for act in (
            lambda: stage.step(*batch()),
            saving.wait,
            stage.close,
            lambda: sys.excepthook(ValueError, ValueError("boom"), None),
        )
    ]
    saving.wait()
    losses.append(float(stage.step(*batch())))
    return losses[0] == losses[1] and saving.path.is_dir(), found


def test_children_call_wait_close_or_fail(ranks, tmp_path):
    for outcome in ranks(2).run(uses_in_children, str(tmp_path)):
        is_unchanged, (call, wait, *others) = outcome.value
        assert is_unchanged
        assert "that one can use its stage" in call
        assert "only that one can wait for it" in wait
        assert others == ["None", "None"]
        assert outcome.output == "ValueError: boom\n"
