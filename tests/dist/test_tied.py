"""Layers of several stages that share parameters train as in the plain model.

Truth is the plain model in float64, where the layers do share them. Stages add up a gradient in
another order than autograd, so it may differ in its last digits. Any layers, schedules and
replicas: tests/fuzz.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe import Stage
from tests.dist.devices import is_emulated
from tests.dist.stages import assert_same, assert_same_gradients, plain_step, stage_of, world_of

pytestmark = pytest.mark.on_gpus

TOLERANCE = 1e-12

#: Which layers use the embedding's matrix.
USERS = {"two": [0, 6], "three": [0, 3, 6], "inside and outside": [2, 3, 6]}


class Mix(nn.Module):
    """Multiplies by a square matrix, perhaps another layer's, and by one of its own."""

    def __init__(self, matrix):
        super().__init__()
        self.own = nn.Linear(6, 6)
        self.inner: Any = nn.Module()
        self.inner.weight = matrix

    def forward(self, input):
        return torch.tanh(self.own(input @ self.inner.weight))


def make_model(users="two", seed=1):
    """Make seven layers: those of ``users`` share a matrix."""
    torch.manual_seed(seed)
    matrices = [nn.Parameter(torch.randn(6, 6)) for _ in range(7)]
    shared = USERS.get(users, range(7))  # else all layers
    for k in shared:
        matrices[k] = matrices[shared[0]]
    return nn.Sequential(*map(Mix, matrices)).double()


def make_batch(size=11, seed=2):
    generator = torch.Generator().manual_seed(seed)
    input, target = torch.randn(2, size, 6, generator=generator, dtype=torch.float64)
    return input, target


def train(bare):
    """Train in a schedule of two partitions a stage; all layers share a matrix, at first frozen."""
    plain = make_model("all")
    options = {"chunks": 4, "schedule": "zb-v", "loss_fn": F.mse_loss, "check_tied": True}
    with stage_of(bare, "trains", plain, [1, 1, 1, 1, 2, 1], **options) as stage:
        plain.to(bare.device)
        for seed, is_free in enumerate((False, True, True, False)):
            for name, parameter in (*stage.named_parameters(), *plain.named_parameters()):
                if name.endswith("inner.weight"):
                    parameter.requires_grad_(is_free)
            input, target = (part.to(bare.device) for part in make_batch(seed=seed))
            expected = plain_step(plain, (input,), target, 4, F.mse_loss)
            assert_same(stage.step(input, target), expected, "loss", TOLERANCE)
            assert_same_gradients(stage, plain, f"step {seed}", TOLERANCE)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert_same(stage.clip_grad_norm_(1.0), expected, "norm", TOLERANCE)
        assert_same_gradients(stage, plain, "clipped", TOLERANCE)
        statistics = stage.statistics()
    return [of["tied gradient"] for of in (statistics.num_messages, statistics.sent_bytes)]


def test_a_shared_gradient_is_sent_once_a_call_to_each_other_stage(ranks):
    """However many micro-batches there are, and layers on a stage; none while it is frozen."""
    matrix_bytes = 6 * 6 * 8
    assert ranks(3).run(train, world=False).values() == [[4 * 2, 2 * 2 * matrix_bytes]] * 3


def check_sparse(bare):
    torch.manual_seed(1)
    embedding, head = nn.Embedding(5, 3, sparse=True).double(), nn.Linear(3, 5).double()
    head.weight = embedding.weight
    plain = nn.Sequential(embedding, nn.Tanh(), head)
    with stage_of(bare, "sparse", plain, [2, 1], loss_fn=F.cross_entropy, chunks=2) as stage:
        plain.to(bare.device)
        classes = torch.tensor([1, 2, 3], device=bare.device)
        for _ in range(2):
            plain_step(plain, (classes,), classes, 2, F.cross_entropy)
            stage.step(classes, classes)
            assert_same_gradients(stage, plain, "sparse", TOLERANCE)


@pytest.mark.skipif(is_emulated(), reason="emulated GPUs have no kernels of sparse tensors")
def test_a_sparse_gradient_is_added_to_a_dense_one(ranks):
    ranks(2).run(check_sparse, world=False).values()


def check_equal_from_the_start(bare):
    """Also if ranks build other models; on the meta device: tests/model/test_materialize.py."""
    options: Any = {"chunks": 2, "loss_fn": F.mse_loss, "check_tied": True}
    for users in USERS:
        different = make_model(users, seed=bare.rank)
        with stage_of(bare, users, different, [1, 4, 2], **options) as stage:
            stage.step(*make_batch())


# -- what must not differ ------------------------------------------------------------------------


def change_a_copy(stage, step):
    if stage.rank == 1 and step == 2:  # an error also before a third call
        with torch.no_grad():
            stage.get_parameter("6.inner.weight").add_(1e-15)


def replace(stage, step, rank, name):
    if stage.rank == rank and step == 1:
        inner: Any = stage.get_submodule(f"{name}.inner")
        inner.weight = nn.Parameter(inner.weight.detach().clone())


def freeze_on_one(stage, step):
    if stage.rank == 0 and step == 1:
        stage.get_parameter("0.inner.weight").requires_grad_(False)


def hook_on_one(stage, step):
    if stage.rank == 1 and step == 0:
        stage.get_parameter("6.inner.weight").register_post_accumulate_grad_hook(print)


def untied_on_rank_1(rank):
    model = make_model()
    if rank == 1:
        model[6].inner.weight = nn.Parameter(model[6].inner.weight.detach().clone())
    return model


class Scaled(nn.Module):
    """Uses a buffer, and may change it."""

    scale: Tensor

    def __init__(self, buffer, changes=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.register_buffer("scale", buffer)
        self.changes = changes

    def forward(self, input):
        if self.changes:
            self.scale.mul_(2.0)
        return input * self.scale * self.weight


def with_a_shared_buffer(rank, *, changes=True):
    buffer = torch.full((6,), 2.0, dtype=torch.float64)
    return nn.Sequential(Scaled(buffer), nn.Linear(6, 6).double(), Scaled(buffer, changes))


class Normed(nn.Module):
    """Normalises by a module that another layer may have, too."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, input):
        return self.norm(input)


def with_a_shared_norm(rank):
    norm = nn.BatchNorm1d(6).double()
    return nn.Sequential(Normed(norm), Normed(norm))


two, three = (lambda rank: make_model("two")), (lambda rank: make_model("three"))

#: The model of a rank, its balance, what is changed before each step, the words of both errors.
DIFFERENCES: list[tuple[Any, list[int], Any, str]] = [
    (two, [3, 4], change_a_copy, "copies of one tensor differ: 0.inner.weight on sta"),
    (two, [3, 4], freeze_on_one, "requires a gradient on stage 1 but not on"),
    (
        two,
        [3, 4],
        hook_on_one,
        "0.inner.weight has a hook on stage 1, by register_post_",
    ),
    (three, [4, 3], partial(replace, rank=0, name="3"), "3.inner.weight on stage 0 was replaced"),
    (three, [4, 3], partial(replace, rank=1, name="6"), "6.inner.weight on stage 1 was replaced"),
    (untied_on_rank_1, [3, 4], None, "shared by partitions is ['0.inner.weight in p"),
    (with_a_shared_buffer, [1, 2], None, "differ: the buffer 0.scale on stages 0 and 1"),
    (with_a_shared_norm, [1, 1], None, "differ: the buffer 0.norm.r"),
]


def step_with_a_difference(bare, number):
    make, balance, change, words = DIFFERENCES[number]
    options: Any = {"loss_fn": F.mse_loss, "deferred_batch_norm": True}
    if change is change_a_copy:
        options["check_tied"] = True
    stage = Stage(make(bare.rank), balance, world=world_of(bare, words), **options)
    for step in range(3):
        if change is not None:
            change(stage, step)
        stage.step(*make_batch())


@pytest.mark.parametrize("number", range(len(DIFFERENCES)))
def test_what_must_not_differ_between_stages_that_share_a_tensor(ranks, number):
    for error in ranks(2).run(step_with_a_difference, number, world=False).errors():
        assert DIFFERENCES[number][-1] in error.text


def check_warnings(bare):
    """Without ``check_tied``, copies that differ are a warning before few calls."""
    with stage_of(bare, "differ", make_model(), [3, 4], loss_fn=F.mse_loss) as stage:
        stage.step(*make_batch())
        change_a_copy(stage, 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                stage.step(*make_batch())
    messages = [str(each.message) for each in caught if "copies of one" in str(each.message)]
    assert len(messages) == (2 if bare.rank == 0 else 0)  # before the second call and the fourth


def check_buffers(bare):
    plain = with_a_shared_buffer(0, changes=False)
    with stage_of(bare, "buffer", plain, [1, 2], loss_fn=F.mse_loss) as stage:
        input, target = make_batch()
        expected = plain_step(plain, (input,), target, 1, F.mse_loss)
        assert_same(stage.step(input, target), expected, "loss", TOLERANCE)


def check_hooks(bare):
    """A hook that was removed counts as none; those of own parameters are called."""
    calls: list[Tensor] = []
    with stage_of(bare, "hooks", make_model(), [3, 4], loss_fn=F.mse_loss) as stage:
        shared = stage.get_parameter(["0.inner.weight", "6.inner.weight"][bare.rank])
        for parameter in stage.parameters():
            hook = parameter.register_post_accumulate_grad_hook(calls.append)
            if parameter is shared:
                hook.remove()
        stage.step(*make_batch())
    assert calls
    assert all(parameter is not shared for parameter in calls)


@pytest.mark.parametrize("check", [check_warnings, check_buffers, check_hooks])
def test_what_may_differ(ranks, check):
    ranks(2).run(check, world=False).values()


# -- saved state ---------------------------------------------------------------------------------


def check_loading(bare):
    """Under some of the names, as in the plain model; from files: tests/state/test_keys.py."""
    names = [f"{k}.inner.weight" for k in USERS["three"]]
    for case, without in enumerate(([], names[:1], names[1:], names[:2], names)):
        plain = make_model("three")
        # Each name of a weight has other values, or is left out.
        state = plain.state_dict().items()
        values = {key: torch.randn_like(value) for key, value in state if key not in without}
        with stage_of(bare, f"load {case}", plain, [1, 4, 2], check_tied=True) as stage:
            plain.load_state_dict(values, strict=False)
            stage.load_state_dict(values, strict=False)
            for key, value in stage.state_dict().items():
                assert_same(value.cpu(), plain.state_dict()[key], key)


@pytest.mark.parametrize("check", [check_equal_from_the_start, check_loading])
def test_copies_are_equal(ranks, check):
    ranks(3).run(check, world=False).values()
