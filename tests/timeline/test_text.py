"""Plans and simulated timelines as text: literal grids."""

from __future__ import annotations

from procpipe.plan.schedules.gpipe import forward_plan, gpipe
from procpipe.planner.costs import Costs
from procpipe.planner.simulation import simulate
from procpipe.timeline.text import render_text, render_timeline_text
from tests.cases import for_each


def drawn(drawing: str) -> str:
    return "\n".join(line[8:] for line in drawing.splitlines()[1:-1]) + "\n"


def test_a_plan_is_a_row_a_cycle_and_a_column_a_stage() -> None:
    assert render_text(gpipe(2, 2)) == drawn("""
        k   stage 0   stage 1
        0   F0
        1   F1        F0
        2             F1
        3             B1
        4   B1        B0
        5   B0
    """)


def test_a_column_is_as_wide_as_it_must_be() -> None:
    text = render_text(gpipe(11, 12))
    assert text.splitlines()[0].endswith("stage 9   stage 10   stage 11")
    assert text.splitlines()[21] == "20" + " " * 103 + "F10        F9"
    assert {line.find("F10") for line in text.splitlines()[11:21]} == set(range(5, 105, 10))


def test_a_timeline_is_a_row_a_stage_with_dots_for_idle_time() -> None:
    timeline = simulate(gpipe(2, 2), Costs.uniform(2))
    assert render_timeline_text(timeline, width=37) == drawn("""
        stage 0   F0─F1─·········B1────B0────
        stage 1   ···F0─F1─B1────B0────······
                  0 s                     9 s
                  idle 33.3%
    """)


@for_each("width", [1, 40, 80, 200])
def test_no_line_of_a_timeline_is_too_long(width: int) -> None:
    timeline = simulate(gpipe(32, 4, recompute={1}), Costs.uniform(4, forward_s=0.3))
    lines = render_timeline_text(timeline, width).splitlines()
    assert {len(line) for line in lines[:5]} == {max(width, 20)}


def test_tasks_too_short_for_their_numbers_show_their_kind_once() -> None:
    # 99 s in 33 characters: one for each F, two for each B.
    timeline = simulate(gpipe(10, 2), Costs.uniform(2, forward_s=3, backward_s=6))
    assert render_timeline_text(timeline, width=43).splitlines()[:2] == [
        "stage 0   F─────────···B9B8B7B6B5B4B3B2B1B0",
        "stage 1   ·F─────────B9B8B7B6B5B4B3B2B1B0··",
    ]


def test_a_task_shows_its_partition_if_there_is_room() -> None:
    # 10 s, of which each F has 2, in 10, 15 and 20 characters.
    timeline = simulate(forward_plan(2, 2, (0, 1, 0, 1)), Costs.uniform(4, forward_s=2))
    assert [render_timeline_text(timeline, width).splitlines()[0] for width in (20, 25, 30)] == [
        "stage 0   F0F1F0F1··",
        "stage 0   F0─F1─F0─F1─···",
        "stage 0   F0@0F1@0F0@2F1@2····",
    ]


def test_a_timeline_in_which_no_time_passes_can_be_drawn() -> None:
    timeline = simulate(gpipe(2, 2), Costs.uniform(2, forward_s=0, backward_s=0))
    assert render_timeline_text(timeline, 20).splitlines()[0] == "stage 0   ··········"
