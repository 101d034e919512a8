"""Replicas of a pipeline train as the plain model does on the whole mini-batch.

Truth is the plain model in float64. Replicas add up gradients in another order than autograd, so
they may differ in their last digits; between replicas every bit is the same.
"""

from __future__ import annotations

import contextlib
import gc
import io
import time
import warnings
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import (
    BalanceError,
    CallMismatchError,
    RemoteStageError,
    Stage,
)
from procpipe.losses import MaskedCrossEntropy
from procpipe.replicas.group import Group
from procpipe.timeline.chrome import read
from procpipe.timeline.split import split
from procpipe.timeline.steps import merged
from tests.dist.stages import assert_same, stage_of, world_of

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


def num_tokens(target):
    return float((target != 0).sum())


LOSSES: dict[str, tuple[dict[str, Any], Any]] = {
    "mean": ({"loss_fn": mean_loss}, mean_loss),
    "counting": ({"loss_fn": counting_loss}, weighted_loss),
    "weighted": ({"loss_fn": weighted_loss, "loss_weight": num_tokens}, weighted_loss),
}


def check_added_up(stage: Any) -> None:
    stage._calls.pipeline.replicas.check_added_up("clip_grad_norm_")


def group_of(stage: Any) -> Any:
    """Return the processes that run a stage."""
    return stage._calls.pipeline.replicas._group


def assert_same_gradients(stage, plain, what):
    expected = dict(plain.named_parameters(remove_duplicate=False))
    for name, parameter in stage.named_parameters():
        assert_same(parameter.grad, expected[name].grad, f"{what} gradient of {name}", TOLERANCE)


def train(bare, replicas, schedule, balance, loss):
    """Train over mini-batches of several sizes; the gradients of the second and third add up."""
    plain = make_model()
    options, plain_loss = LOSSES[loss]
    options = options | {"replicas": replicas, "chunks": 3, "schedule": schedule}
    num_stages = bare.num_ranks // replicas
    with stage_of(bare, f"{replicas} {schedule} {loss}", plain, balance, **options) as stage:
        assert (stage.replica, stage.replicas) == (bare.rank // num_stages, replicas)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (stage, plain)]
        for step, size in enumerate((11, 3, 8, 3)):
            input, target = make_batch(size, step)
            expected = plain_loss(plain(input), target)
            expected.backward()
            data = own(stage, input, target) if bare.rank % num_stages == 0 else ()
            if step == 1:
                with stage.no_sync():
                    stage.step(*data)
                continue
            assert_same(stage.step(*data), expected.detach(), f"loss {step}", TOLERANCE)
            assert_same_gradients(stage, plain, f"step {step}")
            norm = stage.clip_grad_norm_(0.3)
            assert_same(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.3), "norm", TOLERANCE)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        copies = group_of(stage)
        for name, parameter in stage.named_parameters():
            of_replicas = copies.gathered(parameter.detach())
            assert all(torch.equal(one, of_replicas[0]) for one in of_replicas), name


def test_training_is_the_plain_models(ranks):
    """The fuzzer draws no third replica, and runs on CPUs."""
    ranks(4).run(train, 2, "1f1b", [2, 4], "counting", world=False).values()
    ranks(3).run(train, 3, "gpipe", [6], "weighted", world=False).values()


class Reentrant(nn.Module):
    """Two layers of one parameter, each recomputed in a backward pass of its own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, input):
        for _ in range(2):
            input = torch.utils.checkpoint.checkpoint(self.inner, input, use_reentrant=True)
        return input


def check_reentrant(bare):
    """Autograd adds twice to a gradient, which must not be added up after the first time."""
    plain = nn.Sequential(nn.Embedding(7, 5), Reentrant(), nn.Linear(5, 7)).double()
    for first in ("step", "no_sync"):
        plain.zero_grad()
        loss_options, plain_loss = LOSSES["counting"]
        options = loss_options | {"replicas": 2, "chunks": 2, "checkpoint": "never"}
        with stage_of(bare, first, plain, [1, 2], **options) as stage:
            for step, size in enumerate((4, 4, 5, 3)):
                input, target = make_batch(size, step)
                plain_loss(plain(input), target).backward()
                if first == "no_sync" and step == 0:
                    with stage.no_sync():
                        stage.step(*own(stage, input, target))
                else:
                    stage.step(*own(stage, input, target))
                    assert_same_gradients(stage, plain, f"{first} step {step}")


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
        assert_same_gradients(stage, plain, "frozen between")


def check_zeroed(bare):
    """Drop what was accumulated by zeros: nothing is still to be added up."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    with stage_of(bare, "zeroed", model, [1, 1], replicas=2, loss_fn=F.mse_loss) as stage:
        with stage.no_sync():
            stage.step(torch.ones(4, 3), torch.zeros(4, 2))
        stage.zero_grad(set_to_none=False)
        assert stage.clip_grad_norm_(1.0) == 0
        F.mse_loss(model(torch.ones(2, 3)), torch.zeros(2, 2)).backward()
        stage.step(torch.ones(2, 3), torch.zeros(2, 2))
        assert_same_gradients(stage, model, "after zeros")


def check_nothing_counts(bare):
    model, no_tokens = make_model(), torch.zeros(4, 3, dtype=torch.long)
    input, target = make_batch(4, 1)
    target_here = [target, no_tokens][bare.rank // 2]  # only that of replica 1 counts nothing
    for loss in ("weighted", "counting"):
        options = LOSSES[loss][0] | {"replicas": 2, "chunks": 2}
        with stage_of(bare, f"nothing {loss}", model, [2, 4], **options) as stage:
            for data in stage.batches([(input, target_here)], same_data=True):
                stage.step(*data)  # a warning would be an error
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert stage.step(input.clone(), no_tokens) == 0
            found = [str(warning.message) for warning in caught]
            assert len(found) == (bare.rank == 1), found
            assert all("its loss and its gradients are 0" in text for text in found), found


def check_unscale(bare):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))

    def unscale_before_the_sum():
        options = {"replicas": 2, "loss_fn": F.mse_loss}
        with stage_of(bare, "unscale", model, [1, 1], **options) as stage:
            scaler = stage.scaler(torch.amp.GradScaler(bare.device.type))
            optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
            with stage.no_sync():
                stage.step(torch.ones(4, 3), torch.zeros(4, 2))
            scaler.unscale_(optimizer)

    with pytest.raises((RuntimeError, RemoteStageError)) as caught:
        unscale_before_the_sum()
    assert "scaler.unscale_ after calls in no_sync()" in str(caught.value)


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
        expected = dict(plain.named_parameters())
        for name, parameter in stage.named_parameters():
            assert (parameter.grad is None) == (expected[name].grad is None), name
            if parameter.grad is not None:
                assert_same(parameter.grad, expected[name].grad, name, TOLERANCE)


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

    def train_on_the_same():
        with stage_of(bare, "same by mistake", layers, [1, 1], **options) as stage:
            for data in stage.batches(items):
                stage.step(*data)

    words = r"rank 2 .* reads the same first mini-batch in training as rank 0 .*same_data=True"
    with pytest.raises((CallMismatchError, RemoteStageError), match=words):
        train_on_the_same()


def other_call(stage, what, is_here, data):
    """Make a call on some ranks, and another one on the others."""
    if what == "step and forward":
        return stage.step(*data) if is_here else stage(data[0])
    if what == "modes":
        stage.train(is_here)
        for item in stage.batches([data] * 2):
            stage.step(*item)
        return stage.clip_grad_norm_(1.0)
    if what == "total":
        return stage.step(*data, total_weight=2 if is_here else 3)
    if what == "accumulate":
        return stage.step(*data, accumulate=2 if is_here else 3)
    if what == "no_sync":
        with stage.no_sync() if is_here else contextlib.nullcontext():
            return stage.step(*data)
    if what == "clip":
        return stage.step(*data) if is_here else stage.clip_grad_norm_(1.0)
    if what == "loop and sum":
        return next(iter(stage.batches([data]))) if is_here else stage.sum_over_replicas(1)
    if what == "backward":
        loss = stage(data[0]).sum()
        return loss.backward() if is_here else stage.step(*data)
    assert what == "break"
    for k, item in enumerate(stage.batches([data] * 3, same_data=True)):
        stage.step(*item)
        if is_here and k == 1:
            break
    return stage.clip_grad_norm_(1.0)


def call_apart(bare, what):
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    data = torch.randn(4, 3), torch.zeros(4, 2)

    def fail():
        options = {"replicas": 2, "loss_fn": F.mse_loss, "timeout_s": 20.0}
        with stage_of(bare, what, layers, [1, 2], **options) as stage:
            other_call(stage, what, stage.replica == 0, data)

    with pytest.raises((CallMismatchError, RemoteStageError)) as caught:
        fail()
    return str(caught.value)


@pytest.mark.parametrize(
    "what",
    [
        *("step and forward", "modes", "total", "accumulate", "no_sync", "clip"),
        *("loop and sum", "backward", "break"),
    ],
)
def test_replicas_in_other_calls_end_with_an_error_that_names_both(ranks, what):
    for words in ranks(4).run(call_apart, what, world=False).values():
        assert "of replica 0)" in words, words
        assert "of replica 1)" in words, words


def fail_in_a_sum(bare):
    """Fail on rank 0 in a sum that rank 1, which keeps its connections open, never begins."""
    layers, options = nn.Sequential(nn.Linear(3, 2)), {"replicas": 2, "timeout_s": 20.0}
    kept, started_s = [], time.monotonic()

    def fail():
        with stage_of(bare, "sum", layers, [1], loss_fn=F.mse_loss, **options) as stage:
            stage.step(torch.ones(4, 3), torch.zeros(4, 2))
            kept.append(group_of(stage).begin_sum(torch.ones(2)))
            kept[0].wait()
            if stage.replica == 0:
                kept.append(group_of(stage).begin_sum(torch.ones(2)))
                raise ZeroDivisionError
            stage.clip_grad_norm_(1.0)

    with pytest.raises((ZeroDivisionError, RemoteStageError)) as caught:
        fail()
    assert kept[0].tensors, "it holds the group's connections until here"
    return type(caught.value), time.monotonic() - started_s


@pytest.mark.only_on_cpus
def test_a_sum_under_way_delays_no_failure(ranks):
    """Symptom: torch's destructor of the group waited for the sum, for all of ``timeout_s``."""
    outcomes = ranks(2).run(fail_in_a_sum, world=False).values()

    assert [kind for kind, _ in outcomes] == [ZeroDivisionError, RemoteStageError]
    assert all(took_s < 10.0 for _, took_s in outcomes), outcomes


KEPT: list[Any] = []


def fail_while_values_are_copied(bare):
    """Fail on rank 0, which keeps its connections, as rank 1 waits for its values: in call 1."""

    def fail(group: Any, tensors: Any) -> None:
        KEPT.append(group._gloo.torchs)
        raise ZeroDivisionError

    def step() -> None:
        layers, options = nn.Sequential(nn.Linear(3, 2)), {"replicas": 2, "timeout_s": 20.0}
        with stage_of(bare, "copy", layers, [1], loss_fn=F.mse_loss, **options) as stage:
            stage.step(torch.ones(4, 3), torch.zeros(4, 2))

    started_s = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if bare.rank == 0:
            patch.setattr(Group, "copy_first", fail)
        with pytest.raises((ZeroDivisionError, RemoteStageError)):
            step()
    gc.collect()
    return time.monotonic() - started_s


@pytest.mark.only_on_cpus
def test_a_failure_while_replicas_connect_delays_nothing(ranks):
    """Symptom: the group was not closed, and Python's garbage collector waited in its destructor.

    That took all of ``timeout_s``, wherever the process was by then (torch 2.13).
    """
    assert all(
        took_s < 10.0 for took_s in ranks(2).run(fail_while_values_are_copied, world=False).values()
    )


def check_different_start(bare):
    torch.manual_seed(bare.rank)
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with stage_of(bare, "start", layers, [1, 1], replicas=2, loss_fn=F.mse_loss) as stage:
        stage.step(torch.ones(4, 3), torch.zeros(4, 4))
        group = group_of(stage)
        for name, value in stage.state_dict().items():
            of_replicas = group.gathered(value.double())
            assert torch.equal(*of_replicas), name


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
            assert_same_gradients(stage, plain, f"{size}")
            if bare.rank % 2 == 1:
                assert_same(loss_fn.scale.grad, own_loss.scale.grad, "of the loss", TOLERANCE)


def check_trace(bare, folder):
    plain = make_model()
    options = {"replicas": 2, "chunks": 3, "trace": f"{folder}/run.json", "loss_fn": mean_loss}
    with stage_of(bare, "trace", plain, [3, 3], **options) as stage:
        stage.step(*own(stage, *make_batch(11, 0)))
        with stage.no_sync():
            stage.step(*own(stage, *make_batch(5, 1)))
        stage.step(*own(stage, *make_batch(2, 2)))
        stage.eval()
        stage.step(*own(stage, *make_batch(4, 3)))
        stage.train()
        stage.step(*own(stage, *make_batch(8, 4)))
        report = stage.report()
        found = stage.statistics()
        num_bytes = sum(parameter.nbytes for parameter in stage.parameters())
    return report, asdict(found), num_bytes


def test_a_recording_has_the_sums_of_all_replicas(ranks, tmp_path):
    found = ranks(4).run(check_trace, str(tmp_path), world=False).values()
    recording = merged([read(path) for path in tmp_path.iterdir()])

    assert recording.is_closed
    assert [step.shares for step in recording.steps] == [
        ((2, 2, 2), (2, 2, 1)),
        ((1, 1, 1), (1, 1)),
        ((1,), (1,)),
        ((1, 1), (1, 1)),
        ((2, 2), (2, 2)),
    ]
    last = recording.step()
    assert (last.number, last.num_stages, last.num_replicas) == (4, 2, 2)
    for step in recording.steps:
        trains, is_kept = step.number != 3, step.number == 1
        for rank, sums in enumerate(step.sums):
            gradients = ["gradients 0", "shared gradient"] * (trains and not is_kept)
            names = [one.what for one in sums]
            assert names == [*gradients, *["loss"] * trains], f"step {step.number} rank {rank}"
        for hop in step.hops:
            assert hop.source // 2 == hop.destination // 2, f"step {step.number}: {hop}"

    reports = {report for report, *_ in found}
    assert [report.count("0 of replica 1 ") for report in reports] == [2]
    assert all("exposed s" in report for report in reports)
    for rank, (_, statistics, own_bytes) in enumerate(found):
        assert (statistics["replica"], statistics["stage"]) == divmod(rank, 2)
        # Behind the gradients of a bucket stands which of them there are; the loss is one of 2.
        sums = statistics["all_reduce_bytes"]
        assert 3 * own_bytes < sums < 3 * own_bytes + 3 * 8 * 16 + 4 * 2 * 8 + 1
        assert 0 < statistics["exposed_s"] <= statistics["step_s"]
        assert statistics["split"] == asdict(split(last)[rank])


def step_with_one_micro_batch(bare, folder):
    options = {"replicas": 2, "trace": f"{folder}/run.json", "loss_fn": F.mse_loss}
    with stage_of(bare, "one", nn.Sequential(nn.Linear(3, 3)), [1], **options) as stage:
        for _ in range(2):  # in the first it is counted how often gradients are added to
            stage.step(torch.ones(4, 3), torch.zeros(4, 3))


def test_gradients_of_one_micro_batch_are_added_up_from_within_its_backward(ranks, tmp_path):
    ranks(2).run(step_with_one_micro_batch, str(tmp_path), world=False).values()
    *_, last = merged([read(path) for path in tmp_path.iterdir()]).steps

    for rank in range(2):
        (sum_,) = (one for one in last.sums[rank] if one.what == "gradients 0")
        (timed,) = (timed for timed in last.rows[rank] if timed.task.kind == "B")
        assert timed.start_s < sum_.start_s < timed.end_s


def check_counts(bare):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    cases: list[tuple[Any, type[Exception], str]] = [
        (3, BalanceError, "replicas=3, but 4 processes cannot be divided into so many"),
        (0, BalanceError, "replicas=0, but"),
        ("2", TypeError, "must be an int"),
    ]
    for replicas, kind, words in cases:
        with pytest.raises((kind, RemoteStageError), match=words):  # as it connects, another's
            Stage(model, [2, 2], replicas=replicas, world=world_of(bare, str(replicas)))
    fitting: list[tuple[Any, dict[str, Any], str]] = [
        ([2, 2], {}, "makes 2 partitions, but schedule='gpipe' runs 4 on 4 stages"),
        ([2, 2], {"schedule": "zb-v"}, "makes 2 .*'zb-v' runs 8 on 4"),
        ([3, 1], {"schedule": "interleaved"}, "makes 2 .*'interleaved' runs 4 on 4"),
        ([2, 2], {"replicas": 4}, "makes 2 .*'gpipe' runs 1 on 1"),
    ]
    for balance, options, words in fitting:
        with pytest.raises((BalanceError, RemoteStageError), match=words):
            Stage(model, balance, world=world_of(bare, words), **options)
    with pytest.raises((BalanceError, RemoteStageError), match="give Stage more replicas"):
        Stage(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), world=world_of(bare, "few layers"))


@pytest.mark.parametrize(
    "check",
    [
        *(check_frozen_between, check_reentrant, check_zeroed, check_nothing_counts),
        *(check_unscale, check_unused, check_left, check_same_data, check_different_start),
        *(check_loss_with_parameters, check_counts),
    ],
)
def test_two_replicas_of_two_stages(ranks, check):
    ranks(4).run(check, world=False).values()
