"""Where a step's time went: literal steps, and replays that agree with simulations."""

from __future__ import annotations

import random
from dataclasses import replace

from procpipe.plan.schedules.gpipe import recomputed
from procpipe.plan.schedules.named import SCHEDULES
from procpipe.plan.task import Task
from procpipe.planner.costs import Costs, Layer, task_seconds
from procpipe.planner.simulation import simulate
from procpipe.run.statistics import Split
from procpipe.timeline.split import replay, split
from procpipe.timeline.text import split_table
from tests.cases import for_each
from tests.timeline.recordings import EQUAL, UNEQUAL, read_step, replicas_step


def test_equal_stages_lose_time_to_the_plan_and_to_messages() -> None:
    assert split(read_step(EQUAL)) == [
        Split(0, 10, busy_s=6, bubble_s=3, imbalance_s=0, communication_s=1),
        Split(1, 10, busy_s=6, bubble_s=3, imbalance_s=0, communication_s=1),
    ]


def test_unequal_stages_lose_more_than_equal_ones_would() -> None:
    # Equal stages, F of 1.5 s and B of 3 s, would be idle for 4.5 s of 13.5 s.
    assert split(read_step(UNEQUAL)) == [
        Split(0, 15, busy_s=6, bubble_s=4.5, imbalance_s=4.5, communication_s=0),
        Split(1, 15, busy_s=12, bubble_s=3, imbalance_s=0, communication_s=0),
    ]


def test_a_micro_batch_that_takes_longer_is_imbalance() -> None:
    (alone,) = split(read_step("F0 0-1 F1 1-4 B1 4-5 B0 5-6"))
    assert alone == Split(0, 6, busy_s=6, bubble_s=0, imbalance_s=0, communication_s=0)

    # Stage 0 is equal to stage 1 in sum, but B1 waits for the long F1 of stage 1.
    first, second = split(read_step("F0 0-2 F1 2-4 B1 8-9 B0 9-10 \n F0 2-3 F1 4-7 B1 7-8 B0 8-9"))
    assert first == Split(0, 10, busy_s=6, bubble_s=3, imbalance_s=1, communication_s=0)
    assert second == Split(1, 10, busy_s=6, bubble_s=3, imbalance_s=1, communication_s=0)


def test_a_single_stage_is_never_idle_by_rounding() -> None:
    """``sum`` rounds less from Python 3.12 on than a replay's additions do."""
    numbers = random.Random(0)
    for _ in range(100):
        text = " ".join(f"F{i} {i}-{i + numbers.random()}" for i in range(10))
        (alone,) = split(read_step(text))

        assert (alone.bubble_s, alone.imbalance_s) == (0, 0), text


def test_wrong_clocks_make_no_share_negative() -> None:
    # By stage 0's clock all was over after 14 s, less than its tasks can take.
    step = read_step("F0 0-1 F1 1-2 B1 8-10 B0 12-14 \n F0 1-3 F1 3-5 B1 5-9 B0 9-13")

    for shares in split(step):
        parts = (shares.busy_s, shares.bubble_s, shares.imbalance_s, shares.communication_s)
        assert min(parts) >= 0
        assert sum(parts) == shares.step_s == 14


@for_each("name", SCHEDULES)
@for_each("mode", ["except_last", "never"])
def test_a_replay_with_one_cost_a_partition_is_a_simulation(name: str, mode: str) -> None:
    for m, n in [(m, n) for m in range(1, 5) for n in range(1, 5)]:
        schedule = SCHEDULES[name]
        placement = schedule.place(schedule.count(n), n)
        p = len(placement)
        of_each = [task_seconds(1.0 + j % 3, 2.5 + j % 2, recompute_s=1.0) for j in range(p)]
        costs = Costs(tuple(Layer("", seconds) for seconds in of_each))
        plan = schedule.plan(m, placement, recomputed(mode, m))
        timeline = simulate(plan, costs)

        def took(task: Task, costs: Costs = costs) -> float:
            return costs.seconds[task.kind][task.j]

        replayed = replay([plan.tasks_of(stage) for stage in range(n)], took)
        found = {one.task: (one.start_s, one.end_s) for row in replayed for one in row}
        assert found == timeline.spans_s


def test_replicas_lose_time_to_sums_after_the_last_task() -> None:
    # The last task ends after 11 s. Each replica alone would need 9 s without messages.
    alike = {"busy_s": 6, "bubble_s": 3, "imbalance_s": 0, "communication_s": 2}
    assert split(replicas_step()) == [
        Split(stage, 12.5, **alike, all_reduce_s=1.5, replica=replica)
        for replica in range(2)
        for stage in range(2)
    ]


def test_the_slower_replica_makes_the_other_idle() -> None:
    slower = "F0 0-1 B0 2-4 \n F0 1-2 B0 2-4 \n F0 0-2 B0 6-8 \n F0 2-4 B0 4-6"
    first, _, third, _ = split(read_step(slower, shares=((4,), (4,))))

    # With equal tasks, F of 1.5 s and B of 2 s, a step would take 7 s.
    assert (first.busy_s, first.bubble_s, first.imbalance_s) == (3, 3.5, 1.5)
    assert (third.busy_s, third.bubble_s, third.imbalance_s) == (4, 3.5, 0.5)
    assert {one.communication_s for one in (first, third)} == {0}


def test_a_replica_without_samples_is_idle() -> None:
    step = read_step("F0 0-1 B0 3-5 \n F0 1-2 B0 2-3", seconds=6)
    step = replace(step, rows=(*step.rows, (), ()), shares=((4,), ()))

    assert [one.busy_s for one in split(step)] == [3, 2, 0, 0]
    for one in split(step):
        parts = one.busy_s, one.bubble_s, one.imbalance_s, one.communication_s, one.all_reduce_s
        assert sum(parts) == one.step_s == 6


def test_the_table_of_replicas_has_their_names_and_the_share_of_sums() -> None:
    lines = split_table(split(replicas_step())).splitlines()

    assert lines[0].split()[-6:] == ["etc.", "ms", "all-reduce", "ms", "step", "ms"]
    names = ["0 of replica 0", "1 of replica 0", "0 of replica 1", "1 of replica 1"]
    assert [line[: len(names[0])] for line in lines[1:]] == names
    assert lines[1].split()[-3:] == ["1500.00", "12.0%", "12500.00"]
