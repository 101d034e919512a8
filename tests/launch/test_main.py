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


DRAWN = """\
            stage 0   stage 1
replica 0   rank 0    rank 1
replica 1   rank 2    rank 3

4 processes on this host"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="it draws GPUs, too")
def test_a_dry_run_draws_stages_times_replicas(script, capsys, tmp_path):
    run = ["run", "-n", "4", "--no-pin", "--dry-run"]
    number = "import procpipe\nstage = procpipe.Stage(model, [2, 2], replicas={})\n"
    for options, arguments, text in (
        (["--replicas", "2"], [], number.format(4)),
        ([], ["--replicas", "2"], number.format(4)),
        ([], ["--lr", "1", "--replicas=2"], ""),
        ([], [], number.format(2)),
    ):
        (tmp_path / "train.py").write_text(text)
        assert main([*run, *options, script, *arguments]) == 0
        assert capsys.readouterr().out.startswith(DRAWN), (options, arguments, text)

    for text in (
        "",
        number.format(1),
        number.format("args.replicas"),
        "Stage(",
        "Stage(**options)",
    ):
        (tmp_path / "train.py").write_text(text)
        assert main([*run, script]) == 0
        assert capsys.readouterr().out.startswith("4 processes"), text

    hosts = ["--nnodes", "2", "--rdzv-endpoint", "first:29500", "--replicas", "4"]
    assert main([*run, *hosts, script]) == 0
    assert capsys.readouterr().out.splitlines()[3].split("   ") == [
        "replica 2", "rank 4, host 1", "rank 5, host 1",
    ]  # fmt: skip


def test_replicas_that_do_not_fit_are_refused_in_a_dry_run(script, capsys):
    for words, expected in (
        (["--dry-run", "--replicas", "3"], "--replicas is 3, but there are 4 processes"),
        (["--replicas", "2"], "--replicas is for the drawing of --dry-run"),
    ):
        with pytest.raises(SystemExit) as error:
            main(["run", "-n", "4", *words, script])
        assert error.value.code == 2
        assert expected in capsys.readouterr().err
