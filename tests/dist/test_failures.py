"""Failures: after any error on one rank, all ranks end in time, with the same correct report."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections import OrderedDict
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import RemoteStageError, Stage, is_recomputing
from procpipe.channel.link import INLINE_BYTES
from procpipe.job.board import Board
from tests.dist import stages
from tests.dist.devices import devices_of_ranks, is_on_gpus
from tests.dist.report import Failure, Outcomes

pytestmark = pytest.mark.on_gpus

#: Every rank must have ended by then, on a machine whose cores are shared with others.
SOON_S = 5.0

WIDTH = 4
CHUNKS = 3

#: Samples of a mini-batch whose micro-batches are too large to travel inside a token.
BULK = 8 * CHUNKS * INLINE_BYTES // (4 * WIDTH)


class BoomError(Exception):
    """What a faulty layer raises."""


class Faulty(nn.Linear):
    """Acts in its second forward, in recomputation or in backward."""

    def __init__(self, where, act):
        super().__init__(WIDTH, WIDTH)
        self.where = where
        self.act = act
        self.num_forward = 0

    def forward(self, x):
        if is_recomputing() and self.where == "recompute":
            self.act()
        self.num_forward += 1
        if self.num_forward == 2 and self.where == "forward":
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


def boom():
    raise BoomError("boom in the layer")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    sys.exit(0)


def model_of(num_stages, faulty_stage=None, where="", act=boom):
    """Two layers a stage, "l0", "l1", …; the second of one stage may be faulty."""
    layers: OrderedDict[str, nn.Module]
    layers = OrderedDict((f"l{k}", nn.Linear(WIDTH, WIDTH)) for k in range(2 * num_stages))
    if faulty_stage is not None:
        layers[f"l{2 * faulty_stage + 1}"] = Faulty(where, act)
    return nn.Sequential(layers)


def stage_of(world, model=None, transport=None, **options):
    world.transport = transport
    options = {"chunks": CHUNKS, "checkpoint": "always", "loss_fn": F.mse_loss, **options}
    balance = options.pop("balance", [2] * world.num_ranks)
    model = model if model is not None else model_of(world.num_ranks)
    return Stage(model, balance, world=world, **options)


def batch(size=6):
    return torch.ones(size, WIDTH), torch.zeros(size, WIDTH)


def train(world, faulty_stage, where, act=boom, api="step", size=6, transport=None):
    """Train until one stage acts: raises, ends its script or is killed."""
    options = {where: lambda *_: act()} if where in ("loss_fn", "loss_weight") else {}
    model = model_of(world.num_ranks, faulty_stage, where, act)
    stage = stage_of(world, model, transport=transport, **options)
    for input, target in stage.batches(loader(act if where == "loader" else None, size)):
        if api == "step":
            stage.step(input, target)
        else:
            F.mse_loss(stage(input), target.to(stage.device)).backward()


def loader(act, size):
    yield batch(size)
    if act is not None:
        act()
    yield batch(size)


def check(outcomes: Outcomes, origin: int, error: str, *words: str) -> None:
    """Check that all ranks ended soon: ``origin`` by its own error, the others by its report."""
    for outcome, failure in zip(outcomes, outcomes.errors(), strict=True):
        assert outcome.duration_s < SOON_S, str(outcome)
        if outcome.rank == origin:
            assert failure.type == error, str(outcome)
        else:
            assert failure.type == "RemoteStageError", str(outcome)
            assert f"rank {origin} failed" in failure.text, str(outcome)
            assert f"stage {origin} (rank {origin}), in " in failure.text, str(outcome)
            assert "Traceback" in failure.text, str(outcome)
            # The report contains one traceback, not one for each rank that forwarded it.
            assert failure.text.count("Traceback (most recent call last)") == 1, str(outcome)
        for word in words:
            assert word in failure.text, f"{word!r} is missing\n{outcome}"
        assert outcome.output == "", str(outcome)


def check_lost(outcomes: Outcomes, origin: int, *words: str) -> None:
    """Check that all other ranks ended soon and name ``origin`` as the lost rank."""
    for outcome in outcomes:
        if outcome.rank == origin:
            continue
        failure = outcome.error
        assert isinstance(failure, Failure), str(outcome)
        assert failure.is_a("RemoteStageError"), str(outcome)
        assert f"rank {origin} failed" in failure.text, str(outcome)
        assert outcome.duration_s < SOON_S, str(outcome)
        for word in words:
            assert word in failure.text, f"{word!r} is missing\n{outcome}"
        assert outcome.output == "", str(outcome)


# -- exceptions ----------------------------------------------------------------------------------

TASKS = {"forward": "F1", "recompute": "R2", "backward": "B2"}

#: Each rank of jobs of 2, 3 and 4 ranks.
EACH_RANK = [(n, origin) for n in (2, 3, 4) for origin in range(n)]

#: A first, a middle and a last rank.
SOME_RANKS = [(2, 0), (3, 1), (4, 3)]


@pytest.mark.parametrize("where", TASKS)
@pytest.mark.parametrize(("n", "origin"), EACH_RANK)
def test_a_layer_raises(ranks, n, origin, where):
    outcomes = ranks(n).run(train, origin, where)

    task = TASKS[where]
    place = [f"stage {origin} (rank {origin}), task {task}@{origin} (micro-batch {task[1]})"]
    if where == "backward":
        place.append("its layers' backward")
    else:
        place.append(f"layer 'l{2 * origin + 1}' (Faulty)")
    check(outcomes, origin, "BoomError", "boom in the layer", *place)


@pytest.mark.parametrize(
    ("where", "origin"),
    [("forward", 1), ("recompute", 2), ("backward", 0), ("backward", 1), ("backward", 2)],
)
def test_a_layer_raises_when_backward_is_the_users_call(ranks, origin, where):
    outcomes = ranks(3).run(train, origin, where, api="backward")

    task = TASKS[where]
    place = f"stage {origin} (rank {origin}), task {task}@{origin} (micro-batch {task[1]})"
    check(outcomes, origin, "BoomError", "boom in the layer", place)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_loss_function_raises(ranks, n):
    outcomes = ranks(n).run(train, None, "loss_fn")

    check(outcomes, n - 1, "BoomError", f"task F0@{n - 1} (micro-batch 0), loss_fn")


@pytest.mark.parametrize(
    ("n", "where"), [(2, "loader"), (3, "loader"), (4, "loader"), (3, "loss_weight")]
)
def test_rank_0_raises_before_there_is_a_plan(ranks, n, where):
    outcomes = ranks(n).run(train, None, where)

    check(outcomes, 0, "BoomError", "boom in the layer")


@pytest.mark.parametrize(
    ("n", "origin", "where"),
    [
        (2, 0, "recompute"),
        (2, 1, "forward"),
        (3, 0, "forward"),
        (3, 1, "forward"),
        (3, 1, "backward"),
        (3, 2, "backward"),
        (4, 2, "recompute"),
        (4, 3, "backward"),
    ],
)
@pytest.mark.parametrize("transport", ["shm", "sockets"])
@pytest.mark.only_on_cpus
def test_a_layer_raises_while_large_tensors_are_being_sent(ranks, n, origin, where, transport):
    outcomes = ranks(n).run(train, origin, where, size=BULK, transport=transport)

    check(outcomes, origin, "BoomError", "boom in the layer")


class NoTextError(Exception):
    """Its ``str()`` raises."""

    def __str__(self):
        raise ZeroDivisionError


def raise_without_text():
    raise NoTextError


def raise_long_text():
    raise BoomError("start" + "x" * (50 << 20) + "end")


def train_and_catch(world):
    try:
        train(world, 1, "forward", raise_without_text)
    except NoTextError:
        return "caught"  # otherwise the harness would call its str()


def test_an_exception_whose_str_raises(ranks):
    victim, origin = ranks(2).run(train_and_catch)

    assert origin.value == "caught"
    assert isinstance(victim.error, Failure)
    reason = "(what it says is not known: its __str__ raised ZeroDivisionError)"
    assert f"in step(): NoTextError: {reason}" in victim.error.text


def test_a_long_exception_text_is_shortened(ranks):
    victim, _ = ranks(2).run(train, 1, "forward", raise_long_text).errors()

    assert "rank 1 failed:" in victim.text
    assert "BoomError: startxxx" in victim.text
    assert "task F1@1 (micro-batch 1)" in victim.text
    assert len(victim.text) < 1 << 18


def allocate():
    torch.empty(1 << 50, device="cuda" if is_on_gpus() else "cpu")


@pytest.mark.parametrize(("n", "origin"), SOME_RANKS)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_memory_runs_out(ranks, n, origin, where):
    outcomes = ranks(n).run(train, origin, where, allocate)

    device = devices_of_ranks(n)[origin]
    message = (
        rf"out of memory on {device}: stage {origin} held (\d) micro-batches between forward and "
    )
    error, words = "RuntimeError", "can't allocate memory"
    if is_on_gpus():
        error, words = "OutOfMemoryError", "CUDA out of memory"
    check(outcomes, origin, error, words, "Give the stage fewer layers")
    for failure in outcomes.errors():
        held = re.search(message, failure.text)
        assert held, failure.text
        assert int(held[1]) > 0


def interrupt():
    raise KeyboardInterrupt


def test_an_interrupt_ends_all(ranks):
    check(ranks(2).run(train, 1, "forward", interrupt), 1, "KeyboardInterrupt")


class Converts(nn.Module):
    """Returns another dtype or shape, or nan."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        return {"dtype": x.double, "shape": lambda: x[:, 1:], "nan": lambda: x * torch.nan}[
            self.what
        ]()


def converts(world, layer, what):
    model = model_of(world.num_ranks)
    model[layer] = Converts(what)
    stage_of(world, model, check_loss=what == "nan").step(*batch())


@pytest.mark.parametrize(
    ("what", "described"), [("dtype", "float64 (2, 4)"), ("shape", "float32 (2, 3)")]
)
@pytest.mark.parametrize(("n", "layer"), [(2, 0), (2, 1), (3, 3), (4, 5), (4, 6)])
def test_a_layer_returns_what_the_next_cannot_use(ranks, n, layer, what, described):
    """The error names the layer that received the value, maybe in the next stage, and the value."""
    receiver = layer + 1
    outcomes = ranks(n).run(converts, layer, what)

    place = f"task F0@{receiver // 2} (micro-batch 0), layer 'l{receiver}' (Linear)"
    given = f"layer 'l{receiver}' (Linear) was given {described}"
    check(outcomes, receiver // 2, "RuntimeError", place, given)


@pytest.mark.parametrize(("n", "layer"), [(2, 0), (3, 3), (4, 7)])
def test_the_loss_is_not_finite(ranks, n, layer):
    outcomes = ranks(n).run(converts, layer, "nan")

    text = "the loss is nan; the output is float32 (2, 4), 100.0% of it not finite"
    check(outcomes, n - 1, "NonFiniteLossError", text, f"task F0@{n - 1} (micro-batch 0), loss_fn")


def catches_and_continues(world, origin):
    """Catch the error on one rank, and call the stage again."""
    stage = stage_of(world, model_of(world.num_ranks, origin, "forward"))
    if world.rank != origin:
        stage.step(*batch())
        return
    try:
        stage.step(*batch())
    except BoomError:
        stage.step(*batch())


@pytest.mark.parametrize(("n", "origin"), [(2, 1), (3, 0), (3, 1), (3, 2), (4, 2)])
def test_a_rank_that_catches_the_error_and_continues_is_stopped(ranks, n, origin):
    outcomes = ranks(n).run(catches_and_continues, origin)

    failures = outcomes.errors()
    assert failures[origin].type == "StageClosedError"
    assert "step() cannot run: step() failed on this rank with BoomError" in failures[origin].text
    for rank in set(range(n)) - {origin}:
        assert failures[rank].type == "RemoteStageError"
        assert "boom in the layer" in failures[rank].text
    assert all(outcome.duration_s < SOON_S for outcome in outcomes)


def all_continue(world):
    """Catch the error on every rank: every later call raises."""
    stage = stage_of(world, model_of(world.num_ranks, 1, "forward"))
    raised = []
    calls = [
        lambda: stage.step(*batch()),
        lambda: stage.step(*batch()),
        lambda: stage(batch()[0]),
        lambda: next(stage.batches([batch()])),
        lambda: stage.clip_grad_norm_(1.0),
        lambda: stage.fetch(torch.ones(1)),
        stage.report,
        stage.statistics,
    ]
    for call in calls:
        try:
            call()
        except Exception as error:
            raised.append(type(error).__name__)
    stage.close()
    return raised


def test_after_a_failure_every_call_is_refused(ranks):
    outcomes = ranks(2).run(all_continue).values()

    assert outcomes[0] == ["RemoteStageError"] + ["StageClosedError"] * 7
    assert outcomes[1] == ["BoomError"] + ["StageClosedError"] * 7


# -- processes that end --------------------------------------------------------------------------


def is_killed(world, origin, when):
    """Train until a rank is killed: in a layer, between two steps, or while its task waits."""
    store = world.store
    store.set(f"pid/{world.rank}", str(os.getpid()))
    pid = int(store.get(f"pid/{origin}"))
    slow = origin + 1 if origin + 1 < world.num_ranks else origin - 1
    waiting_task = when.removeprefix("waiting in ")

    def kill_once_it_waits():
        deadline_s = time.monotonic() + 10.0
        while True:
            board = Board.of_process(pid)
            assert board is not None
            reading = board.read()
            if reading.wait is not None and reading.task == waiting_task:
                os.kill(pid, signal.SIGKILL)
                return
            assert time.monotonic() < deadline_s, f"rank {origin} does not wait in {waiting_task}"
            time.sleep(0.01)

    if when != waiting_task:
        model = model_of(world.num_ranks, slow, "forward", kill_once_it_waits)
    else:
        model = model_of(world.num_ranks, origin, when, kill)
    stage = stage_of(world, model)
    for number, (input, target) in enumerate(stage.batches([batch()] * 3)):
        if when == "between" and number == 1 and world.rank == origin:
            kill()
        stage.step(input, target)


@pytest.mark.parametrize(
    ("n", "origin", "when", "seen"),
    [
        (2, 0, "forward", r"in F1, layer 'l1' \(Faulty\), for "),
        (2, 1, "backward", "in B2, for "),
        (2, 1, "between", "between calls, in the user's code, for "),
        (3, 0, "between", "between calls, in the user's code, for "),
        (3, 1, "forward", r"in F1, layer 'l3' \(Faulty\), for "),
        (3, 2, "backward", "in B2, for "),
        (4, 0, "backward", "in B2, for "),
        (4, 3, "recompute", r"in R2, layer 'l7' \(Faulty\), for "),
        (2, 0, "waiting in B2", r"in B2, waiting \d+\.\d s for gradient from stage 1 \(rank 1\)"),
        (3, 1, "waiting in B2", r"in B2, waiting \d+\.\d s for gradient from stage 2 \(rank 2\)"),
        (4, 3, "waiting in F1", r"in F1, waiting \d+\.\d s for activation from stage 2 \(rank 2\)"),
    ],
)
def test_a_rank_is_killed(ranks, n, origin, when, seen):
    outcomes = ranks(n).run(is_killed, origin, when)

    assert outcomes[origin].error.type == "ProcessDied"
    check_lost(outcomes, origin, f"rank {origin} ended without a message", "out of memory?")
    for rank in set(range(n)) - {origin}:
        assert outcomes[rank].error.type == "PeerLostError"
        assert re.search(f"it was last seen {seen}", outcomes[rank].error.text), outcomes[rank]


@pytest.mark.parametrize(("origin", "transport"), [(0, "shm"), (0, "sockets"), (1, "sockets")])
@pytest.mark.only_on_cpus
def test_a_rank_is_killed_while_large_tensors_are_being_sent(ranks, origin, transport):
    outcomes = ranks(2).run(train, origin, "forward", kill, size=BULK, transport=transport)

    seen = f"it was last seen in F1, layer 'l{2 * origin + 1}' (Faulty), for "
    check_lost(outcomes, origin, f"rank {origin} ended without a message", seen)


@pytest.mark.parametrize(("n", "origin"), [(2, 0), (3, 0), (3, 1), (3, 2), (4, 3)])
def test_a_layer_ends_the_script(ranks, n, origin):
    outcomes = ranks(n).run(train, origin, "forward", leave)

    check(outcomes, origin, "SystemExit", f"task F1@{origin} (micro-batch 1), layer")


def ends_early(world, origin, how):
    stage = stage_of(world)
    for number, (input, target) in enumerate(stage.batches([batch()] * 3)):
        if number == 1 and world.rank == origin:
            if how == "sys.exit":
                sys.exit(0)
            if how == "break":
                break
            return
        stage.step(input, target)
    if how == "break" and world.rank == origin:
        stage.close()


@pytest.mark.parametrize(
    ("n", "how", "origin"),
    [
        (2, "return", 0),
        (2, "sys.exit", 1),
        (3, "return", 0),
        (3, "return", 1),
        (3, "return", 2),
        (3, "sys.exit", 1),
        (3, "break", 2),
        (4, "break", 0),
        (4, "sys.exit", 2),
    ],
)
def test_a_rank_ends_early(ranks, n, origin, how):
    outcomes = ranks(n).run(ends_early, origin, how)

    check_lost(outcomes, origin, f"rank {origin} has left the pipeline", "must make the same calls")


# -- ranks that are not in the same call ---------------------------------------------------------


def calls_differ(world, calls):
    stage = stage_of(world)
    stage.step(*batch())
    input, target = batch()
    call = calls[world.rank]
    if call == "step":
        stage.step(input, target)
    elif call == "forward":
        stage(input)
    elif call == "clip":
        stage.clip_grad_norm_(1.0)
    elif call == "batches":
        next(stage.batches([batch()]))
    elif call == "fetch":
        stage.fetch(torch.ones(1))
    elif call == "report":
        stage.report()
    elif call == "eval step":
        stage.eval()
        stage.step(input, target)
    elif call == "step without gradients":
        with torch.no_grad():
            stage.step(input, target)
    stage.step(input, target)  # in some of these calls rank 0 waits for no other rank


@pytest.mark.parametrize(
    ("calls", "origin", "words"),
    [
        (["step", "forward"], 1, "rank 1 is in forward() while rank 0 is in step()"),
        (["forward", "step"], 1, "rank 1 is in step() while rank 0 is in forward()"),
        (["clip", "step"], 1, "rank 1 is in step() while rank 0 is in clip_grad_norm_()"),
        (["step", "clip"], 1, "rank 1 is in clip_grad_norm_() while rank 0 is in step()"),
        (["batches", "step"], 1, "rank 1 is in step() while rank 0 is in batches()"),
        (["step", "step", "batches"], 2, "rank 2 is in batches() while rank 0 is in step()"),
        (["fetch", "fetch", "report"], 2, "rank 2 is in report() while rank 0 is in fetch()"),
        (["report", "step", "report"], 1, "rank 1 is in step() while rank 0 is in report()"),
        (
            ["step", "step", "step", "forward"],
            3,
            "rank 3 is in forward() while rank 0 is in step()",
        ),
        (["fetch", "fetch", "clip", "fetch"], 2, "rank 2 is in clip_grad_norm_() while rank 0 is"),
        (["clip", "clip", "step"], 2, "rank 2 is in step() while rank 0 is in clip_grad_norm_()"),
        (["step", "eval step"], 1, "rank 1 calls step() in eval mode with gradients on, rank 0 in"),
        (["eval step", "step"], 1, "rank 1 calls step() in training mode with gradients on"),
        (["step", "step", "step without gradients"], 2, "training mode with gradients off"),
    ],
)
def test_ranks_are_in_different_calls(ranks, calls, origin, words):
    outcomes = ranks(len(calls)).run(calls_differ, calls)

    check(outcomes, origin, "CallMismatchError", words)


# -- ranks that were started differently ---------------------------------------------------------


def settings_differ(world, of_rank):
    options = dict(of_rank[world.rank])
    layers = options.pop("layers", None)
    model = model_of(world.num_ranks)
    if layers is not None:
        model[1] = layers
    stage_of(world, model, **options).step(*batch())


def test_ranks_disagree(ranks):
    of_rank = [
        {},
        {"balance": [1, 2, 3], "chunks": 2},
        {"checkpoint": "never", "layers": nn.Linear(WIDTH, WIDTH, bias=False)},
    ]

    outcomes = ranks(3).run(settings_differ, of_rank)

    for outcome, failure in zip(outcomes, outcomes.errors(), strict=True):
        assert failure.type == "DisagreementError", str(outcome)
        assert failure.is_a("ValueError")
        assert "balance is [2, 2, 2] on rank 0 and [1, 2, 3] on rank 1" in failure.text
        assert failure.text.count('Stage(model, balance="time", sample=x)') == 1
        assert "chunks is 3 on rank 0 and 2 on rank 1" in failure.text
        assert "checkpoint is 'always' on rank 0 and 'never' on rank 2" in failure.text
        assert "a layer of the model is" in failure.text
        assert outcome.duration_s < SOON_S
        assert outcome.output == ""


def balance_does_not_fit(world, balances, num_layers):
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)])
    balance = balances[world.rank] if isinstance(balances[0], list) else balances
    stage = Stage(model, balance, loss_fn=F.mse_loss, world=world)
    stage.step(*batch())


@pytest.mark.parametrize(
    ("balance", "error", "words"),
    [
        ([1, 1, 2], "IndexError", "makes 3 partitions, but there are 2 processes"),
        ([4], "BalanceError", "makes 1 partition, but there are 2 processes"),
        ([1, 2], "BalanceError", "places 3 layers but the model has 4"),
        ([4, 0], "BalanceError", "less than one layer"),
    ],
)
def test_a_balance_that_does_not_fit_is_refused_on_every_rank(ranks, balance, error, words):
    outcomes = ranks(2).run(balance_does_not_fit, balance, 4)

    for outcome, failure in zip(outcomes, outcomes.errors(), strict=True):
        assert (failure.type, failure.is_a("ValueError")) == (error, error == "BalanceError")
        assert words in failure.text
        assert outcome.duration_s < SOON_S


@pytest.mark.parametrize("origin", [0, 1, 2])
def test_a_balance_that_does_not_fit_on_one_rank_ends_all(ranks, origin):
    balances = [[2, 1, 1]] * 3
    balances[origin] = [2, 1]

    outcomes = ranks(3).run(balance_does_not_fit, balances, 4)

    check(outcomes, origin, "BalanceError", "the balance [2, 1] places 3 layers")


# -- mini-batches that cannot be run -------------------------------------------------------------


def bad_batch(world, name):
    stage = stage_of(world)
    input, target = batch()
    stage.step(input, target)
    if name == "no tensor":
        stage.step("text", target)
    elif name == "sizes differ":
        stage.step((input, input[:3]), target=target)
    elif name == "empty":
        stage.step(input[:0], target[:0])
    elif name == "target size":
        stage.step(input, target[:4])
    elif name == "no dimension":
        stage.step(torch.tensor(1.0), target)
    elif name == "strange object":
        stage.step({"x": input, "y": object()}, target=target)


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("no tensor", "TypeError", "the input holds no tensor"),
        ("sizes differ", "ValueError", "has 6 samples but"),
        ("empty", "ValueError", "the batch is empty"),
        ("target size", "ValueError", "target has 4 samples but the input has 6"),
        ("no dimension", "ValueError", "without dimensions"),
        ("strange object", "BoundaryError", "builtins.object"),
    ],
)
def test_a_mini_batch_that_cannot_be_split(ranks, name, error, words):
    check(ranks(3).run(bad_batch, name), 0, error, words)


class Returns(nn.Module):
    """Returns a value that cannot be sent to the next stage."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        if self.what == "meta":
            return x.to("meta")
        if self.what == "object":
            return (x, object())
        return x.to_sparse()


def returns(world, stage_number, what):
    model = model_of(world.num_ranks)
    model[2 * stage_number + 1] = Returns(what)
    stage_of(world, model).step(*batch())


@pytest.mark.parametrize(
    ("what", "origin", "words"),
    [
        ("meta", 0, "returned a tensor on meta"),
        pytest.param("sparse", 1, "layout torch.sparse_coo", marks=pytest.mark.only_on_cpus),
        ("object", 1, "builtins.object at [1] cannot travel"),
    ],
)
def test_an_output_that_cannot_travel_is_an_error_of_the_layer(ranks, what, origin, words):
    outcomes = ranks(3).run(returns, origin, what)

    layer = f"layer 'l{2 * origin + 1}' (Returns)"
    check(outcomes, origin, "BoundaryError", words, layer, f"task F0@{origin}")


# -- values on other ranks -----------------------------------------------------------------------


def reads_a_value(world, how):
    stage = stage_of(world)
    output = stage(batch()[0])
    loss = F.mse_loss(output, batch()[1].to(stage.device))
    if world.rank == 0:
        how = {"item": lambda: loss.item(), "float": lambda: float(loss), "if": lambda: bool(loss)}[
            how
        ]
        how()
    loss.backward()


@pytest.mark.parametrize("how", ["item", "float", "if"])
def test_a_remote_value_is_read(ranks, how):
    outcomes = ranks(3).run(reads_a_value, how)

    failure = outcomes[0].error
    assert failure.type == "RemoteValueError"
    assert "lives on rank 2 (the output of stage(input)): move this into loss_fn" in failure.text
    check_lost(outcomes, 0, "rank 0 has left the pipeline")


def runs_backward(world, how):
    stage = stage_of(world)
    losses = []
    for _ in range(2):
        output = stage(batch()[0])
        losses.append(F.mse_loss(output, batch()[1].to(stage.device)))
    (losses[1] if how == "twice" else losses[0]).backward()
    losses[1].backward()


@pytest.mark.parametrize("how", ["twice", "stale"])
def test_backward_that_cannot_be_run(ranks, how):
    outcomes = ranks(3).run(runs_backward, how)

    for outcome, failure in zip(outcomes, outcomes.errors(), strict=True):
        assert failure.type == "RuntimeError", str(outcome)
        assert "backward" in failure.text
        assert outcome.duration_s < SOON_S


# -- ranks that do not make a call ---------------------------------------------------------------


def does_not_call(world, origin, when):
    """One rank waits outside of the stage while the others make their call."""
    stage = stage_of(world)
    if when == "later":
        stage.step(*batch())
    if world.rank == origin:
        world_store(world).wait(["never set"], timedelta(seconds=1.5))
    stage.step(*batch())


def world_store(world):
    return world.store


@pytest.mark.parametrize(
    ("when", "origin", "words"),
    [
        ("start", 1, r"rank [02] waited 0\.5 s, but rank 1 did not start"),
        ("later", 0, r"rank [12] has waited 0\.5 s for the order for step\(\) from rank 0"),
        ("later", 1, r"rank [02] has waited 0\.5 s for \w+ from stage 1 \(rank 1\)"),
    ],
)
def test_a_rank_does_not_make_its_call(ranks, when, origin, words):
    outcomes = ranks(3).run(does_not_call, origin, when, world_timeout_s=0.5)

    failures = outcomes.errors()
    assert failures[origin].type == "DistStoreError"  # from its own wait
    victims = {0, 1, 2} - {origin}
    assert any(failures[rank].type == "WaitTimeoutError" for rank in victims)
    for rank in victims:
        assert failures[rank].type in ("WaitTimeoutError", "RemoteStageError")
        assert re.search(words, failures[rank].text), str(outcomes)
        assert outcomes[rank].duration_s < SOON_S


# -- running ahead -------------------------------------------------------------------------------


def runs_ahead(world):
    """Rank 0 returns from its call long before the others, and then waits for them by a store."""
    width = INLINE_BYTES // 4
    model = nn.Sequential(nn.Identity(), nn.Identity())
    stage = Stage(model, [1, 1], chunks=400, world=world)
    store = world_store(world)
    with torch.no_grad():
        output = stage(torch.ones(400, width))
    if world.rank == 0:
        store.wait(["rank 1 is done"], timedelta(seconds=5))
        return None
    store.set("rank 1 is done", "")
    return output.shape


def test_a_rank_may_run_ahead_and_wait_for_another_by_other_means(ranks):
    assert ranks(2).run(runs_ahead).values() == [None, (400, INLINE_BYTES // 4)]


# -- failing early -------------------------------------------------------------------------------

MANY = 2000


class Counting(nn.Module):
    """Counts its calls; waits in the second one until the last stage fails."""

    def __init__(self, store):
        super().__init__()
        self.store = store
        self.num_calls = 0

    def __deepcopy__(self, memo):
        return self

    def forward(self, input):
        self.num_calls += 1
        if self.num_calls == 2:
            self.store.wait(["failing"])
        elif self.num_calls > 2:
            self.store.check(["failing"])  # a round trip: time for the failure to arrive
        return input


class Failing(nn.Module):
    def __init__(self, store):
        super().__init__()
        self.store = store

    def __deepcopy__(self, memo):
        return self

    def forward(self, input):
        self.store.set("failing", "now")
        raise ZeroDivisionError("on purpose")


def calls_until_failure(bare):
    counting = Counting(bare.store)
    model = nn.Sequential(counting, nn.Identity(), Failing(bare.store))
    with (
        pytest.raises((ZeroDivisionError, RemoteStageError), match="on purpose"),
        stages.stage_of(bare, "early", model, [1, 1, 1], chunks=MANY, checkpoint="never") as stage,
    ):
        stage(torch.ones(MANY, 2))
    return counting.num_calls


@pytest.mark.only_on_cpus
def test_a_stage_stops_early_if_another_has_failed(ranks):
    num_calls, *_ = ranks(3).run(calls_until_failure, world=False).values()
    assert 2 <= num_calls < MANY
