"""The steps kept of a long run, and files that cannot be written; the rest is in tests/dist."""

from __future__ import annotations

import json

import pytest

from procpipe.plan.schedules.gpipe import gpipe
from procpipe.timeline.clocks import Clocks
from procpipe.timeline.collect import FIRST, LAST, Kept, Tracing, claimed
from tests.channel.meshes import make_mesh


def tracing(path):
    mesh = make_mesh(0)
    facts = {"balance": [1], "trace": True}
    return Tracing(path, mesh, Clocks(mesh), facts, lambda order: gpipe(1, 1))


def record(step):
    tasks = [["F", 0, 0, step * 10_000, step * 10_000 + 1000]]
    return {
        "step": step,
        "begin": step * 10_000,
        "end": step * 10_000 + 2000,
        "tasks": tasks,
        "plan": "abc",
    }


def test_the_first_and_the_last_steps_are_kept():
    kept = Kept()
    for k in range(1000):
        kept.add(b"%d" % k)

    first, last = list(range(FIRST)), list(range(1000 - LAST, 1000))
    assert [int(step) for step in kept] == first + last
    assert kept.num_added == 1000


def test_the_file_of_a_long_run_names_the_kept_steps(tmp_path):
    recording = tracing(tmp_path / "run.json")
    for k in range(FIRST + LAST + 3):
        recording.note(record(k), "plan m=1 n=1\nF0@0\n")
    recording.finish()
    recording.leave()
    data = json.loads((tmp_path / "run.json").read_text())["otherData"]

    assert data["kept"] == f"steps 0 to {FIRST - 1} and {FIRST + 3} to {FIRST + LAST + 2}"
    assert (data["num_steps"], data["is_closed"]) == (FIRST + LAST + 3, True)
    assert data["plans"] == {"abc": "plan m=1 n=1\nF0@0\n"}
    assert "trace" not in data
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_file_is_written_once_and_notes_whether_the_run_closed(tmp_path):
    recording = tracing(tmp_path / "run.json")
    recording.leave()
    recording.finish()
    recording.leave()

    assert not json.loads((tmp_path / "run.json").read_text())["otherData"]["is_closed"]


def test_a_file_that_cannot_be_written_is_a_message_and_no_error(tmp_path, capsys):
    recording = tracing(tmp_path / "gone" / "run.json")
    recording.note(record(0), "")
    recording.leave()

    assert "procpipe: the trace was not written: FileNotFoundError" in capsys.readouterr().err


def test_a_file_is_for_one_stage(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert claimed(None) is None
    assert claimed("run.json") == "run.json"
    with pytest.raises(ValueError, match=r"run\.json', but another stage of this process writes"):
        claimed(tmp_path / "run.json")
    assert claimed("other.json") == "other.json"
