"""The soak test's short form, each fault once; and that it detects what it looks for."""

from __future__ import annotations

import dataclasses

import pytest

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
    """Keeps the Python that forks."""
    made = Soak(TIME_LIMIT_S, False, "python -m benchmarks.soak")
    yield made
    made.close()


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
    shared_soak.run(number, a_round(number, fault))

    assert capsys.readouterr().out == ""
    counted = {"rounds": 1} if fault == FAULTS[0] else {"rounds": 1, "faults survived": 1}
    assert shared_soak.sums - before == counted


@pytest.mark.dist
@pytest.mark.slow
def test_nobody_outlives_torchruns_agent(soak, capsys):
    soak.run(0, a_round(0, ("kill the launcher", "")))

    assert soak.sums["faults survived"] == 1, capsys.readouterr()
    assert soak.sums["processes left"] == 0


@pytest.mark.dist
def test_a_hang_is_noticed_and_ended(capsys):
    soak = Soak(0.2, False, "python -m benchmarks.soak --seed 4")  # nothing is done by then
    this = a_round(7, ("none", ""))
    soak.run(7, this)
    soak.close()

    assert soak.sums["hangs"] == 1
    told = capsys.readouterr().out
    assert "round 7 went wrong: none; " in told
    assert "repeat it with: python -m benchmarks.soak --seed 4 --first 7 --rounds 1" in told


def a_round(number, fault):
    launchers = (TORCHRUN,) if fault[0] in NEED_LAUNCHER else (FORK,)
    return draw(SEED, number, max_ranks=2 + number % 3, launchers=launchers, faults=(fault,))


# -- rounds --------------------------------------------------------------------------------------


def test_a_round_is_known_by_seed_and_number():
    rounds = [draw(1, number, max_ranks=4) for number in range(2000)]

    assert rounds == [draw(1, number, max_ranks=4) for number in range(2000)]
    assert rounds[:10] != [draw(2, number, max_ranks=4) for number in range(10)]
    assert {(this.act, this.where) for this in rounds} == set(FAULTS)
    assert {this.num_ranks for this in rounds} == {2, 3, 4}
    assert {(this.num_ranks, this.origin) for this in rounds if this.act == "kill"} == {
        (n, rank) for n in (2, 3, 4) for rank in range(n)
    }
    for this in rounds:
        assert this.origin != this.actor
        assert 0 <= this.step < this.num_steps - 1
        assert this.launcher != FORK or this.act not in NEED_LAUNCHER


# -- verdicts ------------------------------------------------------------------------------------


@pytest.fixture
def raised() -> Round:
    """A layer of rank 1 of 3 raises."""
    this = draw(SEED, 0, max_ranks=2, launchers=(FORK,), faults=(("raise", "forward"),))
    return dataclasses.replace(this, num_ranks=3, origin=1)


STORY = """Traceback (most recent call last):
IllError: ill in forward
procpipe: in stage 1 (rank 1), task F0@1 (micro-batch 0), layer 'l2' (IllLayer)
"""
VICTIM = "procpipe: rank {} ends, because rank 1 failed in step(): IllError: ill in forward\n"


OUTPUTS = (VICTIM.format(0), STORY, VICTIM.format(2))


def ending(codes=(1, 1, 1), outputs=OUTPUTS, launcher=""):
    return Ending(codes, outputs, launcher, 1.0, 0.1, (), 0, (), 0)


def test_a_right_ending_is_right(raised):
    assert faults_of(raised, ending()) == []


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (ending(codes=(1, 1, 0)), "exit code 0 of rank 2"),
        (ending(outputs=("", "", "")), "0 tracebacks, not 1"),
        (ending(outputs=(STORY, STORY, "")), "2 tracebacks, not 1"),
        (ending(outputs=(STORY, "", "")), "'IllError: ill in forward' is not told"),
        (
            ending(outputs=("procpipe: rank 0 ends, because rank 2 failed", STORY, "")),
            "rank 2 is blamed",
        ),
    ],
)
def test_a_wrong_story_is_noticed(raised, wrong, told):
    assert told in faults_of(raised, wrong)


def test_whom_torchrun_blames_is_noticed(raised):
    this = dataclasses.replace(raised, launcher=TORCHRUN)
    report = "Root Cause (first observed failure):\n[0]:\n  rank      : {} (local_rank: 0)\n"

    assert faults_of(this, ending((1,), launcher=report.format(1))) == []
    assert faults_of(this, ending((1,), launcher=report.format(2))) == ["torchrun blames rank 2"]
    assert faults_of(this, ending((1,))) == ["torchrun names no rank"]
    assert "exit code 0 of a job that must fail" in faults_of(this, ending((0,)))


def test_whom_procpipe_run_blames_is_noticed(raised):
    this = dataclasses.replace(raised, launcher="procpipe run")
    report = (
        "procpipe: rank 0 ends, because rank 1 failed\nprocpipe: stage {0} (rank {0}) failed in …"
    )

    assert faults_of(this, ending((1,), launcher=report.format(1))) == []
    assert faults_of(this, ending((1,), launcher=report.format(2))) == [
        "procpipe run blames rank 2"
    ]


def test_a_job_that_must_end_well_may_not_complain(raised):
    this = dataclasses.replace(raised, act="none")
    quiet = ("", "", "")

    assert expected_of(this).is_well
    assert faults_of(this, ending((0, 0, 0), quiet)) == []
    assert faults_of(this, ending((0, -6, 0), quiet)) != []
    assert faults_of(this, ending((0, 0, 0), ("", "procpipe: rank 1 left early", ""))) != []
    assert faults_of(this, ending((0, 0, 0), (STORY, "", ""))) == ["1 tracebacks, not 0"]


def test_a_fault_that_never_came_is_not_survived(soak, raised):
    quiet, strangers = ("", "", ""), dataclasses.replace(raised, act="strangers")
    assert soak._judge(strangers, ending((0, 0, 0), quiet)) == ["no stranger came"]
    came = dataclasses.replace(ending((0, 0, 0), quiet), num_acts=2)
    assert soak._judge(strangers, came) == []
    assert soak.sums["faults survived"] == 1

    killed = dataclasses.replace(raised, act="kill at any time", launcher=TORCHRUN)
    assert soak._judge(killed, ending((0,), quiet)) == []  # it was over before
    assert soak.sums["faults survived"] == 1


def test_what_is_left_is_counted(soak, raised, capsys):
    left = dataclasses.replace(ending(), left=("python x",), shared_bytes=7, files=("tmp",))

    assert soak._judge(raised, left) == [
        "process left: python x",
        "7 bytes left in /dev/shm",
        "temporary files left: tmp",
    ]
    assert [soak.sums[name] for name in HARMS] == [0, 0, 1, 7, 1]
    assert soak.sums["faults survived"] == 0
