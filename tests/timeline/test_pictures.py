"""Pictures: literal grids as text; SVG documents in which every task has a box."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from procpipe.plan.schedules.gpipe import forward_plan, gpipe, recomputed
from procpipe.plan.schedules.zero_bubble import zb_v
from procpipe.plan.task import Plan
from procpipe.planner.all_reduce import Bucket
from procpipe.planner.costs import Costs
from procpipe.planner.simulation import simulate
from procpipe.timeline.palette import ALL_REDUCE, LOOKS
from procpipe.timeline.pictures import render_svg, render_text, render_timeline_text
from tests.cases import for_each

SVG = "{http://www.w3.org/2000/svg}"


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


def test_all_reduces_are_drawn_beside_the_tasks() -> None:
    half, last = Bucket(2**20, 1.0, ((0, 0.5),)), Bucket(2**21, 4.0, ((1, 1.0),))
    timeline = simulate(gpipe(2, 2), replace(Costs.uniform(2), buckets=((half,), (last,))))

    assert render_timeline_text(timeline, width=43) == drawn("""
        stage 0   F0─F1─·········B1────B0────······
        stage 1   ···F0─F1─B1────B0────============
                  0 s                          11 s
                  idle 45.5%
                  = all-reduce, 60% hidden; 18.2% of the step is that alone
    """)
    svg = render_svg(timeline)
    titles = [title.text for title in ET.fromstring(svg).iter(f"{SVG}title")]
    assert titles[-2:] == ["all-reduce of 1 MiB, 8 to 9 s", "all-reduce of 2 MiB, 7 to 11 s"]
    assert "all-reduce" in texts(svg)
    assert svg.count(ALL_REDUCE.fill) == 3  # and in the legend
    assert ALL_REDUCE.fill not in {look.fill for look in LOOKS.values()}


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
    ET.fromstring(render_svg(timeline))


@pytest.mark.parametrize("m", [1, 4])
def test_the_legend_s_words_neither_overlap_nor_leave_the_picture(m: int) -> None:
    root = ET.fromstring(render_svg(zb_v(m, 2)))
    words = ["forward", "input gradient", "weight gradient"]
    placed = [text for text in root.iter(f"{SVG}text") if (text.text or "") in words]
    placed += [text for text in root.findall(f"{SVG}text") if (text.text or "").startswith("idle")]
    starts = [float(text.attrib["x"]) for text in placed]
    ends = [x + 7 * len(text.text or "") for x, text in zip(starts, placed, strict=True)]
    assert len(placed) == 4
    assert all(end < start - 20 for end, start in zip(ends, starts[1:], strict=False))
    assert ends[-1] <= float(root.attrib["width"])


def boxes(svg: str) -> dict[str, tuple[float, float, float]]:
    """Left edge, top and width of each task's box, by the name that it shows."""
    found = {}
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        title, rect = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        assert title is not None
        assert title.text is not None
        assert rect is not None
        found[title.text] = (
            float(rect.attrib["x"]),
            float(rect.attrib["y"]),
            float(rect.attrib["width"]),
        )
    return found


def texts(svg: str) -> list[str | None]:
    return [element.text for element in ET.fromstring(svg).iter(f"{SVG}text")]


def test_each_task_of_a_plan_has_a_box_one_cycle_wide() -> None:
    assert boxes(render_svg(forward_plan(2, 2))) == {
        "F0@0: forward, cycle 0": (76, 52, 34),
        "F1@0: forward, cycle 1": (110, 52, 34),
        "F0@1: forward, cycle 1": (110, 86, 34),
        "F1@1: forward, cycle 2": (144, 86, 34),
    }


def test_each_task_of_a_timeline_has_a_box_as_wide_as_it_takes() -> None:
    timeline = simulate(gpipe(1, 2), Costs.uniform(2, forward_s=1, backward_s=2))
    assert boxes(render_svg(timeline)) == {
        "F0@0: forward, 0 to 1 s": (76, 52, 28),
        "F0@1: forward, 1 to 2 s": (104, 86, 28),
        "B0@1: backward, 2 to 4 s": (132, 86, 56),
        "B0@0: backward, 4 to 6 s": (188, 52, 56),
    }


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_the_picture_has_labels_and_a_title(mode: str) -> None:
    plan = gpipe(4, 3, recompute=recomputed(mode, 4))
    for what in (plan, simulate(plan, Costs.uniform(3, transfer_s=0.1))):
        svg = render_svg(what)
        assert len(boxes(svg)) == len(list(plan.tasks()))
        words = texts(svg)
        assert {"stage 0", "stage 1", "stage 2", "forward", "backward"} <= set(words)
        assert ("recompute" in words) == (mode != "never")
        root = ET.fromstring(svg)
        title = root.findtext(f"{SVG}title")
        assert title is not None
        assert title.startswith("4 micro-batches on 3 stages, ")
        assert title.endswith(" idle")


def test_the_idle_share_of_a_plan_counts_its_empty_places() -> None:
    assert "idle 50.0%" in texts(render_svg(forward_plan(1, 2)))
    assert "idle 0.0%" in texts(render_svg(forward_plan(3, 1)))
    assert "1 micro-batch on 2 stages, 50.0% idle" in texts(render_svg(forward_plan(1, 2)))
    assert "1 micro-batch on 1 stage, 0.0% idle" in texts(render_svg(Plan(1, 1, ())))


def test_nothing_lies_outside_the_picture() -> None:
    plan = gpipe(9, 5, recompute={3})
    for what in (plan, simulate(plan, Costs.uniform(5, forward_s=1e-4, backward_s=3e-4))):
        root = ET.fromstring(render_svg(what))
        for element in root.iter():
            right = float(element.get("x", 0)) + float(element.get("width", 0))
            low = float(element.get("y", 0)) + float(element.get("height", 0))
            assert 0 <= right <= float(root.attrib["width"]) + 0.01
            assert 0 <= low <= float(root.attrib["height"])
