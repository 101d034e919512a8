"""A rank's file: whole after each step, bounded, read back; and events as viewers expect them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from procpipe.timeline import chrome
from procpipe.timeline.chrome import FIRST, LAST, TraceFile, joined, rank_path, read
from procpipe.timeline.steps import Clock
from tests.cases import for_each
from tests.timeline.recordings import FACTS, records_of


def trace_file(path: Path, **facts: Any) -> TraceFile:
    return TraceFile(path, 1, 42, FACTS | facts)


def record(step: int) -> dict[str, Any]:
    return records_of(step)[1]


def test_a_rank_has_a_file_of_its_own(tmp_path: Path) -> None:
    assert rank_path(tmp_path / "run.json", 3) == tmp_path / "run.3.json"
    assert rank_path("run", 0) == Path("run.0")


def test_a_file_is_whole_after_each_step(tmp_path: Path) -> None:
    path = tmp_path / "run.1.json"
    file = trace_file(path)
    assert read(path).records == []
    for k in range(3):
        file.add(record(k))

        trace = read(path)
        assert trace.records == [record(i) for i in range(k + 1)]
        assert not trace.is_closed
    file.close()

    trace = read(path)
    assert (trace.name, trace.rank, trace.run, trace.facts) == ("run.1.json", 1, 42, FACTS)
    assert trace.clock.host == Clock.here().host
    assert len(trace.records) == 3
    assert trace.is_closed
    assert [each.name for each in tmp_path.iterdir()] == ["run.1.json"]


def test_the_first_and_the_last_steps_of_a_long_run_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.1.json"
    file = trace_file(path)
    for k in range(1000):
        file.add(record(k))

    kept = [each["step"] for each in read(path).records]
    assert kept[:FIRST] == list(range(FIRST))
    assert kept[FIRST:] == list(range(1000 - len(kept) + FIRST, 1000))
    assert LAST <= len(kept) - FIRST <= 2 * LAST


def test_a_file_that_cannot_be_written_is_a_note_and_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = trace_file(tmp_path / "gone" / "run.1.json")
    file.add(record(0))
    file.close()

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"procpipe: the trace {tmp_path}/gone/run.1.json is not written on")


def test_the_newest_stage_with_a_path_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.1.json"
    first = trace_file(path)
    first.add(record(0))
    second = trace_file(path)
    second.add(record(7))
    assert capsys.readouterr().err == ""
    for _ in range(2):
        first.add(record(1))
    second.add(record(8))

    assert [each["step"] for each in read(path).records] == [7, 8]
    (line,) = capsys.readouterr().err.splitlines()
    assert "something else writes it now; give each stage its own path" in line


@for_each(
    ("content", "message"),
    [
        ("[1, 2", r"JSONDecodeError: "),
        ("[]", "TypeError: "),
        ('{"traceEvents": []}', "KeyError: 'otherData'"),
        ('{"otherData": {"format": "procpipe timeline 9"}}', "'procpipe timeline 9', and not"),
        ('{"otherData": {"format": "procpipe timeline 4"}}', "KeyError: 'traceEvents'"),
    ],
)
def test_a_file_of_another_kind_is_reported(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"run\.json is no whole timeline of .*{message}"):
        read(path)


# -- for viewers --------------------------------------------------------------------------------


def test_a_rank_is_a_process_with_a_row_for_each_kind_of_event(tmp_path: Path) -> None:
    path = tmp_path / "run.1.json"
    before_ns = time.time_ns() - time.perf_counter_ns()
    trace_file(path).add(record(7))
    data = json.loads(path.read_text())
    names = {e["tid"]: e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"}
    boxes = [e for e in data["traceEvents"] if e["ph"] == "X"]

    assert {event["pid"] for event in data["traceEvents"]} == {5_000_001}
    assert [(names[e["tid"]], e["name"]) for e in boxes] == [
        ("steps", "step 7 (step)"),
        ("tasks", "F0@1"),
        ("tasks", "F0@2"),
        ("waits", "activation 0: 0->1"),
        ("waits", "target 0: 0->2"),
        ("sends", "loss 0: 1->0"),
    ]
    # Its times are wall times: the task began 113 s after the zero of the monotonic clock.
    at_ns = data["baseTimeNanoseconds"] + boxes[1]["ts"] * 1000 - 113 * 10**9
    assert at_ns == pytest.approx(before_ns, abs=10**8)
    assert boxes[1]["dur"] == 2_000_000


def test_replicas_have_a_row_of_sums_that_may_overlap(tmp_path: Path) -> None:
    path = tmp_path / "run.1.json"
    s = 10**9
    sums = [
        ["gradients 0", 64, 112 * s, 113 * s, 115 * s],
        ["gradients 1", 8, 113 * s, 115 * s, 116 * s],
    ]
    trace_file(path, replicas=2).add(record(0) | {"sums": sums})
    events = json.loads(path.read_text())["traceEvents"]

    (name,) = (e["args"]["name"] for e in events if e["name"] == "process_name")
    assert name == "stage 0 of replica 1 (rank 1)"
    found = [e for e in events if e.get("cat") == "all-reduce"]
    zero_us = found[0]["ts"] - 112e6
    assert [(e["name"], e["ph"], round(e["ts"] - zero_us)) for e in found] == [
        ("gradients 0", "b", 112_000_000),
        ("gradients 0", "e", 115_000_000),
        ("gradients 1", "b", 113_000_000),
        ("gradients 1", "e", 116_000_000),
    ]
    assert len({e["id"] for e in found}) == 2
    assert [e["name"] for e in events if e["name"].startswith("all-reduce gradients")] == [
        "all-reduce gradients 0",
        "all-reduce gradients 1",
    ]


def test_all_ranks_in_one_file_begin_at_the_same_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"run.{rank}.json" for rank in range(2)]
    for rank, path in enumerate(paths):  # the second one starts in another quarter of a year
        monkeypatch.setattr(chrome, "_base_ns", lambda rank=rank: (5000 + 1000 * rank) * 10**9)
        TraceFile(path, rank, 42, FACTS).add(records_of(start_s=10)[0])

    data = json.loads(joined(paths))

    assert data["baseTimeNanoseconds"] == 5000 * 10**9
    tasks = [e for e in data["traceEvents"] if e["name"] == "F0@0"]
    assert [e["pid"] for e in tasks] == [5_000_000, 5_000_001]
    assert tasks[1]["ts"] == pytest.approx(tasks[0]["ts"], abs=1e6)  # both clocks are this host's
    assert tasks[0]["dur"] == tasks[1]["dur"] == 2_000_000
