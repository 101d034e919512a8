"""Which rounds are drawn, and that each kind of wrong ending is noticed."""

from __future__ import annotations

import dataclasses

import pytest

from tests.faults.rounds import (
    NONE,
    PROCPIPE_RUN,
    TORCHRUN,
    Ending,
    draw,
    faults_of,
)

# -- drawing -------------------------------------------------------------------------------------


# -- judging -------------------------------------------------------------------------------------


@pytest.fixture
def raised():
    """A layer of rank 1 of 3 raises."""
    return dataclasses.replace(
        draw(1, 0),
        what="raise in forward",
        when="in a task",
        where="forward",
        launcher=NONE,
        num_stages=3,
        replicas=1,
        origin=1,
    )


REPORT = """Traceback (most recent call last):
FaultError: fault in forward
procpipe: in stage 1 (rank 1), task F0@1 (micro-batch 0), layer 'l2' (FaultyLayer)
"""
VICTIM = "procpipe: rank {} ends, because rank 1 failed in step(): FaultError: fault in forward\n"
OUTPUTS = VICTIM.format(0), REPORT, VICTIM.format(2)
OTHER = "procpipe: rank 0 ends, because rank 2 failed in step(): FaultError: fault in forward\n"


def test_an_expected_ending_has_no_faults(raised):
    assert faults_of(raised, Ending((1, 1, 1), OUTPUTS)) == []


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"codes": (), "duration_s": 90.0}, "a hang: it has not ended in 90 s"),
        ({"codes": (1, 1, 0)}, "exit code 0 of rank 2"),
        ({"outputs": ("", "", "")}, "0 tracebacks, not 1"),
        ({"outputs": (REPORT, REPORT, "")}, "2 tracebacks, not 1"),
        ({"outputs": (REPORT, "", "")}, "'FaultError: fault in forward' is not printed"),
        ({"outputs": (OTHER, REPORT, VICTIM.format(2))}, "rank 2 is named"),
        ({"outputs": (*OUTPUTS[:2], "")}, "rank 2 does not print 'because rank 1 failed'"),
        ({"has_struck": False}, "the fault did not happen"),
        ({"fault_s": 16.0}, "the last script ended 16.0 s after the fault"),
        ({"left": ("process 7: python",)}, "left: process 7: python"),
        ({"saved_step": 2, "loaded_step": 1}, "step 2 was saved, and 1 is loaded"),
        ({"wrong_values": ("losses.0",)}, "wrong values: losses.0"),
    ],
)
def test_a_wrong_ending_is_noticed(raised, changed, fault):
    assert fault in faults_of(raised, Ending(**{"codes": (1, 1, 1), "outputs": OUTPUTS} | changed))


def test_the_rank_that_torchrun_names_is_checked(raised):
    round_ = dataclasses.replace(raised, launcher=TORCHRUN)
    report = "Root Cause (first observed failure):\n[0]:\n  rank      : {} (local_rank: 0)\n"

    def faults(code=1, text=""):
        return faults_of(round_, Ending((code,), OUTPUTS, text))

    assert faults(text=report.format(1)) == []
    assert faults(text=report.format(2)) == ["torchrun names rank 2"]
    assert faults() == ["torchrun names no rank"]
    assert "exit code 0 of a job that must fail" in faults(0)


def test_the_one_report_of_procpipe_run_is_checked(raised):
    round_ = dataclasses.replace(raised, launcher=PROCPIPE_RUN)
    report = (
        f"{VICTIM.format(0)}Traceback (most recent call last):\nprocpipe: rank {{}} failed in …"
    )

    def faults(text):
        return faults_of(round_, Ending((1,), OUTPUTS, text))

    assert faults(report.format(1)) == []
    assert faults(report.format(2)) == ["procpipe run names rank 2"]
    assert faults(report.format(1) + REPORT) == ["2 tracebacks on the screen, not 1"]
