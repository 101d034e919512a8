"""Failures during transfers on GPUs: all ranks end in time, with the same correct report.

On one GPU transfers use CUDA IPC, on two and four also NCCL. A transfer whose peer has died never
ends by itself, and a rank that waits for its device then ends with one line instead of an error.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe import Stage
from procpipe.channel import nccl
from procpipe.errors import RemoteStageError, StageClosedError
from tests.dist.report import Outcomes
from tests.dist.stages import stage_of
from tests.dist.test_failures import SOON_S, BoomError, boom, check, check_lost, kill, train
from tests.held import happens, hold

pytestmark = pytest.mark.gpu

WIDTH = 256
CHUNKS = 4


class Long(nn.Module):
    """Keeps the device busy for much longer than the host; acts after its second micro-batch.

    At that time the device has not yet begun to send the outputs of earlier layers.
    """

    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.act = act
        self.num_forward = 0

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(60):
            x = x @ self.weight
        self.num_forward += 1
        if self.act is not None and self.num_forward == 2:
            self.act()
        return x


def train_long(world: Any, origin: int, act: Any) -> None:
    n = world.num_ranks
    model = nn.Sequential(*(Long(act if j == origin else None) for j in range(n)))
    stage = Stage(model, [1] * n, chunks=CHUNKS, loss_fn=F.mse_loss, world=world)
    data = torch.ones(WIDTH * CHUNKS, WIDTH), torch.zeros(WIDTH * CHUNKS, WIDTH)
    for _ in range(2):
        stage.step(*data).item()


def leave() -> None:
    raise SystemExit


@pytest.mark.parametrize(
    ("n", "origin", "act"),
    [(2, 0, boom), (4, 3, boom), (3, 1, leave), (2, 0, kill), (2, 1, kill), (4, 2, kill)],
)
def test_a_rank_ends_while_the_device_has_queued_work(
    ranks: Any, n: int, origin: int, act: Any
) -> None:
    outcomes = ranks(n).run(train_long, origin, act)

    if act is kill:
        check_killed(outcomes, origin)
    else:
        error = "BoomError" if act is boom else "SystemExit"
        place = f"task F1@{origin} (micro-batch 1), layer '{origin}' (Long)"
        check(outcomes, origin, error, place)


def check_killed(outcomes: Outcomes, origin: int, place: str = "") -> None:
    check_lost(outcomes, origin, f"rank {origin}{place} ended without a message")


def opens_another_stage(bare: Any) -> None:
    options = {"chunks": CHUNKS, "loss_fn": F.mse_loss}
    data = torch.ones(WIDTH * CHUNKS, WIDTH), torch.zeros(WIDTH * CHUNKS, WIDTH)
    model = nn.Sequential(Long(), Long(boom if bare.rank == 1 else None))
    with (
        pytest.raises((BoomError, RemoteStageError)),
        stage_of(bare, "fails", model, [1, 1], **options) as stage,
    ):
        stage.step(*data)
    with (
        pytest.raises((StageClosedError, RemoteStageError)) as caught,
        stage_of(bare, "another", nn.Sequential(Long(), Long()), [1, 1], **options) as stage,
    ):
        stage.step(*data)
    assert "cannot open another stage: on cuda:" in str(caught.value)


@pytest.mark.gpu(2)
def test_no_stage_is_opened_where_a_failed_one_has_left_transfers(ranks: Any) -> None:
    """Rank 0 has sent what rank 1 never receives; the next wait for the device would not end."""
    ranks(2).run(opens_another_stage, world=False).values()


#: The micro-batch, of all, from which the device computes for ever: in the second mini-batch, as
#: the host that uses a kernel for the first time waits until its device has nothing to do.
HELD_FORWARD = CHUNKS + 2


class NeverEnds(nn.Linear):
    """Computes on the device for ever from some micro-batch on; is killed for a signal."""

    def __init__(self, is_waited_for: Path | None) -> None:
        super().__init__(WIDTH, WIDTH)
        self.is_waited_for = is_waited_for
        self.num_forward = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forward += 1
        if self.is_waited_for is not None and self.num_forward == HELD_FORWARD:
            hold(torch.cuda.current_stream())
            threading.Thread(target=self.is_killed, daemon=True).start()
        return super().forward(x)

    def is_killed(self) -> None:
        assert self.is_waited_for is not None
        if happens(self.is_waited_for.exists, SOON_S):
            kill()


def waits_for_what_never_ends(
    world: Any, origin: int, waiting: int, replicas: int, is_waited_for: Path
) -> None:
    """Wait for the device on one rank: for a step's loss or, if 0 is killed, in ``loss_fn``."""
    acts = is_waited_for if world.rank == origin else None
    model = nn.Sequential(NeverEnds(acts), NeverEnds(acts))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(output, target)
        if origin == 0 and model[1].num_forward == HELD_FORWARD:
            is_waited_for.touch()
            loss.item()
        return loss

    stage = Stage(
        model,
        [1, 1],
        chunks=CHUNKS,
        loss_fn=loss_fn,
        checkpoint="never",
        replicas=replicas,
        world=world,
    )
    size = CHUNKS * replicas
    data = torch.ones(size, WIDTH), torch.zeros(size, WIDTH)
    stage.step(*data).item()
    loss = stage.step(*data)
    if world.rank == waiting:
        is_waited_for.touch()
    loss.item()


@pytest.mark.parametrize(
    ("n", "origin", "waiting", "replicas"),
    [(2, 0, 1, 1), (2, 1, 0, 1), pytest.param(4, 3, 1, 2, marks=pytest.mark.gpu(4))],
)
def test_a_rank_is_killed_when_a_host_waits_for_its_device(
    ranks: Any, n: int, origin: int, waiting: int, replicas: int, tmp_path: Path
) -> None:
    """No host is elsewhere by chance: the transfer cannot begin, and the signal is given last.

    With replicas it is a sum over the last stage's two processes that never ends.
    """
    outcomes = ranks(n).run(
        waits_for_what_never_ends, origin, waiting, replicas, tmp_path / "waits"
    )

    check_killed(outcomes, origin, f" (stage {origin % 2} of replica 1)" if replicas > 1 else "")


def is_killed_as_it_connects(world: Any) -> None:
    """Rank 1 has a communicator with rank 0, which waits on its device for the first transfer."""
    if world.rank == 1:
        setattr(nccl, "_transfer", lambda *_, **__: kill())  # noqa: B010
    train(world)


@pytest.mark.gpu(2)
def test_a_rank_is_killed_as_it_connects(ranks: Any) -> None:
    outcomes = ranks(2).run(is_killed_as_it_connects)

    check_killed(outcomes, 1)
