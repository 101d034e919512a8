"""Where tensors go after a task; that each is sent once, where it is needed: test_proof.py."""

from __future__ import annotations

from procpipe.plan.routes import Routes
from procpipe.plan.task import Task
from tests.cases import for_each

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
