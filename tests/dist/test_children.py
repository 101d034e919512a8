"""Processes that a rank forks are not part of the pipeline, whatever they do with its stage.

That they may end at any time, in a layer too, or outlive their parent: tests/faults. A
loader's workers: tests/dist/test_stops.py.
"""

from __future__ import annotations

import re
import sys

import torch
import torch.nn.functional as F
from torch import nn

from procpipe import Stage
from procpipe.state import save
from tests.faults.job import held_by
from tests.forked import in_child

WIDTH = 4


def batch():
    return torch.ones(6, WIDTH), torch.zeros(6, WIDTH)


def num_sockets():
    return sum(name.startswith("socket:") for name in held_by("self"))


def uses_in_children(world, folder):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    num_before = num_sockets() - int(in_child(num_sockets))  # others may be open
    stage = Stage(model, [1, 1], chunks=2, loss_fn=F.mse_loss, world=world)
    losses = [float(stage.step(*batch()))]
    num_closed = num_sockets() - int(in_child(num_sockets)) - num_before
    saving = save(folder, stage, asynchronous=True)
    found = [
        in_child(act)
        for act in (
            lambda: stage.step(*batch()),
            saving.wait,
            stage.close,
            lambda: sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None),
        )
    ]
    saving.wait()
    losses.append(float(stage.step(*batch())))
    return losses[0] == losses[1] and saving.path.is_dir(), num_closed, found


def test_children_call_wait_close_or_fail(ranks, tmp_path):
    for outcome in ranks(2).run(uses_in_children, str(tmp_path)):
        is_unchanged, num_closed, (call, wait, *others) = outcome.value
        assert is_unchanged
        assert num_closed == 2  # data and alarms
        assert "that one can use its stage" in call
        assert "which saves it, can wait for it" in wait
        assert others == ["None", "None"]
        # Torch's hook names the rank, once another test has made a default group in this process.
        assert re.sub(r"\[rank\d\]: ", "", outcome.output) == "KeyboardInterrupt\n"
