"""A few cases of the fuzzer, the same each time; and its detection of differences."""

from __future__ import annotations

import dataclasses

import pytest
from benchmarks.fuzz import smallest
from benchmarks.fuzz_cases import ACTS, SCHEDULES, WORDS, Case, draw, simpler
from benchmarks.fuzz_layers import LAYERS
from benchmarks.fuzz_run import run_case, run_cases

from tests.dist.report import RanksFailedError

SEED, NUM_CASES = 11, 40

DRAWN = [draw(SEED, number) for number in range(NUM_CASES)]

#: On two ranks, with every kind of layer whose results must be the same to the last bit.
EXACT = Case(
    seed=3,
    layers="linear stash.0 relu_ dict counting checkpoint pop.0 ids",
    balance=(3, 6),
    num_ranks=2,
    chunks=3,
    schedule="1f1b",
    checkpoint="always",
    loss="classes",
    calls=("step:7", "update", "step:5"),
)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_random_cases_equal_the_plain_model(ranks, num_ranks):
    cases = [case for case in DRAWN if case.num_ranks == num_ranks]
    stories = ranks(num_ranks).run(run_cases, cases, world=False).values()
    for case, of_ranks in zip(cases, zip(*stories, strict=True), strict=True):
        assert of_ranks == (None,) * num_ranks, case


def test_the_cases_cover_all_options():
    assert {case.num_ranks for case in DRAWN} == {1, 2, 3, 4}
    assert {case.schedule for case in DRAWN} == set(SCHEDULES)
    assert 10 <= sum(case.is_exact for case in DRAWN) <= 30
    many = [draw(0, number) for number in range(400)]
    words = {word.rstrip("*") for case in many for word in case.words}
    assert {word for word in words if "." not in word} == set(WORDS) == set(LAYERS)
    assert {call.partition(":")[0] for case in many for call in case.calls} == set(ACTS)


def test_a_case_is_drawn_the_same_and_read_back():
    for number, case in enumerate(DRAWN):
        assert draw(SEED, number) == case
        assert Case.from_text(case.to_text()) == case
        assert sum(case.balance) == len(case.words) + 1
    assert len(set(DRAWN)) == NUM_CASES


@pytest.mark.parametrize(
    ("change", "truth", "message"),
    [
        ({}, {}, ""),
        ({}, {"is_weighted": True}, "loss: off by"),
        ({}, {"schedule": "gpipe"}, "gradients.*: off by .*e-1[789]"),
        ({"layers": "batchnorm"}, {"is_deferred": True}, "state.*running_mean.*: off by"),
    ],
)
def test_a_difference_is_detected(ranks, change, truth, message):
    assert EXACT.is_exact
    case = EXACT
    if change:
        case = dataclasses.replace(EXACT, balance=(1, 1), **change)
    truth = dataclasses.replace(case, **truth)
    outcomes = ranks(2).run(run_case, "case", case, truth=truth, world=False)
    if truth == case:
        outcomes.values()
    else:
        with pytest.raises(RanksFailedError, match=message):
            outcomes.values()


def test_a_case_that_fails_is_made_smaller():
    large = [case for case in DRAWN if case.num_ranks == 4 and case.chunks > 2]
    case = max(large, key=lambda case: len(case.words))
    for smaller in simpler(case):
        assert sum(smaller.balance) == len(smaller.words) + 1

    small = smallest(case, lambda tried: tried.chunks > 1 and len(tried.words) > 1)
    assert (small.num_ranks, len(small.words), len(small.calls)) == (1, 2, 1)
    assert small.chunks == case.chunks
