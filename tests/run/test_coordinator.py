"""Orders of rank 0 over a real mesh: plans verified and sent once, orders followed or refused."""

from __future__ import annotations

import threading

import pytest

from procpipe.errors import (
    CallMismatchError,
    PeerLostError,
    PlanError,
    WaitTimeoutError,
)
from procpipe.job.grid import Grid
from procpipe.plan.routes import LOSS, Routes
from procpipe.plan.schedules.named import SCHEDULES, Schedule
from procpipe.plan.task import Plan
from procpipe.plan.verify import verify
from procpipe.run import programs as programs_module
from procpipe.run.coordinator import CONTROL, Coordinator
from procpipe.run.order import BatchDetail, Order
from procpipe.run.programs import Programs
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
    coordinator.programs = Programs(Routes(3), schedule, rank)
    return coordinator


def step(sizes=(2, 2), recompute=(0,), **fields):
    return Order("step", sizes=sizes, recompute=recompute, weights=(2.0, 2.0), **fields)


def test_messages_are_kept_by_sender_and_in_order(ranks):
    for sender in (2, 1):
        for k in range(2):
            ranks[sender].send(0, b"%d of %d" % (k, sender))

    received = [ranks[0].receive(sender, "it") for sender in (1, 2) for _ in range(2)]
    assert received == [b"0 of 1", b"1 of 1", b"0 of 2", b"1 of 2"]


def test_all_ranks_get_the_result_of_rank_0(ranks):
    outcomes = {}
    threads = [
        threading.Thread(
            target=lambda rank=rank: outcomes.update({rank: ranks[rank].agree([rank], sum_up)})
        )
        for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert outcomes == {0: [0, 1, 2], 1: [0, 1, 2], 2: [0, 1, 2]}


def sum_up(values):
    return [value for of_rank in values for value in of_rank]


def test_the_error_names_the_lost_rank_and_the_awaited_message(meshes, ranks):
    meshes[1].leave()

    with pytest.raises(PeerLostError, match="waits for its part in a common call from rank 1"):
        ranks[0].agree(0, list)


def test_a_rank_that_does_not_answer_is_named(meshes, ranks):
    meshes[1].timeout_s = 0.3
    with pytest.raises(WaitTimeoutError, match=r"rank 1 has waited 0\.[3-9] s for the order"):
        ranks[1].receive(0, "the order")


def test_an_order_is_followed_as_it_was_issued(ranks):
    issued = ranks[0].issue(step())

    followed = [rank.follow(Order("step")) for rank in ranks[1:]]

    assert followed == [issued, issued]
    plans = [rank.programs.program(issued) for rank in ranks]
    assert [str(program[0]) for program in plans] == [
        "run F0@0",
        "receive activation 0: 0->1",
        "receive activation 0: 1->2",
    ]


def test_a_plan_is_verified_once_and_sent_once(ranks, monkeypatch):
    verified = []

    def note(plan, routes):
        verified.append(plan.digest)
        verify(plan, routes)

    monkeypatch.setattr(programs_module, "verify", note)
    orders = [
        ranks[0].issue(order)
        for order in (step(), step(), step((4,), ()), step(), step((1, 3)), step((4,), ()))
    ]
    for rank in ranks[1:]:
        for order in orders:
            rank.programs.program(rank.follow(Order("step")))
            assert order.plan

    assert [bool(order.plan_text) for order in orders] == [True, False, True, *[False] * 3]
    assert verified == [orders[0].plan, orders[2].plan]  # on rank 0 only


def test_the_plan_depends_on_the_call_and_its_modes(ranks):
    calls = {
        "step": step(),
        "eval step": step(recompute=(), is_training=False),
        "step without gradients": step(recompute=(), is_grad_enabled=False),
        "forward": Order("forward", sizes=(2, 2)),
        "backward": Order("backward", sizes=(2, 2), recompute=(0,)),
    }

    plans = {name: Plan.from_text(text_of(ranks[0], order)) for name, order in calls.items()}

    directions = {name: (plan.has_forward, plan.has_backward) for name, plan in plans.items()}
    assert directions == {
        "step": (True, True),
        "eval step": (True, False),
        "step without gradients": (True, False),
        "forward": (True, False),
        "backward": (False, True),
    }


def text_of(rank, order):
    return rank.programs.plan(rank.issue(order)).to_text()


@pytest.mark.parametrize(("call", "has_loss"), [("step", True), ("forward", False)])
def test_the_loss_passes_the_stages_in_a_step_only(ranks, call, has_loss):
    order = ranks[0].issue(Order(call, sizes=(2, 2), is_training=False))

    kinds = {s.transfer.payload for s in ranks[0].programs.program(order) if hasattr(s, "transfer")}
    assert (LOSS in kinds) == has_loss


def test_calls_without_a_plan_carry_their_detail(ranks):
    issued = ranks[0].issue(Order("batches", detail=BatchDetail(["tuple", 2])))

    assert issued.plan == ""
    assert ranks[2].follow(Order("batches")).detail == BatchDetail(["tuple", 2])


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
