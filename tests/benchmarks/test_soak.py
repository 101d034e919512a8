"""The soak test's short form: each fault once; and each kind of wrong ending is detected."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import pytest

from benchmarks import soak as soak_module
from benchmarks.soak import COUNTED, Soak
from benchmarks.soak_rounds import (
    FAULTS,
    FORK,
    NEED_LAUNCHER,
    TORCHRUN,
    Ending,
    Round,
    draw,
    expected_of,
    faults_of,
)
from tests.dist.script import REPORTED_LATE
from tests.launch.forked import start_as_forks

SEED = 4

#: The figures that must be 0.
HARMS = COUNTED[2:]

TIME_LIMIT_S = 60.0


@pytest.fixture
def soak():
    made = Soak(TIME_LIMIT_S, False, "python -m benchmarks.soak")
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared_soak():
    """A soak test for the whole module, which keeps its fork server."""
    made = Soak(TIME_LIMIT_S, False, "python -m benchmarks.soak")
    yield made
    made.close()


#: Each way in which a script can end. Ranks with these faults end as Python does, those with other
#: faults before all modules are freed, which takes most of a round's time.
TORN_DOWN = (
    *(("none", ""), ("raise", "forward"), ("exit", "forward"), ("leave", "")),
    *(("fork", "between"), ("several stages", ""), ("exit beside a thread", "between")),
)

FORKED = [fault for fault in FAULTS if fault[0] not in NEED_LAUNCHER]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("number", "fault"),
    list(enumerate(FORKED)),
    ids=["-".join(filter(None, fault)) for fault in FORKED],
)
def test_each_fault_once(shared_soak, capsys, number, fault):
    if fault[0] == "exit beside a thread" and REPORTED_LATE:
        pytest.skip(REPORTED_LATE)
    before = shared_soak.sums.copy()
    shared_soak.run(number, a_round(number, fault), tears_down=fault in TORN_DOWN)

    assert capsys.readouterr().out == ""
    counted = {"rounds": 1} if fault == FAULTS[0] else {"rounds": 1, "faults survived": 1}
    assert shared_soak.sums - before == counted


@pytest.mark.dist
@pytest.mark.slow
def test_no_process_outlives_torchruns_agent(soak, capsys, monkeypatch):
    start_as_forks(monkeypatch, 2, soak_module)
    round_ = a_round(0, ("kill the launcher", ""))
    endless = dataclasses.replace(round_, num_steps=10**6)  # no rank ends because it is done
    soak.run(0, endless)

    assert soak.sums["faults survived"] == 1, capsys.readouterr()
    assert soak.sums["processes left"] == 0


@pytest.mark.dist
def test_a_hang_is_detected_and_ended(capsys):
    soak = Soak(0.2, False, "python -m benchmarks.soak --seed 4")  # too short for any round
    round_ = a_round(7, ("none", ""))
    soak.run(7, round_)
    soak.close()

    assert soak.sums["hangs"] == 1
    printed = capsys.readouterr().out
    assert "round 7 went wrong: none; " in printed
    assert "repeat it with: python -m benchmarks.soak --seed 4 --first 7 --rounds 1" in printed


def a_round(number, fault):
    launchers = (TORCHRUN,) if fault[0] in NEED_LAUNCHER else (FORK,)
    return draw(SEED, number, max_ranks=2 + number % 3, launchers=launchers, faults=(fault,))


# -- rounds --------------------------------------------------------------------------------------


def test_a_round_depends_on_seed_and_number_only():
    rounds = [draw(1, number, max_ranks=4) for number in range(2000)]

    assert rounds == [draw(1, number, max_ranks=4) for number in range(2000)]
    assert rounds[:10] != [draw(2, number, max_ranks=4) for number in range(10)]
    assert {(round_.act, round_.where) for round_ in rounds} == set(FAULTS)
    assert {round_.num_ranks for round_ in rounds} == {2, 3, 4}
    assert {(round_.num_ranks, round_.origin) for round_ in rounds if round_.act == "kill"} == {
        (n, rank) for n in (2, 3, 4) for rank in range(n)
    }
    for round_ in rounds:
        assert round_.origin != round_.actor
        assert 0 <= round_.step < round_.num_steps - 1
        assert round_.launcher != FORK or round_.act not in NEED_LAUNCHER


# -- verdicts ------------------------------------------------------------------------------------


@pytest.fixture
def raised() -> Round:
    """A layer of rank 1 of 3 raises."""
    round_ = draw(SEED, 0, max_ranks=2, launchers=(FORK,), faults=(("raise", "forward"),))
    return dataclasses.replace(round_, num_ranks=3, origin=1)


REPORT = """Traceback (most recent call last):
FaultError: fault in forward
procpipe: in stage 1 (rank 1), task F0@1 (micro-batch 0), layer 'l2' (FaultyLayer)
"""
VICTIM = "procpipe: rank {} ends, because rank 1 failed in step(): FaultError: fault in forward\n"


OUTPUTS = (VICTIM.format(0), REPORT, VICTIM.format(2))


def ending(codes=(1, 1, 1), outputs=OUTPUTS, launcher=""):
    return Ending(codes, outputs, launcher, 1.0, 0.1, (), 0, (), 0)


def test_an_expected_ending_has_no_faults(raised):
    assert faults_of(raised, ending()) == []


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (ending(codes=(1, 1, 0)), "exit code 0 of rank 2"),
        (ending(outputs=("", "", "")), "0 tracebacks, not 1"),
        (ending(outputs=(REPORT, REPORT, "")), "2 tracebacks, not 1"),
        (ending(outputs=(REPORT, "", "")), "'FaultError: fault in forward' is not printed"),
        (
            ending(outputs=("procpipe: rank 0 ends, because rank 2 failed", REPORT, "")),
            "rank 2 is named",
        ),
    ],
)
def test_a_wrong_report_is_detected(raised, wrong, fault):
    assert fault in faults_of(raised, wrong)


def test_the_rank_that_torchrun_names_is_checked(raised):
    round_ = dataclasses.replace(raised, launcher=TORCHRUN)
    report = "Root Cause (first observed failure):\n[0]:\n  rank      : {} (local_rank: 0)\n"

    assert faults_of(round_, ending((1,), launcher=report.format(1))) == []
    assert faults_of(round_, ending((1,), launcher=report.format(2))) == ["torchrun names rank 2"]
    assert faults_of(round_, ending((1,))) == ["torchrun names no rank"]
    assert "exit code 0 of a job that must fail" in faults_of(round_, ending((0,)))


def test_the_rank_that_procpipe_run_names_is_checked(raised):
    round_ = dataclasses.replace(raised, launcher="procpipe run")
    report = (
        "procpipe: rank 0 ends, because rank 1 failed\nprocpipe: stage {0} (rank {0}) failed in …"
    )

    assert faults_of(round_, ending((1,), launcher=report.format(1))) == []
    assert faults_of(round_, ending((1,), launcher=report.format(2))) == [
        "procpipe run names rank 2"
    ]


def test_a_job_that_must_end_well_may_not_report_a_failure(raised):
    round_ = dataclasses.replace(raised, act="none")
    quiet = ("", "", "")

    assert expected_of(round_).is_well
    assert faults_of(round_, ending((0, 0, 0), quiet)) == []
    assert faults_of(round_, ending((0, -6, 0), quiet)) != []
    assert faults_of(round_, ending((0, 0, 0), ("", "procpipe: rank 1 left early", ""))) != []
    assert faults_of(round_, ending((0, 0, 0), (REPORT, "", ""))) == ["1 tracebacks, not 0"]


def test_a_fault_that_never_happened_is_not_counted(soak, raised):
    quiet, strangers = ("", "", ""), dataclasses.replace(raised, act="strangers")
    assert soak._judge(strangers, ending((0, 0, 0), quiet)) == ["no stranger came"]
    came = dataclasses.replace(ending((0, 0, 0), quiet), num_acts=2)
    assert soak._judge(strangers, came) == []
    assert soak.sums["faults survived"] == 1

    killed = dataclasses.replace(raised, act="kill at any time", launcher=TORCHRUN)
    assert soak._judge(killed, ending((0,), quiet)) == []  # it was over before
    assert soak.sums["faults survived"] == 1


def test_a_file_in_shared_memory_is_left_only_if_it_stays(monkeypatch):
    """Another program's semaphore had its name there just as the soak test listed the names."""
    before = soak_module._shared_memory().keys()
    with tempfile.NamedTemporaryFile(dir="/dev/shm", delete=False) as file:
        file.write(b"7 bytes")
    try:
        monkeypatch.setattr(soak_module, "VANISH_TIMEOUT_S", -1.0)
        assert soak_module._wait_freed(before) >= 7
        monkeypatch.undo()
        unlink = Path(file.name).unlink
        monkeypatch.setattr("time.sleep", lambda _: unlink(missing_ok=True))
        assert soak_module._wait_freed(before) == 0
    finally:
        Path(file.name).unlink(missing_ok=True)


def test_processes_memory_and_files_that_are_left_are_counted(soak, raised, capsys):
    left = dataclasses.replace(ending(), left=("python x",), shared_bytes=7, files=("tmp",))

    assert soak._judge(raised, left) == [
        "process left: python x",
        "7 bytes left in /dev/shm",
        "temporary files left: tmp",
    ]
    assert [soak.sums[name] for name in HARMS] == [0, 0, 1, 7, 1]
    assert soak.sums["faults survived"] == 0
