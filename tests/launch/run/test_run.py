"""``procpipe run`` as a user sees it: real processes, on a real terminal and off it."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests.dist.forks import fork_server
from tests.dist.jobs import TIMEOUT_S, Job, job_environment
from tests.dist.script import free_port
from tests.launch.started import started

pytestmark = pytest.mark.dist

#: A job in which a layer of stage 1 executes given code in the second step.
TRAINING = """
import os, subprocess, sys, time
import torch, torch.nn.functional as F
from torch import nn
from procpipe import Stage

RANK, NUM_RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
NUM_STEPS, START, DO, STALL_S = int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])

class Layer(nn.Linear):
    def forward(self, x):
        if step == 1:
            exec(DO)
        return super().forward(x)

exec(START)
layers = [Layer(4, 4) if k == 1 else nn.Linear(4, 4) for k in range(NUM_RANKS)]
stage = Stage(
    nn.Sequential(*layers), balance=[1] * NUM_RANKS, chunks=2, loss_fn=F.mse_loss,
    stall_timeout_s=STALL_S,
)
x = torch.ones(8, 4)
for step in range(NUM_STEPS):
    loss = stage.step(x, x)
    print(f"rank {RANK}, step {step}", flush=True)
print(f"rank {RANK} says goodbye", file=sys.stderr)
"""

#: No torch, and so quick to start.
PLAIN = """
import os, signal, subprocess, sys, time
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
exec(sys.argv[1])
"""

#: Grandchildren in sessions of their own, which note that they are asked to end.
SLEEPER = "trap 'touch ended_$RANK; exit' TERM; sleep 1000 & wait"
LEAVE_SLEEPERS = f'subprocess.Popen(["sh", "-c", {SLEEPER!r}], start_new_session=True)'


#: Waits until the test writes the file.
UNTIL_GO = """
while not os.path.exists("go"):
    time.sleep(0.01)
"""


def training(num_steps, start="pass", do="pass", stall_s=100.0):
    return TRAINING, str(num_steps), start, do, str(stall_s)


def plain(code):
    return PLAIN, code


def ended_with(run, code):
    """Wait for the end of a run, which must leave no process; return it."""
    ended = run.wait()
    assert ended.code == code, ended
    assert ended.left == ()
    return ended


def test_a_successful_run_without_a_terminal():
    """Rank 1 is a new process, not a fork."""
    with started("-n", "2", script=training(3), num_forked=1) as run:
        ended = ended_with(run, 0)

    assert ended.out == "".join(f"rank 0, step {k}\n" for k in range(3))
    *lines, last = ended.err.splitlines()  # on a slow machine, with a table
    assert "rank 0 says goodbye" in lines
    assert last.startswith("procpipe: done in ")
    assert ", 3 steps, " in last
    assert last.endswith(f"logs in procpipe-logs/{ended.name}")
    assert ended.logs["attempt_0/rank_1/stdout.log"] == ended.out.replace("rank 0", "rank 1")
    assert ended.logs["attempt_0/rank_1/stderr.log"] == "rank 1 says goodbye\n"


#: Standard error is closed, as with 2>&- in a shell.
CLOSED = "import os, sys; os.close(2); sys.stderr = sys.__stderr__ = None"


@pytest.mark.parametrize(("closed", "shown"), [(True, "output\n"), (False, "error\n")])
def test_a_stream_that_is_closed_or_full_does_not_hide_the_other(tmp_path, closed, shown):
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text("import sys; print('output', flush=True); print('error', file=sys.stderr)")
    code = CLOSED if closed else "import sys"
    code += f"; sys.argv[1:] = ['run', '--quiet', '-n', '1', {str(script)!r}]; import runpy; "
    code += "runpy.run_module('procpipe.launch', run_name='__main__')"
    with open(os.devnull) as stdin, log.open("w") as shows, open("/dev/full", "w") as full:
        outputs = [shows, full] if closed else [full, shows]
        files = (stdin.fileno(), *(file.fileno() for file in outputs))
        launcher = fork_server().start(
            ["-c", code], env=job_environment(), cwd=tmp_path, files=files, num_ranks=1
        )

    assert launcher.wait(TIMEOUT_S) == 0, log.read_text()
    assert shown in log.read_text()


def test_a_successful_run_on_a_terminal():
    bar = "print('bar 1', end='\\rbar 2', flush=True)\n" + UNTIL_GO.replace("go", "seen")
    start = UNTIL_GO.replace("go", "drawn") + bar + "print(' and 3')\n" + LEAVE_SLEEPERS
    with started(
        "-n", "3", on_terminal=True, script=training(3, start, UNTIL_GO, 0.5), num_forked=3
    ) as run:
        run.wait_for("no Stage yet")
        (run.job.path / "drawn").touch()
        run.wait_for("bar 2")
        (run.job.path / "seen").touch()
        run.wait_for(r"waits \d+ s for gradient from stage 1 ")
        run.wait_for(r"waits \d+ s for activation from stage 1 ")
        run.wait_for(r"F0 '1' \(Layer\) for \d+ s")
        (run.job.path / "go").touch()
        ended = ended_with(run, 0)
        assert len([*run.job.path.glob("ended_*")]) == 3

    assert re.search(r"rank +stage +device +step +samples/s +busy +bubble +memory +now", ended.out)
    assert re.search(r"1 +1 +cpu +1 +\S.* MiB", ended.out)
    assert "bar 2 and 3\n" in ended.out
    # Each report of a stall is seen once, whichever rank makes it.
    logs = "".join(text for path, text in ended.logs.items() if path.endswith("stderr.log"))
    assert ended.out.count("procpipe: no progress") == logs.count("procpipe: no progress") > 0
    assert "stage 1 (rank 1): in F0, layer '1' (Layer), for " in ended.out
    assert "rank 0, step 2\n" in ended.out
    assert "rank 1, step" not in ended.out
    *_, left_behind, done, nothing = ended.out.split("\n")
    left_behind = left_behind.lstrip("\r")
    assert left_behind.startswith("procpipe: ended what the run had left behind: ")
    assert left_behind.count("sh (process ") == 3
    assert done.startswith("procpipe: done in ")
    assert nothing == ""
    assert ended.raw.rindex("\x1b[?25h") > ended.raw.rindex("\x1b[?25l"), "the cursor is hidden"


def test_an_exception_in_a_layer_is_reported_once():
    layer = UNTIL_GO + "raise KeyError('boom')"
    with started("-n", "3", on_terminal=True, script=training(3, do=layer), num_forked=3) as run:
        run.wait_for(r"F0 '1' \(Layer\)")
        (run.job.path / "go").touch()
        ended = ended_with(run, 1)

    output, start, report = ended.out.partition("procpipe: stage 1 (rank 1) failed")
    assert "rank 0, step 0" in output
    assert "Traceback" not in output
    assert "ends, because" not in report
    lines = report.splitlines()
    assert lines[0] == " in F0, layer '1' (Layer): KeyError: 'boom'"
    assert report.count("Traceback") == 1
    assert report.count("KeyError: 'boom'") == 2
    assert "The others in the end:\n  stage 0 (rank 0) was in " in report
    assert f"Logs: procpipe-logs/{ended.name}/attempt_0/ (rank_1/stderr.log" in report
    assert lines[-1].startswith("Exit code 1 after ")
    assert ended.logs["report.txt"].startswith(start + lines[0])
    assert "failed (exitcode: 1)" in ended.logs["launcher.log"], "torch's own report"


def test_ctrl_c_ends_all_processes():
    """Rank 1 is a new process, not a fork: all that it is interrupted in is its own."""
    with started(
        "-n", "2", on_terminal=True, script=training(10**9, LEAVE_SLEEPERS), num_forked=1
    ) as run:
        run.wait_for("step 2")
        run.press("\x03")
        ended = ended_with(run, 128 + signal.SIGINT)

    assert "Traceback" not in ended.out
    assert ended.out.count("procpipe: SIGINT: ending all processes; again to kill them") == 1
    assert ended.out.splitlines()[-1].startswith("procpipe: ended by SIGINT after ")
    # Either its own signal comes first, or the message that rank 0 was interrupted.
    errors = ended.logs["attempt_0/rank_1/stderr.log"]
    assert re.search(r"rank 1 was interrupted|rank 0 failed in step\(\): KeyboardInterrupt", errors)
    assert "Exception ignored" not in errors


def test_ctrl_c_twice_kills_all_processes():
    ignore = "signal.signal(signal.SIGINT, signal.SIG_IGN); print('ready'); time.sleep(1000)"
    with started("-n", "2", on_terminal=True, grace_s=1000, script=plain(ignore)) as run:
        run.wait_until(lambda: len(ready(run)) == 2, "both ranks to be ready")
        run.press("\x03")
        run.wait_for("ending all processes")
        run.press("\x03")
        ended = ended_with(run, 128 + signal.SIGINT)

    assert "procpipe: killing all processes" in ended.out
    assert ended.out.splitlines()[-1].startswith("procpipe: ended by SIGINT after ")


NOHUP = """
import signal, sys
from procpipe.launch.main import main
signal.signal(signal.SIGHUP, signal.SIG_IGN)
sys.exit(main())
"""


def test_a_host_that_waits_for_another_ignores_what_nohup_ignores_and_ends_at_ctrl_c():
    """torch waits for the store of the first host in C++, where no handler of Python's runs."""
    endpoint = f"127.0.0.1:{free_port()}"
    options = ["-n", 1, "--nnodes", 2, "--rdzv-endpoint", endpoint, "--rdzv-conf", "is_host=0"]
    with Job() as job:
        job.write("script.py", "")
        job.write("nohup.py", NOHUP)
        run = job.start(["nohup.py", "run", *options, "script.py"])
        run.wait_until(lambda: f"waits for hosts at {endpoint}" in run.output)
        run.popen.send_signal(signal.SIGHUP)
        run.popen.send_signal(signal.SIGINT)
        assert run.wait_end() == -signal.SIGINT, run.output


def ready(run):
    paths = run.job.path.glob("procpipe-logs/*/attempt_0/*/stdout.log")
    return [path for path in paths if "ready" in path.read_text()]


def test_sigterm_comes_to_ranks_and_ends_those_that_go_on():
    code = """
signal.signal(signal.SIGTERM, lambda *_: print("goes on", flush=True))
print("ready", flush=True)
time.sleep(1000)
"""
    with started("-n", "2", "--quiet", grace_s=1, script=plain(code)) as run:
        run.wait_until(lambda: len(ready(run)) == 2, "both ranks to ignore it")
        signalled_s = time.monotonic()
        run.popen.send_signal(signal.SIGTERM)
        ended = run.wait()
        took_s = time.monotonic() - signalled_s

    assert ended.code == 128 + signal.SIGTERM, ended
    assert ended.left == ()
    assert "procpipe: ended by SIGTERM after " in ended.err
    for rank in range(2):
        assert ended.logs[f"attempt_0/rank_{rank}/stdout.log"] == "ready\ngoes on\n"
    assert 1 <= took_s < 15, "torch's agent waits for 30 s by default"


def test_a_failed_job_is_restarted():
    code = """
if ATTEMPT == 0 and RANK == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if ATTEMPT == 1:
    raise ValueError("the same on all")
print("attempt", ATTEMPT, "goes well")
"""
    with started("-n", "2", "--max-restarts", "2", "--quiet", script=plain(code)) as run:
        ended = ended_with(run, 0)

    assert "attempt 2 goes well" in ended.out
    first, second = [line for line in ended.err.splitlines() if "procpipe: " in line]
    assert first == "procpipe: restart 1 of 2, with 2 ranks, because a rank failed"
    assert second == "procpipe: restart 2 of 2, with 2 ranks, because a rank failed"
    assert ended.logs["attempt_2/rank_1/stdout.log"] == "attempt 2 goes well\n"


#: Two pipelines, whose stages share layers by FSDP2.
IN_A_MESH = """
import os, torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from procpipe import Stage

dist.init_process_group("gloo")
print(os.getpid(), file=open(f"pid.{dist.get_rank()}", "w"))
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
stage = Stage(model, balance=[2, 2], mesh=mesh["pp"], chunks=3, loss_fn=F.mse_loss)
for layer in stage:
    fully_shard(layer, mesh=mesh["dp"])
for step in range(10**9):
    stage.step(torch.ones(6, 8), torch.ones(6, 8))
    if step == 2:
        print("trains", flush=True)
"""


def test_a_killed_rank_of_a_mesh_ends_all_pipelines_and_is_named():
    with started("-n", "4", script=(IN_A_MESH,), num_forked=4) as run:
        run.wait_for("trains")
        start_s = time.monotonic()
        os.kill(int((run.job.path / "pid.2").read_text()), signal.SIGKILL)
        ended = run.wait()

    # Long before the timeouts of torch.distributed and of procpipe.
    assert time.monotonic() - start_s < 30.0
    assert ended.code == 128 + signal.SIGKILL, ended
    assert ended.left == ()
    assert "procpipe: stage 0 (rank 2) was killed by SIGKILL " in ended.err, ended
    for rank, stage in ((0, 0), (1, 1), (3, 1)):
        assert f"\n  stage {stage} (rank {rank}) was " in ended.err, ended
