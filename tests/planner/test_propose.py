"""Proposals for costs that a reader can check by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from procpipe.planner.costs import Layer, Machine, Skip, Table, Tie, task_seconds
from procpipe.planner.propose import Proposal, Question, alone_s, best_of_each, propose
from procpipe.planner.simulation import Timeline
from tests.plan.proof import prove


def model(
    *seconds: float,
    kept: int = 0,
    parameters: int = 0,
    machine: Machine | None = None,
    **more: Any,
) -> tuple[dict[int, Table], Machine]:
    """Make a model whose layers take so many seconds a sample forward, and twice that backward."""
    tables = {}
    for n in (1, 2):
        layers = tuple(
            Layer(
                f"layer{k}",
                task_seconds(n * forward_s, n * 2 * forward_s),
                output_bytes=n * 10,
                held_bytes=n * (10 + kept),
                kept_bytes=n * kept,
                parameter_bytes=parameters,
                trained_bytes=parameters,
            )
            for k, forward_s in enumerate(seconds)
        )
        tables[n] = Table(n, layers, **more)
    return tables, machine or Machine()


def chosen(proposals: list[Proposal], memory_bytes: int | None = None) -> Proposal:
    """Return the best, whether it fits or not."""
    return best_of_each(proposals, memory_bytes)[0]


def of(proposals: list[Proposal], schedule: str, checkpoint: str = "never") -> Proposal:
    (found,) = (p for p in proposals if (p.schedule, p.checkpoint) == (schedule, checkpoint))
    return found


def test_literal_times_of_two_even_stages() -> None:
    # 4 micro-batches of 1 s forward and 2 s backward on each of 2 stages.
    proposals = propose(*model(0.5, 0.5, 0.5, 0.5), Question(2, 4, chunks=(4,)))

    assert {p.balance for p in proposals if len(p.balance) == 2} == {(2, 2)}
    assert of(proposals, "gpipe").timeline.total_s == 15  # (m + n - 1)(F + B)
    assert of(proposals, "1f1b").timeline.total_s == 15
    assert of(proposals, "zb-h1").timeline.total_s == 13  # (n - 1)(F + I - W) less: m(F + B) + 1
    assert of(proposals, "interleaved").timeline.total_s == 13.5  # half the bubble
    assert of(proposals, "gpipe", "always").timeline.total_s == 19  # (m + n - 1)(F + B) + m R
    assert alone_s(*model(0.5, 0.5, 0.5, 0.5), Question(2, 4, chunks=(4,))) == 24


def test_what_layers_share_counts_once_on_a_stage() -> None:
    ties = (Tie((0, 3), 400, 400),)
    tied, alone = (
        model(0.5, 0.5, 0.5, 0.5, parameters=1000, ties=each, machine=Machine(send_s=0.01))
        for each in (ties, ())
    )
    question = Question(2, 4, memory_bytes=10_000, chunks=(4,))

    proposals = propose(*tied, question)
    apart = propose(*alone, question)

    gpipe, untied = of(proposals, "gpipe"), of(apart, "gpipe")
    assert gpipe.balance == untied.balance == (2, 2)
    assert gpipe.static_bytes == untied.static_bytes == (2 * 4 * 1000,) * 2
    folded = of(proposals, "zb-v")  # stage 0 has both partitions
    assert folded.static_bytes == (8000 - 4 * 400, 8000)
    for proposal in proposals:
        prove(proposal.timeline.plan, proposal.timeline.routes)


def test_two_partitions_a_device_need_two_layers_a_device() -> None:
    names = {p.schedule for p in propose(*model(1, 1, 1), Question(2, 4, chunks=(4,)))}

    assert names == {"gpipe", "1f1b", "zb-h1"}


def test_the_fastest_that_fits_is_chosen() -> None:
    # Stage 0 holds 4 micro-batches with gpipe, 2 with 1F1B; each has 2 layers that keep 100 bytes.
    question = Question(2, 4, memory_bytes=None, chunks=(4,))
    proposals = propose(*model(1, 1, kept=100), question)
    gpipe, one_f_one_b = of(proposals, "gpipe"), of(proposals, "1f1b")
    assert max(gpipe.held_bytes) - max(one_f_one_b.held_bytes) >= 200
    lean = max(one_f_one_b.needed_bytes)

    assert chosen([gpipe, one_f_one_b], lean) is one_f_one_b
    assert one_f_one_b.fits(lean)
    assert not any(p.fits(lean - 1) for p in (gpipe, one_f_one_b))
    assert chosen([gpipe, one_f_one_b], lean - 1) is one_f_one_b  # it needs the least


def test_of_equal_seconds_the_leanest_then_the_simplest_is_first() -> None:
    base = of(propose(*model(1, 1), Question(2, 4, chunks=(4,))), "gpipe")

    def taking(seconds: float) -> Timeline:
        return replace(base.timeline, total_s=seconds)

    fast = replace(base, timeline=taking(10.0), held_bytes=(300, 300))
    lean = replace(base, timeline=taking(10.01), held_bytes=(200, 100))
    fat = replace(base, timeline=taking(10.01), held_bytes=(0, 0), static_bytes=(10**6, 0))
    slow = replace(base, timeline=taking(10.2), held_bytes=(0, 0))
    simple = replace(base, timeline=taking(10.01), held_bytes=(200, 100), schedule="gpipe")
    less_simple = replace(simple, schedule="zb-h1")
    fewer_chunks = replace(simple, chunks=2)

    assert chosen([slow, fast, fat, lean]) is lean
    assert chosen([less_simple, simple]) is simple
    assert chosen([simple, fewer_chunks]) is fewer_chunks


def test_layers_are_moved_if_memory_is_short() -> None:
    # By seconds the last layer gets its own device, by bytes the first layer.
    layers = tuple(
        Layer(name, task_seconds(seconds, seconds), parameter_bytes=size, trained_bytes=size)
        for name, seconds, size in (("a", 1.0, 500), ("b", 1.0, 500), ("c", 2.0, 100))
    )
    question = Question(2, 2, memory_bytes=2050, states=0.0, chunks=(2,))
    tight = replace(question, memory_bytes=1500)

    of_model = {1: Table(1, layers)}, Machine()

    roomy = chosen(propose(*of_model, question), 2050)
    moved = chosen(propose(*of_model, tight), 1500)

    assert (roomy.balance, roomy.static_bytes) == ((2, 1), (2000, 200))
    assert (moved.balance, moved.static_bytes) == ((1, 2), (1000, 1200))
    assert moved.fits(1500)


def test_skip_tensors_are_routed_and_counted() -> None:
    skips = (Skip(0, (3,), 1000),)
    proposals = propose(*model(1, 1, 1, 1, skips=skips), Question(4, 2, chunks=(2,)))

    assert of(proposals, "gpipe").timeline.routes.skips == ((0, 3),)
    assert of(proposals, "gpipe").held_bytes[3] >= 2000


def test_literal_times_of_two_replicas() -> None:
    # Each replica gets 4 of 8 samples in 2 micro-batches, of 2 s forward and 4 s backward on each
    # of 2 stages, 18 s in all, and messages of 20 bytes. Then a stage's 600 bytes: 2 of 300.
    question = Question(4, 8, chunks=(2,), num_replicas=2)
    of_model = model(0.5, 0.5, 0.5, 0.5, parameters=300, machine=Machine(send_s=1 / 150))

    gpipe = of(propose(*of_model, question), "gpipe")
    alone = of(propose(*of_model, Question(2, 4, chunks=(2,))), "gpipe")

    assert (gpipe.timeline.plan.num_stages, gpipe.num_replicas, gpipe.micro_batch) == (2, 2, 2)
    assert gpipe.timeline.total_s == pytest.approx(alone.timeline.total_s + 4)
    assert gpipe.timeline.exposed_s == pytest.approx(4)
    assert gpipe.static_bytes == alone.static_bytes == (4 * 600,) * 2
    uneven = replace(question, batch=9, chunks=(3,))
    assert of(propose(*of_model, uneven), "gpipe").micro_batch == 2  # 5 samples: 2, 2, 1


def test_default_chunks_are_powers_of_two() -> None:
    assert list(Question(2, 64).splits().items()) == [(1, 64), (2, 32), (4, 16), (8, 8), (16, 4)]
    assert Question(2, 5).splits() == {1: 5, 2: 3, 4: 2}


def test_questions_without_an_answer() -> None:
    impossible: list[tuple[int, int, dict[str, Any]]] = [
        (4, 8, {"num_replicas": 3}),
        (4, 3, {"num_replicas": 4}),  # too few samples
        (6, 8, {"num_replicas": 2}),  # too few layers
        (2, 8, {"num_replicas": 2, "chunks": (8,)}),
    ]
    for num_devices, batch, more in impossible:
        assert not Question(num_devices, batch, **more).is_possible(2), more
    assert Question(4, 8, num_replicas=2, chunks=(4, 8)).is_possible(2)
