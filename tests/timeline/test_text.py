"""Plans as text: literal grids."""

from __future__ import annotations

from procpipe.plan.schedules.gpipe import gpipe
from procpipe.timeline.text import render_text


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
