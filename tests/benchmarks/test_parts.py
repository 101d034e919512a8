"""The one command: a part runs at tiny sizes, and the documentation's tables come from results.

What a part computes is its own truth: contenders compare their losses with one another.
"""

from __future__ import annotations

import json

import pytest

from benchmarks import rounds, throughput
from benchmarks.__main__ import MORE, QUICK, main
from benchmarks.gpu.hour import ROOT
from benchmarks.report import OF_BARE, OF_ONE, OF_TORCH, SHARE
from tests.cases import for_each
from tests.dist.forks import fork_server
from tests.dist.script import run_forked


def call_as_forks(command, *, env, cwd):
    """Run torchrun and its two ranks as forks, which saves seconds."""
    process = fork_server().start(command[1:], env=env, cwd=cwd, files=(0, 1, 2), num_ranks=2)
    return process.wait()


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(400)  # a busy machine
def test_a_part_runs_and_writes_its_ratios(tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(throughput._NUM_IN_A_TURN, "tiny", 2)
    monkeypatch.setattr(rounds, "call", call_as_forks)
    words = ["throughput", "--sizes", "tiny", "--workloads", "tiny", "--micro-batches", "2"]
    words += ["--contenders", "torch GPipe", "bare gloo", "--rounds", "1", "--out", str(tmp_path)]

    assert main(words) == 0

    found = json.loads((tmp_path / "throughput.json").read_text())
    (ratios,) = found["ratios"].values()
    assert ratios.keys() >= {OF_TORCH, OF_BARE, OF_ONE, SHARE}
    assert all(ratio > 0 for ratio in ratios.values())
    assert found["quiet"].keys() == {"stolen", "others", "drift"}
    printed = (tmp_path / "throughput.txt").read_text()
    assert printed in capfd.readouterr().out
    assert f"torch {found['machine']['torch']}" in printed


#: Its default argument keeps the group, as in torch.distributed.nn.functional of torch 2.15.
LATE = """
import pathlib, torch.distributed as dist
def threads(group=dist.group.WORLD):
    return [file.read_text() for file in pathlib.Path("/proc/self/task").glob("*/comm")]
"""


@pytest.mark.dist
def test_no_thread_of_gloo_outlives_a_workers_group(tmp_path):
    """Symptom: one released a tensor in Python's shutdown, which ended a rank by SIGABRT."""
    tmp_path.joinpath("late.py").write_text(LATE)
    code = f"import sys; sys.path += {[str(ROOT), str(tmp_path)]}; from benchmarks import worker;"
    code += "worker.main(); from late import threads; print(threads())"
    words = ["late:threads", "{}", "60", str(tmp_path / "names")]
    done = run_forked(code, num_ranks=1, args=words)

    assert "gloo" not in done.check().stdout
    assert "gloo" in tmp_path.joinpath("names").read_text()


@for_each("part", [*QUICK, *MORE])
def test_every_part_has_a_help_text(part, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([part, "--help"])

    assert "--device" in capsys.readouterr().out
