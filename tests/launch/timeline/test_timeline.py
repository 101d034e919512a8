"""``procpipe timeline``: what it prints, the figure, and all ranks' events in one file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from procpipe.launch.main import main
from procpipe.plan.schedules.gpipe import gpipe
from procpipe.planner import Costs, simulate
from procpipe.timeline.chrome import TraceFile
from procpipe.timeline.text import KIND_NAMES
from tests.timeline.recordings import EQUAL, FACTS, read_step, recording_of, replicas_step

S = 10**9


def write(rank, *steps, run=1, is_closed=True, late_s=0.0):
    """Write the file of a rank with steps of two tasks, which are as late as they are long."""
    file = TraceFile(Path(f"run.{rank}.json"), rank, run, FACTS | {"balance": [1, 1]})
    for k in steps:
        zero = k * 100 * S
        f, b = zero + rank * S, zero + (4 - 2 * rank) * S
        hop = [zero + 1 * S, zero + 1 * S + 1000]
        of_rank = {"sends": [["activation", 0, 0, 1, 64, *hop]], "takes": []}
        if rank == 1:
            taken = [zero, zero + round((1.0 - late_s) * S) + 2000]
            of_rank = {"sends": [], "takes": [["activation", 0, 0, 1, 64, *taken]]}
        file.add(
            {
                "step": k, "call": "step", "plan": "abc", "sizes": [4],
                "begin": zero, "end": zero + 6 * S,
                "tasks": [["F", 0, rank, f, f + S], ["B", 0, rank, b, b + 2 * S]],
                "sums": [], **of_rank,
            }
        )  # fmt: skip
    if is_closed:
        file.close()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The files of two ranks with steps 0, 1 and 5."""
    monkeypatch.chdir(tmp_path)
    for rank in range(2):
        write(rank, 0, 1, 5)


FILES = ("run.0.json", "run.1.json")


def test_the_last_step_is_printed_and_drawn(run, capsys):
    assert main(["timeline", *FILES]) == 0

    assert capsys.readouterr().out.splitlines() == [
        "step 5 (recorded: steps 0-1,5 of 6):",
        "",
        "stage  busy ms         bubble ms         imbalance ms        comm. etc. ms        step ms",
        "    0  3000.00  50.0%    3000.00  50.0%          0.00  0.0%           0.00  0.0%  6000.00",
        "    1  3000.00  50.0%    3000.00  50.0%          0.00  0.0%           0.00  0.0%  6000.00",
        "",
        "run.png",
    ]
    assert Path("run.png").read_bytes().startswith(b"\x89PNG")


def test_another_step_and_other_files(run, capsys):
    outputs = [word for name in ("one.svg", "one.pdf", "all.json") for word in ("-o", name)]
    assert main(["timeline", *FILES, "--step", "1", *outputs]) == 0

    assert capsys.readouterr().out.startswith("step 1 (")
    assert "<svg" in Path("one.svg").read_text()
    assert Path("one.pdf").read_bytes().startswith(b"%PDF")
    events = json.loads(Path("all.json").read_text())["traceEvents"]
    assert len({event["pid"] for event in events}) == 2
    assert not Path("run.png").exists()


def test_the_last_step_of_a_run_that_did_not_close_is_named(run, capsys):
    write(1, 0, 1, 5, is_closed=False)
    assert main(["timeline", *FILES]) == 0
    assert "it failed, or goes on, after step 5.\n" in capsys.readouterr().out


def test_clocks_that_differ_are_reported(run, capsys):
    write(1, 0, late_s=0.25)
    assert main(["timeline", *FILES]) == 0
    assert (
        "The clocks of the hosts of rank 0 and rank 1 differ: messages arrive up to 250 ms before "
        "they are sent."
    ) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words", "expected"),
    [
        (None, [], "No such file or directory: 'run.0.json'"),
        ("ours", ["--step", "3"], "step 3 was not recorded, but steps 0-1,5 of 6"),
        ("ours", ["-o", "nowhere/x.png"], "No such file or directory: 'nowhere/x.png'"),
        ("ours", ["-o", "x.doc"], "Format 'doc' is not supported"),
        ("ours", ["-o", "."], "Is a directory"),
    ],
)
def test_each_mistake_is_one_line(run, content, words, expected, capsys):
    if content is None:
        Path("run.0.json").unlink()

    assert main(["timeline", *FILES, *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("procpipe timeline: ")
    assert expected in line
    assert not Path("run.png").exists()


def test_without_matplotlib_there_are_the_numbers_and_what_to_install(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "procpipe.launch.timeline.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    assert main(["timeline", *FILES]) == 1
    printed = capsys.readouterr()
    assert "50.0%" in printed.out
    assert "pip install 'procpipe[plots]'" in printed.err


# -- the figure ---------------------------------------------------------------------------------


def boxes(axes):
    """Return start, width, row and colour of each box of a panel, those of idle time first."""
    found: list[tuple[Any, ...]] = [
        (box.get_x(), box.get_width(), round(box.get_y() + box.get_height() / 2, 2), "idle")
        for box in axes.patches
    ]
    for collection in axes.collections:
        colours = collection.get_facecolor()
        for k, path in enumerate(collection.get_paths()):
            extents = path.get_extents()
            middle = (extents.y0 + extents.y1) / 2
            box = extents.x0, extents.width, round(middle, 2), tuple(colours[k % len(colours)])
            found.append(box)
    return found


def test_each_task_has_a_box_above_and_below():
    from procpipe.launch.timeline.figure import draw, panels_of

    step = read_step(EQUAL)
    above, below = draw(panels_of(recording_of(step), step)).axes

    assert above.get_title(loc="left") == "plan: 9 s, 33% idle"
    assert below.get_title(loc="left") == "measured, step 7: 10 s, 40% idle"
    assert [label.get_text() for label in below.get_yticklabels()] == ["stage 0", "stage 1"]
    assert [box[:3] for box in boxes(above)] == [
        (0, 9, 0), (0, 9, 1),
        (0, 1, 0), (1, 1, 0), (5, 2, 0), (7, 2, 0),
        (1, 1, 1), (2, 1, 1), (3, 2, 1), (5, 2, 1),
    ]  # fmt: skip
    assert [box[:3] for box in boxes(below)] == [
        (0, 10, 0), (0, 10, 1),
        (0, 1, 0), (1, 1, 0), (6, 2, 0), (8, 2, 0),
        (1.5, 1, 1), (2.5, 1, 1), (3.5, 2, 1), (5.5, 2, 1),
    ]  # fmt: skip
    assert len({box[3] for box in boxes(below)}) == 3  # idle, forward, backward
    assert [text.get_text() for text in below.texts] == ["0", "1", "1", "0", "0", "1", "1", "0"]


def test_replicas_are_rows_with_their_sums():
    from procpipe.launch.timeline.figure import draw, panels_of

    step = replicas_step()
    above, below = draw(panels_of(recording_of(step), step)).axes

    assert [label.get_text() for label in below.get_yticklabels()] == [
        "replica 0, stage 0", "replica 0, stage 1", "replica 1, stage 0", "replica 1, stage 1",
    ]  # fmt: skip
    sums = [box[:2] for box in boxes(below)][-4:]
    assert sums == [(9.5, 3), (7, 2), (11, 1.25), (8, 1)]
    assert [text.get_text() for text in above.figure.legends[0].texts] == [
        "forward", "backward", "all-reduce", "idle",
    ]  # fmt: skip


def test_tasks_of_later_partitions_are_lighter():
    from procpipe.launch.timeline.figure import draw, simulated

    timeline = simulate(gpipe(1, 1, placement=(0, 0)), Costs.uniform(2))
    (axes,) = draw([simulated(timeline, "two partitions")]).axes

    opacities = [round(box[3][3], 2) for box in boxes(axes)[1:]]
    assert opacities == [1, 0.65, 0.65, 1]  # F0@0, F0@1, B0@1, B0@0
    assert [text.get_color() for text in axes.texts] == ["white", "black", "black", "black"]


def test_boxes_of_any_width_are_parted_by_edges_that_leave_them_visible():
    from procpipe.launch.timeline.figure import Panel, draw

    row = "F0 0-1  F1 1-2  B1 2-1000  B0 1000-2000"
    step = read_step(row, shares=((1, 1),))
    (axes,) = draw([Panel("narrow", ["stage 0"], step.rows, 2000.0)]).axes

    edges = axes.collections[0].get_linewidth()
    width_pt = 6 * 72 / 2000  # of a task of 1 s
    assert all(0 < edge < width_pt / 4 for edge in edges[:2])
    assert list(edges[2:]) == [0.4, 0.4]


def test_each_kind_of_task_has_a_colour_of_its_own():
    from procpipe.launch.timeline.figure import Panel, draw

    row = " ".join(f"{kind}0 {k}-{k + 1}" for k, kind in enumerate(KIND_NAMES))
    step = read_step(row, shares=((1,),))
    (axes,) = draw([Panel("all", ["stage 0"], step.rows, 5.0)]).axes

    assert len({box[3] for box in boxes(axes)}) == 6
    names = [text.get_text() for text in axes.figure.legends[0].texts]
    assert names == [*KIND_NAMES.values(), "idle"]
