"""Replicas of a pipeline train as the plain model does on the whole mini-batch.

Truth is the plain model in float64. Replicas add up gradients in another order than autograd, so
they may differ in their last digits; between replicas every bit is the same.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import time
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import BalanceError, CallMismatchError, RemoteStageError, Stage
from procpipe.launch.plan.replay import usual
from procpipe.losses import MaskedCrossEntropy
from procpipe.plan.schedules.gpipe import gpipe
from procpipe.replicas.group import Group
from procpipe.timeline.chrome import read
from procpipe.timeline.split import split
from procpipe.timeline.steps import early_hops_s, merged
from tests.dist.stages import assert_same, assert_same_gradients, stage_of, world_of

pytestmark = pytest.mark.on_gpus

TOLERANCE = 1e-12


class Head(nn.Module):
    """Classifies by the rows of an embedding's matrix."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, input):
        return input @ self.weight.T


def make_model():
    """Make six layers, of which two share a matrix: token numbers to classes."""
    torch.manual_seed(1)
    embedding = nn.Embedding(7, 5)
    return nn.Sequential(
        embedding,
        nn.Tanh(),
        nn.Linear(5, 5),
        nn.Sequential(nn.Tanh(), nn.Linear(5, 5)),
        nn.Tanh(),
        Head(embedding.weight),
    ).double()


def make_batch(size, seed):
    generator = torch.Generator().manual_seed(seed)
    input, target = torch.randint(0, 7, (2, size, 3), generator=generator)
    return input, target


def own(stage, *whole):
    """Return this replica's part of each tensor of a whole mini-batch."""
    return [tensor.tensor_split(stage.replicas)[stage.replica] for tensor in whole]


def mean_loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Counting(MaskedCrossEntropy):
    """The mean over tokens that are not 0, which says how many these are."""

    def __call__(self, output, target):
        return super().__call__(output.flatten(0, 1), target.flatten())


counting_loss = Counting(ignore_index=0)


def weighted_loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=0)


def check_added_up(stage: Any) -> None:
    stage._calls.pipeline.replicas.check_added_up("clip_grad_norm_")


def group_of(stage: Any) -> Any:
    """Return the processes that run a stage."""
    return stage._calls.pipeline.replicas._group


def train(bare):
    """Train over mini-batches of several sizes; the gradients of the second and third add up."""
    plain = make_model()
    options = {"replicas": 2, "chunks": 3, "schedule": "1f1b", "loss_fn": counting_loss}
    model = copy.deepcopy(plain)
    if bare.rank >= 2:  # replicas begin with the values of the first
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    with stage_of(bare, "train", model, [2, 4], **options) as stage:
        assert (stage.replica, stage.replicas) == (bare.rank // 2, 2)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (stage, plain)]
        for step, size in enumerate((11, 3, 8, 3)):
            input, target = make_batch(size, step)
            expected = weighted_loss(plain(input), target)
            expected.backward()
            data = own(stage, input, target) if bare.rank % 2 == 0 else ()
            if step == 1:
                with stage.no_sync():
                    stage.step(*data)
                continue
            assert_same(stage.step(*data), expected.detach(), f"loss {step}", TOLERANCE)
            assert_same_gradients(stage, plain, f"step {step}", TOLERANCE)
            norm = stage.clip_grad_norm_(0.3)
            assert_same(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.3), "norm", TOLERANCE)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for name, parameter in stage.named_parameters():
            assert torch.equal(*group_of(stage).gathered(parameter.detach())), name


def test_training_is_the_plain_models(ranks):
    """Any models and options, on CPUs: tests/fuzz."""
    ranks(4).run(train, world=False).values()


def check_frozen_between(bare):
    plain = make_model()
    options = {"replicas": 2, "chunks": 2, "loss_fn": mean_loss}
    with stage_of(bare, "frozen between", plain, [2, 4], **options) as stage:
        for step in range(2):
            input, target = make_batch(5, step)
            (mean_loss(plain(input), target)).backward()
            if step == 0:
                with stage.no_sync():
                    stage.step(*own(stage, input, target))
                with pytest.raises(RuntimeError, match="still to be added up"):
                    check_added_up(stage)
            else:
                stage.step(*own(stage, input, target))
            plain[3].requires_grad_(False)
            stage.get_submodule("3").requires_grad_(False) if "3" in stage._modules else None
        assert_same_gradients(stage, plain, "frozen between", TOLERANCE)
        step_unsynced(stage, own(stage, input, target))
        stage.zero_grad(set_to_none=False)
        check_added_up(stage)  # zeros need no sum


def check_nothing_counts(bare):
    """A warning is given if the mini-batch counts nothing on all replicas; numbers: tests/fuzz."""
    input, target = make_batch(4, 1)
    no_tokens = torch.zeros_like(target)
    options = {"replicas": 2, "chunks": 2, "loss_fn": counting_loss}
    with stage_of(bare, "nothing", make_model(), [2, 4], **options) as stage:
        for data in stage.batches([(input, [target, no_tokens][stage.replica])], same_data=True):
            stage.step(*data)  # a warning would be an error
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert stage.step(input.clone(), no_tokens) == 0
        found = [str(warning.message) for warning in caught]
        assert len(found) == (bare.rank == 1), found
        assert all("its loss and its gradients are 0" in text for text in found), found


def check_unscale(bare):
    options: Any = {"replicas": 2, "loss_fn": F.mse_loss}
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    stage = Stage(model, [1, 1], world=world_of(bare, "unscale"), **options)
    scaler = stage.scaler(torch.amp.GradScaler(bare.device.type))
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)

    def unscale_before_the_sum():
        step_unsynced(stage, (torch.ones(4, 3), torch.zeros(4, 2)))
        scaler.unscale_(optimizer)

    words = r"scaler.unscale_ after calls in no_sync\(\)"
    with pytest.raises((RuntimeError, RemoteStageError), match=words):
        unscale_before_the_sum()


def check_unused(bare):
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.never = nn.Linear(3, 3), nn.Linear(3, 3)
            self.sometimes = nn.Linear(3, 3)

        def forward(self, input):
            output = self.used(input)
            return output + self.sometimes(input) if input[0, 0] > 0 else output

    torch.manual_seed(4)
    plain = nn.Sequential(Unused(), nn.Linear(3, 2)).double()
    plain[1].weight.requires_grad_(False)
    input = torch.randn(4, 3, dtype=torch.float64)
    input[:, 0] = torch.tensor([-1.0, -1.0, 1.0, 1.0])  # only replica 1 uses it
    target = torch.zeros(4, 2, dtype=torch.float64)
    with stage_of(bare, "unused", plain, [1, 1], replicas=2, loss_fn=F.mse_loss) as stage:
        for half in input.split(2):
            (F.mse_loss(plain(half), target[:2]) / 2).backward()
        stage.step(*own(stage, input, target))
        assert_same_gradients(stage, plain, "unused", TOLERANCE)


def test_the_end_of_the_first_loader_is_said_once(ranks):
    outcomes = ranks(2).run(loops_that_end_apart, world=False).values()

    assert outcomes == [(2, 2), (2, 2)]


def loops_that_end_apart(bare):
    layers = nn.Sequential(nn.Linear(3, 2))
    counts = []
    with (
        stage_of(bare, "apart", layers, [1], replicas=2, loss_fn=F.mse_loss) as stage,
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        mine = torch.full((4, 3), 1.0 + stage.replica), torch.zeros(4, 2)
        items = [mine] * (2 + stage.replica)
        for _ in range(2):
            counts.append(0)
            for data in stage.batches(items):
                stage.step(*data)
                counts[-1] += 1
    words = "the loop over batches ends on all replicas, as rank 0 (stage 0 of replica 0) has no"
    assert said.getvalue().count(words) == (bare.rank == 0), said.getvalue()
    return tuple(counts)


def check_left(bare):
    """Loops that are left, in one or all replicas, of two that take turns, or with an iterator."""
    layers = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    with stage_of(bare, "left", layers, [1, 1], replicas=2, loss_fn=F.mse_loss) as stage:
        items = [(torch.full((4, 3), 1.0 + stage.replica), torch.zeros(4, 2))] * 4
        kept: Any = iter(stage.batches(items))
        for k, data in enumerate(kept):
            stage.step(*data)
            if k == 1:
                break
        pairs = zip(*(stage.batches(items[:n]) for n in (2, 3)), strict=False)
        assert len([stage.step(*data) for data, _ in pairs]) == 2
        stage.eval()
        num = 0
        for data in stage.batches(items[: 4 - 3 * stage.replica]):  # replica 1 has one
            stage.step(*data)
            num += 1
            if num == 3:
                break
        assert stage.sum_over_replicas(num) == 4
        stage.train()
        assert len([stage.step(*data) for data in kept]) == 2  # goes on where it was left
        stage.step(*items[0])


def check_same_data(bare):
    layers = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    items = [(torch.ones(4, 3), torch.zeros(4, 2))]
    options = {"replicas": 2, "loss_fn": F.mse_loss}
    with stage_of(bare, "same", layers, [1, 1], **options) as stage:
        for data in stage.batches(items, same_data=True):
            stage.step(*data)
    with stage_of(bare, "same in eval", layers, [1, 1], **options) as stage:
        stage.eval()
        for data in stage.batches(items):
            stage.step(*data)
        stage.train()
        own = torch.full((4, 3), float(stage.replica)), torch.zeros(4, 2)
        for data in stage.batches([own, *items]):  # a later one may be the same
            stage.step(*data)

    def train_on_the_same():
        with stage_of(bare, "same by mistake", layers, [1, 1], **options) as stage:
            for data in stage.batches(items):
                stage.step(*data)

    words = r"rank 2 .* reads the same first mini-batch in training as rank 0 .*same_data=True"
    with pytest.raises((CallMismatchError, RemoteStageError), match=words):
        train_on_the_same()


def loop(stage, data, num_items=3, *, trains=True):
    stage.train(trains)
    for _, item in zip(range(num_items), stage.batches([data] * 3, same_data=True), strict=False):
        stage.step(*item)
    return stage.clip_grad_norm_(1.0)


def step_unsynced(stage, data):
    with stage.no_sync():
        return stage.step(*data)


def begin_late(bare, fifo):
    """Replica 1 begins once replica 0 is in the backward pass of its first stage."""
    layers = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    options = {"replicas": 2, "chunks": 2, "loss_fn": F.mse_loss}
    with stage_of(bare, "late", layers, [1, 1], **options) as stage:
        stage.step(torch.ones(4, 3), torch.zeros(4, 2))  # connects all ranks
        if bare.rank == 2:  # whose order rank 3 waits for
            open(fifo).close()
        if bare.rank == 0:

            def begin_others(_):
                hook.remove()
                open(fifo, "w").close()

            hook: Any = stage.get_parameter("0.weight").register_hook(begin_others)
        stage.step(torch.ones(4, 3), torch.zeros(4, 2), total_weight=8)


def test_a_replica_waits_for_others_only_where_something_is_added_up(ranks, tmp_path):
    os.mkfifo(tmp_path / "begun")
    ranks(4).run(begin_late, str(tmp_path / "begun"), world=False).values()


#: A call on the first replica, and another one on the second.
OTHER_CALLS: dict[str, tuple[Any, Any]] = {
    "forward": (lambda s, d: s.step(*d), lambda s, d: s(d[0])),
    "mode": (loop, partial(loop, trains=False)),
    "total": (lambda s, d: s.step(*d, total_weight=2), lambda s, d: s.step(*d, total_weight=3)),
    "accumulate": (lambda s, d: s.step(*d, accumulate=2), lambda s, d: s.step(*d, accumulate=3)),
    "no_sync": (step_unsynced, lambda s, d: s.step(*d)),
    "clip": (lambda s, d: s.step(*d), lambda s, d: s.clip_grad_norm_(1.0)),
    "sum": (lambda s, d: next(iter(s.batches([d]))), lambda s, d: s.sum_over_replicas(1)),
    "backward": (lambda s, d: s(d[0]).sum().backward(), lambda s, d: (s(d[0]), s.step(*d))),
    "break": (partial(loop, num_items=2), loop),
}


def call_apart(bare, what):
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    options: Any = {"replicas": 2, "loss_fn": F.mse_loss, "timeout_s": 20.0}
    stage = Stage(layers, [1, 2], world=world_of(bare, what), **options)
    with pytest.raises((CallMismatchError, RemoteStageError)) as caught:
        OTHER_CALLS[what][stage.replica](stage, (torch.randn(4, 3), torch.zeros(4, 2)))
    return str(caught.value)


@pytest.mark.parametrize("what", OTHER_CALLS)
def test_replicas_in_other_calls_end_with_an_error_that_names_both(ranks, what):
    for words in ranks(4).run(call_apart, what, world=False).values():
        assert "of replica 0)" in words, words
        assert "of replica 1)" in words, words


KEPT: list[Any] = []


def fail_in_a_group(bare, when):
    """Fail on rank 0 in what rank 1 waits for, and which keeps the group's connections open.

    That is a sum that rank 1 never begins, or the copy of rank 0's values in call 1.
    """

    def fail(group: Any, tensors: Any) -> None:
        KEPT.append(group._gloo.torchs)
        raise ZeroDivisionError

    def step() -> None:
        layers, options = nn.Sequential(nn.Linear(3, 2)), {"replicas": 2, "timeout_s": 20.0}
        with stage_of(bare, when, layers, [1], loss_fn=F.mse_loss, **options) as stage:
            stage.step(torch.ones(4, 3), torch.zeros(4, 2))
            KEPT.append(group_of(stage).begin_sum(torch.ones(2)))
            KEPT[-1].wait()
            if stage.replica == 0:
                KEPT.append(group_of(stage).begin_sum(torch.ones(2)))
                raise ZeroDivisionError
            stage.clip_grad_norm_(1.0)

    started_s = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if bare.rank == 0 and when == "in a copy":
            patch.setattr(Group, "copy_first", fail)
        with pytest.raises((ZeroDivisionError, RemoteStageError)) as caught:
            step()
    gc.collect()
    return type(caught.value), time.monotonic() - started_s


@pytest.mark.only_on_cpus
@pytest.mark.parametrize("when", ["in a sum", "in a copy"])
def test_what_replicas_have_under_way_delays_no_failure(ranks, when):
    """Symptom: torch's destructor of the group waited for all of ``timeout_s`` (torch 2.13)."""
    outcomes = ranks(2).run(fail_in_a_group, when, world=False).values()

    assert [kind for kind, _ in outcomes] == [ZeroDivisionError, RemoteStageError]
    assert all(took_s < 10.0 for _, took_s in outcomes), outcomes


class Scaled(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, output, target):
        return F.mse_loss(output * self.scale, target)


def check_loss_with_parameters(bare):
    torch.manual_seed(bare.rank)
    loss_fn = Scaled()
    torch.manual_seed(1)
    own_loss = Scaled()  # as on rank 1, the last stage of replica 0
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)).double()
    options = {"replicas": 2, "chunks": 2, "schedule": "zb-h1", "loss_fn": loss_fn}
    with stage_of(bare, "loss", plain, [1, 1], **options) as stage:
        for size in (5, 2, 4):
            input = torch.randn(size, 3, dtype=torch.float64, generator=torch.Generator())
            target = torch.ones(size, 4, dtype=torch.float64)
            for module in (plain, own_loss, stage, loss_fn):
                module.zero_grad()
            expected = own_loss(plain(input), target)
            expected.backward()
            found = stage.step(*own(stage, input, target))
            assert_same(found, expected.detach(), f"loss of {size}", TOLERANCE)
            assert_same_gradients(stage, plain, f"{size}", TOLERANCE)
            if bare.rank % 2 == 1:
                assert_same(loss_fn.scale.grad, own_loss.scale.grad, "of the loss", TOLERANCE)


def check_trace(bare, folder):
    options = {"replicas": 2, "chunks": 3, "trace": f"{folder}/run.json", "loss_fn": mean_loss}
    with stage_of(bare, "trace", make_model(), [3, 3], **options) as stage:
        stage.step(*own(stage, *make_batch(11, 0)))
        step_unsynced(stage, own(stage, *make_batch(2, 1)))
        stage.eval()
        stage.step(*own(stage, *make_batch(4, 2)))
        stage.train()
        input, target = own(stage, *make_batch(2, 3))
        mean_loss(stage(input), target.to(stage.device)).backward()
        assert stage.statistics().split is None
        stage.step(input, target)
        return stage.report(), stage.statistics(), sum(p.nbytes for p in stage.parameters())


def test_a_recording_has_the_sums_of_all_replicas(ranks, tmp_path):
    found = ranks(4).run(check_trace, str(tmp_path), world=False).values()
    recording = merged([read(path) for path in tmp_path.iterdir()])

    assert sorted(path.name for path in tmp_path.iterdir()) == [f"run.{r}.json" for r in range(4)]
    assert recording.is_closed
    # F, R of all but the last micro-batch, and B, on 4 stages; forward; forward and backward.
    of_loss, gradients = ["loss"], ["gradients 0", "shared gradient"]
    expected = [
        ("step", 4 * 8, ((2, 2, 2), (2, 2, 1)), gradients + of_loss),
        ("step", 4 * 2, ((1,), (1,)), of_loss),
        ("step", 4 * 2, ((1, 1), (1, 1)), []),
        ("forward", 4 * 1, ((1,), (1,)), []),
        ("backward", 4 * 1, ((1,), (1,)), gradients),
        ("step", 4 * 2, ((1,), (1,)), gradients + of_loss),
    ]
    for step, (call, num_tasks, shares, names) in zip(recording.steps, expected, strict=True):
        assert (step.call, sum(map(len, step.rows)), step.shares) == (call, num_tasks, shares)
        assert [[one.what for one in sums] for sums in step.sums] == [names] * 4
        assert all(hop.source // 2 == hop.destination // 2 for hop in step.hops)
    assert early_hops_s(recording.steps) == {}
    assert usual(recording).plan == gpipe(1, 2, recompute=set())
    last = recording.step()
    assert (last.number, last.num_stages, last.num_replicas) == (5, 2, 2)
    for rank in (1, 3):  # gradients of one micro-batch are added up from within its backward
        first, *_ = last.sums[rank]
        (timed,) = (timed for timed in last.rows[rank] if timed.task.kind == "B")
        assert timed.start_s < first.start_s < timed.end_s

    reports = {report for report, *_ in found}
    assert [report.count("0 of replica 1 ") for report in reports] == [2]
    assert all("exposed s" in report for report in reports)
    for rank, (_, statistics, own_bytes) in enumerate(found):
        assert (statistics.replica, statistics.stage) == divmod(rank, 2)
        # Behind the gradients of a bucket stands which of them there are; the loss is one of 2.
        sums = statistics.all_reduce_bytes
        assert 3 * own_bytes < sums < 3 * own_bytes + 3 * 8 * 16 + 3 * 2 * 8 + 1
        assert 0 < statistics.exposed_s <= statistics.step_s
        assert statistics.split == split(last)[rank]


def check_counts(bare):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([2, 2], {"replicas": 3}, "replicas=3, but 4 processes cannot be divided into so many"),
        ([2, 2], {"replicas": 0}, "replicas=0, but"),
        ([2, 2], {"replicas": "2"}, "must be an int"),
        ([2, 2], {}, "makes 2 partitions, but schedule='gpipe' runs 4 on 4 stages"),
        (None, {"schedule": "zb-v"}, "give Stage more replicas"),
    ]
    for balance, options, words in cases:
        with pytest.raises((BalanceError, TypeError, RemoteStageError), match=words):
            Stage(model, balance, world=world_of(bare, words), **options)


@pytest.mark.parametrize(
    "check",
    [
        *(check_frozen_between, check_nothing_counts),
        *(check_unscale, check_unused, check_left, check_same_data),
        *(check_loss_with_parameters, check_counts),
    ],
)
def test_two_replicas_of_two_stages(ranks, check):
    ranks(4).run(check, world=False).values()
