"""The one command: ``python -m benchmarks PART``."""

from __future__ import annotations

import sys
import types

import pytest

from benchmarks import __main__ as command
from benchmarks.report import Report, Table
from tests.cases import for_each


@pytest.fixture
def parts(monkeypatch):
    """Replace all parts by two, and return the options that they are run with."""
    ran = []

    def make(name):
        module = types.ModuleType(f"benchmarks.{name}", f"Measures {name}.")

        def run(options):
            ran.append((name, options.rounds))
            return Report(name, [Table(name, [""], [], [])])

        def configure(parser):
            parser.add_argument("--rounds", type=int, default=3)

        vars(module).update(configure=configure, run=run)
        monkeypatch.setitem(sys.modules, f"benchmarks.{name}", module)

    make("one")
    make("two")
    monkeypatch.setattr(command, "QUICK", ["one", "two"])
    monkeypatch.setattr(command, "PUBLISHED", [])
    monkeypatch.setattr(command, "GROUPS", {"all": ["one", "two"]})
    return ran


def test_one_part_with_its_options(parts, tmp_path):
    assert command.main(["two", "--rounds", "5", "--out", str(tmp_path)]) == 0

    assert parts == [("two", 5)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["two.json", "two.txt"]


def test_all_parts_run_with_their_default_options(parts, tmp_path):
    assert command.main(["all", "--out", str(tmp_path)]) == 0

    assert parts == [("one", 3), ("two", 3)]
    assert (tmp_path / "one.json").exists()
    assert (tmp_path / "two.json").exists()


def test_a_part_that_fails_does_not_end_the_others(parts, tmp_path, capsys, monkeypatch):
    def fail(options):
        raise RuntimeError("a process failed")

    monkeypatch.setattr(sys.modules["benchmarks.one"], "run", fail)

    assert command.main(["all", "--out", str(tmp_path)]) == 1
    assert parts == [("two", 3)]
    assert capsys.readouterr().err == "one: a process failed\nfailed: one\n"


def test_an_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.main(["sped"])

    assert "throughput" in capsys.readouterr().err


@for_each("part", [*command.QUICK, *command.PUBLISHED])
def test_every_part_has_a_help_text(part, capsys):
    with pytest.raises(SystemExit, match="0"):
        command.main([part, "--help"])

    assert "--out" in capsys.readouterr().out
