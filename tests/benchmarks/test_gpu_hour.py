"""``python -m benchmarks gpu``: mostly the parts that need no GPU."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

import pytest

from benchmarks.gpu import processes
from benchmarks.gpu.plugin import importance
from benchmarks.gpu.processes import MARK, ROOT, run_all
from benchmarks.gpu.results import RESULTS, append, read
from benchmarks.gpu.steps import LEAST_S, allowance_s, steps_for
from benchmarks.gpu.tables import markdown, tables_of
from tests.dist.script import run_script

# -- results --------------------------------------------------------------------------------------


def test_records_are_read_as_they_were_added(tmp_path):
    file = tmp_path / "results.jsonl"
    assert read(file) == []

    append(file, {"kind": "run", "emulated": False})
    append(file, {"kind": "test", "why": "ä\n"})

    assert read(file) == [{"kind": "run", "emulated": False}, {"kind": "test", "why": "ä\n"}]


@pytest.mark.parametrize("length", range(1, 20))
def test_a_line_that_was_cut_off_is_left_out(tmp_path, length):
    file = tmp_path / "results.jsonl"
    append(file, {"kind": "run"})
    with file.open("a") as stream:
        stream.write('{"kind": "parity" }'[:length])

    assert read(file)[:1] == [{"kind": "run"}]
    assert len(read(file)) == (2 if length == 19 else 1)


# -- time -----------------------------------------------------------------------------------------


def test_a_step_may_take_its_part_of_what_is_left():
    assert allowance_s(100.0, [1, 1, 2]) == 25.0
    assert allowance_s(75.0, [1, 2]) == 25.0
    assert allowance_s(50.0, [2]) == 50.0


def test_a_step_has_the_time_to_start_while_there_is_any():
    assert allowance_s(60.0, [1, 9]) == LEAST_S
    assert allowance_s(9.0, [1, 9]) == 9.0


def test_all_later_steps_share_the_time_that_a_step_saves():
    assert allowance_s(99.0, [1, 2]) == 33.0  # the step before took 1 s of its 25 s


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_steps_that_use_all_of_their_time_never_use_more_than_there_is(share):
    weights, left_s = [30.0, 130.0, 40.0, 25.0], 480.0
    for k in range(len(weights)):
        allowed_s = allowance_s(left_s, weights[k:])
        assert 0.0 < allowed_s <= left_s
        left_s -= share * allowed_s
    assert (left_s == 0.0) == (share == 1.0)


# -- steps ----------------------------------------------------------------------------------------


def names(steps):
    return " ".join(step.name for step in steps if not step.why_not)


def test_one_gpu_without_a_new_nccl():
    steps = steps_for(1)

    assert names(steps) == (
        "versions tests parity shared-2 shared-4 shared-8 host ipc-messages gpt trace"
    )
    assert {step.name for step in steps if step.why_not} == {
        "nccl-shared",
        "nccl-messages",
        "gpt-peers",
    }
    assert all("--nccl PATH" in step.why_not for step in steps if step.why_not)


def test_one_gpu_with_a_new_nccl():
    steps = {step.name: step for step in steps_for(1, shares_by_nccl=True)}

    assert not any(step.why_not for step in steps.values())
    by_nccl = {name for name, step in steps.items() if step.with_nccl}
    assert by_nccl == {"nccl-shared", "nccl-messages", "gpt-peers"}
    assert steps["nccl-shared"].options["transport"] == "nccl"
    assert steps["nccl-shared"].options["devices"] == ["cuda:0", "cuda:0"]


def test_four_gpus():
    steps = {step.name: step for step in steps_for(4)}

    assert names(steps.values()) == (
        "versions tests parity shared-2 shared-4 shared-8 nccl-2 nccl-4 host ipc-messages "
        "nccl-messages nccl-blocks gpt gpt-peers trace"
    )
    assert steps["nccl-4"].options["devices"] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert steps["nccl-messages"].options["devices"] == ["cuda:0", "cuda:1"]
    assert steps["nccl-2"].options["transport"] is None
    assert not any(step.with_nccl for step in steps.values())


def test_without_pytest_the_step_of_tests_has_a_reason():
    (tests,) = (step for step in steps_for(1, why_no_tests="no pytest") if step.why_not[:2] == "no")

    assert (tests.name, tests.why_not) == ("tests", "no pytest")


def test_sizes_for_an_emulated_gpu_are_tiny():
    full, tiny = (
        {step.name: step.options for step in steps_for(1, is_tiny=is_tiny)}
        for is_tiny in (False, True)
    )

    assert full["gpt"]["sizes"] == [32768, 24, 1792, 14, 1024]
    assert tiny["gpt"]["sizes"] == [64, 2, 16, 2, 8]
    assert full.keys() == tiny.keys()
    assert all(full[name].keys() == tiny[name].keys() for name in full)


def test_tests_of_parity_run_first():
    ids = [
        "tests/state/test_one_process.py::test_a",
        "tests/dist/test_gpu.py::test_a_killed_rank",
        "tests/dist/test_gpu.py::test_large_messages_over_nccl",
        "tests/dist/test_gpu.py::test_parity_on_gpus[1]",
        "tests/timeline/test_recorder.py::test_b",
    ]

    assert sorted(ids, key=importance) == [ids[k] for k in (3, 2, 1, 0, 4)]


# -- processes ------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a line of the shell on two ranks; return how it ended, the seconds, and the log."""
    monkeypatch.setattr(processes, "_LATE_S", 0.0)
    monkeypatch.setattr(processes, "_GRACE_S", 0.1)

    def run(line, limit_s=10.0):
        log = tmp_path / "logs.txt"
        commands = [["/bin/sh", "-c", line, "sh", str(rank)] for rank in range(2)]
        ended = run_all(commands, {MARK: str(tmp_path)}, limit_s, log)
        assert processes._marked(str(tmp_path)) == []
        return *ended, log.read_text()

    return run


@pytest.mark.dist
def test_ranks_that_succeed_are_done(run):
    outcome, _, log = run('echo "I am $1"')

    assert outcome == "done"
    assert sorted(log.splitlines()) == ["I am 0", "I am 1"]


@pytest.mark.dist
def test_a_rank_that_is_killed_is_named(run):
    assert run("if [ $1 = 1 ]; then kill -KILL $$; fi; sleep 100")[0] == "failed: rank 1: signal 9"


@pytest.mark.dist
def test_ranks_that_hang_are_killed_with_their_children(run):
    outcome, seconds, _ = run("setsid sleep 100 & sleep 100", limit_s=0.5)

    assert outcome == "cut off"
    assert seconds < 50.0


@pytest.mark.dist
def test_ranks_that_wait_for_a_failed_rank_are_killed(run):
    outcome, *_ = run("if [ $1 = 0 ]; then sleep 100; fi; exit 3")

    assert outcome == "failed: rank 1: exit code 3"


@pytest.mark.dist
def test_the_error_is_recorded_by_the_rank_where_it_began(tmp_path):
    results, log = tmp_path / "results.jsonl", tmp_path / "logs.txt"
    words = ["math:factorial", "step", "{}", str(time.time() + 60.0), "0", "1", "0"]
    command = [sys.executable, "-m", "benchmarks.gpu.child", *words]

    outcome, _ = run_all([command], {MARK: str(tmp_path), RESULTS: str(results)}, 60.0, log)

    assert outcome == "failed: rank 0: exit code 1"
    (record,) = read(results)
    assert (record["step"], record["kind"]) == ("step", "error")
    assert record["error"].startswith("rank 0: TypeError: ")
    assert "TypeError: " in log.read_text()


# -- tables ---------------------------------------------------------------------------------------

RECORDS: list[dict[str, Any]] = [
    {"kind": "run", "emulated": False, "tiny": False},
    {"kind": "begin", "name": "parity", "limit_s": 40.0},
    {
        "step": "parity",
        "kind": "parity",
        "name": "CUDA IPC: gpipe, never",
        "cells": {"loss": 0.0, "output": 5.55e-17, "rows": 4096, "ahead": None},
        "note": "in turn",
    },
    {
        "step": "parity",
        "kind": "parity",
        "name": "CUDA IPC: gpipe, never",
        "cells": {"ahead": "25%"},
        "note": "in turn",
    },
    {"kind": "end", "name": "parity", "outcome": "failed: rank 1: ValueError: no", "seconds": 12.2},
    {"kind": "begin", "name": "gpt", "limit_s": 70.0},
    {"kind": "end", "name": "trace", "outcome": "not run: 2 s were left for it", "seconds": None},
]


def test_tables_as_text():
    steps, parity = tables_of(RECORDS)

    assert steps.to_text() == (
        "what was run\n"
        "\n"
        "                           outcome   s  of at most\n"
        "--------------------------------------------------\n"
        "parity                      failed  12          40\n"
        "gpt     cut off with the whole run   -          70\n"
        "trace                      not run   -           -\n"
        "\n"
        "parity failed: rank 1: ValueError: no\n"
        "trace not run: 2 s were left for it"
    )
    assert parity.to_text() == (
        "parity: largest difference to the plain model on the same GPU, float64\n"
        "\n"
        "                        loss    output  rows  ahead\n"
        "---------------------------------------------------\n"
        "CUDA IPC: gpipe, never     0  5.55e-17  4096    25%\n"
        "\n"
        "in turn\n"
        "in three steps, of batches that cannot be split evenly"
    )


def test_every_table_of_an_emulated_run_is_marked():
    records = [{"kind": "run", "emulated": True}, *RECORDS[1:]]

    tables = tables_of(records)
    text = markdown(records)

    assert all(table.title.startswith("EMULATED, no GPU: ") for table in tables)
    assert all("not those of any GPU" in table.notes[-1] for table in tables)
    assert text.startswith("## On emulated GPUs: no time here is a GPU's\n")
    assert text.count("```text\nEMULATED") == len(tables)
    assert "EMULATED" not in markdown(RECORDS)


def test_a_run_without_findings_has_a_table():
    (steps,) = tables_of([{"kind": "run", "emulated": False}, RECORDS[-1]])

    assert "not run" in steps.to_text()


# -- on a GPU -------------------------------------------------------------------------------------


#: Steps of a few seconds each.
STEPS = ("parity", "host", "trace")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_command_runs_its_steps_and_writes_all_files(tmp_path):
    done = run_script(
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from benchmarks.__main__ import main; "
        "sys.exit(main(sys.argv[1:]))",
        args=["gpu", "--tiny", "--steps", *STEPS, "--budget-s", "200", "--folder", str(tmp_path)],
        timeout_s=220.0,
    )

    done.check()
    assert {path.name for path in tmp_path.iterdir()} == {
        *("gpu.json", "gpu.md", "gpu.txt", "logs.txt", "results.jsonl"),
        *("trace.0.json", "trace.1.json"),
    }
    records = read(tmp_path / "results.jsonl")
    ended = {record["name"]: record["outcome"] for record in records if record["kind"] == "end"}
    assert ended == dict.fromkeys(("versions", *STEPS), "done")
    kinds = Counter(record["kind"] for record in records)
    assert {kind: kinds[kind] for kind in STEPS} == {"parity": 4, "host": 2, "trace": 2}
    text = (tmp_path / "gpu.md").read_text()
    assert "parity: largest difference" in text
    for record in records:
        assert record["kind"] not in STEPS or record["name"] in text
