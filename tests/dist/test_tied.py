"""Layers of several stages that share parameters train as in the plain model.

Truth is the plain model in float64, where the layers do share them. Stages add up a gradient in
another order than autograd, so it may differ in its last digits. Any layers, schedules and
replicas: tests/fuzz.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe import DisagreementError, RemoteStageError, Stage
from tests.dist.devices import is_emulated
from tests.dist.stages import assert_same, plain_step, stage_of, world_of

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


def make_model(users="two", device="cpu", seed=1):
    """Make seven layers: those of ``users`` share a matrix."""
    torch.manual_seed(seed)
    with torch.device(device):
        matrices = [nn.Parameter(torch.randn(6, 6)) for _ in range(7)]
        shared = USERS.get(users, range(7))  # else all layers
        for k in shared:
            matrices[k] = matrices[shared[0]]
        return nn.Sequential(*map(Mix, matrices)).double()


def make_batch(size=11, seed=2):
    generator = torch.Generator().manual_seed(seed)
    input, target = torch.randn(2, size, 6, generator=generator, dtype=torch.float64)
    return input, target


def assert_same_gradients(stage, plain, what):
    expected = dict(plain.named_parameters(remove_duplicate=False))
    for name, parameter in stage.named_parameters():
        assert_same(parameter.grad, expected[name].grad, f"{what} gradient of {name}", TOLERANCE)


def train(bare):
    """Train in a schedule of two partitions a stage; all layers share the matrix."""
    plain = make_model("all")
    options = {"chunks": 4, "schedule": "zb-v", "loss_fn": F.mse_loss, "check_tied": True}
    with stage_of(bare, "trains", plain, [1, 1, 1, 1, 2, 1], **options) as stage:
        plain.to(bare.device)
        for seed in range(4):
            input, target = (part.to(bare.device) for part in make_batch(seed=seed))
            expected = plain_step(plain, (input,), target, 4, F.mse_loss)
            assert_same(stage.step(input, target), expected, "loss", TOLERANCE)
            assert_same_gradients(stage, plain, f"step {seed}")
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert_same(stage.clip_grad_norm_(1.0), expected, "norm", TOLERANCE)
        assert_same_gradients(stage, plain, "clipped")
        return stage.statistics().num_messages["tied gradient"]


def test_a_shared_gradient_is_sent_once_a_call_to_each_other_stage(ranks):
    """However many micro-batches there are, and layers on a stage."""
    assert ranks(3).run(train, world=False).values() == [4 * 2] * 3


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
            assert_same_gradients(stage, plain, "sparse")


@pytest.mark.skipif(is_emulated(), reason="emulated GPUs have no kernels of sparse tensors")
def test_a_sparse_gradient_is_added_to_a_dense_one(ranks):
    ranks(2).run(check_sparse, world=False).values()


def check_frozen(bare):
    plain, layers = make_model("three"), USERS["three"]
    plain[0].inner.weight.requires_grad_(False)
    with stage_of(bare, "frozen", plain, [2, 2, 3], chunks=2, loss_fn=F.mse_loss) as stage:
        plain.to(bare.device)
        for free in (False, True, False):
            for module in (stage, plain):
                module.zero_grad()
                for name, parameter in module.named_parameters(remove_duplicate=False):
                    if name.endswith("inner.weight") and int(name[0]) in layers:
                        parameter.requires_grad_(free)
            input, target = (part.to(bare.device) for part in make_batch())
            plain_step(plain, (input,), target, 2, F.mse_loss)
            stage.step(input, target)
            assert_same_gradients(stage, plain, f"free {free}")


def test_frozen_and_set_free_between_steps(ranks):
    ranks(3).run(check_frozen, world=False).values()


def check_equal_from_the_start(bare):
    """Also if ranks build other models, and on the meta device, with the values of one stage."""
    balance = [1, 4, 2]
    options: dict[str, Any] = {"chunks": 2, "loss_fn": F.mse_loss, "check_tied": True}
    for users in USERS:
        different = make_model(users, seed=bare.rank)
        with stage_of(bare, f"seeds {users}", different, balance, **options) as stage:
            stage.step(*make_batch())
        torch.manual_seed(5)
        alone = Stage(make_on_meta(users), [7])
        torch.manual_seed(5)
        stage = Stage(
            make_on_meta(users), balance, world=world_of(bare, f"meta {users}"), **options
        )
        expected = alone.state_dict()
        for key, value in stage.state_dict().items():  # before anything is sent
            assert_same(value.cpu(), expected[key], f"{users} {key}")
        stage.step(*make_batch())
        stage.close()


def make_on_meta(users):
    model = make_model(users, device="meta")
    for layer in model:
        layer.__class__ = Resetting
    return model


class Resetting(Mix):
    def reset_parameters(self):
        nn.init.normal_(self.inner.weight)


def test_copies_are_equal_from_the_start(ranks):
    ranks(3).run(check_equal_from_the_start, world=False).values()


def check_differences(bare, is_error):
    options = {"loss_fn": F.mse_loss, "check_tied": is_error}
    stage = Stage(make_model(), [3, 4], world=world_of(bare, "differ"), **options)
    for _ in range(2 if is_error else 1):  # an error also before the third call
        stage.step(*make_batch())
    if bare.rank == 1:
        with torch.no_grad():
            stage.get_parameter("6.inner.weight").add_(1e-15)
    if is_error:
        message = r"copies of one tensor differ: 0\.inner\.weight on sta"
        with pytest.raises(RuntimeError, match=message):
            stage.step(*make_batch())
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            stage.step(*make_batch())
    stage.close()
    messages = [str(each.message) for each in caught if "copies of one" in str(each.message)]
    assert len(messages) == (2 if bare.rank == 0 else 0)  # before the second call and the fourth


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


def check_buffers(bare):
    for changes in (False, True):
        buffer = torch.full((6,), 2.0, dtype=torch.float64)
        plain = nn.Sequential(Scaled(buffer), nn.Linear(6, 6).double(), Scaled(buffer, changes))
        stage = Stage(
            copy.deepcopy(plain),
            [1, 1, 1],
            world=world_of(bare, f"buffer {changes}"),
            loss_fn=F.mse_loss,
        )
        if changes:
            stage.step(*make_batch())
            with pytest.raises(
                RuntimeError, match=r"differ: the buffer 0\.scale on stages 0 and 2"
            ):
                stage.step(*make_batch())
        else:
            input, target = make_batch()
            expected = plain_step(plain, (input,), target, 1, F.mse_loss)
            assert_same(stage.step(input, target).cpu(), expected, "loss", TOLERANCE)
            stage.close()


class Normed(nn.Module):
    """Normalises by a module that another layer may have, too."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, input):
        return self.norm(input)


def check_deferred(bare):
    norm = nn.BatchNorm1d(6).double()
    stage = Stage(
        nn.Sequential(Normed(norm), Normed(norm)),
        [1, 1],
        world=world_of(bare, "deferred"),
        loss_fn=F.mse_loss,
        deferred_batch_norm=True,
    )
    stage.step(*make_batch())
    with pytest.raises(RuntimeError, match=r"differ: the buffer 0\.norm\.r"):
        stage.step(*make_batch())


def check_replaced(bare, rank, name):
    stage = Stage(make_model("three"), [4, 3], world=world_of(bare, "replaced"), loss_fn=F.mse_loss)
    stage.double()
    stage.step(*make_batch())
    if bare.rank == rank:
        inner: Any = stage.get_submodule(f"{name}.inner")
        inner.weight = nn.Parameter(inner.weight.detach().clone())
    message = rf"{name}\.inner\.weight on stage {rank} was replaced .* stages 0 and 1 each have a"
    with pytest.raises(RuntimeError if bare.rank == rank else RemoteStageError, match=message):
        stage.step(*make_batch())


def check_hooks(bare):
    calls: list[Tensor] = []
    stage = Stage(make_model(), [3, 4], world=world_of(bare, "no hooks"), loss_fn=F.mse_loss)
    for name, parameter in stage.named_parameters():
        hook = parameter.register_post_accumulate_grad_hook(calls.append)
        if name == "0.inner.weight":
            hook.remove()
    stage.step(*make_batch())
    assert calls  # of its own parameters
    assert all(
        parameter is not stage.get_parameter(["0.inner.weight", "6.inner.weight"][bare.rank])
        for parameter in calls
    )
    stage.close()
    calls.clear()

    stage = Stage(make_model(), [3, 4], world=world_of(bare, "hooks"), loss_fn=F.mse_loss)
    for name, parameter in stage.named_parameters():
        if bare.rank == 1 or name != "0.inner.weight":
            parameter.register_post_accumulate_grad_hook(calls.append)
    with pytest.raises(
        RuntimeError if bare.rank == 1 else RemoteStageError,
        match=r"0\.inner\.weight has a hook on stage 1, by register_post_accumulate_grad_hook, but",
    ):
        stage.step(*make_batch())
    assert not calls


def check_tied_on_one_rank(bare):
    model = make_model()
    if bare.rank == 1:
        model[6].inner.weight = nn.Parameter(model[6].inner.weight.detach().clone())
    stage = Stage(model, [3, 4], world=world_of(bare, "one rank"), loss_fn=F.mse_loss)
    with pytest.raises(
        DisagreementError, match=r"shared by partitions is \['0\.inner\.weight in p"
    ):
        stage.step(*make_batch())


def check_frozen_on_one_stage(bare):
    stage = Stage(make_model(), [3, 4], world=world_of(bare, "by name"), loss_fn=F.mse_loss)
    stage.step(*make_batch())
    if bare.rank == 0:
        stage.get_parameter("0.inner.weight").requires_grad_(False)
    message = (
        r"0\.inner\.weight, also named 6\.inner\.weight, requires a gradient on stage 1 but not on"
    )
    with pytest.raises((RuntimeError, RemoteStageError), match=message):
        stage.step(*make_batch())


@pytest.mark.parametrize(
    "check",
    [
        *(check_buffers, check_deferred, check_hooks, check_tied_on_one_rank),
        *(check_frozen_on_one_stage, partial(check_replaced, rank=0, name="3")),
        *(partial(check_replaced, rank=1, name="6"), partial(check_differences, is_error=True)),
        partial(check_differences, is_error=False),
    ],
)
def test_what_must_not_differ_between_stages_that_share_a_tensor(ranks, check):
    ranks(3 if check is check_buffers else 2).run(check, world=False).values()


# -- saved state ---------------------------------------------------------------------------------


def make_weights(users, without, seed):
    """Return a state dict in which each name of a weight has other values, or is left out."""
    torch.manual_seed(seed)
    values = make_model(users).state_dict()
    return {key: torch.randn_like(value) for key, value in values.items() if key not in without}


def check_loading(bare):
    names = [f"{k}.inner.weight" for k in USERS["three"]]
    for case, without in enumerate(([], names[:1], names[1:], names[:2], names)):
        plain = make_model("three")
        values = make_weights("three", without, seed=case)
        with stage_of(bare, f"load {case}", plain, [1, 4, 2], check_tied=True) as stage:
            plain.load_state_dict(values, strict=False)
            stage.load_state_dict(values, strict=False)
            for key, value in stage.state_dict().items():
                assert_same(value.cpu(), plain.state_dict()[key], key)


def test_loading_under_some_of_the_names_is_as_in_the_plain_model(ranks):
    """From files: tests/state/test_keys.py."""
    ranks(3).run(check_loading, world=False).values()
