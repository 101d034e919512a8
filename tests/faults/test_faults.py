"""Four rounds of the fault test, new ones each run; and what the runner sees of a real job."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

from procpipe import state
from tests.faults import runner
from tests.faults.__main__ import correct
from tests.faults.job import Fault, Progress, held_by, note_named_memory, train_plainly
from tests.faults.rounds import draw
from tests.faults.runner import Job, Rounds, ending_of

NUM_ROUNDS = 4

#: A short round takes 0.5 to 10 s on quiet cores.
TIME_LIMIT_S = 120.0


@pytest.mark.dist
@pytest.mark.parametrize("number", range(NUM_ROUNDS))
def test_a_round(seed, number):
    command = f"python -m tests.faults --short --seed {seed}"
    rounds = Rounds(fresh=False, is_verbose=False, command=command, time_limit_s=TIME_LIMIT_S)
    faults = rounds.run(number, draw(seed, number, short=True))

    assert not faults


@pytest.mark.dist
def test_a_hang_is_ended_with_the_stacks_of_all_ranks(tmp_path, monkeypatch):
    """Each rank waits for a note that nobody writes."""
    monkeypatch.setattr(runner, "VANISH_TIMEOUT_S", 2.0)
    late = dataclasses.replace(
        correct(0), what="exit", when="in a transfer", where="between", origin=0, tears_down=False
    )
    ending = ending_of(late, tmp_path, fresh=False, time_limit_s=6.0)

    assert ending.codes == ()
    assert "job.py" in ending.outputs[0]
    assert "in wait" in ending.outputs[0]
    assert all("most recent call first" in output for output in ending.outputs)
    assert not ending.left


@pytest.fixture
def saved(tmp_path):
    """Yield a folder as a job leaves it whose first step was saved."""
    round_ = correct(3)
    loss, model, optimizer = next(train_plainly(round_))
    progress = Progress(Fault(round_))
    progress._fault.step = 0
    state.save(tmp_path / "state", model, optimizer, extra={"progress": progress}, step=1)
    (tmp_path / "losses.0").write_text(f"{loss!r}\n")
    return round_, tmp_path, model, optimizer, progress


def test_a_right_saved_state_has_no_faults(saved):
    round_, folder, *_ = saved

    assert runner._compare(round_, folder) == (1, [])


def test_wrong_losses_and_values_are_noticed(saved):
    round_, folder, model, optimizer, progress = saved
    with torch.no_grad():
        model[1].weight[0, 0] += 1e-6
    optimizer.state[model[2].weight]["momentum_buffer"][0, 0] += 1e-6
    state.save(folder / "state", model, optimizer, extra={"progress": progress}, step=1)
    (folder / "losses.1").write_text("0.125\n")
    step, wrong = runner._compare(round_, folder)

    assert step == 1
    assert wrong[0].startswith("losses.1: 0.125 in step 0, the plain model's ")
    assert wrong[1:] == ["saved parameter l1.weight", "saved momentum of l2.weight"]


def test_a_saved_state_that_does_not_load_is_noticed(saved):
    round_, folder, *_ = saved
    next(folder.glob("state/*/*.pt")).write_bytes(b"")
    step, wrong = runner._compare(round_, folder)

    assert step == 0
    assert "the newest saved state does not load" in wrong[0]


@pytest.mark.dist
def test_what_another_process_still_has_is_noticed(tmp_path, monkeypatch):
    """Here the other process is this one."""
    job = Job(correct(0), tmp_path, fresh=False)
    try:
        assert job.wait(TIME_LIMIT_S) == (0, 0)
        assert job.left() == []
        memory = os.memfd_create("left")
        key = f"memory:{os.fstat(memory).st_ino}"
        assert key in held_by("self")
        shared = Path(f"/dev/shm/procpipe-test-{os.getpid()}")
        shared.touch()
        keys = [key, f"memory:{shared.stat().st_ino}"]
        (tmp_path / "held.9.first").write_text(json.dumps(keys))
        (tmp_path / "tmp" / "file").touch()
        named = Path(f"/dev/shm/procpipe-named-{os.getpid()}")
        note_named_memory(tmp_path / "named.9", "open", (str(named), "w", 0))
        named.touch()  # and closed
        monkeypatch.setattr(job, "_start_s", 0.0)
        monkeypatch.setattr(runner, "VANISH_TIMEOUT_S", 0.0)
        found = job.left()
        os.close(memory)
        shared.unlink()
        named.unlink()

        files = [str(shared), f"file {named}", "temporary file file"]
        assert found == [f"{key} in process {os.getpid()}", *files]
        assert job.left() == ["temporary file file"]
    finally:
        job.kill()
