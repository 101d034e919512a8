"""Scripts in fresh processes: their results are reported, and their processes all end."""

from __future__ import annotations

import re

import psutil
import pytest

from tests.dist.report import RanksFailedError, RanksHungError
from tests.dist.script import _wait_end, run_forked, run_script

pytestmark = pytest.mark.dist

HANG = """
    import os, sys, threading
    sys.stdout.write(f"pid {os.getpid()}\\n")
    sys.stdout.flush()

    def wait_for_ever():
        threading.Event().wait()

    wait_for_ever()
"""

LEAVE_A_FORK = """
    import os, threading
    child = os.fork()
    if child == 0:
        threading.Event().wait()
    print("pid", child)
    raise SystemExit(3)
"""

LEAVE_A_PROCESS = """
    import subprocess, sys
    code = "import threading; threading.Event().wait()"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    print("pid", child.pid)
    raise SystemExit(3)
"""


def pids(text):
    return [int(pid) for pid in re.findall(r"pid (\d+)", text)]


def runs(pid):
    # In a container there may be no process that reaps orphans, which then stay as zombies.
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.on_gpus
def test_a_forked_process_writes_nothing_as_it_ends():
    """Also if Triton is installed, which the fork server must not import."""
    done = run_forked("import torch._dynamo").check()
    assert (done.stdout, done.stderr) == ("", "")


def test_the_environment_reaches_the_script():
    code = "import os; print(os.environ['NAME'], os.environ['OMP_NUM_THREADS'])"

    assert run_script(code, env={"NAME": "value"}).check().stdout == "value 1\n"


def test_torchruns_first_ranks_can_be_forks():
    """They differ from new processes in what they have imported, not in what /proc shows."""
    code = """
        import os, sys, time
        from pathlib import Path
        rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        shown = Path("/proc/self/environ").read_text().split("\\0")
        assert {f"{name}={value}" for name, value in os.environ.items()} <= {*shown}
        children = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
        assert str(os.getpid()) in children and os.getsid(0) == os.getpid()
        sys.stdout.write(f"{attempt} {rank} {'torch' in sys.modules} {sys.argv[1:]}\\n")
        sys.stdout.flush()
        if attempt == "0":
            Path(rank).touch()
            while not Path("0").exists() or not Path("1").exists():
                time.sleep(0.01)
            sys.exit("once")
    """
    restart = ["--max-restarts=1"]

    done = run_script(code, nproc=2, args=["a"], launcher_args=restart, num_forked=2).check()

    assert sorted(done.stdout.splitlines()) == [
        *("0 0 True ['a']", "0 1 True ['a']", "1 0 False ['a']", "1 1 False ['a']")
    ]
    assert "once\n" in done.stderr


def test_forks_that_torchrun_did_not_need_end_with_it():
    code = """
        import os
        from pathlib import Path
        for pid in Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split():
            print("pid", pid)
    """

    done = run_script(code, nproc=1, num_forked=3).check()

    assert len(pids(done.stdout)) == 3
    assert all(_wait_end(pid, 10.0) for pid in pids(done.stdout))


def test_a_process_left_behind_is_reported_and_killed(monkeypatch):
    monkeypatch.setattr("tests.dist.script.END_TIMEOUT_S", 0.2)

    done = run_script(LEAVE_A_PROCESS)

    assert done.returncode == 3
    assert len(done.left_behind) == 1
    assert "threading.Event().wait()" in done.left_behind[0]
    assert not any(map(runs, pids(done.stdout)))


@pytest.mark.parametrize(("nproc", "timeout_s"), [(None, 2.0), (2, 8.0)])
def test_a_hang_ends_with_the_stacks_of_every_process(nproc, timeout_s):
    with pytest.raises(RanksHungError) as caught:
        run_script(HANG, nproc=nproc, timeout_s=timeout_s)

    text = str(caught.value)
    assert f"did not end in {timeout_s} s" in text
    assert len(pids(text)) == (nproc or 1)
    assert not any(map(runs, pids(text)))
    for rank in range(nproc or 0):
        _, _, stack = text.partition(f"--- rank {rank} (process ")
        assert "in wait_for_ever" in stack.partition("---")[0]
    assert text.count("in wait_for_ever") == (nproc or 1)


def test_forks_have_a_launchers_variables_and_their_own_main_module():
    code = """
        import os, sys, __main__
        assert "torch" in sys.modules
        assert vars(__main__) is globals() and __name__ == "__main__" and __file__ == sys.argv[0]
        assert os.listdir() == []
        names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS"
        sys.stdout.write(f"{[os.environ.get(name) for name in names]} {sys.argv[1:]}\\n")
    """

    done = run_forked(code, num_ranks=2, args=["--lr=1"]).check()
    alone = run_forked(code).check()

    assert sorted(done.stdout.splitlines()) == [
        "['0', '0', '2', '1'] ['--lr=1']",
        "['1', '1', '2', '1'] ['--lr=1']",
    ]
    assert alone.stdout == "[None, None, None, '1'] []\n"


def test_a_fork_fails_as_a_script_does():
    code = """
        import atexit, os, sys
        atexit.register(print, "at exit")
        {}
    """
    known, unknown, hard = (
        run_forked(code.format(end))
        for end in ("sys.exit('wrong')", "raise KeyError('mine')", "os.kill(os.getpid(), 9)")
    )

    assert (known.returncode, known.stdout, known.stderr) == (1, "at exit\n", "wrong\n")
    assert (unknown.returncode, unknown.stdout) == (1, "at exit\n")
    assert unknown.stderr.endswith("KeyError: 'mine'\n")
    assert (hard.returncode, hard.stdout) == (-9, "")
    with pytest.raises(RanksFailedError, match=r"exit code -9"):
        hard.check()


def test_a_fork_that_hangs_or_leaves_a_process_is_reported_and_killed(monkeypatch):
    monkeypatch.setattr("tests.dist.script.END_TIMEOUT_S", 0.2)
    with pytest.raises(RanksHungError, match=r"on 2 ranks did not end in 2\.0 s") as caught:
        run_forked(HANG, num_ranks=2, timeout_s=2.0)
    text = str(caught.value)
    assert text.count("in wait_for_ever") == len(pids(text)) == 2
    assert not any(map(runs, pids(text)))

    done = run_forked(LEAVE_A_FORK)

    assert done.returncode == 3
    assert len(done.left_behind) == len(pids(done.stdout)) == 1
    assert not any(map(runs, pids(done.stdout)))


def test_lines_of_several_ranks_are_whole(monkeypatch):
    """With PYTHONUNBUFFERED, Python writes a line's end apart from the line."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    code = "import time\nfor _ in range(1000): print('line'); time.sleep(0)"
    assert run_forked(code, num_ranks=4).check().stdout == "line\n" * 4000
