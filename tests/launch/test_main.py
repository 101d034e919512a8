"""The command line: mistakes and dry runs, before anything is started."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from procpipe.job.pin import cores_of_host
from procpipe.launch import main as launcher
from procpipe.launch.main import main


@pytest.fixture(autouse=True)
def own_environment():
    """Restore the environment: ``main`` changes that of its process, which here runs the tests."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


MISTAKES = [
    (["-n", "2", "nowhere.py"], "there is no file nowhere.py (seen from "),
    (["-n", "0", "train.py"], "argument -n/--nproc-per-node: 0: give a number of at least 1"),
    (["-n", "x", "train.py"], "argument -n/--nproc-per-node: x: give a number of at least 1"),
    (["-n", "2", "--max-restarts", "-1", "train.py"], "-1: give a number of at least 0"),
    (
        ["-n", "2", "--nnodes", "3:2", "train.py"],
        "argument --nnodes: 3:2: give a number of hosts, or ",
    ),
    (
        ["-n", "2", "--nnodes", "two", "train.py"],
        "argument --nnodes: two: give a number of hosts, or ",
    ),
    (["-n", "2", "--nnodes", "2", "train.py"], "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
    (["-n", "2", "--node-rank", "1", "train.py"], "--node-rank is for several hosts"),
    (["-n", "2", "--log-dir", "train.py/x", "train.py"], "the logs cannot be written: "),
    (["-n", "2"], "the following arguments are required: train.py"),
]


def test_each_mistake_in_the_command_line_is_named(script, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for words, message in MISTAKES:
        with pytest.raises(SystemExit) as error:
            main(["run", *words])

        assert error.value.code == 2, words
        assert message in capsys.readouterr().err, words


@pytest.mark.skipif(torch.cuda.is_available(), reason="it takes one process a GPU here")
def test_without_gpus_the_number_of_processes_is_required(script, capsys):
    with pytest.raises(SystemExit) as error:
        main(["run", script])

    assert error.value.code == 2
    assert "give the number of processes by -n" in capsys.readouterr().err


def test_a_dry_run_prints_all_and_starts_nothing(script, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    assert main(["run", "-n", "1", "--dry-run", "--max-restarts", "3", script, "--lr", "1 2"]) == 0

    printed = capsys.readouterr().out
    assert "1 processes" not in printed
    assert "process  device  cores  CPUs" in printed
    assert f"0        CPU     {len(cores_of_host())} " in printed
    assert f"starts    {sys.executable} -u train.py --lr '1 2'\n" in printed
    assert "(the physical cores of a process)" in printed
    assert "restarts  3\n" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_dry_run_of_several_hosts(script, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    hosts = ["--nnodes", "2:4", "--rdzv-endpoint", "first:29500"]

    assert main(["run", "-n", "2", "--no-pin", "--dry-run", *hosts, "-m", "my.train"]) == 0

    printed = capsys.readouterr().out
    assert printed.startswith("2 processes on this host, not pinned to cores\n")
    assert " -u -m my.train\n" in printed
    assert "OMP_NUM_THREADS=5 (OMP_NUM_THREADS is set)" in printed
    assert "hosts     2 to 4, which meet at first:29500" in printed


def test_a_command_whose_folder_is_missing_is_not_offered(tmp_path, capsys, monkeypatch):
    for name in ("run", "plan"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "command.py").touch()
    monkeypatch.setattr(launcher, "__file__", str(tmp_path / "main.py"))

    with pytest.raises(SystemExit) as error:
        main(["doctor"])

    assert error.value.code == 2
    printed = capsys.readouterr().err
    assert "invalid choice: 'doctor'" in printed
    assert ("run" in printed, "plan" in printed, "timeline" in printed) == (True, True, False)
