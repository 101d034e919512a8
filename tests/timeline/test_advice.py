"""Advice: each sentence with numbers that can be checked by hand, and none without a cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from procpipe.balance.blocks import blocks
from procpipe.plan.schedules.gpipe import gpipe
from procpipe.plan.task import Plan
from procpipe.planner.costs import Costs
from procpipe.planner.simulation import simulate
from procpipe.timeline.advice import advise, basis
from procpipe.timeline.recording import Hop, Ran, Step
from tests.timeline.recordings import (
    EQUAL,
    UNEQUAL,
    read_step,
    recording_of,
    replicas_recording,
    replicas_step,
)


def advice_on(step: Step, **fields: object) -> list[str]:
    return advise(recording_of(step, **fields), step, blocks)


def test_another_balance_is_advised_with_its_gain() -> None:
    # 2 layers of 3 s each on stage 0, 3 of 4 s each on stage 1: [3, 2] makes 6 and 12 s 10 and 8 s.
    # Stage 0: F 1.67 s, B 3.33 s, stage 1: F 1.33 s, B 2.67 s. The step of 15 s is 14 s then:
    #     0  F0 F1 3.33 .......... B1 7.33-10.67 B0 10.67-14
    #     1     F0 1.67-3 F1 3.33-4.67 B1 4.67-7.33 B0 7.33-10
    (first, *_) = advice_on(read_step(UNEQUAL))

    assert first == (
        "Stage 1 is 33% slower than the mean (usually 12 s busy, the mean is 9 s): balance "
        "[3, 2] would make a step 7% shorter (guessed: the layers of a stage were not timed and "
        "are taken to be alike)."
    )


def test_measured_layers_decide_where_to_cut() -> None:
    # Nearly all of stage 1 is in its last layer, which cannot be divided.
    (first, *_) = advice_on(read_step(UNEQUAL), layer_s=(1.0, 1.0, 0.1, 0.1, 9.8))

    assert first == (
        "Stage 1 is 33% slower than the mean (usually 12 s busy, the mean is 9 s), but no other "
        "balance of whole layers would make a step 2% shorter (by each layer's forward seconds)."
    )


def test_equal_stages_get_no_advice_on_balance() -> None:
    assert not any("balance" in advice for advice in advice_on(read_step(EQUAL)))


def scaled(step: Step, factor: float, number: int) -> Step:
    """Return the same step with all times multiplied by a factor."""
    tasks = tuple(
        replace(ran, start_s=factor * ran.start_s, end_s=factor * ran.end_s) for ran in step.tasks
    )
    ends_s = tuple(factor * end_s for end_s in step.ends_s)
    return replace(step, number=number, tasks=tasks, ends_s=ends_s)


@pytest.mark.parametrize("factor", [0.2, 1.0, 5.0])
def test_the_gain_of_a_change_does_not_depend_on_the_step_that_is_shown(factor: float) -> None:
    for step, facts in ((read_step(UNEQUAL), {}), (measured(8, 4), {"balance": [1] * 4})):
        usual = [replace(step, number=k) for k in range(1, 5)]
        odd = scaled(step, factor, number=5)
        recording = recording_of(*usual, odd, facts=facts)

        assert advise(recording, odd, blocks)[0] == advise(recording, usual[0], blocks)[0]
        assert basis(recording, odd) == "the medians of 5 steps like this one"


def measured(m: int, n: int, plan: Plan | None = None, **fields: Any) -> Step:
    """Return a step of equal stages, by default gpipe's; all idle time is the bubble."""
    timeline = simulate(plan or gpipe(m, n), Costs.uniform(n))
    plan = timeline.plan
    tasks = tuple(
        Ran(j, task, timeline.start_s(task), timeline.end_s(task))
        for j in range(n)
        for task in plan.tasks_of(j)
    )
    ends = (timeline.total_s,) * n
    return Step(3, "step", "abc", ((8,) * m,), (0.0,) * n, ends, tasks, (), **fields)


def test_more_micro_batches_make_the_bubble_smaller() -> None:
    # (n - 1) / (m + n - 1): 3 of 11, and 3 of 19 with twice as many.
    advice = advice_on(measured(8, 4), facts={"balance": [1] * 4})

    assert advice[0] == (
        "More micro-batches: chunks=16 would take the bubble from 27% to about 16%, if tasks of "
        "half the samples take half as long."
    )


def test_more_micro_batches_than_samples_are_not_advised() -> None:
    step = measured(8, 4)
    few = Step(**{**vars(step), "shares": ((1,) * 8,)})

    advice = advice_on(few, facts={"balance": [1] * 4})
    assert not any("micro-batches:" in sentence for sentence in advice)


def test_1f1b_is_advised_as_it_holds_fewer_micro_batches() -> None:
    advice = advice_on(measured(8, 4), facts={"balance": [1] * 4})

    assert advice[1] == (
        "schedule='1f1b' would hold at most 4 micro-batches on a stage, not 8 (2.0 times fewer), "
        "and be as fast."
    )
    assert len(advice) == 2


def test_1f1b_is_not_advised_if_it_is_the_schedule() -> None:
    facts = {"balance": [1] * 4, "schedule": "1f1b"}
    assert not any("1f1b" in advice for advice in advice_on(measured(8, 4), facts=facts))


def test_one_stage_is_not_advised_another_schedule() -> None:
    step = measured(8, 1, gpipe(8, 1, recompute=()))
    assert advice_on(step, facts={"balance": [5]}) == []


def test_communication_is_reported_with_its_longest_waits() -> None:
    hops = [
        Hop("activation", 0, 0, 1, 1 << 20, 1.0, 1.1, 0.0, 1.5),
        Hop("activation", 1, 0, 1, 1 << 20, 2.0, 2.1, 2.5, 2.5),
        Hop("gradient", 1, 1, 0, 1 << 19, 5.5, 5.5, 2.0, 6.0),
    ]
    advice = advice_on(read_step(EQUAL, hops=hops))

    assert advice[-1] == (
        "Communication and overhead are 10% of the step: 3 messages of 2.5 MiB in all. The longest "
        "waits were those of stage 0 for the gradient of stage 1: 4 s. Fewer or larger "
        "micro-batches make fewer messages."
    )


def test_tasks_that_took_far_longer_than_usual_are_reported() -> None:
    # B1 of stage 1 takes 2 s in the other steps, and 6 s in this one; all after it is 4 s later.
    slow = """
        F0 0-1 F1 1-2                        B1 10-12 B0 12-14
        F0 1.5-2.5 F1 2.5-3.5 B1 3.5-9.5 B0 9.5-11.5
    """
    steps = [read_step(EQUAL, number=k) for k in range(3)] + [read_step(slow, number=3)]
    recording = recording_of(*steps)

    assert advise(recording, steps[3], blocks)[-1] == (
        "1 of 8 tasks took more than twice as long as usual, 4 s longer in all; B1@1 on stage 1 "
        "took 6 s, not 2 s. Look for what else used its processor, or at another step."
    )
    assert not any("usual" in advice for advice in advise(recording, steps[2], blocks))


def test_sums_over_replicas_are_reported_if_nothing_hides_them() -> None:
    step = replicas_step()
    advice = advise(replicas_recording(step), step, blocks)

    assert (
        "Waits for all-reduces, after the last task, are 12% of the step. Stage 0 of replica 0 "
        "adds up most, 3.91 KiB. Larger mini-batches, or several steps in stage.no_sync() before "
        "one outside of it, need fewer all-reduces."
    ) in advice
    hidden = replace(step, sums=step.sums[1::2])
    assert not any(
        "all-reduce" in one for one in advise(replicas_recording(hidden), hidden, blocks)
    )
