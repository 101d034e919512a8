"""Orders of rank 0 over a real mesh: plans sent once, orders followed or refused; and facts."""

from __future__ import annotations

import pytest

from procpipe.errors import CallMismatchError
from procpipe.job.grid import Grid
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.named import SCHEDULES
from procpipe.plan.verify import verify
from procpipe.run import coordinator as coordinator_module
from procpipe.run.coordinator import Coordinator, compare_facts
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
    made = [Coordinator(mesh, Grid(rank, 3)) for rank, mesh in enumerate(meshes)]
    for coordinator in made:
        coordinator.use(Routes(3), SCHEDULES["gpipe"])
    return made


def step(sizes=(2, 2), recompute=(0,), **fields):
    return Order("step", sizes=sizes, recompute=recompute, weights=(2.0, 2.0), **fields)


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


def test_another_mode_than_the_first_rank_has_is_refused(ranks):
    ranks[0].issue(step())
    words = r"rank 1 calls step\(\) in eval mode with gradients on, rank 0 in training mode"
    with pytest.raises(CallMismatchError, match=words):
        ranks[1].follow(Order("step", is_training=False))


def test_every_difference_of_every_rank_is_a_sentence():
    facts = {"balance": [1, 2], "chunks": 4, "layers": ["a", "b", "c"]}

    *sentences, advice = compare_facts(
        [
            facts,
            {"balance": [2, 1], "chunks": 4, "layers": ["a", "x", "y"]},
            {"balance": [1, 2], "layers": ["a", "b"]},
        ]
    )
    assert 'balance="time", sample=x' in advice
    assert sentences == [
        "balance is [1, 2] on rank 0 and [2, 1] on rank 1",
        "a layer of the model is (b) on rank 0 and (x) on rank 1",
        "chunks is 4 on rank 0 and None on rank 2",
        "the model has 3 layers on rank 0 and 2 on rank 2",
    ]
