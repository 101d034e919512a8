"""How the tests are distributed to processes, and the summary of all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from _pytest.config import get_config

from tests.at_once import AtOnce, is_taken_here, is_wanted, num_never_run, worst_of


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], True),
        (["-m", "not dist", "-k", "plan"], True),
        (["tests"], False),
        (["tests/plan", "-v"], False),
        (["-x"], False),
        (["--maxfail=3"], False),
        (["-s"], False),
        (["--pdb"], False),
        (["--trace"], False),
        (["--collect-only"], False),
        (["--last-failed"], False),
        (["--failed-first"], False),
        (["--stepwise"], False),
        (["--junitxml=results.xml"], False),
        (["--gpus=share"], False),
    ],
)
def test_only_runs_of_all_tests_without_pauses_are_divided(words, expected, pytestconfig):
    config = get_config()
    config.parse(["-c", str(pytestconfig.inipath), f"--rootdir={pytestconfig.rootpath}", *words])

    assert is_wanted(config) == expected


def test_each_file_is_taken_by_one_process(tmp_path):
    paths = [Path("tests/test_a.py"), Path("tests/other/test_a.py")]

    assert [is_taken_here(tmp_path, path) for path in paths] == [True, True]
    assert [is_taken_here(tmp_path, path) for path in paths] == [False, False]


def test_files_with_processes_come_first_and_no_file_is_divided():
    def item(name, is_dist):
        return SimpleNamespace(path=name[0], name=name, get_closest_marker=lambda _: is_dist)

    items = [item("a1", False), item("b1", False), item("b2", True), item("c1", False)]
    AtOnce().pytest_collection_modifyitems(items)

    assert [item.name for item in items] == ["b1", "b2", "a1", "c1"]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], 0),
        ([0, 1], 1),
        ([1, -9], 9),
        ([2, 0], 2),
    ],
)
def test_one_process_that_fails_is_enough(codes, expected):
    assert worst_of(codes) == expected


def test_tests_that_no_process_has_run_are_counted():
    parts = [{"num_collected": 7, "num_run": 4}, {"num_collected": 7, "num_run": 2}]

    assert num_never_run(parts) == 1
    assert num_never_run([]) == 0
