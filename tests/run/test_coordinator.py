"""Orders of rank 0 over a real mesh: plans verified and sent once, orders followed or refused."""

from __future__ import annotations

import pytest

from procpipe.errors import (
    CallMismatchError,
    PeerLostError,
    PlanError,
)
from procpipe.job.grid import Grid
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.named import SCHEDULES, Schedule
from procpipe.plan.task import Plan
from procpipe.plan.verify import verify
from procpipe.run import coordinator as coordinator_module
from procpipe.run.coordinator import CONTROL, Coordinator
from procpipe.run.order import Order
from tests.channel.meshes import make_meshes


@pytest.fixture
def meshes():
    """Three connected ranks."""
    made = make_meshes(3, timeout_s=2.0)
    yield made
    for mesh in made:
        mesh.close()


@pytest.fixture
def ranks(meshes):
    return [coordinator_of(mesh, rank, SCHEDULES["gpipe"]) for rank, mesh in enumerate(meshes)]


def coordinator_of(mesh, rank, schedule):
    coordinator = Coordinator(mesh, Grid(rank, 3))
    coordinator.use(Routes(3), schedule)
    return coordinator


def step(sizes=(2, 2), recompute=(0,), **fields):
    return Order("step", sizes=sizes, recompute=recompute, weights=(2.0, 2.0), **fields)


def test_the_error_names_the_lost_rank_and_the_awaited_message(meshes, ranks):
    meshes[1].leave()

    with pytest.raises(PeerLostError, match="waits for its part in a common call from rank 1"):
        ranks[0].agree(0, list)


def test_a_plan_is_verified_once_and_sent_once(ranks, monkeypatch):
    verified = []

    def note(plan, routes):
        verified.append(plan.digest)
        verify(plan, routes)

    monkeypatch.setattr(coordinator_module, "verify", note)
    orders = [
        ranks[0].issue(order)
        for order in (step(), step(), step((4,), ()), step(), step((1, 3)), step((4,), ()))
    ]
    for rank in ranks[1:]:
        for order in orders:
            rank.program(rank.follow(Order("step")))
            assert order.plan

    assert [bool(order.plan_text) for order in orders] == [True, False, True, *[False] * 3]
    assert verified == [orders[0].plan, orders[2].plan]  # on rank 0 only


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (Order("forward"), "rank 1 is in forward() while rank 0 is in step()"),
        (
            Order("step", is_training=False),
            "rank 1 calls step() in eval mode with gradients on,",
        ),
        (Order("step", is_grad_enabled=False), "rank 0 in training mode with gradients on"),
    ],
)
def test_a_call_that_differs_from_rank_0s_is_refused(ranks, ours, words):
    ranks[0].issue(step())

    with pytest.raises(CallMismatchError) as caught:
        ranks[1].follow(ours)

    assert words in str(caught.value)


def test_a_plan_that_cannot_run_is_not_issued(meshes):
    broken = Plan.from_text("plan m=1 n=3\nF0@0\nF0@2\nF0@1\n")
    schedule = Schedule("broken", lambda *_: broken)
    coordinator = coordinator_of(meshes[0], 0, schedule)
    received = []
    meshes[1].on(0, CONTROL, lambda *frame: received.append(frame))

    with pytest.raises(PlanError):
        coordinator.issue(Order("step", sizes=(2,)))
    meshes[1].poll()

    assert received == []
