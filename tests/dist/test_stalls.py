"""A stopped rank: reported once, with the places of all ranks; the run continues after it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import Stage
from procpipe.job.board import Board

pytestmark = pytest.mark.on_gpus

#: On a busy machine other waits may be as long, so tests select reports by their content.
STALL_S = 0.6

DEADLINE_S = 40.0

#: The rank that stops, of four: the last stage of the second replica.
ORIGIN = 3


class Stops(nn.Linear):
    """Stops its process in the second step's forward of the second micro-batch."""

    stops = False
    num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        if self.stops and self.num_calls == 4:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().forward(x)


def train(world):
    """Train in two replicas; one rank stops in the second step, in a layer."""
    world.store.set(f"pid/{world.rank}", str(os.getpid()))
    pids = [int(world.store.get(f"pid/{rank}")) for rank in range(world.num_ranks)]
    world.mesh.monitor._stall_timeout_s = STALL_S
    helper = threading.Thread(target=continue_when_reported, args=(pids.pop(ORIGIN), pids))
    if world.rank != ORIGIN:
        helper.start()
    torch.manual_seed(0)
    layers = [Stops(4, 4) for _ in range(4)]
    layers[3].stops = world.rank == ORIGIN
    stage = Stage(
        nn.Sequential(*layers),
        [2, 2],
        chunks=2,
        checkpoint="never",
        loss_fn=F.mse_loss,
        replicas=2,
        world=world,
    )
    batch = torch.ones(8, 4), torch.zeros(8, 4)
    losses = [stage.step(*batch).item() for _ in range(3)]
    if world.rank != ORIGIN:
        helper.join(DEADLINE_S)
    return losses


def continue_when_reported(pid, others):
    """Continue a stopped process once the stall is reported and all others could have done so."""
    wait_for(lambda: status_of(pid) == psutil.STATUS_STOPPED)
    wait_for(
        lambda: (
            status_of(pid) != psutil.STATUS_STOPPED  # another rank has done it
            or all(waited_s(other) > 1.3 * STALL_S for other in others)
        )
    )
    os.kill(pid, signal.SIGCONT)


def status_of(pid):
    return psutil.Process(pid).status()


def waited_s(pid):
    board = Board.of_process(pid)
    reading = board.read() if board is not None else None
    return reading.waited_s if reading is not None and reading.waits_for else 0.0


def wait_for(condition):
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not become true"
        time.sleep(0.02)


def test_a_stopped_rank_is_reported_and_continues(ranks):
    outcomes = ranks(4).run(train)

    losses = outcomes.values()
    assert all(len(set(of_rank)) == 1 and of_rank == losses[0] for of_rank in losses)
    text = "".join(outcome.output for outcome in outcomes)
    reports = re.split(r"procpipe: no progress for (\d+\.\d) s, reported by rank \d+\n", text)
    found = [
        (float(stalled_s), lines)
        for stalled_s, lines in zip(reports[1::2], reports[2::2], strict=True)
        if "is stopped" in lines
    ]
    assert found, str(outcomes)
    for stalled_s, _ in found:
        # A stall is reported again after twice the time, each time by only one rank.
        assert sum(stalled_s / 1.5 < other_s < stalled_s * 1.5 for other_s, _ in found) == 1
    lines = found[0][1]
    assert re.search(r"waiting \d+\.\d s for .+ from (stage \d.* \()?rank \d", lines), lines
    place = r"in F1, layer '3' \(Stops\), for \d+\.\d s"
    stopped = r"; its process (\d+) is stopped \(kill -CONT \1 continues it\)"
    assert re.search(rf" \(rank {ORIGIN}\): {place}{stopped}", lines), lines
