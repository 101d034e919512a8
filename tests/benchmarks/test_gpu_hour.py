"""``python -m benchmarks gpu``: which commands it has, how long each may take, and how it ends."""

from __future__ import annotations

import sys

import pytest

from benchmarks.gpu import hour
from benchmarks.gpu.hour import MARK, ROOT, run_limited
from benchmarks.gpu.steps import LEAST_S, allowance_s, steps_for
from tests.dist.script import run_script

#: What needs a NCCL that takes two ranks on a GPU, where there is one GPU.
BY_NCCL = {"nccl-parity", "nccl-pair", "nccl-messages", "gpt-peers"}


def test_a_machine_with_fewer_gpus_has_fewer_steps():
    one, new, four = steps_for(1), steps_for(1, shares_by_nccl=True), steps_for(4)

    assert {step.name for step in one if step.why_not} == BY_NCCL
    assert not any(step.why_not for step in (*new, *four))
    assert {step.name for step in new if step.with_nccl} == BY_NCCL
    assert not any(step.with_nccl for step in four)
    names = {step.name for step in four}
    assert names >= {"nccl-2", "nccl-4", "nccl-blocks", *(step.name for step in one)}
    assert "nccl-8" not in names
    assert [step.name for step in one][:3] == ["versions", "tests", "parity"]


def test_steps_that_use_all_of_their_time_never_use_more_than_there_is():
    assert allowance_s(100.0, [1, 1, 2]) == 25.0
    assert allowance_s(60.0, [1, 9]) == LEAST_S  # it has the time to start
    for share in (0.0, 0.3, 1.0):
        weights, left_s = [30.0, 130.0, 40.0, 25.0], 480.0
        for k in range(len(weights)):
            allowed_s = allowance_s(left_s, weights[k:])
            assert 0.0 < allowed_s <= left_s
            left_s -= share * allowed_s
        assert (left_s == 0.0) == (share == 1.0)


@pytest.mark.dist
def test_a_step_that_hangs_writes_its_stacks_and_is_killed_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(hour, "_STACKS_S", 60.0)
    code = "import faulthandler, subprocess, time; faulthandler.enable(); "
    code += "subprocess.Popen(['setsid', 'sleep', '100']); print('hangs', flush=True); "
    code += "time.sleep(100)"
    log, environment = tmp_path / "logs.txt", {MARK: str(tmp_path)}

    ended, seconds = run_limited([sys.executable, "-c", code], environment, 3.0, log)

    assert ended == "cut off"
    assert seconds < 60.0
    assert "Fatal Python error: Aborted" in log.read_text()
    assert hour.signal_all(str(tmp_path), 0) == 0
    code = "import sys; print('ValueError: no'); print('and so on'); sys.exit(3)"
    ended, _ = run_limited([sys.executable, "-c", code], environment, 60.0, log)
    assert ended == "failed: ValueError: no"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(560)  # its parity starts 14 processes, on any number of cores
def test_the_command_runs_its_steps_and_writes_their_tables(tmp_path):
    names = ("versions", "parity", "gpt-memory", "trace")
    done = run_script(
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from benchmarks.__main__ import main; "
        "sys.exit(main(sys.argv[1:]))",
        args=["gpu", "--tiny", "--steps", *names, "--budget-s", "500", "--folder", str(tmp_path)],
        timeout_s=540.0,
    )

    done.check()
    text = (tmp_path / "gpu.txt").read_text()
    assert text.count(" done ") == len(names)
    assert "parity: largest difference" in text
    assert "8 stages: zb-h1, never" in text
    assert (tmp_path / "trace/trace.0.json").is_file()
