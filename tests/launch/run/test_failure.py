"""Which rank failed first, and its report, from made-up ends of ranks."""

from __future__ import annotations

import signal
import traceback
from pathlib import Path

import pytest

from procpipe.job.board import Board
from procpipe.launch.run.failure import explain
from procpipe.launch.run.ranks import Logs, Rank, Recorded
from procpipe.launch.run.traceback_text import exception_line, folded, printed_traceback

TRACEBACK = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 5, in <module>
    stage.step(x, y)
ValueError: mine
"""


def end(rank, code, at_s=10.0, stderr="", recorded=None, reading=None):
    folder = Path(f"/logs/attempt_0/rank_{rank}")
    logs = Logs(rank, folder / "stdout.log", folder / "stderr.log", folder / "error.json")
    error = recorded and Recorded("ValueError: mine", recorded, at_s - 1)
    return Rank(logs, code=code, at_s=at_s, reading=reading, recorded=error, stderr=stderr)


def reading_of(rank, wait=None):
    board = Board.create(rank, 3)
    board.start_call("step")
    board.start_task("F", 3)
    if wait:
        board.note_wait(wait, 1)
    return board.read()


def victim(rank, code=1, at_s=10.2, why="rank 1 failed"):
    return end(rank, code, at_s, f"procpipe: rank {rank} ends, because {why}\n")


def test_the_recorded_exception_is_first_even_if_its_process_ends_last():
    ends = [victim(0), end(1, 1, 12.0, TRACEBACK, recorded=TRACEBACK), victim(2, -15, 10.3)]

    failure = explain(ends)

    assert failure.headline == "rank 1 failed: ValueError: mine"
    assert failure.exit_code == 1
    assert failure.body.count("ValueError: mine") == 1


def test_of_two_exceptions_the_earlier_is_the_headline():
    ends = [end(0, 1, 12.0, recorded=TRACEBACK), end(1, 4, 11.0, recorded=TRACEBACK), end(2, 0)]

    failure = explain(ends)

    assert failure.headline.startswith("rank 1 failed")
    assert failure.exit_code == 4
    assert "The same on rank 0." in failure.body
    assert "rank 2 ended well" in failure.body


def test_of_ranks_seen_to_end_at_once_the_agent_has_ended_some_because_of_another():
    ends = [end(0, -signal.SIGTERM), end(1, -signal.SIGTERM), end(2, -signal.SIGKILL)]

    failure = explain(ends)

    assert failure.headline == "rank 2 was killed by SIGKILL"
    assert failure.exit_code == 128 + signal.SIGKILL


def test_a_rank_that_failed_before_it_was_found_is_first():
    """Symptom: the launcher reported the rank that the agent had killed in the end."""
    ends = [end(0, -signal.SIGKILL, 40.0), end(1, 3, None), end(2, -signal.SIGTERM, None)]

    assert explain(ends).exit_code == 3


def test_a_killed_rank_is_reported_with_what_the_others_did():
    ends = [
        end(0, 1, 10.1, victim(0).stderr, reading=reading_of(0, "gradient from stage 1 (rank 1)")),
        end(1, -9, 10.0, reading=reading_of(1)),
        end(2, -15, 10.3, reading=reading_of(2)),
    ]

    failure = explain(ends, num_oom_kills=1)

    assert failure.headline == "stage 1 (rank 1) was killed by SIGKILL in F3"
    assert failure.exit_code == 137
    assert "SIGKILL: out of memory" in failure.body
    assert "Meanwhile the kernel has killed 1 of this control group's processes" in failure.body
    assert "\n  stage 0 (rank 0) was in F3, waiting " in failure.body
    assert " s for gradient from stage 1 (rank 1)\n" in failure.body
    assert "\n  stage 2 (rank 2) was in F3\n" in failure.body


def test_ranks_of_replicas_are_named_by_replica_and_stage():
    def reading(rank):
        board = Board.create(rank, 4)
        board.page.num_replicas = 2
        board.start_call("step")
        board.start_task("F", 3)
        return board.read()

    name = "rank 3 (stage 1 of replica 1)"
    why = f"procpipe: rank 0 (stage 0 of replica 0) ends, because {name} failed\n"
    ends = [end(0, 1, 10.1, why, reading=reading(0)), end(3, -9, 10.0, reading=reading(3))]
    failure = explain(ends)
    assert failure.headline == "stage 1 of replica 1 (rank 3) was killed by SIGKILL in F3"
    assert "\n  stage 0 of replica 0 (rank 0) was in F3\n" in failure.body
    assert explain(ends[:1]).headline.startswith(f"{name} failed (on another host")

    noted = f"{TRACEBACK}procpipe: in stage 1 of replica 1 (rank 3), task F3 (micro-batch 3)\n"
    headline = explain([end(3, 1, 10.0, noted, recorded=noted, reading=reading(3))]).headline
    assert headline == (
        "stage 1 of replica 1 (rank 3) failed in task F3 (micro-batch 3): ValueError: mine"
    )


def sharer(rank, at_s=10.2):
    note = "procpipe: the layers are sharded over ranks [0, 2]: another of these ranks has ended"
    return end(rank, 1, at_s, f"{TRACEBACK}[rank{rank}]: {note}\n", recorded=TRACEBACK)


def test_a_rank_that_waited_for_another_pipeline_is_first_only_if_no_other_is():
    """Two pipelines, of ranks 0 and 1, and 2 and 3; ranks 0 and 2 share layers."""
    first = victim(1, why="rank 0 failed in step(): ValueError: mine")
    # Rank 2 was killed, and rank 0 has recorded its error before the launcher saw that.
    ends = [sharer(0, 9.9), first, end(2, -9, 10.0), victim(3, why="rank 2 has ended")]
    assert explain(ends).headline == "rank 2 was killed by SIGKILL"
    # Rank 3 left early, with exit code 0, and rank 2 ended for it.
    ends = [sharer(0), first, victim(2, why="rank 3 has left the pipeline"), end(3, 0)]
    failure = explain(ends)
    assert failure.headline == "rank 3 has left the pipeline"
    assert failure.body.startswith("rank 3 ended with exit code 0.\n")
    # The other pipeline has made fewer steps, and has ended well.
    ends = [sharer(0), first, end(2, 0), end(3, 0)]
    assert explain(ends).headline == "rank 0 failed: ValueError: mine"


@pytest.mark.parametrize("code", [-15, -9], ids=["terminated", "killed, as it did not end"])
def test_a_rank_that_left_early_is_named_and_not_one_that_the_agent_killed(code):
    why = "rank 1 has left the pipeline while rank 2 waits for it"
    ends = [end(0, code, 12.0), end(1, 0, 9.0), victim(2, 1, 10.0, why)]

    failure = explain(ends)

    assert failure.headline == why
    assert "rank 1 ended with exit code 0." in failure.body
    assert failure.exit_code == 1


def test_a_failure_on_another_host_is_named():
    failure = explain([victim(0, why="rank 5 failed"), victim(1, why="rank 5 failed")])

    assert failure.headline == "rank 5 failed (on another host, whose launcher reports more)"


def test_a_rank_killed_by_sigterm_is_named():
    failure = explain([victim(0, 1, 10.2), end(1, -signal.SIGTERM, 10.0)])

    assert failure.headline == "rank 1 was killed by SIGTERM"
    assert failure.exit_code == 128 + signal.SIGTERM


def test_an_exit_code_without_a_traceback_is_reported_with_the_last_lines():
    failure = explain([end(0, 3, stderr="one\ntwo\n")])

    assert failure.headline == "rank 0 ended with exit code 3"
    assert "Its last lines on standard error:\n  one\n  two" in failure.body


def test_an_unknown_signal_or_no_ranks_at_all():
    assert explain([end(0, -40)]).headline == "rank 0 was killed by signal 40"
    assert explain([]).exit_code == 1


SYNTAX = """\
  File "/home/me/train.py", line 3
    def
       ^
SyntaxError: invalid syntax
"""


def test_a_syntax_error_is_a_traceback():
    assert printed_traceback(f"warning\n{SYNTAX}") == SYNTAX.rstrip()
    assert explain([end(0, 1, stderr=SYNTAX)]).headline == (
        "rank 0 failed: SyntaxError: invalid syntax"
    )


CHAINED = """\
Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'x'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
my.module.Error: two
lines
procpipe: in stage 1 (rank 1), task F0@1 (micro-batch 0), layer '2' (Layer)
"""


def test_the_last_traceback_is_found_with_its_causes():
    text = f"{TRACEBACK}and it goes on\n{CHAINED}"

    assert printed_traceback(text) == CHAINED.rstrip()
    assert exception_line(CHAINED) == "my.module.Error: two"
    assert printed_traceback("nothing") == exception_line("") == ""


LONG = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 5, in <module>
    stage.step(x, y)
  File "/env/procpipe/stage.py", line 1, in step
    pipeline.run()
    ^^^^^^^^^^^^^^
  File "/env/site-packages/torch/nn/modules/module.py", line 2, in _call_impl
    forward()
  File "/home/me/layers.py", line 6, in forward
    return torch.relu(x)
  File "/env/site-packages/torch/a.py", line 2, in relu
    one()
  File "/env/site-packages/torch/b.py", line 2, in one
    two()
  File "/env/site-packages/torch/c.py", line 2, in two
    raise ValueError
ValueError
"""


def test_the_traceback_of_an_exception_group_is_found():
    try:
        raise ExceptionGroup("two", [KeyError("a"), ValueError("b")])
    except ExceptionGroup as error:
        trace = "".join(traceback.format_exception(error))

    assert printed_traceback(f"a warning\n{trace}") == trace.rstrip()
    assert exception_line(trace) == "ExceptionGroup: two (2 sub-exceptions)"


def test_inner_frames_except_the_last_are_folded():
    assert (
        folded(LONG)
        == """\
Traceback (most recent call last):
  File "/home/me/train.py", line 5, in <module>
    stage.step(x, y)
  … 2 frames in procpipe and torch
  File "/home/me/layers.py", line 6, in forward
    return torch.relu(x)
  … 2 frames in procpipe and torch
  File "/env/site-packages/torch/c.py", line 2, in two
    raise ValueError
ValueError"""
    )
