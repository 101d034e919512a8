"""Checkpoint modes, autocast, random numbers, optimizers, clipping, and methods of a Stage."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from procpipe import Remote, is_checkpointing, is_recomputing
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


def make_batch(size=10, seed=2):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (size,), generator=generator)


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
    ).double()


class Log(nn.Module):
    """Notes the phase of each forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: list[Any] = []

    def forward(self, input):
        first = "checkpointing" if is_checkpointing() else ""
        self.seen.append(first + ("again" if is_recomputing() else ""))
        return input * self.weight


# -- what a layer sees ---------------------------------------------------------------------------


def phases_seen(bare):
    """Return the phases of a layer in each stage: for each mode, a list per call."""
    seen: dict[str, list[Any]] = {}
    for mode in MODES:
        model = nn.Sequential(Log(), Log())
        options: Any = {"chunks": 3, "checkpoint": mode, "loss_fn": torch.mean}
        with stage_of(bare, mode, model, [1, 1], **options) as stage:
            layer: Any = stage[0]
            seen[mode] = []
            for call in CALLS:
                call(stage)
                seen[mode].append(layer.seen)
                layer.seen = []
    return seen


def train_6(stage):
    stage.step(torch.ones(6, 2))


def train_2(stage):
    stage.step(torch.ones(2, 2))


def evaluate_6(stage):
    stage.eval()
    stage.step(torch.ones(6, 2))
    stage(torch.ones(6, 2)).sum().backward()
    stage.train()


def train_without_gradients(stage):
    with torch.no_grad():
        stage.step(torch.ones(6, 2))
        stage(torch.ones(6, 2))


CALLS = (train_6, train_2, evaluate_6, train_without_gradients)

FIRST, AGAIN = "checkpointing", "again"

#: The phases of a layer in each call: 3 micro-batches forward, then backward in reverse.
EXPECTED_PHASES = {
    "always": [
        [FIRST, FIRST, FIRST, AGAIN, AGAIN, AGAIN],
        [FIRST, FIRST, AGAIN, AGAIN],
        [""] * 6,
        [""] * 6,
    ],
    "except_last": [
        [FIRST, FIRST, "", AGAIN, AGAIN],
        [FIRST, "", AGAIN],  # the second of two micro-batches is the last
        [""] * 6,
        [""] * 6,
    ],
    "never": [[""] * 3, [""] * 2, [""] * 6, [""] * 6],
}


# -- random numbers ------------------------------------------------------------------------------


class Hidden(nn.Module):
    """Depends on a count, which recomputation does not restore."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.count = 0

    def forward(self, input):
        self.count += 1
        return input * self.weight * (1 + 0.2 * self.count)


def train_with_hidden(bare, where):
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    model[where] = Hidden()
    options: Any = {"chunks": 3, "checkpoint": "always", "loss_fn": F.cross_entropy}
    with stage_of(bare, "hidden", model, [2, 2], **options) as stage:
        for _ in range(3):
            stage.step(*make_batch())


class InFloat32(nn.Module):
    """A product that autocast must not change, forward and backward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, input):
        with torch.autocast(input.device.type, enabled=False):
            return input.float() @ self.weight


def check_autocast_gradients(bare, balance):
    """Before torch 2.11 (seen with 2.6.0, 2.9.1 and 2.10.0), gradients are silently dropped from
    the second step on: a cast that was made without a graph is used again."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(4, 4), InFloat32(), nn.GELU(), nn.Linear(4, 3))
    inputs, target = make_batch()
    inputs = inputs.float()
    for mode, dtype in [*product(MODES, [torch.bfloat16]), ("always", torch.float16)]:
        plain.zero_grad()
        truth = copy.deepcopy(plain).to(bare.device)  # what autocast casts depends on the device
        inputs, target = inputs.to(bare.device), target.to(bare.device)
        options: Any = {"chunks": 3, "checkpoint": mode, "loss_fn": F.cross_entropy}
        with stage_of(bare, f"autocast {mode} {dtype}", plain, balance, **options) as stage:
            for style in ("step", "forward"):
                truth.zero_grad()
                stage.zero_grad()
                with torch.autocast(bare.device.type, dtype=dtype):
                    losses = [
                        F.cross_entropy(truth(x), y) * (len(x) / 10)
                        for x, y in zip(inputs.chunk(3), target.chunk(3), strict=True)
                    ]
                for loss in reversed(losses):
                    loss.backward()
                with torch.autocast(bare.device.type, dtype=dtype):
                    if style == "step":
                        stage.step(inputs, target)
                    else:
                        output = stage(inputs)
                        loss = F.cross_entropy(output, target)
                if style == "step":
                    assert_same_gradients(stage, truth, f"{mode} {dtype} {style}")
                else:
                    loss.backward()
                    assert_same_gradients(stage, truth, f"{mode} {dtype} {style}", 0.02)
                    assert_same(stage.fetch(output).dtype, dtype, "output")


def check_unfreezing(bare, balance):
    """Layers are frozen and unfrozen between steps, and parameters are replaced."""
    inputs, target = make_batch()
    for schedule, mode in [*product(["gpipe"], MODES), ("zb-h1", "always")]:
        plain = make_model()
        plain.requires_grad_(False)
        options: Any = {"chunks": 3, "checkpoint": mode, "schedule": schedule}
        options["loss_fn"] = F.cross_entropy
        is_reversed = schedule == "gpipe"
        with stage_of(bare, f"{schedule} {mode}", plain, balance, **options) as stage:
            for name, requires_grad, is_replaced in (
                ("", False, False),
                ("0", True, True),
                ("4", True, False),
                ("3", True, False),
                ("0", False, False),
                ("0", True, True),
            ):
                for model in (plain, stage):
                    for layer_name, layer in model.named_children():
                        if layer_name == name:
                            change(layer, requires_grad, is_replaced)
                plain.zero_grad()
                stage.zero_grad()
                expected = plain_step(
                    plain, (inputs,), target, 3, F.cross_entropy, is_backward_reversed=is_reversed
                )
                what = f"{schedule} {mode}, layer {name!r} {requires_grad}:"
                assert_same(stage.step(inputs, target), expected, what)
                assert_same_gradients(stage, plain, what)


def change(layer, requires_grad, is_replaced):
    for name, parameter in list(layer.named_parameters()):
        if is_replaced:
            setattr(layer, name, nn.Parameter(parameter.detach() * 0.5))
        getattr(layer, name).requires_grad_(requires_grad)


# -- optimizers ----------------------------------------------------------------------------------


def check_frozen_stage(bare, balance):
    """All stages but the last have nothing to train; each has an optimizer all the same."""
    plain = make_model()
    plain[:4].requires_grad_(False)
    options: Any = {"chunks": 3, "loss_fn": F.cross_entropy}
    with stage_of(bare, "frozen", plain, balance, **options) as stage:
        own = [parameter for _, parameter in stage.named_parameters()]
        is_frozen = bare.rank < bare.num_ranks - 1
        assert len(list(stage.parameters())) == len(own) + is_frozen
        assert sum(p.numel() for p in stage.parameters()) == sum(p.numel() for p in own)
        trained = [parameter for parameter in stage.parameters() if parameter.requires_grad]
        optimizers = [torch.optim.AdamW(part, lr=0.1) for part in (plain[4:].parameters(), trained)]
        inputs, target = make_batch()
        plain_step(plain, (inputs,), target, 3, F.cross_entropy)
        stage.step(inputs, target)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_state(stage, plain)


# -- clipping ------------------------------------------------------------------------------------


def check_clipping(bare, balance):
    """Every bit is equal: norms are combined in the order of the partitions."""
    models = {
        "all": make_model(),
        "deep": nn.Sequential(  # another order of its norms gives another sum
            *(nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 4)) for _ in range(4)),
            nn.Linear(4, 3),
        ).double(),
        "two dtypes": nn.Sequential(
            nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Cast(), nn.Linear(4, 3).double()
        ),
    }
    inputs, target = make_batch()
    for name, plain in models.items():
        given = inputs.float() if name == "two dtypes" else inputs
        options: Any = {"chunks": 3, "loss_fn": F.cross_entropy, "schedule": "interleaved"}
        with stage_of(bare, name, plain, balance, **options) as stage:
            # Nothing to clip yet.
            assert_same(stage.clip_grad_norm_(1.0), torch.tensor(0.0), f"{name}: no gradients")
            norm_types: Any = (2.0, 1.0, math.inf, 3.5, 0.0, "inf")
            for norm_type in norm_types:
                plain.zero_grad()
                stage.zero_grad()
                plain_step(plain, (given,), target, 3, F.cross_entropy, is_backward_reversed=False)
                stage.step(given, target)
                for max_norm in (1e6, 1e-3):  # the first leaves the gradients as they are
                    expected = torch.nn.utils.clip_grad_norm_(
                        plain.parameters(), max_norm, norm_type
                    )
                    found = stage.clip_grad_norm_(max_norm, norm_type)
                    what = f"{name}, norm {norm_type}, at most {max_norm}:"
                    tolerance = 1e-6 if name == "two dtypes" else 0.0
                    assert_same(found, expected, what, tolerance)
                    assert_same_gradients(stage, plain, what, tolerance)


class Cast(nn.Module):
    def forward(self, input):
        return input.double()


def clip_what_is_not_finite(bare, error_if_nonfinite):
    with stage_of(bare, "inf", make_model(), [3, 2], loss_fn=F.cross_entropy) as stage:
        inputs, target = make_batch()
        stage.step(inputs, target)
        if bare.rank == 1:
            gradient = next(stage.parameters()).grad
            assert gradient is not None
            gradient[0] = math.nan
        return stage.clip_grad_norm_(1.0, error_if_nonfinite=error_if_nonfinite).isnan().item()


# -- fetch ---------------------------------------------------------------------------------------


def check_fetch(bare, balance):
    inputs, _ = make_batch()
    plain = make_model()
    with stage_of(bare, "fetch", plain, balance, chunks=3) as stage:
        output = stage(inputs)
        expected = plain_output(plain, (inputs,), 3).detach()
        assert isinstance(output, Remote) == (bare.rank < bare.num_ranks - 1)
        fetched = stage.fetch(output.softmax(1)[:2] * 2)
        assert_same(fetched, expected.softmax(1)[:2] * 2, "fetched")
        assert not fetched.requires_grad
        # A value of rank 0, and plain ones.
        nested = {"a": [inputs, None, 3], "b": ("c", 0.5)} if bare.rank == 0 else None
        assert_same(stage.fetch(nested), {"a": [inputs, None, 3], "b": ("c", 0.5)}, "nested")
        large = torch.arange(300_000) if bare.rank == 0 else None
        assert_same(stage.fetch(large), torch.arange(300_000), "large")


# -- state ---------------------------------------------------------------------------------------


def check_state(bare, balance):
    """Keys are those of the full model; states of the model and of the stage can be loaded."""
    plain = make_model()
    names = [name for name, _ in plain.named_children()]
    first = sum(balance[: bare.rank])
    ours = names[first : first + balance[bare.rank]]
    with stage_of(bare, "state", plain, balance) as stage:
        expected = [key for key in plain.state_dict() if key.split(".")[0] in ours]
        assert list(stage.state_dict()) == expected
        assert [n for n, _ in stage.named_parameters()] == [
            n for n, _ in plain.named_parameters() if n.split(".")[0] in ours
        ]
        other = make_model()
        for parameter in other.parameters():
            nn.init.normal_(parameter)
        other(make_batch()[0])  # other running statistics
        of_stage = {k: v for k, v in other.state_dict().items() if k.split(".")[0] in ours}
        for given in (other.state_dict(), of_stage):
            stage.load_state_dict(plain.state_dict() if bare.rank else dict(plain.state_dict()))
            assert_same_state(stage, plain)
            result = stage.load_state_dict(given)
            assert (result.missing_keys, result.unexpected_keys) == ([], [])
            assert_same_state(stage, other)

        with pytest.raises(RuntimeError, match=r'Unexpected key\(s\).*"9.weight"'):
            stage.load_state_dict({**plain.state_dict(), "9.weight": torch.ones(1)})
        for left_out in expected[:1] + [key for key in expected if key.endswith("tracked")]:
            part = other.state_dict()  # with torch's versions of modules
            del part[left_out]
            with pytest.raises(RuntimeError, match=rf"Missing key\(s\).*{left_out}"):
                stage.load_state_dict(part)
            assert stage.load_state_dict(part, strict=False).missing_keys == [left_out]
        # The stage uses the loaded parameters.
        stage.load_state_dict(on(bare.device, other), assign=True)
        inputs, _ = make_batch()
        other.eval()
        stage.eval()
        assert_same(stage.fetch(stage(inputs).detach()), other(inputs).detach(), "loaded")


def on(device, model):
    """Return the state of a model on a device."""
    return {key: value.to(device) for key, value in model.state_dict().items()}


def values_from_meta(bare, balance):
    """Build a model on the meta device, train it a step; return the stage's state."""
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        )
    torch.manual_seed(11)
    before = torch.get_rng_state()
    with stage_of(bare, str(balance), model, balance, chunks=2, loss_fn=F.cross_entropy) as stage:
        assert torch.equal(torch.get_rng_state(), before)
        assert all(not tensor.is_meta for tensor in stage.state_dict().values())
        assert all(tensor.is_meta for tensor in model.state_dict().values())
        state = {key: value.clone() for key, value in stage.state_dict().items()}
        inputs, target = make_batch()
        stage.step(inputs.float(), target)
        assert all(p.grad is not None for _, p in stage.named_parameters())
        return state


# -- being an nn.Sequential ----------------------------------------------------------------------


def check_attributes(bare, balance):
    plain = make_model()
    options: Any = {"chunks": 3, "checkpoint": "always", "deferred_batch_norm": True}
    with stage_of(bare, "attributes", plain, torch.tensor(balance), **options) as stage:
        first = sum(balance[: bare.rank])
        assert stage.balance == balance
        assert all(type(part) is int for part in stage.balance)
        assert (stage.devices, stage.device) == (bare.devices, bare.device)
        assert (stage.chunks, stage.checkpoint, stage.rank) == (3, "always", bare.rank)
        assert len(stage) == balance[bare.rank]
        assert stage[0] is stage.get_submodule(str(first))
        assert stage[-1] is stage.get_submodule(str(first + len(stage) - 1))
        assert [name for name, _ in stage[0:1].named_children()] == [str(first)]
        with pytest.raises(IndexError):
            stage[len(stage)]

        # Every optimizer accepts parameters(), though layer 1 has none.
        assert len(list(stage.parameters())) == (len(list(stage.named_parameters())) or 1)
        for optimizer_type in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
            optimizer = optimizer_type(stage.parameters(), lr=0.1)
            optimizer.zero_grad()
            optimizer.step()

        for move in (
            lambda: stage.cuda(),
            lambda: stage.cpu(),
            lambda: stage.to(0),
            lambda: stage.to(device="cpu"),
            lambda: stage.to(torch.ones(1)),
            lambda: stage.to("cpu", torch.float64),
        ):
            with pytest.raises(TypeError, match=f"rank {bare.rank} stays on {bare.device}"):
                move()
        for convert in (stage.double, stage.float, stage.half, stage.bfloat16):
            assert convert() is stage
        assert stage.to(dtype=torch.float64, non_blocking=True) is stage
        assert all(p.dtype == torch.float64 for _, p in stage.named_parameters())
        inputs, _ = make_batch()
        output = stage(inputs)  # still works
        output.sum().backward()
        assert stage.fetch(output).shape == (10, 3)


def check_mode_given(bare, balance):
    """A model in eval mode makes a stage in eval mode, and the layers keep their own modes."""
    model = make_model()
    model[3].eval()
    with stage_of(bare, "partly", model, balance) as stage:
        assert stage.training
        assert all(layer.training == (name != "3") for name, layer in stage.named_children())
    with stage_of(bare, "eval", make_model().eval(), balance, loss_fn=torch.sum) as stage:
        assert not stage.training
        before = copy.deepcopy(stage.state_dict())
        stage.step(make_batch()[0])
        assert_same(dict(stage.state_dict()), dict(before), "state")
        assert all(p.grad is None for p in stage.parameters())


def test_is_checkpointing_and_is_recomputing_in_a_layer(ranks):
    for seen in ranks(2).run(phases_seen, world=False).values():
        assert seen == EXPECTED_PHASES


def test_gradients_under_autocast(ranks):
    ranks(2).run(check_autocast_gradients, [1, 3], world=False).values()


@pytest.mark.parametrize(("where", "rank"), [(0, 0), (3, 1)], ids=str)
def test_a_layer_whose_recomputation_differs_is_an_error(ranks, where, rank):
    errors = ranks(2).run(train_with_hidden, where, world=False).errors()
    assert errors[rank].type == "RecomputeError"
    assert re.search("the layers gave values that differ", errors[rank].text)
    assert re.search(rf"task R\d@{rank} ", errors[rank].text)
    assert errors[1 - rank].type == "RemoteStageError"
    assert re.search("RecomputeError: the layers gave", errors[1 - rank].text)


def test_layers_frozen_and_unfrozen_between_steps(ranks):
    ranks(3).run(check_unfreezing, [1, 3, 1], world=False).values()


def test_clipping_over_all_stages(ranks):
    ranks(2).run(check_clipping, [1, 1, 2, 1], world=False).values()


def test_a_norm_that_is_not_finite(ranks):
    assert ranks(2).run(clip_what_is_not_finite, False, world=False).values() == [True, True]
    for error in ranks(2).run(clip_what_is_not_finite, True, world=False).errors():
        assert "the gradients' norm over all stages is nan" in error.text


def test_a_stage_with_nothing_to_train_has_an_optimizer(ranks):
    ranks(3).run(check_frozen_stage, [1, 3, 1], world=False).values()


def test_fetch(ranks):
    ranks(3).run(check_fetch, [1, 3, 1], world=False).values()


@pytest.mark.parametrize("balance", [[2, 3], [1, 1, 1, 2]], ids=str)
def test_state_dicts(ranks, balance):
    ranks(len(balance)).run(check_state, balance, world=False).values()


def save_wrongly(bare):
    """All ways to pickle a stage's state dict raise; what does not pickle it works."""
    model = make_model()
    with stage_of(bare, "save wrongly", model, [3, len(model) - 3]) as stage:
        part = stage.state_dict()
        for value in (part, part.copy(), copy.copy(part), copy.deepcopy(part), {"model": part}):
            for save in (torch.save, pickle.dump):
                with pytest.raises(
                    TypeError, match=r"state\.save.*state\.export.* dict\("
                ) as caught:
                    save(value, io.BytesIO())
                assert f"{len(part)} values of stage {bare.rank} (rank {bare.rank})" in str(
                    caught.value
                )
        with pytest.raises(TypeError, match=r"state\.save.*state\.export"):
            torch.save(stage, io.BytesIO())
        torch.save(dict(part), io.BytesIO())

        for copied in (part.copy(), copy.copy(part), copy.deepcopy(part)):
            assert all(torch.equal(copied[key], part[key]) for key in part)
            assert copied._metadata == part._metadata
        shapes = tree_map(lambda tensor: tensor.shape, part)
        assert shapes == {key: value.shape for key, value in part.items()}
        for strict in (True, False):
            assert not stage.load_state_dict(copy.deepcopy(part), strict=strict).missing_keys
            assert not stage[:].load_state_dict(part, strict=strict).missing_keys
        assert list(stage.state_dict(prefix="a.")) == [f"a.{key}" for key in part]
        of_parameters = stage.state_dict(keep_vars=True)
        assert all(of_parameters[key] is value for key, value in stage[:].named_parameters())
        mine: dict[str, Any] = {}
        assert stage.state_dict(destination=mine) is mine


def test_a_part_of_a_model_is_not_pickled(ranks):
    ranks(2).run(save_wrongly, world=False).values()


def save_whole(bare):
    """A stage that is the whole model, here of each of two replicas, is pickled as any module."""
    with stage_of(bare, "whole", make_model(), None, replicas=2) as stage:
        file = io.BytesIO()
        torch.save(stage.state_dict(), file)
        file.seek(0)
        assert list(torch.load(file)) == list(make_model().state_dict())


def test_a_state_dict_of_the_whole_model_is_pickled(ranks):
    ranks(2).run(save_whole, world=False).values()


def test_a_model_from_the_meta_device_has_the_same_values_for_every_balance(ranks):
    states = []
    for balance in ([5], [2, 3], [1, 1, 1, 2]):
        state: dict[str, Any] = {}
        for of_stage in ranks(len(balance)).run(values_from_meta, balance, world=False).values():
            assert not state.keys() & of_stage.keys()
            state |= of_stage
        states.append(state)
    assert len(states[0]) == 11
    for state in states[1:]:
        assert_same(state, states[0], "state")


def test_attributes(ranks):
    ranks(4).run(check_attributes, [1, 1, 1, 2], world=False).values()


def test_the_mode_of_the_model_is_kept(ranks):
    ranks(2).run(check_mode_given, [2, 3], world=False).values()
