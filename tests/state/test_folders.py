"""Several jobs that save into one folder."""

from __future__ import annotations

import fcntl
import os

import pytest
from torch import nn

from procpipe import state
from procpipe.state.folders import Draft, Hold, saved_in
from tests.dist.script import run_forked


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_numbers_of_drafts_differ(tmp_path):
    one, two = Draft(tmp_path, 5), Draft(tmp_path, 5)
    assert names(tmp_path) == [".saving-000001", ".saving-000002"]
    two.publish(1)
    two.let_go()
    one.publish(1)  # older than the other, and held
    assert names(tmp_path) == ["000001-step-5", "000002-step-5"]
    one.let_go()
    Draft(tmp_path, None).publish(1)
    assert names(tmp_path) == ["000003"]


def test_a_state_that_another_rank_waits_for_is_not_removed(tmp_path):
    first = Draft(tmp_path, 1)
    of_rank_1 = Hold(first.path)
    first.publish(1)
    first.let_go()
    second = Draft(tmp_path, 2)
    second.publish(1)
    second.let_go()
    assert names(tmp_path) == ["000001-step-1", "000002-step-2"]
    of_rank_1.let_go()
    Draft(tmp_path, 3).publish(1)
    assert names(tmp_path) == ["000003-step-3"]


def test_states_that_are_already_removed_are_skipped(tmp_path):
    for step in (1, 2, 3):
        state.save(tmp_path, nn.Linear(1, 1), step=step)
    old = saved_in(tmp_path)
    draft = Draft(tmp_path, 4)
    (tmp_path / ".removing-000001-step-1").mkdir()  # left by a crash
    (tmp_path / ".removing-000001-step-1/file").write_text("")
    os.rename(old[1].path, tmp_path / ".removing-000002-step-2-x")
    draft.publish(1)
    draft.let_go()
    assert names(tmp_path)[2:] == ["000004-step-4"]
    busy = os.open(tmp_path / ".removing-000002-step-2-x", os.O_RDONLY)
    fcntl.flock(busy, fcntl.LOCK_EX)  # as a process that removes it
    state.save(tmp_path, nn.Linear(1, 1))
    assert names(tmp_path) == [".removing-000002-step-2-x", "000004-step-4", "000005"]
    os.close(busy)
    state.save(tmp_path, nn.Linear(1, 1))
    assert names(tmp_path) == ["000004-step-4", "000005", "000006"]


WRITERS = """
import os, sys, torch
from torch import nn
from procpipe import state
import procpipe.state.files, torch.distributed.checkpoint.filesystem

torch.set_num_threads(1)
KEEP, NUM_SAVES, NUM_WRITERS = 2, 10, 3

def write(k):
    model = nn.Linear(2, 2)
    for i in range(NUM_SAVES):
        saving = state.save("runs", model, step=10 * i + k, keep=KEEP, asynchronous=i % 2 > 0)
        saving.wait()
    sys.exit(0)

pids = []
for k in range(NUM_WRITERS):
    pid = os.fork()
    if pid == 0:
        write(k)
    pids.append(pid)
assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * NUM_WRITERS
left = sorted(os.listdir("runs"))
assert len(left) >= KEEP and not any(name.startswith(".") for name in left), left
assert left[-1].startswith(f"{NUM_SAVES * NUM_WRITERS:06d}-"), left
state.load("runs", nn.Linear(2, 2))
state.save("runs", nn.Linear(2, 2), keep=KEEP)
assert len(os.listdir("runs")) == KEEP
print("done")
"""


@pytest.mark.dist
def test_several_writers_of_one_folder():
    """Every save is published, under a number of its own, and nothing is left."""
    assert run_forked(WRITERS, timeout_s=60).check().stdout == "done\n"
