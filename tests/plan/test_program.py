"""Programs: one order on all stages, and each receive posted one task ahead."""

from __future__ import annotations

from itertools import pairwise

from procpipe.plan.program import (
    Program,
    Receive,
    Run,
    last_additions,
    program,
)
from procpipe.plan.routes import Routes
from procpipe.plan.schedules.gpipe import backward_plan, forward_plan, gpipe, recomputed
from procpipe.plan.schedules.named import SCHEDULES
from procpipe.plan.task import Plan, Task
from tests.cases import for_each
from tests.plan.proof import programs

SIZES = [(m, n) for m in range(1, 7) for n in range(1, 7)]


def text(steps: Program) -> list[str]:
    return [str(step) for step in steps]


def lines(drawing: str) -> list[str]:
    return [line.strip() for line in drawing.strip().splitlines()]


def test_programs_do_not_depend_on_the_order_within_a_cycle() -> None:
    plan = gpipe(3, 3, recompute={0, 1})
    turned = Plan(3, 3, tuple(cycle[::-1] for cycle in plan.cycles))
    routes = Routes(3, skips=((0, 2),))
    assert programs(plan, routes) == programs(turned, routes)


def test_the_program_of_the_first_stage() -> None:
    plan = gpipe(2, 2, recompute=recomputed("except_last", 2))
    assert text(program(plan, Routes(2), 0, has_loss=True)) == lines("""
        run F0@0
        send activation 0: 0->1
        receive loss 0: 1->0
        receive gradient 1: 1->0
        run F1@0
        send activation 1: 0->1
        run B1@0
        receive gradient 0: 1->0
        run R0@0
        run B0@0
    """)


def test_the_program_of_the_last_stage() -> None:
    plan = gpipe(2, 2, recompute=recomputed("except_last", 2))
    assert text(program(plan, Routes(2), 1, has_loss=True)) == lines("""
        receive activation 0: 0->1
        receive activation 1: 0->1
        run F0@1
        run F1@1
        send loss 0: 1->0
        run B1@1
        send gradient 1: 1->0
        run R0@1
        run B0@1
        send gradient 0: 1->0
    """)


def all_skips(n: int) -> tuple[tuple[int, int], ...]:
    return tuple((a, b) for a in range(n) for b in range(a + 1, n))


@for_each(("m", "n"), SIZES)
def test_a_receive_is_posted_before_the_task_that_precedes_its_use(m: int, n: int) -> None:
    routes = Routes(n, all_skips(n))
    for steps in programs(gpipe(m, n, recompute={0}), routes):
        place = {step: index for index, step in enumerate(steps)}
        runs = [step.task for step in steps if isinstance(step, Run)]
        for before, task in pairwise(runs):
            for transfer in routes.needed(task):
                assert place[Receive(transfer)] < place[Run(before)]


def test_the_last_additions_of_every_schedule_begin_with_the_last_of_all() -> None:
    for name, schedule in SCHEDULES.items():
        for m, n in ((1, 2), (4, 2), (5, 3)):
            plan = schedule.plan(m, schedule.place(schedule.count(n), n), ())
            for stage in range(n):
                tasks, expected = plan.tasks_of(stage), dict[int, Task]()
                for task in tasks:
                    if task.kind in "BW":
                        expected.pop(task.j, None)
                        expected[task.j] = task
                found = list(last_additions(tasks).items())
                assert found == list(expected.items())[::-1], (name, m, n, stage)


def test_a_program_marks_the_last_task_that_adds_to_gradients() -> None:
    def marks(plan: Plan, stage: int) -> list[str]:
        steps = program(plan, Routes(plan.num_partitions), stage)
        return [str(step.task) for step in steps if isinstance(step, Run) and step.adds_last]

    def of(name: str) -> Plan:
        schedule = SCHEDULES[name]
        return schedule.plan(4, schedule.place(schedule.count(2), 2), ())

    assert marks(gpipe(3, 2), 0) == ["B0@0"]
    assert marks(of("1f1b"), 1) == ["B3@1"]
    assert marks(of("zb-h1"), 1) == ["W3@1"]
    assert marks(forward_plan(3, 2), 0) == []
    assert marks(backward_plan(3, 2), 0) == ["B0@0"]
