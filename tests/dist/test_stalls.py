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
from procpipe.channel.link import INLINE_BYTES
from procpipe.job.board import Board
from tests.dist.devices import is_on_gpus

pytestmark = pytest.mark.on_gpus

WIDTH = 4
NUM_STEPS = 3

#: On a busy machine other waits may be as long, so tests select reports by their content.
STALL_S = 0.6

DEADLINE_S = 40.0
LOOK_EVERY_S = 0.02


class Acting(nn.Linear):
    """Acts in the second step's forward of the second micro-batch."""

    def __init__(self, act):
        super().__init__(WIDTH, WIDTH)
        self.act = act
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        if self.num_calls == 4:
            self.act()
        return super().forward(x)


def model_of(num_stages, origin, act):
    """Two layers a stage; the second one of a stage acts."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2 * num_stages)]
    model = nn.Sequential(*layers)
    acting = Acting(act)
    acting.load_state_dict(layers[2 * origin + 1].state_dict())
    model[2 * origin + 1] = acting
    return model


def train(world, origin, where, num_samples, act, replicas=1):
    """Train; one rank stops or is slow in the second step, in a layer or before the step."""
    store = world.store
    store.set(f"pid/{world.rank}", str(os.getpid()))
    pids = [int(store.get(f"pid/{rank}")) for rank in range(world.num_ranks)]

    def stop():
        os.kill(os.getpid(), signal.SIGSTOP)

    def dawdle():
        """Keep running until another rank has reported a stall."""
        begun_s = time.monotonic()
        wait_for(lambda: any(has_reported(pid, begun_s) for pid in pids if pid != os.getpid()))

    run_act = {"stop": stop, "dawdle": dawdle}[act]
    world.mesh.monitor._stall_timeout_s = STALL_S
    if world.rank != origin and act == "stop":
        helper = threading.Thread(target=continue_when_reported, args=(pids[origin], pids))
        helper.start()
    num_stages = world.num_ranks // replicas
    world.transport = "sockets" if world.num_ranks == 2 and not is_on_gpus() else None
    acts = where == "layer" and world.rank == origin
    stage = Stage(
        model_of(num_stages, origin % num_stages, run_act if acts else lambda: None),
        [2] * num_stages,
        chunks=2,
        checkpoint="never",
        loss_fn=F.mse_loss,
        replicas=replicas,
        world=world,
    )
    losses = []
    for step, (x, y) in enumerate(stage.batches(data(num_samples))):
        if step == 1 and where == "between" and world.rank == origin:
            run_act()
        losses.append(stage.step(x, y).item())
    if world.rank != origin and act == "stop":
        helper.join(DEADLINE_S)
    return losses


def continue_when_reported(pid, pids):
    """Continue a stopped process once the stall is reported and all others could have done so."""
    wait_for(lambda: status_of(pid) == psutil.STATUS_STOPPED)
    stopped_s = time.monotonic()
    others = [other for other in pids if other != pid]
    wait_for(
        lambda: (
            status_of(pid) != psutil.STATUS_STOPPED  # another rank has done it
            or (
                any(has_reported(other, stopped_s) for other in others)
                and all(waited_s(other) > 1.3 * STALL_S for other in others)
            )
        )
    )
    os.kill(pid, signal.SIGCONT)


def status_of(pid):
    return psutil.Process(pid).status()


def waited_s(pid):
    board = Board.of_process(pid)
    wait = board.read().wait if board is not None else None
    return wait.seconds if wait is not None else 0.0


def has_reported(pid, since_s):
    board = Board.of_process(pid)
    reported_s = board.read().reported_s if board is not None else None
    return reported_s is not None and time.monotonic() - reported_s > since_s


def wait_for(condition):
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not become true"
        time.sleep(LOOK_EVERY_S)


def data(num_samples):
    generator = torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS):
        yield tuple(torch.randn(2, num_samples, WIDTH, generator=generator))


def plain_losses(num_stages, origin, num_samples):
    model = model_of(num_stages, origin, lambda: None)
    return [F.mse_loss(model(x), y).item() for x, y in data(num_samples)]


def reports_of(outcomes):
    """Return all reports of all ranks: the reported seconds, and the lines."""
    text = "".join(outcome.output for outcome in outcomes)
    reports = re.split(r"procpipe: no progress for (\d+\.\d) s, reported by rank \d+\n", text)
    return list(zip(map(float, reports[1::2]), reports[2::2], strict=True))


@pytest.mark.parametrize(
    ("n", "origin", "where", "num_samples", "replicas"),
    [
        (2, 0, "between", 6, 1),
        (3, 1, "layer", INLINE_BYTES, 1),
        (4, 1, "between", 8, 2),
        (4, 3, "layer", 8, 2),
    ],
)
def test_a_stopped_rank_is_reported_and_continues(ranks, n, origin, where, num_samples, replicas):
    outcomes = ranks(n).run(train, origin, where, num_samples, "stop", replicas)
    num_stages = n // replicas

    def name_of(rank):
        replica, stage = divmod(rank, num_stages)
        return rf"stage {stage} of replica {replica} \(rank {rank}\)"

    def name_of_one(rank):
        return rf"stage {rank} \(rank {rank}\)"

    name = name_of if replicas > 1 else name_of_one
    for losses in outcomes.values():
        truth = plain_losses(num_stages, origin % num_stages, num_samples)
        assert losses == pytest.approx(truth)
    reports = [report for report in reports_of(outcomes) if "is stopped" in report[1]]
    assert reports, str(outcomes)
    for stalled_s, _ in reports:
        # A stall is reported again after twice the time, each time by only one rank.
        assert sum(stalled_s / 1.5 < other_s < stalled_s * 1.5 for other_s, _ in reports) == 1
    stalled_s, lines = reports[0]
    assert stalled_s >= STALL_S
    for rank in set(range(n)) - {origin}:
        # A GPU's host is ahead: it may wait in loss.item(), for a sum over replicas.
        place = "(in|between calls)" if is_on_gpus() and replicas > 1 else "in"
        assert re.search(rf"^  {name(rank)}: {place}", lines, re.MULTILINE), lines
    assert re.search(r"waiting \d+\.\d s for .+ from (stage \d.* \()?rank \d", lines), lines
    place = {
        "layer": rf"in F1, layer '{2 * (origin % num_stages) + 1}' \(Acting\), for \d+\.\d s",
        "between": r"between calls, in the user's code, for \d+\.\d s",
    }[where]
    stopped = r"; its process (\d+) is stopped \(kill -CONT \1 continues it\)"
    assert re.search(rf"{name(origin)}: {place}{stopped}", lines), lines
    # What waits for a device may have ended before its end is seen.
    assert "continues after" in lines or " s for its device, in transfers with" in lines


def test_a_rank_that_is_slow_in_a_layer_is_reported_with_the_layer(ranks):
    outcomes = ranks(3).run(train, 1, "layer", 6, "dawdle")

    for losses in outcomes.values():
        assert losses == pytest.approx(plain_losses(3, 1, 6))
    report = "".join(lines for _, lines in reports_of(outcomes))
    assert re.search(r"stage 1 \(rank 1\): in F1, layer '3' \(Acting\), for \d+\.\d s\n", report)
    assert "is stopped" not in report
