"""What a stage holds: the drawn example, then a ledger of names against the ledger of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from procpipe.plan.program import Receive, Run, program
from procpipe.plan.routes import Routes, Transfer
from procpipe.plan.schedules.gpipe import backward_plan, forward_plan, gpipe
from procpipe.plan.task import Plan, Task
from procpipe.planner.costs import Costs, Layer
from procpipe.planner.memory import held_bytes
from procpipe.planner.simulation import simulate

COSTS = Costs((Layer("", {}, output_bytes=10), Layer("", {}, output_bytes=4)), input_bytes=100)


def test_the_example_of_the_module() -> None:
    plan = gpipe(2, 2, recompute={0})
    held = list(held_bytes(plan, COSTS, Routes(2), 1))
    assert held == [0, 10, 20, 20, 20, 24, 24, 24, 10, 10, 14, 14, 14, 0, 0]


def test_the_last_stage_holds_the_target_of_all_micro_batches() -> None:
    costs = replace(COSTS, target_bytes=1000)
    held = [list(held_bytes(forward_plan(2, 2), costs, Routes(2), stage)) for stage in (0, 1)]
    assert max(held[0]) < 1000
    assert held[1] == [2000, 2010, 2020, 2020, 2010, 2010, 2000, 0]
    assert max(held_bytes(backward_plan(2, 2), costs, Routes(2), 1)) < 1000


def test_copies_are_held_from_the_task_that_begins_their_all_reduce() -> None:
    # Stage 0 of 2 holds the inputs of 2 micro-batches of 100 bytes, and copies of 35.
    costs = replace(Costs.uniform(2, trained_bytes=35), input_bytes=100, num_replicas=2)

    held = list(held_bytes(gpipe(2, 2), costs, Routes(2), 0))

    assert max(held) == 200  # both micro-batches, before there is any copy
    assert held[-3:] == [135, 35, 0]  # in B0, after it, and at the end
    assert 135 not in held_bytes(gpipe(2, 2), replace(costs, num_replicas=1), Routes(2), 0)


def test_received_skips_that_wait_are_counted() -> None:
    costs = replace(Costs.uniform(4), skip_bytes={(0, 3): 7})
    routes = Routes(4, ((0, 3),))
    # stage 3 posts four before its first task, and then one for each that it returns
    assert simulate(forward_plan(8, 4), costs, routes).peak_bytes(3) == 4 * 7
    assert simulate(gpipe(8, 4), costs, routes).peak_bytes(3) == 8 * 7


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, Costs, Routes]:
    m, n = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    again = draw(st.sets(st.integers(0, m - 1)))
    plans = [gpipe(m, n, recompute=again), forward_plan(m, n), backward_plan(m, n, again)]
    sizes = st.integers(0, 1000)
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n)]
    skips = draw(st.lists(st.sampled_from(pairs), unique=True).map(tuple)) if pairs else ()
    costs = replace(
        Costs.uniform(n),
        partitions=tuple(
            replace(one, output_bytes=draw(sizes)) for one in Costs.uniform(n).partitions
        ),
        input_bytes=draw(sizes),
        skip_bytes={skip: draw(sizes) for skip in skips},
        target_bytes=draw(sizes),
    )
    return draw(st.sampled_from(plans)), costs, Routes(n, skips)


def named(plan: Plan, costs: Costs, routes: Routes, stage: int) -> Iterator[int]:
    """Count named entries instead of one sum, and drop all entries of a micro-batch at its end."""
    again = {task.i for task in plan.tasks_of(stage) if task.kind == "R"}
    held: dict[tuple[str, int, int], int] = {}
    n, m = plan.num_stages, plan.num_micro_batches
    target = m * costs.target_bytes if stage == n - 1 > 0 and "F" in plan.kinds else 0

    def size_of(t: Transfer) -> int:
        ends = min(t.source, t.destination), max(t.source, t.destination)
        return (
            costs.skip_bytes[ends]
            if "skip" in t.payload
            else costs.partitions[ends[0]].output_bytes
        )

    def hold_roots(i: int) -> None:
        held["output", i, stage] = costs.partitions[stage].output_bytes
        for (a, b), size in costs.skip_bytes.items():
            if a == stage:
                held["stashed", i, b] = size

    def hold_forward(i: int) -> None:
        if stage == 0:
            held["input", i, 0] = costs.input_bytes
        if plan.has_backward and i not in again:
            hold_roots(i)

    if "F" not in plan.kinds:
        for i in range(plan.num_micro_batches):
            hold_forward(i)
            for t in routes.needed(Task("F", i, stage)):
                held[t.payload, i, t.source] = size_of(t)
    yield sum(held.values()) + target
    for step in program(plan, routes, stage):
        if isinstance(step, Run):
            kind, i, _ = step.task
            if kind == "F":
                hold_forward(i)
            if kind == "R":
                hold_roots(i)
            yield sum(held.values()) + target
            if kind == "B" or not plan.has_backward:
                held = {key: size for key, size in held.items() if key[1] != i}
        if isinstance(step, Receive):
            t = step.transfer
            held[t.payload, t.i, t.source] = size_of(t)
        yield sum(held.values()) + target
    if target:
        yield 0


@given(case=cases())
def test_a_ledger_of_names_agrees_at_every_step(case: tuple[Plan, Costs, Routes]) -> None:
    plan, costs, routes = case
    timeline = simulate(plan, costs, routes)
    for stage in range(plan.num_stages):
        held = list(held_bytes(plan, costs, routes, stage))
        assert held == list(named(plan, costs, routes, stage))
        assert timeline.peak_bytes(stage) == max(held)
        assert held[-1] == 0, "a plan ends with nothing held"
