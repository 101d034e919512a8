"""``python -m benchmarks gpu``: which commands it has, how long each may take, and how it ends."""

from __future__ import annotations

import pytest

from benchmarks.gpu.hour import ROOT
from benchmarks.gpu.steps import steps_for
from tests.dist.script import run_forked

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


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(560)  # its parity starts 14 processes, on any number of cores
def test_the_command_runs_its_steps_and_writes_their_tables(tmp_path):
    names = ("versions", "parity", "gpt-memory", "trace")
    done = run_forked(
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
