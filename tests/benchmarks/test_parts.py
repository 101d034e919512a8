"""The one command: a part runs at tiny sizes, and the documentation's tables come from results.

What a part computes is its own truth: contenders compare their losses with one another.
"""

from __future__ import annotations

import json

import pytest

from benchmarks import page, rounds, throughput
from benchmarks.__main__ import MORE, QUICK, main
from benchmarks.contenders import COPIES, ONE_PROCESS, PROCPIPE, limit_s
from benchmarks.report import OF_BARE, OF_ONE, OF_TORCH, SHARE, Report, Table, publish
from benchmarks.throughput import ratios_of
from benchmarks.workloads import WORKLOADS, Job
from tests.cases import for_each
from tests.dist.forks import fork_server


def call_as_forks(command, *, env, cwd):
    """Run torchrun and its two ranks as forks, which saves seconds."""
    process = fork_server().start(command[1:], env=env, cwd=cwd, files=(0, 1, 2), num_ranks=2)
    return process.wait()


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(400)  # a busy machine
def test_a_part_runs_and_writes_its_ratios(tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(throughput._NUM_STEPS, "tiny", 1)
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


@for_each("part", [*QUICK, *MORE])
def test_every_part_has_a_help_text(part, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([part, "--help"])

    assert "--device" in capsys.readouterr().out


@for_each(
    ("m", "n", "is_bubble_free", "expected_s"),
    [
        (8, 2, False, 5.0 * 9 / 8),
        (8, 2, True, 5.0),
        (1, 1, False, 10.0),
        (1, 4, False, 10.0),  # one micro-batch: no two stages work at once
    ],
)
def test_the_limit_of_a_pipeline(m, n, is_bubble_free, expected_s):
    assert limit_s(10.0, m, n, is_bubble_free=is_bubble_free) == pytest.approx(expected_s)


def test_ratios_are_medians_of_those_of_rounds():
    times = {
        PROCPIPE: [6.0, 6.0, 24.0],
        "torch GPipe": [8.0, 8.0, 8.0],
        ONE_PROCESS: [12.0, 12.0, 48.0],
        COPIES: [9.6, 9.6, 38.4],
    }

    (ratios,) = ratios_of(Job(WORKLOADS["tiny"], 2, 8), times).values()

    assert ratios[OF_TORCH] == 0.75
    assert ratios[OF_ONE] == 0.5
    assert ratios[SHARE] == pytest.approx(4.8 * 9 / 8 / 6)


def test_the_page_gets_its_tables_from_results(tmp_path):
    table = Table("speed", ["", "ms", "of one"], [["procpipe", 12.34, None]], [".1f", ".2f"])
    assert table.to_text().splitlines()[-1] == "procpipe  12.3       -"
    for k, number in enumerate((0.5, 0.25)):
        report = Report("speed", [table], ratios={"tiny": {OF_TORCH: number, SHARE: 0.75}})
        publish(report, tmp_path / str(k), {"stolen": 0.0123, "others": 0.0, "drift": 1.04})
    text = f"# Title\n\n{page.BEGIN}\nold\n{page.END}\n\nThe rest.\n"
    written = tmp_path / "page.md"
    for folders in ([tmp_path / "0"], [tmp_path / "0", tmp_path / "1"]):
        written.write_text(text)
        page.write(written, folders)
        lines = written.read_text().splitlines()
        assert (lines[0], lines[-1]) == ("# Title", "The rest.")
        assert "old" not in lines
        assert "| speed | 1.2% | 0.0% | 1.04 |" in lines
        of_torch = "0.50" if len(folders) == 1 else "0.50 | 0.25"
        assert f"| tiny | {of_torch} | - | - | 0.75 | - |" in lines

    with pytest.raises(FileNotFoundError, match="has no results"):
        page.write(written, [tmp_path / "none"])
    written.write_text("without comments")
    with pytest.raises(ValueError, match="two comments"):
        page.write(written, [tmp_path / "0"])
