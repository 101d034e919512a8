"""Records of two ranks with clocks of their own, merged: literal numbers."""

from __future__ import annotations

from typing import Any

from procpipe.plan.task import Task
from procpipe.timeline.clocks import ClockReading
from procpipe.timeline.merging import merged, merged_step
from procpipe.timeline.recording import Clock, Hop, Ran, Summed

S = 1_000_000_000


def records(step: int = 0, start_s: int = 10) -> list[dict[str, Any]]:
    """One micro-batch forward; rank 1's clock is 100 s ahead. Rank 1 has two partitions."""
    k, h = start_s, start_s + 101  # when each begins, by its own clock
    return [
        {
            "step": step, "call": "step", "plan": "abc", "sizes": [4],
            "begin": k * S, "end": (k + 8) * S,
            "tasks": [["F", 0, 0, k * S, (k + 2) * S]],
            "sends": [
                ["activation", 0, 0, 1, 64, (k + 2) * S, (k + 2) * S],
                ["target", 0, 0, 2, 8, (k + 2) * S, (k + 3) * S],
            ],
            "takes": [["loss", 0, 1, 0, 4, (k + 3) * S, (k + 8) * S]],
            "layers": [[0, 0, 3 * S, 2], [0, 1, S, 2]],
        },
        {
            "step": step, "call": "step", "plan": "abc", "sizes": [4],
            "begin": h * S, "end": (h + 7) * S,
            "tasks": [["F", 0, 1, (h + 2) * S, (h + 4) * S], ["F", 0, 2, (h + 4) * S, (h + 6) * S]],
            "sends": [["loss", 0, 1, 0, 4, (h + 6) * S, (h + 6) * S]],
            "takes": [
                ["activation", 0, 0, 1, 64, h * S, (h + 2) * S],
                ["target", 0, 0, 2, 8, (h + 2) * S, (h + 2) * S],
            ],
            "layers": [[1, 0, 4 * S, 1], [2, 0, S, 1], [2, 1, S, 1]],
        },
    ]  # fmt: skip


READINGS = [[], [ClockReading(100 * S, 100 * S, 2_000)]]


def recording(of_rank_0, of_rank_1, **fields):
    values: dict[str, Any] = {
        "plans": {"abc": "plan"},
        "facts": {"balance": [2, 1, 1]},
        "num_steps": 2,
        "is_closed": True,
    }
    return merged([of_rank_0, of_rank_1], READINGS, **(values | fields))


def test_all_times_are_on_the_clock_of_rank_0_and_begin_at_0() -> None:
    step = merged_step(records(), READINGS)

    assert (step.begins_s, step.ends_s, step.seconds) == ((0, 1), (8, 8), 8)
    assert step.tasks == (
        Ran(0, Task("F", 0, 0), 0, 2),
        Ran(1, Task("F", 0, 1), 3, 5),
        Ran(1, Task("F", 0, 2), 5, 7),
    )


def test_the_two_ends_of_a_message_are_matched() -> None:
    assert merged_step(records(), READINGS).hops == (
        Hop("activation", 0, 0, 1, 64, posted_s=2, sent_s=2, asked_s=1, taken_s=3),
        Hop("target", 0, 0, 1, 8, posted_s=2, sent_s=3, asked_s=3, taken_s=3),
        Hop("loss", 0, 1, 0, 4, posted_s=7, sent_s=7, asked_s=3, taken_s=8),
    )


def test_messages_between_the_same_stages_are_matched_by_their_partitions() -> None:
    first, second = records()
    first["sends"] = [["activation", 0, j, j + 1, 64, *[(10 + j) * S] * 2] for j in (0, 2)]
    second["takes"] = [["activation", 0, j, j + 1, 64, 111 * S, (120 - j) * S] for j in (2, 0)]
    hops = merged_step([first, second], READINGS).hops

    assert [(hop.posted_s, hop.taken_s) for hop in hops if hop.source == 0] == [(0, 10), (2, 8)]


def test_a_step_counts_if_all_ranks_recorded_it() -> None:
    both = [records(k, 10 + 20 * k) for k in range(3)]
    found = recording([both[0][0], both[1][0]], [both[1][1], both[2][1]])

    assert [step.number for step in found.steps] == [1]
    assert found.steps[0].start_s == 0
    assert recording([], []).steps == ()


def test_layers_are_the_model_s_in_order_and_the_loss_counts_with_the_last() -> None:
    assert recording(records()[:1], records()[1:]).layer_s == (1.5, 0.5, 4.0, 2.0)


def test_layers_are_unknown_if_one_was_not_timed() -> None:
    first, second = records()
    del second["layers"][0]

    assert recording([first], [second]).layer_s == ()


def test_clocks_have_their_offsets_and_errors() -> None:
    assert recording([], []).clocks == (Clock(0, 0.0, 0.0, 0.0), Clock(1, 100.0, 2e-6, None))


def test_replicas_keep_their_messages_and_sums_apart() -> None:
    first = records()
    second = [{**record, "sizes": [3]} for record in records()]
    second[1] = {**second[1], "sums": [["gradients 0", 64, 112 * S, 114 * S, 113 * S, 114 * S]]}
    step = merged_step([*first, *second], READINGS * 2, num_replicas=2)

    assert (step.num_ranks, step.num_stages, step.shares) == (4, 2, ((4,), (3,)))
    pairs = {(hop.payload, hop.source, hop.destination) for hop in step.hops}
    assert pairs == {
        *(("activation", 0, 1), ("target", 0, 1), ("loss", 1, 0)),
        *(("activation", 2, 3), ("target", 2, 3), ("loss", 3, 2)),
    }
    assert step.sums == (Summed(3, "gradients 0", 64, 2, 4, 3, 4),)  # it began after 1 s
    assert step.name_of(3) == "stage 1 of replica 1"
