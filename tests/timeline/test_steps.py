"""Records of two ranks with clocks of their own, merged: literal numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from procpipe.plan.routes import Transfer
from procpipe.timeline.steps import (
    Clock,
    Hop,
    Summed,
    common_offsets,
    early_hops_s,
    merged,
    merged_step,
    ranges_text,
)
from tests.cases import for_each
from tests.timeline.recordings import CLOCKS, EQUAL, read_step, recording_of, records_of, traces_of

S = 10**9
OFFSETS_NS = [clock.offset_ns for clock in CLOCKS]


def test_times_are_exact_to_nanoseconds() -> None:
    """As seconds since 1970 a double would have only those of 0.2 µs."""
    records = records_of()
    records[1]["end"] = records[0]["end"] + 100 * S + 1
    offsets_ns = [offset_ns + 1_700_000_000 * S for offset_ns in OFFSETS_NS]

    assert merged_step(records, offsets_ns, 1).seconds == 8.000000001


def test_the_two_ends_of_a_message_are_matched() -> None:
    first, second, third = merged_step(records_of(), OFFSETS_NS, 1).hops
    activation, target = Transfer("activation", 0, 0, 1), Transfer("target", 0, 0, 2)

    assert first == Hop(activation, 0, 1, 64, posted_s=2, sent_s=2, asked_s=1, taken_s=3)
    assert second == Hop(target, 0, 1, 8, posted_s=2, sent_s=3, asked_s=3, taken_s=3)
    assert third == Hop(Transfer("loss", 0, 1, 0), 1, 0, 4, 7, 7, 3, 8)


def test_messages_between_the_same_stages_are_matched_by_their_partitions() -> None:
    first, second = records_of()
    first["sends"] = [["activation", 0, j, j + 1, 64, *[(10 + j) * S] * 2] for j in (0, 2)]
    second["takes"] = [["activation", 0, j, j + 1, 64, 111 * S, (120 - j) * S] for j in (2, 0)]
    hops = merged_step([first, second], OFFSETS_NS, 1).hops

    assert [(hop.posted_s, hop.taken_s) for hop in hops if hop.source == 0] == [(0, 10), (2, 8)]


def test_ranks_of_one_host_have_one_offset() -> None:
    """If wall time is set between their starts, their monotonic times are still comparable."""
    clocks = [Clock("a", 100), Clock("b", 7), Clock("a", 3_000_000), Clock("b", 8)]
    assert common_offsets(clocks) == [100, 7, 100, 7]


def test_a_step_counts_if_all_ranks_recorded_it() -> None:
    both = [records_of(k, 10 + 20 * k) for k in range(3)]
    traces = traces_of([both[0][0], both[1][0]], [both[1][1], both[2][1]])
    found = merged(traces[::-1])

    assert [step.number for step in found.steps] == [1]
    assert found.num_steps == 3
    assert merged(traces_of([], [])).steps == ()


def test_files_that_are_not_those_of_one_run_are_refused() -> None:
    first, second = traces_of([], [])
    other = replace(second, run=2)
    with pytest.raises(ValueError, match=r"^run\.0\.json, run\.1\.json are of different runs"):
        merged([first, other])
    for given in ([first], [first, second, first]):
        with pytest.raises(ValueError, match=r"files of ranks 0.*: give those of all 2 ranks"):
            merged(given)


def test_replicas_keep_their_messages_and_sums_apart() -> None:
    records = [*records_of(), *({**record, "sizes": [3]} for record in records_of())]
    records[3]["sums"] = [["gradients 0", 64, 112 * S, 113 * S, 114 * S]]
    step = merged_step(records, OFFSETS_NS * 2, 2)

    assert (len(step.rows), step.num_stages, step.shares) == (4, 2, ((4,), (3,)))
    pairs = {(hop.transfer.payload, hop.source, hop.destination) for hop in step.hops}
    assert pairs == {
        *(("activation", 0, 1), ("target", 0, 1), ("loss", 1, 0)),
        *(("activation", 2, 3), ("target", 2, 3), ("loss", 3, 2)),
    }
    assert step.sums == ((), (), (), (Summed("gradients 0", 64, 2, 3, 4),))  # it began after 1 s
    assert step.replica(1) == step.rows[2:]


def test_messages_that_arrive_before_they_are_sent_show_that_clocks_differ() -> None:
    apart = [OFFSETS_NS[0], OFFSETS_NS[1] - 4 * S]  # rank 1's wall time is 4 s behind
    steps = [merged_step(records_of(k), apart, 1) for k in range(2)]

    # The activation is sent at 6 s and taken at 3 s; the loss is late by the same.
    assert early_hops_s(steps) == {(0, 1): 3}
    assert early_hops_s([merged_step(records_of(), OFFSETS_NS, 1)]) == {}


def test_a_step_is_found_by_its_number_and_the_last_that_trained_without() -> None:
    recording = recording_of(
        *(read_step(EQUAL, number=k) for k in (0, 1, 5)),
        read_step("F0 0-1 \n F0 1-2", number=6),
    )

    assert recording.step(1).number == 1
    assert recording.step().number == 5
    assert replace(recording, steps=recording.steps[3:]).step().number == 6
    with pytest.raises(ValueError, match="step 3 was not recorded, but steps 0-1,5-6 of 8"):
        recording.step(3)
    with pytest.raises(ValueError, match="no step ended on all stages"):
        recording_of().step()


def test_steps_with_the_same_work_are_without_the_first_of_a_run() -> None:
    steps = [read_step(EQUAL, number=k, plan="b" if k == 2 else "a") for k in range(4)]
    recording = recording_of(*steps)

    assert [step.number for step in recording.like(steps[3])] == [1, 3]
    assert [step.number for step in recording.like(steps[2])] == [2]


@for_each(
    ("numbers", "expected"), [((0,), "0"), ((8, 2, 0, 1), "0-2,8"), ((), ""), ((3, 5, 6), "3,5-6")]
)
def test_numbers_are_written_as_ranges(numbers: tuple[int, ...], expected: str) -> None:
    assert ranges_text(numbers) == expected
