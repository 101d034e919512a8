"""The usual step of a recording: medians that can be checked by eye."""

from __future__ import annotations

from dataclasses import replace

import pytest

from procpipe.launch.plan.replay import usual
from procpipe.plan.schedules.gpipe import gpipe
from tests.timeline.recordings import EQUAL, UNEQUAL, hop, read_step, recording_of

#: From stage 0, which sends for 0.1 s and goes on; to stage 1, which waits for the first only.
HOPS = (
    hop("activation", 0, 0, 1, 1.0, 1.1, 0.0, 1.5),
    hop("activation", 1, 0, 1, 2.0, 2.3, 2.5, 2.5),
    hop("gradient", 1, 1, 0, 5.5, 5.5, 2.3, 6.0),
)


def test_medians_are_of_the_steps_with_the_work_of_the_last_one() -> None:
    steps = [read_step(EQUAL, number=k, hops=HOPS) for k in (0, 1, 2)]
    other = read_step(UNEQUAL, number=3, plan="another")
    evaluation = read_step("F0 0-1 \n F0 1-2", number=5, plan="forward")
    slow = read_step(EQUAL.replace("8-10", "8-11").replace("5.5-7.5", "5.5-9.5"), number=4)
    recording = recording_of(*steps, other, slow, evaluation)
    found = usual(recording)

    assert found.plan == gpipe(2, 2, recompute=())
    assert (found.num_steps, found.step_s, found.samples) == (3, 10, (8, 8))
    assert found.task_s == {("F", 0): 1, ("F", 1): 1, ("B", 0): 2, ("B", 1): 2}
    assert found.facts["schedule"] == "gpipe"


def test_the_seconds_of_messages_are_medians_of_channels() -> None:
    larger = replace(HOPS[1], num_bytes=100)
    found = usual(recording_of(read_step(EQUAL, hops=(HOPS[0], larger, HOPS[2]))))

    assert found.message_bytes == {("activation", 0, 1): 100, ("gradient", 1, 0): 64}
    assert found.machine.send_s == pytest.approx(0.2 / 164)
    assert found.machine.hop_s == pytest.approx(0.4)  # 0.5 less 0.2, and 0.5
    only_late = usual(recording_of(read_step(EQUAL, hops=HOPS[1:2])))
    assert only_late.machine.hop_s == 0


def test_the_ends_of_a_step_are_before_its_first_task_and_after_its_last() -> None:
    step = read_step("F0 0.5-1 B0 3-4 \n F0 1-2 B0 2-3", seconds=4.25)

    assert usual(recording_of(step)).machine.step_s == 0.75


def test_a_run_without_a_training_step_is_an_error() -> None:
    for step in (read_step("F0 0-1 \n F0 1-2"), read_step("B0 1-2 \n B0 0-1", call="backward")):
        with pytest.raises(ValueError, match=r"no training step of stage\.step"):
            usual(recording_of(step))
