"""Four rounds of the fault test, new ones each run; and that each kind of wrong end is noticed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from procpipe import state
from tests.cases import for_each
from tests.conftest import FUZZ_SEED
from tests.dist.jobs import TIMEOUT_S, Job
from tests.faults import runner
from tests.faults.job import Fault, Progress, held_by, note_named_memory, train_plainly
from tests.faults.rounds import NONE, PROCPIPE_RUN, TASK, TORCHRUN, Ending, correct, draw, faults_of

NUM_ROUNDS = 4

#: A short round takes 0.5 to 10 s on quiet cores.
TIME_LIMIT_S = 120.0

#: A layer of rank 1 of 3 raises.
RAISED = replace(
    correct(0), what="raise in forward", when=TASK, where="forward", origin=1, num_stages=3, step=1
)


@pytest.mark.dist
@pytest.mark.parametrize("number", range(NUM_ROUNDS))
def test_a_round(number):
    seed = int(os.environ[FUZZ_SEED])
    command = f"python -m tests.faults --short --seed {seed}"
    round_ = draw(seed, number, short=True)

    assert not runner.run(number, round_, command=command, time_limit_s=TIME_LIMIT_S)


@pytest.mark.dist
def test_an_exception_under_torchrun():
    """Whatever is drawn. Under ``procpipe run``: tests/launch/run/test_run.py."""
    round_ = replace(RAISED, launcher=TORCHRUN, num_stages=2, tears_down=False)

    assert not runner.run(0, round_, time_limit_s=TIME_LIMIT_S)


# -- what a job has written and left -------------------------------------------------------------


def test_wrong_losses_and_values_are_noticed(tmp_path):
    round_ = correct(3)
    _, model, optimizer = next(train_plainly(round_))
    progress = Progress(Fault(round_))
    progress._fault.step = 0
    with torch.no_grad():
        model.get_parameter("l1.weight")[0, 0] += 1e-6
    optimizer.state[model.get_parameter("l2.weight")]["momentum_buffer"][0, 0] += 1e-6
    state.save(tmp_path / "state", model, optimizer, extra={"progress": progress}, step=1)
    (tmp_path / "losses.1").write_text("0.125\n")
    step, wrong = runner.compare(round_, tmp_path)

    assert step == 1
    assert wrong[0].startswith("losses.1: 0.125 in step 0, the plain model's ")
    assert wrong[1:] == ["saved parameter l1.weight", "saved momentum of l2.weight"]


@pytest.mark.dist
def test_what_another_process_still_has_is_noticed(monkeypatch):
    """Here the other process is this one."""
    with Job() as job:
        processes = runner.start(correct(0), job, is_new=False)
        assert [process.wait_end(TIMEOUT_S) for process in processes] == [0, 0]
        assert runner.what_is_left(job, 0.0) == []
        memory = os.memfd_create("left")
        key = f"memory:{os.fstat(memory).st_ino}"
        assert key in held_by("self")
        shared = Path(f"/dev/shm/procpipe-test-{os.getpid()}")
        shared.touch()
        keys = [key, f"memory:{shared.stat().st_ino}"]
        (job.path / "held.9.first").write_text(json.dumps(keys))
        (job.path / "tmp" / "file").touch()
        named = Path(f"/dev/shm/procpipe-named-{os.getpid()}")
        note_named_memory(job.path / "named.9", "open", (str(named), "w", 0))
        named.touch()  # and closed
        monkeypatch.setattr(runner, "VANISH_TIMEOUT_S", 0.0)
        found = runner.what_is_left(job, 0.0)
        os.close(memory)
        shared.unlink()
        named.unlink()

        files = [str(shared), f"file {named}", "temporary file file"]
        assert found == [f"{key} in process {os.getpid()}", *files]
        assert runner.what_is_left(job, 0.0) == ["temporary file file"]


# -- judging -------------------------------------------------------------------------------------

REPORT = """Traceback (most recent call last):
FaultError: fault in forward
procpipe: in stage 1 (rank 1), task F0@1 (micro-batch 0), layer 'l2' (FaultyLayer)
"""
VICTIM = "procpipe: rank {} ends, because rank 1 failed in step(): FaultError: fault in forward\n"
OUTPUTS = VICTIM.format(0), REPORT, VICTIM.format(2)
OTHER = "procpipe: rank 0 ends, because rank 2 failed in step(): FaultError: fault in forward\n"
BY_TORCHRUN = "Root Cause (first observed failure):\n[0]:\n  rank      : {} (local_rank: 0)\n"
BY_OURS = f"{VICTIM.format(0)}Traceback (most recent call last):\nprocpipe: rank {{}} failed in …"


@for_each(
    ("changed", "fault"),
    [
        ({}, None),
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
def test_a_wrong_end_is_noticed(changed, fault):
    faults = faults_of(RAISED, Ending(**{"codes": (1, 1, 1), "outputs": OUTPUTS} | changed))
    assert fault in faults if fault else faults == []


@for_each(
    ("launcher", "code", "text", "expected"),
    [
        (TORCHRUN, 1, BY_TORCHRUN.format(1), []),
        (TORCHRUN, 1, BY_TORCHRUN.format(2), ["torchrun names rank 2"]),
        (TORCHRUN, 1, "", ["torchrun names no rank"]),
        (TORCHRUN, 0, BY_TORCHRUN.format(1), ["exit code 0 of a job that must fail"]),
        (PROCPIPE_RUN, 1, BY_OURS.format(1), []),
        (PROCPIPE_RUN, 1, BY_OURS.format(2), ["procpipe run names rank 2"]),
        (PROCPIPE_RUN, 1, BY_OURS.format(1) + REPORT, ["2 tracebacks on the screen, not 1"]),
    ],
)
def test_a_launchers_report_is_checked(launcher, code, text, expected):
    assert RAISED.launcher == NONE
    assert faults_of(replace(RAISED, launcher=launcher), Ending((code,), OUTPUTS, text)) == expected
