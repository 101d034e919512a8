"""A process that is killed while it saves harms no saved state (exports: tests/hf/test_weights.py).

A forked process is killed at its k-th call to the operating system that changes the folder, for
every k. Then the folder is checked, loaded from and saved to again. Killed ranks are the fault
test's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from procpipe import state
from procpipe.state import files
from tests.dist.jobs import Job
from tests.dist.script import environments_of, run_forked

pytestmark = pytest.mark.dist

ONE_PROCESS = """
import io, itertools, os, signal, sys
from pathlib import Path
import torch
from torch import nn
from procpipe import state

torch.set_num_threads(1)
FOLDER = Path("runs")
CHANGES = ("mkdir", "rename", "fsync", "rmdir", "unlink", "written")

def kill_at_change(kill_at):
    count = 0
    def patch(name):
        original = getattr(os, name)
        def change(*args, **kwargs):
            nonlocal count
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        setattr(os, name, change)
    os.written = lambda: None
    for name in CHANGES:
        patch(name)
    def save(values, file, torchs=torch.save):  # the last bytes are zeros at first
        whole = io.BytesIO()
        torchs(values, whole)
        data = whole.getvalue()
        file.write(data[:-50])
        file.truncate(len(data))
        file.flush()
        os.written()
        file.write(data[-50:])
    torch.save = save

def make(step):
    torch.manual_seed(step)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

def save(step, keep=2):
    state.save(FOLDER, make(step), extra={"step": step}, step=step, keep=keep)

def check_loads(*steps):
    extra = {"step": None}
    model = make(0)
    saved = state.load(FOLDER, model, extra=extra)
    assert saved.step == extra["step"], (saved, extra)
    assert saved.step in steps, (saved, steps)
    expected = make(saved.step).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    return saved.step

def code_of_save_killed(step, kill_at):
    pid = os.fork()
    if pid == 0:  # it ends as a script does, well or with an exception
        kill_at_change(kill_at)
        save(step)
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

save(1); save(2)
step, latest, found = 3, 2, []
for kill_at in itertools.count(1):
    code = code_of_save_killed(step, kill_at)
    latest = check_loads(latest, step)
    if code == 0:
        break
    assert code == -signal.SIGKILL, code
    found.append(latest == step)
    step += 1
# Before the rename the older state is there, after it the newer one.
assert len(found) >= 8 and found == sorted(found), found
assert True in found and False in found, found
assert len(os.listdir(FOLDER)) == 2, os.listdir(FOLDER)
print("survived", len(found))
"""


def test_a_process_is_killed_at_every_change_of_the_folder():
    done = run_forked(ONE_PROCESS, timeout_s=90).check()

    assert done.stdout.startswith("survived ")


#: A script that saves in the background and ends at once, in a way.
ENDS = """
import os, resource, sys
import torch, torch.nn.functional as F
from torch import nn
from procpipe import Stage, state

step, way = int(sys.argv[1]), sys.argv[2]
model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
stage = Stage(model, [1, 1], loss_fn=F.mse_loss, timeout_s=30)
x = torch.ones(2, 300)
stage.step(x, x)
if way == "full" and stage.rank == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
state.save("runs", stage, step=step, asynchronous=True)
if way == "closed":
    stage.close()
if way == "error":
    if stage.rank == 0:
        raise KeyError("mine")
    stage.step(x, x)
"""


def test_the_end_of_a_script_waits_for_its_save():
    """A save that fails fails the script; an error of the script is printed first."""
    ends: dict[str, list[Any]] = {}
    environments: Any = environments_of(2)
    with Job() as job:
        job.write("script.py", ENDS)
        for step, way in enumerate(("closed", "open", "full", "error")):
            words = ["script.py", step, way]
            ends[way] = [job.start(words, tears_down=True, **env) for env in environments]
            codes = [each.wait_end() for each in ends[way]]
            if way == "full":
                codes[0] = 1  # rank 0 may have left
            assert codes == ([1, 1] if way in ("full", "error") else [0, 0]), way
            if way in ("open", "full"):
                whole = [path.name for path in files.saved_in(job.path / "runs")]
                assert whole == ["000001-step-0", "000002-step-1"]
        errors = {way: "".join(each.raw("err") for each in ends[way]) for way in ends}

    assert "File too large" in errors["full"]
    assert "KeyError: 'mine'" in errors["error"]
    assert "no longer waits" not in errors["error"]
    assert "terminate called" not in "".join(errors.values())


def test_files_of_several_saves_are_no_whole_state(tmp_path):
    """As where the whole folder of a run was removed, and a stopped process goes on."""
    model = nn.Linear(1, 1)
    old = state.save(tmp_path / "old", model, step=1).path
    contents = torch.load(old / "stage-0-of-1.pt", weights_only=True)
    for number, nonces in enumerate((("a", "a"), ("b", "c")), 1):
        path = tmp_path / f"run/00000{number}-step-{number}"
        path.mkdir(parents=True)
        for rank, nonce in enumerate(nonces):
            values = contents | {"save": nonce, "about": {"step": number, "num_stages": 2}}
            files.write(path, rank, 2, values)

    saved = state.load(tmp_path / "run", model)
    assert saved is not None
    assert saved.step == 1
    with pytest.raises(FileNotFoundError, match="there is no saved state in"):
        state.load(tmp_path / "run/000002-step-2", model)
