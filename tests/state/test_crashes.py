"""A process that is killed while it saves never harms what was saved before.

A forked process is killed at its k-th call to the operating system that changes the folder: for
every k where it saves a plain module, and for some k on each rank of a pipeline. Then the folder
is checked, loaded from and saved to again.
"""

from __future__ import annotations

import pytest

from tests.dist.script import run_forked

pytestmark = pytest.mark.dist

COMMON = """
import os, signal, socket, sys, warnings
from pathlib import Path
import torch, torch.distributed, torch.nn.functional as F
import torch.distributed.checkpoint
from torch import nn
from procpipe import Stage, state
import procpipe.state.files

torch.set_num_threads(1)
FOLDER = Path("runs")
CHANGES = ("mkdir", "rename", "fsync", "rmdir", "unlink")

def count_changes(kill_at=None, names=CHANGES):
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
    for name in names:
        patch(name)
    return lambda: count

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
    count_changes(kill_at)
    save(step)

def count_all():
    changes = count_changes()
    save(3)
    Path("count").write_text(str(changes()))

save(1); save(2)
assert end_of(in_fork(count_all)) == 0
num_changes = int(Path("count").read_text())
assert num_changes > 10, num_changes
step, latest, found = 4, 3, []
for kill_at in range(1, num_changes + 1):
    assert end_of(in_fork(save_killed, step, kill_at)) == -signal.SIGKILL
    latest = check_loads(latest, step)
    found.append(latest == step)
    step += 1
# Before the rename the older state is there, after it the newer one.
assert found == sorted(found), found
assert True in found and False in found, found
save(step)
check_loads(step)
assert len(names()) == 2 and not any(name.startswith(".") for name in names()), names()
print("survived", num_changes)
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

KILLED = """
def run_rank(rank, port, step, killed_rank, change, kill_at, asynchronous):
    stage = make_stage(rank, port)
    state.load(FOLDER, stage, missing_ok=True)
    x = torch.ones(2, 300)
    stage.step(x, x)
    if rank == killed_rank:
        count_changes(kill_at, (change,))
    state.save(FOLDER, stage, step=step, asynchronous=asynchronous).wait()
    stage.close()

assert run(0, None, None, None, False) == [0, 0]
for step, case in enumerate(CASES, 1):
    rank = case[0]
    codes = run(step, *case)
    assert codes[rank] == -signal.SIGKILL, (codes, case)
    assert codes[1 - rank] == 1, (codes, case)
    assert [name for name in names() if not name.startswith(".")] == ["000001-step-0"], names()
assert run(99, None, None, None, True) == [0, 0]
assert names() == ["000001-step-0", "000002-step-99"], names()
print("survived", len(CASES))
"""


def test_a_process_is_killed_at_every_change_of_the_folder():
    done = run_forked(COMMON + ONE_PROCESS, timeout_s=90).check()

    assert done.stdout.startswith("survived ")


#: Rank; the call and its number that kills it; whether in the background. Each calls fsync for its
#: values (1), their index (2), its folder (3); rank 0 then for the whole index (4). Each renames
#: its index (1); rank 0 then the whole folder (2).
CASES = [
    (0, "fsync", 1, False),
    (0, "rename", 2, False),
    (1, "mkdir", 1, False),
    (1, "rename", 1, False),
    (0, "rename", 2, True),
    (1, "fsync", 1, True),
]


def test_a_rank_of_a_pipeline_is_killed_while_saving():
    """The other rank ends too, and the next run removes what the killed one left."""
    done = run_forked(COMMON + RANKS + f"CASES = {CASES}\n" + KILLED, timeout_s=90)

    assert done.stdout == f"survived {len(CASES)}\n", done
    assert done.returncode == 0


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
    if fails:
        if rank == 0:
            raise KeyError("mine")
        stage.step(x, x)

def whole():
    return [name for name in names() if not name.startswith(".")]

assert run(1, False, False) == [0, 0]
assert whole() == ["000001-step-1"], names()
assert run(2, True, False) == [1, 1]
assert whole() == ["000001-step-1"], names()
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
    assert "RemoteStageError" in first
    assert "KeyError: 'mine'" in second
    assert "no longer waits" not in second
    assert "terminate called" not in done.stderr
