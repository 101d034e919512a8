"""Programs on real layers, with all stages as threads of one process over memory channels."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe.compute.layers import PartitionLayers
from procpipe.compute.partition import Partition
from procpipe.data.loss import Loss
from procpipe.data.mean_loss import MeanLoss
from procpipe.data.minibatch import MiniBatch, Outcome
from procpipe.errors import PlanError
from procpipe.job.grid import Grid
from procpipe.plan.program import program
from procpipe.plan.routes import ACTIVATION, GRADIENT, LOSS, TARGET, Routes
from procpipe.plan.schedules.gpipe import gpipe, recomputed
from procpipe.run.executor import Channels, Executor
from procpipe.run.messages import Order
from procpipe.run.observer import Observers
from procpipe.run.trace import Trace
from procpipe.tree import Flat
from tests.cases import pairs
from tests.channel.memory import MemoryChannel

CPU = torch.device("cpu")
WIDTH = 3


class Rig:
    """All stages of a pipeline in this process."""

    def __init__(self, model, num_stages):
        self.num_stages = num_stages
        per_stage = len(model) // num_stages
        ends = [Channels() for _ in range(num_stages)]
        last = num_stages - 1
        pairs = [(ACTIVATION, j, j + 1) for j in range(last)]
        pairs += [(GRADIENT, j + 1, j) for j in range(last)]
        pairs += [(LOSS, j + 1, j) for j in range(last)] + [(TARGET, 0, last)] * (last > 0)
        self.channels = {}
        for kind, a, b in pairs:
            channel: Any = MemoryChannel(f"{kind} {a}->{b}", timeout_s=5.0)
            self.channels[kind, a, b] = channel
            ends[a].senders[kind, a, b] = channel
            ends[b].receivers[kind, a, b] = channel
        self.executors = []
        self.traces = [Trace() for _ in range(num_stages)]
        for j in range(num_stages):
            layers = {str(k): model[k] for k in range(j * per_stage, (j + 1) * per_stage)}
            partition = Partition(PartitionLayers(layers, CPU, is_first=j == 0))
            self.executors.append(
                Executor(Grid(j, num_stages), range(num_stages), {j: partition}, ends[j])
            )
            self.executors[j].observe(Observers([self.traces[j]]))

    def run(self, plan, batches, *, target=False):
        """Run a plan on all stages; return each stage's exception and its outcome."""
        routes = Routes(self.num_stages, target=target)
        raised: list[BaseException | None] = [None] * self.num_stages
        outcomes: list[Outcome | None] = [None] * self.num_stages

        def run_stage(j):
            self.executors[j].begin()
            try:
                steps = program(plan, routes, j, has_loss=True)
                with Observers([self.traces[j]]).step(Order("step")):
                    outcomes[j] = self.executors[j].run(steps, batches[j])
            except BaseException as error:
                raised[j] = error

        threads = [threading.Thread(target=run_stage, args=[j]) for j in range(self.num_stages)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # Recomputation switches it off for a moment, which here several threads do at a time.
        torch.backends.mha.set_fastpath_enabled(True)
        return raised, outcomes


def make_batches(x, y, m, n, *, keep=True, target=False):
    xs, ys = x.chunk(m), y.chunk(m)
    inputs = [Flat.of((part,)) for part in xs]
    given = 0 if target else n - 1
    return [
        MiniBatch(
            inputs=inputs if j == 0 else None,
            targets=ys if j == given else None,
            loss=MeanLoss(Loss(F.mse_loss, None), [1.0] * m) if j == n - 1 else None,
            keep=keep,
            is_step=True,
        )
        for j in range(n)
    ]


def make_model(num_stages):
    torch.manual_seed(num_stages)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_stages)]
    return nn.Sequential(*layers).double()


CASES = pairs(range(1, 5), range(1, 5), ("always", "except_last", "never"), (False, True))


def test_every_small_plan_gives_the_plain_models_gradients():
    for case in CASES:
        try:
            check_gradients(*case)
        except AssertionError as error:
            error.add_note(f"m, n, mode, target = {case}")
            raise


def check_gradients(m, n, mode, target):
    model = make_model(n)
    x = torch.randn(2 * m, WIDTH, dtype=torch.float64)
    y = torch.randn(2 * m, WIDTH, dtype=torch.float64)
    plain_loss = sum(
        F.mse_loss(model(a), b) / m for a, b in zip(x.chunk(m), y.chunk(m), strict=True)
    )
    expected = torch.autograd.grad(plain_loss, list(model.parameters()))
    recompute = recomputed(mode, m)
    rig = Rig(model, n)
    batches = make_batches(x, y, m, n, target=target)

    raised, outcomes = rig.run(gpipe(m, n, recompute=recompute), batches, target=target)

    assert raised == [None] * n
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-15)
    for outcome in outcomes:
        torch.testing.assert_close(outcome.loss, plain_loss.detach(), rtol=0, atol=1e-15)
    for j, executor in enumerate(rig.executors):
        tasks = {"F": m, "B": m, "R": len(recompute)}
        assert rig.traces[j].num_tasks == {kind: k for kind, k in tasks.items() if k}
        assert executor.ledger.held_bytes == 0, f"stage {j} still holds tensors"
        assert executor.partitions[j].num_held == 0
        assert executor.current_task is None
    assert all(not channel._messages for channel in rig.channels.values())


def test_evaluation_holds_nothing_and_sends_no_gradients():
    model, n, m = make_model(3), 3, 4
    x = torch.randn(8, WIDTH, dtype=torch.float64)
    rig = Rig(model, n)
    batches = make_batches(x, x, m, n, keep=False)

    raised, outcomes = rig.run(gpipe(m, n, backward=False), batches)
    assert raised == [None] * n

    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(outcomes[0].loss, F.mse_loss(model(x), x).detach())
    sent = {kind: channel.num_messages for (kind, _, _), channel in rig.channels.items()}
    assert sent == {ACTIVATION: 4, GRADIENT: 0, LOSS: 1, TARGET: 0}
    assert all(executor.ledger.held_bytes == 0 for executor in rig.executors)


def test_no_gradient_is_sent_to_a_stage_that_needs_none():
    model = make_model(3)
    model[0].requires_grad_(False)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    rig = Rig(model, 3)

    raised, _ = rig.run(gpipe(2, 3, recompute=[0]), make_batches(x, x, 2, 3))

    assert raised == [None] * 3
    assert rig.channels[GRADIENT, 1, 0].num_messages == 0
    assert rig.channels[GRADIENT, 2, 1].num_messages == 2
    assert model[1][0].weight.grad is not None


class Boom(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        if self.num_calls == self.call:
            raise ZeroDivisionError("boom")
        return x


@pytest.mark.parametrize(
    ("call", "note"),
    [
        (2, "procpipe: in stage 1 (rank 1), task F1@1 (micro-batch 1), layer '1' (Boom)"),
        (4, "procpipe: in stage 1 (rank 1), task R2@1 (micro-batch 2), layer '1' (Boom)"),
    ],
)
def test_an_exception_names_its_task_and_layer(call, note):
    model = make_model(2)
    model[1] = Boom(call)
    x = torch.randn(6, WIDTH, dtype=torch.float64)
    rig = Rig(model, 2)
    for channel in rig.channels.values():
        channel._timeout_s = 0.2  # the other stage waits for a message that is never sent
    recompute = recomputed("always", 3)

    raised, _ = rig.run(gpipe(3, 2, recompute=recompute), make_batches(x, x, 3, 2))

    assert type(raised[1]) is ZeroDivisionError
    given = "procpipe: layer '1' (Boom) was given float64 (2, 3)"
    assert raised[1].__notes__ == [given, note]
    assert type(raised[0]).__name__ == "WaitTimeoutError"


def test_a_mini_batch_after_a_failed_one_starts_clean():
    model = make_model(2)
    model[1] = nn.Sequential(Boom(2), model[1])
    x = torch.randn(6, WIDTH, dtype=torch.float64)
    rig = Rig(model, 2)
    for channel in rig.channels.values():
        channel._timeout_s = 0.2
    rig.run(gpipe(3, 2), make_batches(x, x, 3, 2))
    for channel in rig.channels.values():
        channel._messages.clear()
        channel._num_allowed = 0
    model.zero_grad()

    assert rig.run(gpipe(3, 2), make_batches(x, x, 3, 2))[0] == [None, None]

    expected = torch.autograd.grad(F.mse_loss(model(x), x), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_plan_error_names_every_fault():
    error = PlanError(["one", "two"])

    assert error.faults == ("one", "two")
    assert str(error) == "the plan cannot run:\n  - one\n  - two"
