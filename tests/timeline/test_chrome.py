"""The file of a timeline: it is read back, has the viewers' fields, and faults are errors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from procpipe.timeline.chrome import from_chrome, to_chrome
from procpipe.timeline.recording import Hop, Recording
from tests.cases import for_each
from tests.timeline.recordings import (
    EQUAL,
    SUMS,
    UNEQUAL,
    read_step,
    recording_of,
    replicas_recording,
)

HOPS = [
    Hop("activation", 0, 0, 1, 64, 1.0, 1.1, 0.0, 1.5),
    Hop("gradient", 1, 1, 0, 32, 5.5, 5.5, 2.0, 6.0),
]


def recorded() -> Recording:
    first = read_step(EQUAL, number=3, hops=HOPS)
    second = read_step(UNEQUAL, number=7, call="forward", begins_s=(0.25, 0.5))
    return recording_of(first, second, layer_s=(1.0, 2.0), is_closed=False)


def test_a_written_recording_is_read_back() -> None:
    assert from_chrome(json.loads(json.dumps(to_chrome(recorded())))) == recorded()


def test_a_stage_is_a_process_with_a_row_for_each_kind_of_event() -> None:
    events = to_chrome(recorded())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X" and e["args"]["step"] == 3]
    rows = [(e["pid"], names[e["pid"], e["tid"]], e["name"]) for e in slices]

    assert len({event["tid"] for event in events} | {event["pid"] for event in events}) == 2 * 4 + 2
    assert [(pid - 1000, *row) for pid, *row in rows if pid == 1001] == [
        (1, "steps", "step 3 (step)"),
        (1, "tasks", "F0@1"),
        (1, "tasks", "F1@1"),
        (1, "tasks", "B1@1"),
        (1, "tasks", "B0@1"),
        (1, "waits", "activation 0 from stage 0"),
        (1, "transfers", "activation 0 from stage 0"),
        (1, "transfers", "gradient 1 to stage 0"),
    ]
    (task,) = (e for e in slices if e["name"] == "B1@1")
    assert (task["ts"], task["dur"]) == (3_500_000, 2_000_000)
    assert task["args"] == {"step": 3, "micro_batch": 1, "partition": 1}
    (sent,) = (e for e in slices if e["name"] == "activation 0 to stage 1")
    assert sent["args"] == {
        "step": 3, "transfer": 0, "kind": "activation", "micro_batch": 0, "from": 0, "to": 1,
        "bytes": 64, "posted_to_taken_us": 500_000,
    }  # fmt: skip


def test_an_arrow_connects_each_send_with_its_arrival() -> None:
    events = to_chrome(recorded())["traceEvents"]
    arrows = [event for event in events if event.get("cat") == "flow"]
    into = []
    for arrow in arrows:
        (slice_,) = (
            e for e in events
            if e["ph"] == "X" and e["tid"] == arrow["tid"]
            and e["ts"] <= arrow["ts"] < e["ts"] + max(e["dur"], 0.001)
        )  # fmt: skip
        into.append((arrow["id"], arrow["ph"], slice_["name"], slice_["ts"]))

    assert into == [
        (0, "s", "activation 0 to stage 1", 1_000_000),
        (0, "f", "activation 0 from stage 0", 1_100_000),
        (1, "s", "gradient 1 to stage 0", 5_500_000),
        (1, "f", "gradient 1 from stage 1", 5_500_000),
    ]


def test_plans_options_and_steps_are_in_other_data() -> None:
    data = to_chrome(recorded())["otherData"]

    assert data["plans"] == {"abc": "plan m=2 n=2\n"}
    assert (data["balance"], data["chunks"], data["schedule"]) == ([2, 3], 2, "gpipe")
    assert data["kept"] == "steps 3 and 7"
    assert data["clock_error_s"] == 2e-6
    assert data["steps"][0]["ends_us"] == [10_000_000, 7_500_000]


@for_each(
    ("data", "message"),
    [
        ([], "not a timeline that"),
        ({"traceEvents": []}, "not a timeline that"),
        ({"otherData": {"version": 3}}, "not a timeline that"),
        ({"otherData": {"format": "procpipe timeline 9"}}, "'procpipe timeline 9', but this"),
        ({"otherData": {"format": "procpipe timeline 1"}}, "damaged .KeyError: 'traceEvents'"),
    ],
)
def test_a_file_of_another_kind_is_reported(data: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_chrome(data)


def test_a_damaged_file_is_reported() -> None:
    data = to_chrome(recorded())
    data["traceEvents"] = [e for e in data["traceEvents"] if e.get("cat") != "wait"]

    with pytest.raises(ValueError, match=r"damaged .KeyError: 'wait'"):
        from_chrome(data)


def test_a_step_is_found_by_its_number_and_the_last_that_trained_without() -> None:
    recording = recording_of(
        *(read_step(EQUAL, number=k) for k in (0, 1, 5)),
        read_step("F0 0-1 \n F0 1-2", number=6),
    )

    assert recording.step(1).number == 1
    assert recording.step().number == 5
    assert replace(recording, steps=recording.steps[3:]).step().number == 6
    with pytest.raises(KeyError, match="step 3 is not in it: it has steps 0 to 1 and 5 to 6 of 8"):
        recording.step(3)
    with pytest.raises(KeyError, match="no step ended on all stages"):
        recording_of().step()


def test_similar_steps_have_the_same_sizes_and_exclude_the_slow_first_one() -> None:
    steps = [read_step(EQUAL, number=k) for k in range(3)]
    different = read_step(EQUAL, number=3, shares=((4, 4),))
    recording = recording_of(*steps, different)

    assert recording.like(steps[2]) == steps[1:]
    assert recording.like(different) == [different]
    assert recording_of(steps[0]).like(steps[0]) == steps[:1]


def test_replicas_are_read_back_with_their_sums() -> None:
    recording = replicas_recording()
    data = json.loads(json.dumps(to_chrome(recording)))

    assert from_chrome(data) == recording
    assert data["otherData"]["format"] == "procpipe timeline 2"
    events = data["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {
        1000: "stage 0 of replica 0 (rank 0)",
        1001: "stage 1 of replica 0 (rank 1)",
        1002: "stage 0 of replica 1 (rank 2)",
        1003: "stage 1 of replica 1 (rank 3)",
    }
    sums = [e for e in events if e.get("cat") == "all-reduce"]
    assert [(e["pid"] - 1000, e["ph"], e["ts"] / 1e6) for e in sums] == [
        (one.rank, phase, at_s)
        for one in SUMS
        for phase, at_s in zip("be", (one.start_s, one.end_s), strict=True)
    ]
    assert {e["name"] for e in sums} == {"all-reduce gradients 0"}
