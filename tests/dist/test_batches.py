"""Mini-batches of every size, in training and evaluation, with and without a loader."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe import NoChunk, Remote, Stage
from tests.dist.stages import (
    MODES,
    assert_same,
    assert_same_gradients,
    assert_same_state,
    plain_output,
    plain_step,
    stage_of,
)

pytestmark = pytest.mark.on_gpus


def make_model(norm: Any = nn.LayerNorm):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 8), norm(8), nn.Dropout(0.0), nn.Tanh(), nn.Linear(8, 3)
    ).double()


def make_batch(size, seed=2):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (size,), generator=generator)


def count_micro_batches(stage):
    """Return how many forward tasks the stage has run."""
    return stage.statistics().num_tasks.get("F", 0)


# -- sizes ---------------------------------------------------------------------------------------


def check_sizes(bare, balance):
    """Mini-batches of several sizes in one stage; most are not divisible by the chunks."""
    for mode in MODES:
        plain = make_model()
        options: Any = {"chunks": 4, "checkpoint": mode, "loss_fn": F.cross_entropy}
        with stage_of(bare, mode, plain, balance, **options) as stage:
            num_before = 0
            for chunks, size, num_expected in (
                (4, 10, 4),  # 3 + 3 + 3 + 1
                (8, 3, 3),
                (8, 12, 6),
                (8, 5, 5),
                (8, 1, 1),
                (4, 9, 3),
                (1, 7, 1),
                (8, 12, 6),
            ):
                stage.chunks = chunks
                inputs, target = make_batch(size)
                expected = plain_step(plain, (inputs,), target, chunks, F.cross_entropy)
                what = f"{size} in {chunks}:"
                assert_same(stage.step(inputs, target), expected, f"{what} loss")
                assert_same_gradients(stage, plain, what)
                num_after = count_micro_batches(stage)
                assert num_after - num_before == num_expected, what

                output = stage.fetch(stage(inputs).detach())
                assert_same(output, plain_output(plain, (inputs,), chunks).detach(), what)
                num_before = count_micro_batches(stage)


# -- evaluation ----------------------------------------------------------------------------------


def evaluate(stage, plain, style):
    """Evaluate a mini-batch of another size, in eval mode or under no_grad."""
    inputs, target = make_batch(7, seed=9)
    parts = plain_copy_in_eval(plain)
    if style in ("eval", "eval with inference_mode", "eval forward with gradients"):
        stage.eval()
    if style == "eval":
        found = stage.step(inputs, target)
        assert_same(found, plain_loss(parts, inputs, target), "loss in eval mode")
    elif style == "eval with inference_mode":
        with torch.inference_mode():
            found = stage.step(inputs, target)
            output = stage.fetch(stage(inputs))
        assert_same(found, plain_loss(parts, inputs, target), "loss in inference mode")
        assert_same(output, plain_output(parts, (inputs,), 3).detach(), "output in inference mode")
    elif style == "eval forward with gradients":
        output = stage(inputs)
        assert output.requires_grad
        assert_same(
            stage.fetch(output), plain_output(parts, (inputs,), 3).detach(), "output in eval mode"
        )
    else:
        stage.eval()
        with torch.no_grad():
            output = stage(inputs)
            assert not output.requires_grad
            stage.step(inputs, target)
    stage.train()


def plain_copy_in_eval(plain):
    return copy.deepcopy(plain).eval()


def plain_loss(plain, inputs, target):
    with torch.no_grad():
        losses = [
            F.cross_entropy(plain(x), y) * (len(x) / len(inputs))
            for x, y in zip(inputs.chunk(3), target.chunk(3), strict=True)
        ]
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total


EVALUATIONS = ("eval", "eval with inference_mode", "eval forward with gradients", "no_grad")


def check_evaluation(bare, balance):
    """Evaluation between two training steps changes nothing for training."""
    for k, mode in enumerate(MODES):
        deferred = (k + bare.num_ranks) % 2 == 0  # each mode with and without it, and each balance
        model = make_model(nn.BatchNorm1d)
        options: Any = {
            "chunks": 3,
            "checkpoint": mode,
            "loss_fn": F.cross_entropy,
            "deferred_batch_norm": deferred,
        }
        with stage_of(bare, f"{mode} undisturbed", model, balance, **options) as stage:
            undisturbed = train(stage, lambda: None)
        with stage_of(bare, f"{mode} disturbed", model, balance, **options) as stage:
            plain = copy.deepcopy(model)

            def disturb(stage=stage, plain=plain):
                gather_state(bare, stage, plain)
                before = snapshot(stage)
                for style in EVALUATIONS:
                    evaluate(stage, plain, style)
                    assert_same(snapshot(stage), before, style)

            assert_same(train(stage, disturb), undisturbed, f"{mode}: training")


def train(stage, disturb):
    """Train two steps that add to the same gradients, then one more; return losses and state."""
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.1)
    losses = []
    for seed in (2, 3):
        losses.append(stage.step(*make_batch(11, seed)))
        disturb()
    optimizer.step()
    disturb()
    losses.append(stage.step(*make_batch(8, 4)))
    return losses, snapshot(stage)


def snapshot(stage):
    gradients = {
        name: None if p.grad is None else p.grad.clone() for name, p in stage.named_parameters()
    }
    return gradients, {key: value.clone() for key, value in stage.state_dict().items()}


def gather_state(bare, stage, plain):
    """Load the pipeline's state, fetched from every rank, into the plain model."""
    for rank in range(bare.num_ranks):
        # fetch() takes the value from rank 0, unless it is a placeholder for another rank's value.
        state = dict(stage.state_dict())
        value = state if bare.rank == rank else Remote(rank, "a state dict", None)
        plain.load_state_dict(stage.fetch(value), strict=False)


# -- targets and losses --------------------------------------------------------------------------


class Masked(nn.Module):
    def __init__(self, num_in, num_out):
        super().__init__()
        self.linear = nn.Linear(num_in, num_out)

    def forward(self, x, mask):
        return self.linear(x) * mask


def weighted(output, *target):
    return output.sum() * (1 + sum(each.mean() for each in target))


def check_named_target(bare, balance):
    """With several inputs, the target is named; arguments on other ranks are not used."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    model = nn.Sequential(Masked(5, 3), nn.Tanh())
    x, mask, target = torch.randn(6, 5), torch.rand(6, 1), torch.rand(6)
    unused_arguments = [(), (1,), (1, 2, 3, 4, 5), (x, mask, None)][bare.rank :: 2]
    with stage_of(bare, "named", model, balance, chunks=2, loss_fn=weighted) as stage:
        for named in (target, None):
            for args in unused_arguments:
                expected = plain_step(model, (x, mask), named, 2, weighted)
                if bare.rank == 0:
                    loss = stage.step(x, mask, target=named)
                else:
                    loss = stage.step(*args)
                assert_same(loss, expected, "loss")
                assert_same_gradients(stage, model)
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh())
    with stage_of(bare, "two values", model, balance, chunks=2, loss_fn=weighted) as stage:
        expected = plain_step(model, (x,), target, 2, weighted)
        assert_same(stage.step(x, target), expected, "the second of two is the target")
        expected = plain_step(model, (x,), None, 2, weighted)
        assert_same(stage.step(x), expected, "one is the input")


@pytest.mark.parametrize("balance", [[2], [1, 1]])
def test_target_by_name_after_several_inputs(ranks, balance):
    ranks(len(balance)).run(check_named_target, balance, world=False)


def step_without_a_name(world, values_elsewhere):
    model = nn.Sequential(Masked(5, 3), nn.Tanh())
    stage = Stage(model, [1, 1], loss_fn=weighted, world=world)
    values = (torch.randn(6, 5), torch.rand(6, 1), torch.rand(6))
    stage.step(*(values if world.rank == 0 else values[:values_elsewhere]))


@pytest.mark.parametrize("values_elsewhere", [0, 2, 3])
def test_more_than_two_values_without_a_named_target_fail_on_every_rank(ranks, values_elsewhere):
    first, second = ranks(2).run(step_without_a_name, values_elsewhere).errors()
    assert first.type == "TypeError"
    assert "3 positional values" in first.text
    assert "step(a, b, target=y)" in first.text
    assert second.type == "RemoteStageError"
    assert "step(a, b, target=y)" in second.text


def masked_loss(output, target):
    """Mean over the valid tokens of a micro-batch."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-1)


def num_valid(target):
    return (target >= 0).sum().item()


def check_targets(bare, balance):
    last = bare.num_ranks - 1
    plain = make_model()
    inputs, target = make_batch(10)

    def mse(output, target):
        return F.mse_loss(output * target["scale"][0], target["value"]) * target["factor"]

    with stage_of(bare, "given where", plain, balance, chunks=4, loss_fn=F.cross_entropy) as stage:
        for where in ("everywhere", "on rank 0", "on the last rank", "by name"):
            expected = plain_step(plain, (inputs,), target, 4, F.cross_entropy)
            if where == "everywhere":
                loss = stage.step(inputs, target)
            elif where == "on rank 0":
                loss = stage.step(inputs, target) if bare.rank == 0 else stage.step()
            elif where == "on the last rank":
                loss = stage.step(inputs, target if bare.rank == last else None)
            else:
                loss = stage.step(inputs, target=target)
            assert_same(loss, expected, where)
            assert loss.shape == ()
            assert not loss.requires_grad
            assert_same_gradients(stage, plain, where)

    nested = {
        "scale": NoChunk(torch.rand(3).double()),
        "value": torch.randn(10, 3).double(),
        "factor": 0.5,
    }
    nested = {**nested, "scale": (nested["scale"], None)}
    plain.zero_grad()
    with stage_of(bare, "nested", plain, balance, chunks=4, loss_fn=mse) as stage:
        expected = plain_step(plain, (inputs,), nested, 4, mse)
        assert_same(stage.step(inputs, nested), expected, "nested target")
        assert_same_gradients(stage, plain)

    plain.zero_grad()
    with stage_of(
        bare, "none", plain, balance, chunks=4, loss_fn=lambda o: o.exp().mean()
    ) as stage:
        expected = plain_step(plain, (inputs,), None, 4, lambda o: o.exp().mean())
        assert_same(stage.step(inputs), expected, "no target")
        assert_same(stage.step(inputs, target=None), expected, "no target, by name")
        plain_step(plain, (inputs,), None, 4, lambda o: o.exp().mean())
        assert_same_gradients(stage, plain)


def check_loss_weight(bare, balance):
    """Micro-batches that count by their valid tokens: the mean over all tokens of the batch."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Embedding(11, 6), nn.Tanh(), nn.Linear(6, 11)).double()
    tokens = torch.randint(11, (7, 5))
    target = torch.where(torch.rand(7, 5) < 0.6, torch.randint(11, (7, 5)), -1)
    counts = [num_valid(part) for part in target.chunk(3)]
    shares = [count / sum(counts) for count in counts]
    assert len(set(counts)) == 3
    whole = masked_loss(plain(tokens), target).detach()
    options: Any = {"chunks": 3, "loss_fn": masked_loss, "loss_weight": num_valid}
    with stage_of(bare, "weight", plain, balance, **options) as stage:
        for where in range(bare.num_ranks):
            if where not in (0, bare.num_ranks - 1):
                continue
            expected = plain_step(plain, (tokens,), target, 3, masked_loss, shares)
            loss = stage.step(tokens, target if bare.rank == where else None)
            assert_same(loss, expected, f"target on rank {where}")
            assert_same(loss, whole, "the mean over all tokens", 1e-14)
            assert_same_gradients(stage, plain)
        stage.eval()
        assert_same(stage.step(tokens, target), expected, "eval")


def mean_of_valid(output, target):
    """Divide 0 by 0 where nothing is valid, forward and backward."""
    is_valid = target >= 0
    losses = F.cross_entropy(output, target.clamp(min=0), reduction="none")
    return (losses * is_valid).sum() / is_valid.sum()


def constant_if_none_is_valid(output, target):
    return mean_of_valid(output, target) if (target >= 0).any() else output.new_tensor(math.nan)


def changing_its_output(output, target):
    return mean_of_valid(output.mul_(2).log_softmax(-1), target)


#: Labels of 8 samples, in 4 micro-batches of 2. Without a valid one: first, middle, last.
LABELS = (
    [-1, -1, 1, 2, 0, 1, 2, 2],
    [0, -1, -1, -1, 2, -1, -1, -1],
    [-1, -1, -1, -1, -1, 2, -1, -1],
)


def check_left_out(bare, schedule, mode):
    """Micro-batches of weight 0 add nothing, for any value of their loss."""
    torch.manual_seed(1)
    plain = nn.Sequential(
        nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)
    ).double()
    num_partitions = bare.num_ranks * (2 if schedule in ("zb-v", "interleaved") else 1)
    balance = [7 - num_partitions, *[1] * (num_partitions - 1)]
    inputs, _ = make_batch(8)
    for loss_fn in (mean_of_valid, constant_if_none_is_valid, changing_its_output):
        options: Any = {"chunks": 4, "schedule": schedule, "checkpoint": mode}
        options |= {"loss_fn": loss_fn, "loss_weight": num_valid, "check_loss": True}
        plain.zero_grad()
        with stage_of(bare, loss_fn.__name__, plain, balance, **options) as stage:
            for where in {0, stage.placement[-1]}:
                for labels in LABELS:
                    target = torch.tensor(labels)
                    expected = loss_fn(plain(inputs), target)
                    expected.backward()
                    loss = stage.step(inputs, target if bare.rank == where else None)
                    assert_same(loss, expected.detach(), f"labels {labels}", 1e-13)
                    assert_same_gradients(stage, plain, tolerance=1e-13)
                stage.eval()
                with torch.no_grad():
                    assert_same(stage.step(inputs, target), expected.detach(), "eval", 1e-14)
                stage.train()


def check_all_left_out(bare, schedule, mode):
    plain = make_model()
    balance = [5 - bare.num_ranks + 1, *[1] * (bare.num_ranks - 1)]
    inputs, _ = make_batch(6)
    nothing = torch.full((6,), -1)
    options: Any = {"chunks": 3, "loss_fn": mean_of_valid, "loss_weight": num_valid}
    options |= {"schedule": schedule, "checkpoint": mode}
    for where in (0, bare.num_ranks - 1):
        with (
            stage_of(bare, f"target on {where}", plain, balance, **options) as stage,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            for _ in range(2):
                loss = stage.step(inputs, nothing if bare.rank == where else None)
                assert_same(loss, torch.zeros((), dtype=torch.float64), "loss")
                for name, parameter in stage.named_parameters():
                    assert_same(parameter.grad, torch.zeros_like(parameter), name)
        assert [str(each.message).partition(" of a mini")[0] for each in caught] == [
            "loss_weight is 0 for every micro-batch"
        ] * (bare.rank == where)
        assert all(each.filename == __file__ for each in caught)


# -- loaders -------------------------------------------------------------------------------------


def check_loaders(bare, balance):
    """All ranks read a loader together; rank 0's loader gives the items and their number."""
    last = bare.num_ranks - 1
    plain = make_model()
    items = [make_batch(size, seed) for seed, size in enumerate((10, 3, 7))]
    with stage_of(bare, "loaders", plain, balance, chunks=4, loss_fn=F.cross_entropy) as stage:

        def step_and_compare(input, target, k, what, to_target=lambda target: target):
            expected_target = to_target(items[k][1])
            expected = plain_step(plain, items[k][:1], expected_target, 4, F.cross_entropy)
            assert_same(stage.step(input, target), expected, what)
            assert_same_gradients(stage, plain, what)

        # Tuples; the loaders of other ranks are not read: they may be None or of another length.
        untouched = iter([1, 2])
        for name, loader in (
            ("on rank 0 only", items if bare.rank == 0 else None),
            ("of other lengths", items if bare.rank == 0 else items[: bare.rank % 2] * 9),
            ("untouched", iter(items) if bare.rank == 0 else untouched),
        ):
            num_steps = 0
            for k, (input, target) in enumerate(stage.batches(loader)):
                step_and_compare(input, target, k, name)
                if bare.rank not in (0, last):
                    assert isinstance(target, Remote)
                if bare.rank == last:
                    assert_same(target, items[k][1], "target on the last stage")
                num_steps += 1
            assert num_steps == 3, name
        assert bare.rank == 0 or list(untouched) == [1, 2]

        # A loop that ends early, then another.
        for k, (input, target) in enumerate(stage.batches(items)):
            step_and_compare(input, target, k, "early break")
            if k == 1:
                break
        for k, item in enumerate(stage.batches([list(item) for item in items])):
            assert type(item) is list
            input, target = item
            step_and_compare(input, target, k, "lists")
        for k, item in enumerate(
            stage.batches({"y": y, "x": x, 3: k} for k, (x, y) in enumerate(items))
        ):
            assert list(item) == ["y", "x", 3]
            step_and_compare(item["x"], item["y"], k, "dicts")
        for k, input in enumerate(stage.batches([x for x, _ in items])):
            expected = plain_output(plain, (items[k][0],), 4).detach()
            assert_same(stage.fetch(stage(input).detach()), expected, "inputs alone")
        assert list(stage.batches([])) == []
        assert len(list(stage.batches(["end", "of"]))) == 2

        # Three entries: all but the first are real on the last stage.
        for input, target, extra in stage.batches((x, y, {"x": x}) for x, y in items):
            if bare.rank == last:
                assert_same(extra["x"].shape[0], len(target), "third entry")
            stage.step(input, target)
        stage.zero_grad()
        plain.zero_grad()

        # A target that is changed after it was loaded: replaced, or changed in place.
        def one_first(target):
            return torch.cat([torch.ones(1, dtype=target.dtype), target[1:]])

        for k, (input, target) in enumerate(stage.batches(items)):
            step_and_compare(input, 2 - target, k, "another target", lambda t: 2 - t)
        for k, (input, target) in enumerate(stage.batches([(x, y.clone()) for x, y in items])):
            target[0] = 1
            step_and_compare(input, target, k, "in place", one_first)
        for k, (input, target) in enumerate(stage.batches([(x, y.clone()) for x, y in items])):
            if bare.rank == 0:
                target[0] = 1
            step_and_compare(input, target, k, "in place on rank 0", one_first)

        # Loss code after stage(input) needs no branch either.
        for k, (input, target) in enumerate(stage.batches(items)):
            loss = F.cross_entropy(stage(input), target)
            loss.backward()
            expected = F.cross_entropy(plain_output(plain, items[k][:1], 4), items[k][1]).detach()
            assert_same(stage.fetch(loss), expected, "loss of stage(input)")

        # The target is sent once: with the item, not again with the step.
        before = stage.statistics().num_messages.get("target", 0)
        for input, target in stage.batches(items):
            stage.step(input, target)
        assert stage.statistics().num_messages.get("target", 0) == before
        stage.step(*items[0])
        expected_more = 1 if bare.rank == 0 and last > 0 else 0
        assert stage.statistics().num_messages.get("target", 0) == before + expected_more


def check_interleaved(bare, balance):
    """Train and evaluate by turns, with a loader inside a loader's loop."""
    plain = make_model(nn.BatchNorm1d)
    items = [make_batch(size, seed) for seed, size in enumerate((10, 6))]
    options: Any = {"chunks": 3, "loss_fn": F.cross_entropy, "deferred_batch_norm": False}
    with stage_of(bare, "interleaved", plain, balance, **options) as stage:
        for k, (input, target) in enumerate(stage.batches(items)):
            expected = plain_step(plain, items[k][:1], items[k][1], 3, F.cross_entropy)
            assert_same(stage.step(input, target), expected, "training")
            stage.eval()
            plain.eval()
            with torch.no_grad():
                for n, (x, y) in enumerate(stage.batches(items)):
                    loss = stage.step(x, y)
                    assert_same(loss, plain_loss(plain, *items[n]), "evaluation")
            stage.train()
            plain.train()
            assert_same_gradients(stage, plain)
            assert_same_state(stage, plain)


SHORT = pytest.mark.parametrize("balance", [[5], [2, 3], [1, 1, 3]], ids=str)


@SHORT
def test_mini_batch_sizes_in_any_order(ranks, balance):
    ranks(len(balance)).run(check_sizes, balance, world=False).values()


@SHORT
def test_evaluation_does_not_change_training(ranks, balance):
    ranks(len(balance)).run(check_evaluation, balance, world=False).values()


@SHORT
def test_targets_of_every_kind_from_every_rank(ranks, balance):
    ranks(len(balance)).run(check_targets, balance, world=False).values()


@pytest.mark.parametrize("balance", [[3], [1, 2], [1, 1, 1]], ids=str)
def test_loss_weight(ranks, balance):
    ranks(len(balance)).run(check_loss_weight, balance, world=False).values()


@pytest.mark.parametrize(
    ("num_ranks", "schedule", "mode"),
    [
        (1, "gpipe", "always"),
        (2, "gpipe", "except_last"),
        (2, "1f1b", "always"),
        (2, "zb-v", "never"),
        (2, "interleaved", "except_last"),
        (3, "zb-h1", "always"),
    ],
)
def test_micro_batches_of_weight_zero_are_left_out(ranks, num_ranks, schedule, mode):
    ranks(num_ranks).run(check_left_out, schedule, mode, world=False).values()


@pytest.mark.parametrize(
    ("num_ranks", "schedule", "mode"),
    [(1, "gpipe", "always"), (2, "zb-h1", "never"), (3, "1f1b", "except_last")],
)
def test_loss_and_gradients_are_zero_if_all_weights_are_zero(ranks, num_ranks, schedule, mode):
    ranks(num_ranks).run(check_all_left_out, schedule, mode, world=False).values()


@SHORT
def test_loaders(ranks, balance):
    ranks(len(balance)).run(check_loaders, balance, world=False).values()


@SHORT
def test_training_and_evaluation_interleaved(ranks, balance):
    ranks(len(balance)).run(check_interleaved, balance, world=False).values()


def read_from_a_function(world: Any) -> int:
    def make() -> list[Any]:
        made.append(world.rank)
        return [(torch.ones(4, 6), torch.ones(4, 6))] * 3

    made: list[int] = []
    stage = Stage(
        nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), [1, 1], loss_fn=F.mse_loss, world=world
    )
    assert len([stage.step(x, y) for x, y in stage.batches(make)]) == 3
    return len(made)


def test_a_loader_function_is_called_on_rank_0_only(ranks: Any) -> None:
    assert ranks(2).run(read_from_a_function).values() == [1, 0]
