"""Where tensors go: each task's transfers are exactly those that other tasks need."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from procpipe.plan.routes import Routes, Transfer
from procpipe.plan.schedules.gpipe import backward_plan, forward_plan, gpipe
from procpipe.plan.task import Task
from tests.cases import for_each


@st.composite
def routes_of(draw: st.DrawFn) -> Routes:
    n = draw(st.integers(1, 6))
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n)]
    skips = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return Routes(n, tuple(skips))


FULL = Routes(4, skips=((0, 2), (0, 3), (1, 3)))


@for_each(
    ("task", "expected"),
    [
        ("F1@0", ["activation 1: 0->1", "skip 1: 0->2", "skip 1: 0->3"]),
        ("F1@1", ["activation 1: 1->2", "skip 1: 1->3"]),
        ("F1@2", ["activation 1: 2->3"]),
        ("F1@3", []),
        ("R1@1", []),
        ("B1@3", ["gradient 1: 3->2", "skip gradient 1: 3->0", "skip gradient 1: 3->1"]),
        ("B1@2", ["gradient 1: 2->1", "skip gradient 1: 2->0"]),
        ("B1@0", []),
    ],
)
def test_the_transfers_after_a_task(task: str, expected: list[str]) -> None:
    assert [str(transfer) for transfer in FULL.made_by(Task.parse(task))] == expected


@given(routes=routes_of(), m=st.integers(1, 4))
def test_every_transfer_is_needed_and_sent_once(routes: Routes, m: int) -> None:
    n = routes.num_stages
    for plan in (gpipe(m, n, recompute={0}), forward_plan(m, n), backward_plan(m, n)):
        sent: list[Transfer] = []
        for j in range(n):
            for k, transfer in routes.sent(plan, j):
                sent.append(transfer)
                assert {*transfer.makers} & {*plan.cycles[k]}
                assert j in routes.sources(transfer.destination)
        taken = [transfer for task in plan.tasks() for transfer in routes.needed(task)]
        assert len(set(sent)) == len(sent), "a tensor crosses the wire once"
        assert sorted(sent) == sorted(taken)
