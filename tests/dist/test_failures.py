"""What each rank raises after an error on one of them, on CPUs and GPUs.

That every kind of failure ends all processes in time, with one report: tests/faults.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections import OrderedDict
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import RemoteStageError, Stage, is_recomputing
from procpipe.channel.link import INLINE_BYTES
from tests.compute.segments import Do
from tests.dist.devices import devices_of_ranks, is_on_gpus
from tests.dist.report import Outcomes

pytestmark = pytest.mark.on_gpus

#: Every rank must have ended by then, on a machine whose cores are shared with others.
SOON_S = 5.0

WIDTH, CHUNKS = 4, 3


class BoomError(Exception):
    """What a faulty layer raises."""


def boom(*_):
    raise BoomError("boom in the layer")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def stage_of(world, faulty_stage=0, function=None):
    """Two layers a stage, "l0", "l1", …; the second of one stage may be a function."""
    layers: OrderedDict[str, nn.Module]
    layers = OrderedDict((f"l{k}", nn.Linear(WIDTH, WIDTH)) for k in range(2 * world.num_ranks))
    if function is not None:
        layers[f"l{2 * faulty_stage + 1}"] = Do(function)
    return Stage(
        nn.Sequential(layers), [2] * world.num_ranks, chunks=CHUNKS, checkpoint="always",
        loss_fn=F.mse_loss, check_loss=True, world=world,
    )  # fmt: skip


def batch():
    return torch.ones(6, WIDTH), torch.zeros(6, WIDTH)


def train(world, *faulty):
    stage = stage_of(world, *faulty)
    for input, target in [batch()] * 2:
        stage.step(input, target)


def without_ended(outcomes, origin):
    """Return the outcomes but for victims that waited for their GPU, and ended with one line."""

    def is_ended(outcome):
        if outcome.rank == origin or not outcome.error or outcome.error.type != "ProcessDied":
            return False
        assert is_on_gpus(), str(outcome)
        assert f"rank {outcome.rank} " in outcome.output, str(outcome)
        assert f" ends, because rank {origin} " in outcome.output, str(outcome)
        assert outcome.output.count("\n") == 1, str(outcome)
        return True

    return Outcomes(outcome for outcome in outcomes if not is_ended(outcome))


def check(outcomes, origin, error, *words):
    """Check that all ranks ended soon: ``origin`` by its own error, the others by its report."""
    outcomes = without_ended(outcomes, origin)
    for outcome, failure in zip(outcomes, outcomes.errors(), strict=True):
        assert outcome.duration_s < SOON_S, str(outcome)
        assert outcome.output == "", str(outcome)
        if outcome.rank == origin:
            assert failure.type == error, str(outcome)
        else:
            assert failure.type == "RemoteStageError", str(outcome)
            assert f"rank {origin} failed:\nstage {origin} (rank {origin}), in " in failure.text
            # The report contains one traceback, not one for each rank that forwarded it.
            assert failure.text.count("Traceback (most recent call last)") == 1, str(outcome)
        for word in words:
            assert word in failure.text, f"{word!r} is missing\n{outcome}"


def check_lost(outcomes, origin, *words, soon_s=SOON_S):
    """Check that all other ranks ended soon and name ``origin`` as the lost rank."""
    for outcome in without_ended(outcomes, origin):
        if outcome.rank != origin:
            assert outcome.error.type == "PeerLostError", str(outcome)
            assert f"rank {origin} failed:" in outcome.error.text, str(outcome)
            assert outcome.duration_s < soon_s, str(outcome)
            assert outcome.output == "", str(outcome)
            for word in words:
                assert word in outcome.error.text, f"{word!r} is missing\n{outcome}"


# -- an error on one rank ------------------------------------------------------------------------


def not_a_number(x):
    return x * torch.nan


@pytest.mark.parametrize(
    ("n", "stage", "function", "origin", "error", "words"),
    [
        (2, 1, boom, 1, "BoomError", "task F0@1 (micro-batch 0), layer 'l3' (Do)"),
        # The layer that got the value is named, in the next stage, and the value.
        (3, 1, torch.Tensor.double, 2, "RuntimeError", "'l4' (Linear) was given float64 (2, 4)"),
        (2, 1, not_a_number, 1, "NonFiniteLossError", "100.0% of it not finite"),
    ],
)
def test_an_error_says_where_it_was(ranks, n, stage, function, origin, error, words):
    check(ranks(n).run(train, stage, function), origin, error, words)


def allocate(x):
    if is_recomputing():
        torch.empty(1 << 50, device=x.device)
    return x


def test_memory_runs_out(ranks):
    outcomes = ranks(3).run(train, 1, allocate)

    message = rf"out of memory on {devices_of_ranks(3)[1]}: stage 1 held [1-9] micro-batches betwe"
    error, words = "RuntimeError", "can't allocate memory"
    if is_on_gpus():
        error, words = "OutOfMemoryError", "CUDA out of memory"
    check(outcomes, 1, error, words, "Give the stage fewer layers")
    assert all(re.search(message, failure.text) for failure in outcomes.errors())


# -- ranks that wait -----------------------------------------------------------------------------

MANY = 2000


def counts_calls(world):
    """Count the first stage's calls; it is in the second one at most as the last stage fails."""
    store, calls = world.store, []

    def count(x):
        calls.append(x)
        if len(calls) == 2:
            store.wait(["failing"])
        elif len(calls) > 2:
            store.check(["failing"])  # a round trip: time for the failure to arrive
        return x

    def fail(x):
        store.set("failing", "now")
        boom()

    layers = nn.Sequential(*map(Do, (count, lambda x: x, fail)))
    stage = Stage(layers, [1, 1, 1], chunks=MANY, checkpoint="never", world=world)
    with pytest.raises((BoomError, RemoteStageError), match="boom"):
        stage(torch.ones(MANY, 2))
    return len(calls)


@pytest.mark.only_on_cpus
def test_a_stage_stops_early_if_another_has_failed(ranks):
    num_calls, *_ = ranks(3).run(counts_calls).values()
    assert num_calls < MANY


def waits_by_other_means(world):
    """Call the stage; then the first rank waits for the second one, by the store."""
    world.transport, num_calls, store = "sockets", itertools.count(1), world.store

    def count(x):
        if next(num_calls) == 64:
            store.set("all but one are sent", "")
        return x

    def wait(x):
        store.wait(["all but one are sent"])
        return x

    stage = Stage(nn.Sequential(Do(count), Do(wait)), [1, 1], chunks=64, world=world)
    with torch.no_grad():
        stage(torch.ones(64, INLINE_BYTES // 4))  # more than a socket takes
    if world.rank == 1:
        store.set("all have arrived", "")
    store.wait(["all have arrived"], timedelta(seconds=10))


@pytest.mark.only_on_cpus
def test_a_call_ends_once_the_sockets_have_taken_everything(ranks):
    """A rank may compute for long after a call, or wait for a peer in ``dist.barrier()``."""
    ranks(2).run(waits_by_other_means).values()
