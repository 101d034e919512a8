"""A process that is killed while it saves harms no saved state (exports: tests/hf/test_weights.py).

A forked process is killed at its k-th call to the operating system that changes the folder, for
every k. Then the folder is checked, loaded from and saved to again. Killed ranks are the fault
test's.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from procpipe import state
from procpipe.state import files
from tests.dist.script import run_forked

pytestmark = pytest.mark.dist

COMMON = """
import io, itertools, os, signal, socket, sys
from pathlib import Path
import torch, torch.nn.functional as F
from torch import nn
from procpipe import Stage, state
from procpipe.state import files

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

def in_fork(function, *args):
    pid = os.fork()
    if pid == 0:  # it ends as a script does, well or with an exception
        function(*args)
        sys.exit(0)
    return pid

def end_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def names():
    return sorted(path.name for path in FOLDER.iterdir())

def whole():
    return [path.name for path in files.saved_in(FOLDER)]
"""

ONE_PROCESS = """
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

def save_killed(step, kill_at):
    kill_at_change(kill_at)
    save(step)

save(1); save(2)
step, latest, found = 3, 2, []
for kill_at in itertools.count(1):
    code = end_of(in_fork(save_killed, step, kill_at))
    latest = check_loads(latest, step)
    if code == 0:
        break
    assert code == -signal.SIGKILL, code
    found.append(latest == step)
    step += 1
# Before the rename the older state is there, after it the newer one.
assert len(found) >= 8 and found == sorted(found), found
assert True in found and False in found, found
assert len(names()) == 2, names()
print("survived", len(found))
"""

RANKS = """
def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])

def run(*args):
    port = free_port()
    pids = [in_fork(run_rank, rank, port, *args) for rank in (0, 1)]
    return [end_of(pid) for pid in pids]

def make_stage(rank, port):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=port)
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    return Stage(model, [1, 1], loss_fn=F.mse_loss, timeout_s=30)

os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
"""


def test_a_process_is_killed_at_every_change_of_the_folder():
    done = run_forked(COMMON + ONE_PROCESS, timeout_s=90).check()

    assert done.stdout.startswith("survived ")


#: What scripts that save in the background and end at once leave behind.
ENDS = """
def run_rank(rank, port, step, is_full, fails):
    stage = make_stage(rank, port)
    x = torch.ones(2, 300)
    stage.step(x, x)
    if is_full and rank == 1:
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    state.save(FOLDER, stage, step=step, asynchronous=True)
    if step == 0:
        stage.close()
    if fails:
        if rank == 0:
            raise KeyError("mine")
        stage.step(x, x)

assert run(0, False, False) == [0, 0]
assert run(1, False, False) == [0, 0]
assert whole() == ["000001-step-0", "000002-step-1"], names()
assert run(2, True, False)[1] == 1  # rank 0 may have left
assert whole() == ["000001-step-0", "000002-step-1"], names()
print("-- an error of the script", file=sys.stderr)
assert run(3, False, True) == [1, 1]
print("done")
"""


def test_the_end_of_a_script_waits_for_its_save():
    """A save that fails fails the script; an error of the script is printed first."""
    done = run_forked(COMMON + RANKS + ENDS, timeout_s=90, tears_down=True).check()

    assert done.stdout == "done\n"
    first, second = done.stderr.split("-- an error of the script")
    assert "File too large" in first
    assert "KeyError: 'mine'" in second
    assert "no longer waits" not in second
    assert "terminate called" not in done.stderr


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
