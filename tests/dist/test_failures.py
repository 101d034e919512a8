"""What each rank raises after an error on one of them. That all end in time: tests/faults."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections import OrderedDict
from datetime import timedelta
from operator import methodcaller
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import RemoteStageError, Stage, is_recomputing
from procpipe.channel.link import INLINE_BYTES
from procpipe.job.board import Board
from tests.dist import stages
from tests.dist.devices import devices_of_ranks, is_on_gpus
from tests.dist.report import Outcomes

pytestmark = pytest.mark.on_gpus

#: Every rank must have ended by then, on a machine whose cores are shared with others.
SOON_S = 5.0

WIDTH, CHUNKS = 4, 3

#: Samples of a mini-batch whose micro-batches are too large to travel inside a token.
BULK = 8 * CHUNKS * INLINE_BYTES // (4 * WIDTH)


class BoomError(Exception):
    """What a faulty layer raises."""


class Faulty(nn.Linear):
    """Acts in its second forward, in recomputation or in backward."""

    def __init__(self, where, act):
        super().__init__(WIDTH, WIDTH)
        self.where, self.act, self.num_forward = where, act, 0

    def forward(self, x):
        self.num_forward += 1
        if {"recompute": is_recomputing(), "forward": self.num_forward == 2}.get(self.where):
            self.act()
        y = super().forward(x)
        return ActBackward.apply(y, self.act) if self.where == "backward" else y


class ActBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, act):
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.act()
        return gradient, None


class Returns(nn.Module):
    """Returns what it makes of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def boom(*_):
    raise BoomError("boom in the layer")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def stage_of(world, faulty_stage=None, faulty=None, **options):
    """Two layers a stage, "l0", "l1", …; the second of one stage may be given."""
    layers: OrderedDict[str, nn.Module]
    layers = OrderedDict((f"l{k}", nn.Linear(WIDTH, WIDTH)) for k in range(2 * world.num_ranks))
    if faulty is not None:
        layers[f"l{2 * faulty_stage + 1}"] = faulty
    defaults: dict[str, Any] = {"chunks": CHUNKS, "checkpoint": "always", "loss_fn": F.mse_loss}
    balance = options.pop("balance", [2] * world.num_ranks)
    return Stage(nn.Sequential(layers), balance, world=world, **(defaults | options))


def batch(size=6):
    return torch.ones(size, WIDTH), torch.zeros(size, WIDTH)


def train(world, faulty_stage, where, act=boom, api="step", size=6):
    """Train until something acts: a layer, for instance, or the loader of the data."""
    options = {where: act} if where in ("loss_fn", "loss_weight") else {}
    faulty: nn.Module | None = None if faulty_stage is None else Faulty(where, act)
    if where == "output":
        faulty, options = Returns(act), {"check_loss": True}

    def loader():
        yield batch(size)
        if where == "loader":
            act()
        yield batch(size)

    stage = stage_of(world, faulty_stage, faulty, **options)
    for input, target in stage.batches(loader()):
        if api == "step":
            stage.step(input, target)
        else:
            F.mse_loss(stage(input), target.to(stage.device)).backward()


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


def check_lost(outcomes, origin, *words):
    """Check that all other ranks ended soon and name ``origin`` as the lost rank."""
    for outcome in without_ended(outcomes, origin):
        if outcome.rank != origin:
            assert outcome.error.type == "PeerLostError", str(outcome)
            assert f"rank {origin} failed:" in outcome.error.text, str(outcome)
            assert outcome.duration_s < SOON_S, str(outcome)
            assert outcome.output == "", str(outcome)
            for word in words:
                assert word in outcome.error.text, f"{word!r} is missing\n{outcome}"


# -- an error on one rank ------------------------------------------------------------------------


def to_meta(x):
    return x.to("meta")


def without_a_column(x):
    return x[:, 1:]


def not_a_number(x):
    return x * torch.nan


def with_an_object(x):
    return x, object()


LAYER = ", layer 'l3' (Faulty)"


@pytest.mark.parametrize(
    ("n", "stage", "where", "act", "api", "origin", "error", "words"),
    [
        (2, 1, "forward", boom, "step", 1, "BoomError", f"task F1@1 (micro-batch 1){LAYER}"),
        (4, 1, "recompute", boom, "step", 1, "BoomError", f"task R2@1 (micro-batch 2){LAYER}"),
        (3, 1, "backward", boom, "step", 1, "BoomError", "B2@1 (micro-batch 2), its layers'"),
        (3, 1, "forward", boom, "call", 1, "BoomError", f"task F1@1 (micro-batch 1){LAYER}"),
        (3, 1, "backward", boom, "call", 1, "BoomError", "task B2@1 (micro-batch 2)"),
        (2, 1, "forward", sys.exit, "step", 1, "SystemExit", f"F1@1 (micro-batch 1){LAYER}"),
        (3, None, "loss_fn", boom, "step", 2, "BoomError", "task F0@2 (micro-batch 0), loss_fn"),
        (3, None, "loss_weight", boom, "step", 0, "BoomError", "boom in the layer"),
        (3, None, "loader", boom, "step", 0, "BoomError", "boom in the layer"),
        # The layer that got the value is named, in the next stage, and the value.
        *(
            (3, 1, "output", act, "step", 2, "RuntimeError", f"'l4' (Linear) was given {value}")
            for act, value in (
                (torch.Tensor.double, "float64 (2, 4)"),
                (without_a_column, "float32 (2, 3)"),
            )
        ),
        (2, 1, "output", not_a_number, "step", 1, "NonFiniteLossError", "the output is float32 ("),
        (3, 0, "output", to_meta, "step", 0, "BoundaryError", "returned a tensor on meta"),
        (3, 1, "output", with_an_object, "step", 1, "BoundaryError", "builtins.object at [1] cann"),
        pytest.param(
            *(3, 1, "output", torch.Tensor.to_sparse, "step", 1, "BoundaryError", "torch.sparse_"),
            marks=pytest.mark.only_on_cpus,
        ),
    ],
)
def test_an_error_says_where_it_was(ranks, n, stage, where, act, api, origin, error, words):
    check(ranks(n).run(train, stage, where, act, api), origin, error, words)


def allocate():
    torch.empty(1 << 50, device="cuda" if is_on_gpus() else "cpu")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_memory_runs_out(ranks, where):
    outcomes = ranks(3).run(train, 1, where, allocate)

    message = rf"out of memory on {devices_of_ranks(3)[1]}: stage 1 held [1-9] micro-batches betwe"
    error, words = "RuntimeError", "can't allocate memory"
    if is_on_gpus():
        error, words = "OutOfMemoryError", "CUDA out of memory"
    check(outcomes, 1, error, words, "Give the stage fewer layers")
    assert all(re.search(message, failure.text) for failure in outcomes.errors())


# -- calls after a failure -----------------------------------------------------------------------


def continues(world):
    """Catch the error on every rank, and make all calls."""
    stage = stage_of(world, 1, Faulty("forward", boom))
    raised = []
    for call in (
        lambda: stage.step(*batch()),
        lambda: stage.step(*batch()),
        lambda: stage(batch()[0]),
        lambda: next(stage.batches([batch()])),
        lambda: stage.clip_grad_norm_(1.0),
        lambda: stage.fetch(torch.ones(1)),
        stage.report,
        stage.statistics,
    ):
        try:
            call()
        except Exception as error:
            raised.append(f"{type(error).__name__}: {error}")
    stage.close()
    return raised


def test_after_a_failure_every_call_is_refused(ranks):
    for raised, first in zip(ranks(2).run(continues).values(), ("Remote", "Boom"), strict=True):
        assert raised[0].startswith(first)
        assert [each.partition(":")[0] for each in raised[1:]] == ["StageClosedError"] * 7
        assert "step() cannot run: step() failed on this rank with " in raised[1]
        assert "boom" in raised[1]


# -- ranks that end ------------------------------------------------------------------------------


def is_killed(world, when):
    """Train until rank 1 is killed: in its layer, between two steps, or while its task waits."""
    world.store.set(f"pid/{world.rank}", str(os.getpid()))
    pid = int(world.store.get("pid/1"))

    def kill_once_it_waits():
        board = Board.of_process(pid)
        assert board is not None
        while not (reading := board.read()).waits_for or reading.task != "B2":
            pass
        os.kill(pid, signal.SIGKILL)

    faulty = (
        (2, Faulty("forward", kill_once_it_waits)) if when == "waits" else (1, Faulty(when, kill))
    )
    stage = stage_of(world, *faulty)
    for number, (input, target) in enumerate(stage.batches([batch()] * 3)):
        if when == "between" and number == 1 and world.rank == 1:
            kill()
        stage.step(input, target)


@pytest.mark.parametrize(
    ("when", "seen"),
    [
        ("forward", r"in F1, layer 'l3' \(Faulty\), for "),
        ("backward", "in B2, for "),
        ("between", "between calls, in the user's code, for "),
        ("waits", r"in B2, waiting \d+\.\d s for gradient from stage 2 \(rank 2\)"),
    ],
)
def test_a_rank_is_killed(ranks, when, seen):
    outcomes = ranks(3).run(is_killed, when)

    assert outcomes[1].error.type == "ProcessDied"
    check_lost(outcomes, 1, "rank 1 ended without a message", "out of memory?")
    for outcome in (outcomes[0], outcomes[2]):
        text = f"{outcome.error.text}{outcome.output}"
        assert re.search(f"it was last seen {seen}", text), str(outcome)


def ends_early(world):
    stage = stage_of(world)
    for number, (input, target) in enumerate(stage.batches([batch()] * 3)):
        if number == 1 and world.rank == 1:
            return
        stage.step(input, target)


def test_a_rank_ends_early(ranks):
    outcomes = ranks(3).run(ends_early)

    check_lost(outcomes, 1, "rank 1 has left the pipeline", "must make the same calls")


# -- ranks that differ ---------------------------------------------------------------------------

CALLS = {
    "step": lambda stage: stage.step(*batch()),
    "forward": lambda stage: stage(batch()[0]),
    "clip": lambda stage: stage.clip_grad_norm_(1.0),
    "batches": lambda stage: next(stage.batches([batch()])),
    "fetch": lambda stage: stage.fetch(torch.ones(1)),
    "report": lambda stage: stage.report(),
    "eval step": lambda stage: stage.eval().step(*batch()),
    "step without gradients": lambda stage: torch.no_grad()(stage.step)(*batch()),
}


def calls_differ(world, calls):
    stage = stage_of(world)
    stage.step(*batch())
    CALLS[calls[world.rank]](stage)
    stage.step(*batch())  # in some of these calls rank 0 waits for no other rank


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (["step", "forward"], "rank 1 is in forward() while rank 0 is in step()"),
        (["clip", "step"], "rank 1 is in step() while rank 0 is in clip_grad_norm_()"),
        (["step", "step", "batches"], "rank 2 is in batches() while rank 0 is in step()"),
        (["fetch", "fetch", "report"], "rank 2 is in report() while rank 0 is in fetch()"),
        (["report", "step", "report"], "rank 1 is in step() while rank 0 is in report()"),
        (["step", "eval step"], "rank 1 calls step() in eval mode with gradients on, rank 0 in"),
        (["step", "step", "step without gradients"], "rank 2 calls step() in training mode with"),
    ],
)
def test_ranks_are_in_different_calls(ranks, calls, words):
    outcomes = ranks(len(calls)).run(calls_differ, calls)

    check(outcomes, int(words[5]), "CallMismatchError", words)


def options_differ(world, of_rank):
    stage_of(world, 0, **of_rank[world.rank]).step(*batch())


def test_ranks_disagree(ranks):
    unbiased = nn.Linear(WIDTH, WIDTH, bias=False)
    of_rank = [{}, {"balance": [1, 2, 3], "chunks": 2}, {"checkpoint": "never", "faulty": unbiased}]
    outcomes = ranks(3).run(options_differ, of_rank)

    for outcome, failure in zip(outcomes, outcomes.errors(), strict=True):
        assert failure.type == "DisagreementError", str(outcome)
        assert "balance is [2, 2, 2] on rank 0 and [1, 2, 3] on rank 1" in failure.text
        assert failure.text.count('Stage(model, balance="time", sample=x)') == 1
        assert "chunks is 3 on rank 0 and 2 on rank 1" in failure.text
        assert "checkpoint is 'always' on rank 0 and 'never' on rank 2" in failure.text
        assert "a layer of the model is" in failure.text
        assert outcome.duration_s < SOON_S
        assert outcome.output == ""


@pytest.mark.parametrize(
    ("balance", "error", "words"),
    [
        ([1, 1, 2], "IndexError", "makes 3 partitions, but there are 2 processes"),
        ([4], "BalanceError", "makes 1 partition, but there are 2 processes"),
        ([1, 2], "BalanceError", "places 3 layers but the model has 4"),
        ([4, 0], "BalanceError", "less than one layer"),
    ],
)
def test_arguments_that_are_wrong_are_refused(ranks, balance, error, words):
    outcomes = ranks(2).run(options_differ, [{"balance": balance}] * 2)

    for outcome, failure in zip(outcomes, outcomes.errors(), strict=True):
        assert failure.type in (error, "RemoteStageError"), str(outcome)
        assert words in failure.text
        assert outcome.duration_s < SOON_S


@pytest.mark.parametrize("origin", [0, 2])
def test_arguments_that_are_wrong_on_one_rank_end_all(ranks, origin):
    """They do so at once, before any call: rank 1 calls nothing, and waits for an end."""
    of_rank: list[dict[str, Any]] = [{}, {}, {}]
    of_rank[origin] = {"balance": [2, 1]}

    outcomes = ranks(3).run(options_differ, of_rank)

    check(outcomes, origin, "BalanceError", "the balance [2, 1] places 3 layers")


# -- calls that cannot be run --------------------------------------------------------------------


def bad_batch(world, input, target):
    stage = stage_of(world)
    stage.step(*batch())
    stage.step(input, target=target)


X, Y = batch()


@pytest.mark.parametrize(
    ("input", "target", "error", "words"),
    [
        ("text", Y, "TypeError", "the input holds no tensor"),
        ((X, X[:3]), Y, "ValueError", "has 6 samples but"),
        (X[:0], Y[:0], "ValueError", "the batch is empty"),
        (X, Y[:4], "ValueError", "target has 4 samples but the input has 6"),
        (torch.tensor(1.0), Y, "ValueError", "without dimensions"),
        ({"x": X, "y": object}, Y, "BoundaryError", "builtins.type"),
    ],
)
def test_a_mini_batch_that_cannot_be_split(ranks, input, target, error, words):
    check(ranks(2).run(bad_batch, input, target), 0, error, words)


def reads_a_value(world, read):
    stage = stage_of(world)
    loss = F.mse_loss(stage(batch()[0]), batch()[1].to(stage.device))
    if world.rank == 0:
        read(loss)
    loss.backward()


@pytest.mark.parametrize("read", [methodcaller("item"), float, bool])
def test_a_remote_value_is_read(ranks, read):
    outcomes = ranks(3).run(reads_a_value, read)

    assert outcomes[0].error.type == "RemoteValueError"
    text = "lives on rank 2 (the output of stage(input)): move this into loss_fn"
    assert text in outcomes[0].error.text
    assert "rank 0 has left the pipeline" in outcomes[1].error.text


def runs_backward(world, first):
    stage = stage_of(world)
    losses = [F.mse_loss(stage(batch()[0]), batch()[1].to(stage.device)) for _ in range(2)]
    losses[first].backward()
    losses[1].backward()


@pytest.mark.parametrize("first", [1, 0], ids=["twice", "stale"])
def test_backward_that_cannot_be_run(ranks, first):
    for failure in ranks(3).run(runs_backward, first).errors():
        assert failure.type == "RuntimeError"
        assert "backward" in failure.text


# -- ranks that wait -----------------------------------------------------------------------------


def does_not_call(world, origin):
    """One rank waits outside of the stage while the others make their call."""
    stage = stage_of(world)
    stage.step(*batch())
    if world.rank == origin:
        world.store.wait(["never set"], timedelta(seconds=1.5))
    stage.step(*batch())


@pytest.mark.skipif(is_on_gpus(), reason="a wait outside of the stage looks like one for the GPU")
@pytest.mark.parametrize(
    ("origin", "words"),
    [
        (0, r"rank [12] has waited 0\.5 s for the order for step\(\) from rank 0"),
        (1, r"rank [02] has waited 0\.5 s for \w+ from stage 1 \(rank 1\)"),
    ],
)
def test_a_rank_does_not_make_its_call(ranks, origin, words):
    outcomes = ranks(3).run(does_not_call, origin, world_timeout_s=0.5)

    failures = outcomes.errors()
    assert failures[origin].type == "DistStoreError"  # from its own wait
    victims = [failures[rank] for rank in range(3) if rank != origin]
    assert {failure.type for failure in victims} <= {"WaitTimeoutError", "RemoteStageError"}
    for failure in victims:
        assert re.search(words, failure.text), str(outcomes)


def use_two(bare):
    """Each rank calls another of two pipelines."""
    two = []
    for k in range(2):
        world = stages.world_of(bare, str(k))
        two.append(stage_of(world))
    two[bare.rank].step(*batch())


def test_pipelines_used_in_different_order_wait_for_one_another(ranks):
    for failure in ranks(2).run(use_two, world=False, world_timeout_s=0.5).errors():
        assert failure.type in ("WaitTimeoutError", "RemoteStageError")
        assert re.search(r"rank (1|0) has waited 0.\d s for .* from (rank|.*\(rank)", failure.text)


def runs_ahead(world):
    """Rank 0 returns from its call long before the others, and then waits for them by a store."""
    stage = Stage(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], chunks=400, world=world)
    with torch.no_grad():
        output = stage(torch.ones(400, INLINE_BYTES // 4))
    if world.rank == 0:
        world.store.wait(["rank 1 is done"], timedelta(seconds=5))
        return None
    world.store.set("rank 1 is done", "")
    return output.shape


def test_a_rank_may_run_ahead_and_wait_for_another_by_other_means(ranks):
    assert ranks(2).run(runs_ahead).values() == [None, (400, INLINE_BYTES // 4)]


MANY = 2000


def counts_calls(world):
    """Count the first stage's calls; it is in the second one when the last stage fails."""
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

    layers = nn.Sequential(*map(Returns, (count, lambda x: x, fail)))
    stage = Stage(layers, [1, 1, 1], chunks=MANY, checkpoint="never", world=world)
    with pytest.raises((BoomError, RemoteStageError), match="boom"):
        stage(torch.ones(MANY, 2))
    return len(calls)


@pytest.mark.only_on_cpus
def test_a_stage_stops_early_if_another_has_failed(ranks):
    num_calls, *_ = ranks(3).run(counts_calls).values()
    assert 2 <= num_calls < MANY
