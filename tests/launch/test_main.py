"""The command line, before anything is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from procpipe.launch import main as launcher
from procpipe.launch.main import main
from procpipe.launch.run import command

MISTAKES = [
    (["-n", "2", "nowhere.py"], "there is no file nowhere.py (seen from "),
    (["-n", "0", "train.py"], "argument -n/--nproc-per-node: 0: give a number of at least 1"),
    (
        ["-n", "2", "--nnodes", "two", "train.py"],
        "argument --nnodes: two: give a number",
    ),
    (
        ["-n", "2", "--nnodes", "0:2", "train.py"],
        "argument --nnodes: 0: give a number",
    ),
    (["-n", "2", "--max-restarts", "-1", "train.py"], "--max-restarts -1: give 0 or more"),
    (
        ["-n", "2", "--nnodes", "2", "train.py"],
        "several hosts need --rdzv-endpoint HOST:PORT, which all of them reach",
    ),
    (["-n", "2", "--log-dir", "train.py/x", "train.py"], "the logs cannot be written: "),
    (["-n", "2"], "the following arguments are required: train.py"),
    pytest.param(
        *(["train.py"], "give the number of processes by -n"),
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="one process a GPU"),
    ),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_each_mistake_in_the_command_line_is_named(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # main() changes it
    (tmp_path / "train.py").touch()
    with pytest.raises(SystemExit) as error:
        main(["run", *words])

    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_torchs_agent_gets_the_settings_of_its_rendezvous():
    words = "-n 1 --nnodes 2:4 --rdzv-endpoint first:1 --rdzv-conf is_host=1,read_timeout=9 x.py"
    made = command._config(command._parser().parse_args(words.split()), Path("logs/a-run"))
    assert (made.min_nodes, made.max_nodes, made.run_id) == (2, 4, "procpipe")
    assert {"is_host": "1", "read_timeout": "9"}.items() <= made.rdzv_configs.items()


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
