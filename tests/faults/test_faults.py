"""Four rounds of the fault test, new ones each run; and what the runner sees of a real job."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

from procpipe import state
from tests.conftest import FUZZ_SEED
from tests.faults import runner
from tests.faults.__main__ import correct
from tests.faults.job import Fault, Progress, held_by, note_named_memory, train_plainly
from tests.faults.rounds import TASK, TORCHRUN, draw
from tests.faults.runner import Job, Rounds

NUM_ROUNDS = 4

#: A short round takes 0.5 to 10 s on quiet cores.
TIME_LIMIT_S = 120.0


@pytest.mark.dist
@pytest.mark.parametrize("number", range(NUM_ROUNDS))
def test_a_round(number):
    seed = int(os.environ[FUZZ_SEED])
    command = f"python -m tests.faults --short --seed {seed}"
    rounds = Rounds(fresh=False, is_verbose=False, command=command, time_limit_s=TIME_LIMIT_S)
    faults = rounds.run(number, draw(seed, number, short=True))

    assert not faults


@pytest.mark.dist
def test_an_exception_under_torchrun():
    """Whatever is drawn. Under ``procpipe run``: tests/launch/run/test_run.py."""
    round_ = dataclasses.replace(
        correct(0), what="raise in forward", when=TASK, where="forward", origin=1, step=1,
        launcher=TORCHRUN, tears_down=False,
    )  # fmt: skip
    rounds = Rounds(fresh=False, is_verbose=False, command="", time_limit_s=TIME_LIMIT_S)

    assert not rounds.run(0, round_)


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
    step, wrong = runner._compare(round_, tmp_path)

    assert step == 1
    assert wrong[0].startswith("losses.1: 0.125 in step 0, the plain model's ")
    assert wrong[1:] == ["saved parameter l1.weight", "saved momentum of l2.weight"]


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
