"""Which rank failed first, and its report, from the files of made-up ranks."""

from __future__ import annotations

import json
import signal

import pytest

from procpipe.job.board import Board
from procpipe.launch.run.ranks import Rank
from procpipe.launch.run.report import report_on

TRACEBACK = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 5, in <module>
    stage.step(x, y)
  File "/opt/procpipe/stage.py", line 300, in step
    self._run()
    ~~~~~~~~~^^
  File "/opt/torch/nn/module.py", line 200, in _call_impl
    return forward(x)
  File "/home/me/train.py", line 2, in forward
    raise ValueError("mine")
ValueError: mine
"""


@pytest.fixture
def rank(tmp_path):
    """Return what makes a rank: its files, and a board if ``task`` is given."""

    def make(number, *, stderr="", recorded="", note=None, task="", num_ranks=3, num_replicas=1):
        made = Rank(number, tmp_path / f"rank_{number}")
        made.folder.mkdir()
        made.stderr.write_text(stderr)
        if recorded:
            message = {"message": recorded, "extraInfo": {"py_callstack": TRACEBACK}}
            made.error.write_text(json.dumps({"message": message}))
        if note is not None:
            (made.folder / "victim.json").write_text(json.dumps(note))
        if task:
            board = made.board = Board.create(number, num_ranks)
            board.page.num_replicas = num_replicas
            board.start_call("step")
            board.start_task(task[0], int(task[1:]))
        return made

    return make


def failed(ranks, codes, **options):
    """Report on ranks with these exit codes, the first to fail first."""
    for number, code in codes.items():
        ranks[number].code = code
    return report_on(ranks, [ranks[number] for number in codes], **options)


def victim(of, because="rank 1 failed in step(): ValueError: mine"):
    return {"victim_of": of, "because": because}


def test_a_victim_is_not_the_first_even_if_it_ends_first(rank):
    ranks = [
        rank(0, note=victim(1)),
        rank(1, stderr=TRACEBACK, recorded="ValueError: mine", task="F3"),
        rank(2, note=victim(1)),
    ]

    report = failed(ranks, {0: 1, 1: 4, 2: -15})

    assert report.headline == "stage 1 (rank 1) failed in F3: ValueError: mine"
    assert report.exit_code == 4
    assert "\n    … frames in procpipe and torch\n" in report.body
    assert '\n    File "/home/me/train.py", line 2, in forward\n' in report.body
    assert report.body.count("ValueError: mine") == 1


def test_a_failure_whose_exit_code_is_not_known_is_one(rank):
    new = rank(0, recorded="ValueError: mine")
    new.board = Board.create(0, 1)  # in Stage(), which is no place between calls
    report = failed([new], {0: 0})  # the agent failed, too
    assert (report.headline, report.exit_code) == ("stage 0 (rank 0) failed: ValueError: mine", 1)


def test_a_rank_that_records_nothing_is_named_with_its_last_line(rank):
    ranks = [rank(0), rank(1, stderr="bar 1\rbar 2\rno data\n")]
    report = failed(ranks, {1: 3})

    assert "\n  rank 0 had made no Stage yet\n" in report.body

    assert report.headline == "rank 1 ended with exit code 3: no data"
    assert "Its last lines on standard error:\n  no data\n" in report.body


def test_a_killed_rank_is_reported_with_what_the_others_did(rank):
    ranks = [rank(k, task="F3", num_ranks=4, num_replicas=2) for k in range(4)]
    ranks[0].board.note_wait("gradient from stage 1 of replica 0 (rank 1)", 1)

    report = failed(ranks, {3: -signal.SIGKILL, 0: 1}, num_oom_kills=1)

    assert report.headline == "stage 1 of replica 1 (rank 3) was killed by SIGKILL in F3"
    assert report.exit_code == 137
    assert "SIGKILL: out of memory" in report.body
    assert "The kernel counted 1 out-of-memory kills here during the run." in report.body
    assert "\n  stage 0 of replica 0 (rank 0) was in F3, waiting " in report.body


def test_a_rank_that_waited_for_another_pipeline_is_first_only_if_no_other_is(rank):
    """Two pipelines, of ranks 0 and 1, and 2 and 3; ranks 0 and 2 share layers."""
    sharer = rank(0, recorded="DistNetworkError: reset", note={"shared_with": [0, 2]})
    ranks = [sharer, rank(1, note=victim(0)), rank(2), rank(3, note=victim(2, "rank 2 has ended"))]

    killed = failed(ranks, {0: 1, 1: 1, 2: -9, 3: 1})
    assert killed.headline == "rank 2 was killed by SIGKILL"
    left = failed(ranks, {0: 1, 1: 1, 3: 1})
    assert left.headline == "rank 2 has ended"
    alone = failed(ranks, {0: 1, 1: 1})
    assert alone.headline == "rank 0 failed: DistNetworkError: reset"


@pytest.mark.parametrize("of", [1, 7])
def test_victims_of_a_rank_that_did_not_fail_here(rank, of):
    cause = f"rank {of} has left the pipeline while rank 0 waits for it"
    ranks = [rank(0, note=victim(of, cause)), rank(1, stderr="bye\n")]

    report = failed(ranks, {0: 3})

    is_elsewhere = of == 7
    more = " (on another host, whose launcher reports more)"
    assert report.headline == cause + more * is_elsewhere
    assert ("bye" in report.body) is not is_elsewhere
    assert report.exit_code == 3
