"""How a part's figures are printed as tables and written to files."""

from __future__ import annotations

import json
import sys

from benchmarks.report import Report, Table, machine, publish

TABLE = Table(
    "speed: 2 stages",
    ["", "ms", "of one"],
    [["procpipe", 12.345, 0.5], ["one process", 24.69, None], ["bare", "not run", 1]],
    [".1f", ".2f"],
    ["ms: median"],
)


def test_a_table_as_text():
    assert TABLE.to_text() == (
        "speed: 2 stages\n"
        "\n"
        "                  ms  of one\n"
        "----------------------------\n"
        "procpipe        12.3    0.50\n"
        "one process     24.7       -\n"
        "bare         not run    1.00\n"
        "\n"
        "ms: median"
    )


def test_a_table_without_rows_or_notes():
    assert Table("nothing", ["", "ms"], [], [".1f"]).to_text() == "nothing\n\n  ms\n----"


def test_a_report_is_printed_and_written(tmp_path, capsys):
    publish(Report("speed", [TABLE, TABLE], {"raw": [1.5]}, {"rounds": 3}), tmp_path / "new")

    text = (tmp_path / "new/speed.txt").read_text()
    written = json.loads((tmp_path / "new/speed.json").read_text())
    assert text.count(TABLE.to_text()) == 2
    assert text in capsys.readouterr().out
    assert (written["part"], written["figures"], written["options"]) == (
        "speed",
        {"raw": [1.5]},
        {"rounds": 3},
    )
    assert written["tables"][0]["rows"][1] == ["one process", 24.69, None]
    assert written["machine"] == machine()
    assert not (tmp_path / "new/speed.png").exists()


def test_a_report_is_drawn(tmp_path):
    publish(Report("speed", [TABLE], draw=lambda figure: figure.subplots()), tmp_path)

    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    publish(Report("speed", [TABLE], draw=lambda figure: figure.subplots()), tmp_path)

    assert "no plot" in capsys.readouterr().out
    assert not (tmp_path / "speed.png").exists()


def test_the_machine_and_the_versions_are_named():
    named = machine()

    assert named.keys() >= {"processor", "cores", "GPUs", "Python", "torch", "procpipe"}
    assert all(named.values())
