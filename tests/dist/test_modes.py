"""Layers that are frozen, clipping, state dicts, and other methods of a Stage.

What checkpoint modes recompute: tests/dist/test_memory.py, tests/compute.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.dist.stages import (
    assert_same,
    assert_same_gradients,
    assert_same_state,
    make_batch,
    plain_step,
    stage_of,
)

pytestmark = pytest.mark.on_gpus


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
    ).double()


def check_unfreezing(bare):
    """Layers are frozen and unfrozen between steps, and parameters are replaced."""
    inputs, target = make_batch()
    for schedule, mode in ("gpipe", "except_last"), ("zb-h1", "always"):
        plain = make_model().requires_grad_(False)
        options: Any = {"chunks": 3, "checkpoint": mode, "schedule": schedule}
        options["loss_fn"] = F.cross_entropy
        with stage_of(bare, schedule, plain, [1, 3, 1], **options) as stage:
            for name, requires_grad, is_replaced in (
                ("", False, False),
                ("0", True, True),
                ("4", True, False),
                ("0", False, False),
                ("0", True, True),
            ):
                for model in (plain, stage):
                    model.zero_grad()
                    for layer_name, layer in model.named_children():
                        if layer_name == name:
                            change(layer, requires_grad, is_replaced)
                is_reversed = schedule == "gpipe"
                expected = plain_step(
                    plain, (inputs,), target, 3, F.cross_entropy, is_backward_reversed=is_reversed
                )
                what = f"{schedule}, layer {name!r} {requires_grad}:"
                assert_same(stage.step(inputs, target), expected, what)
                assert_same_gradients(stage, plain, what)


def change(layer, requires_grad, is_replaced):
    for name, parameter in list(layer.named_parameters()):
        if is_replaced:
            setattr(layer, name, nn.Parameter(parameter.detach() * 0.5))
        getattr(layer, name).requires_grad_(requires_grad)


# -- clipping ------------------------------------------------------------------------------------


def clip_what_is_not_finite(bare, value, error_if_nonfinite):
    with stage_of(bare, "inf", make_model(), [3, 2], loss_fn=F.cross_entropy) as stage:
        inputs, target = make_batch()
        stage.step(inputs, target)
        if bare.rank == 1:
            gradient = next(stage.parameters()).grad
            assert gradient is not None
            gradient[0] = value
        return stage.clip_grad_norm_(1.0, error_if_nonfinite=error_if_nonfinite).isfinite().item()


# -- fetch ---------------------------------------------------------------------------------------


def check_fetch(bare):
    inputs, _ = make_batch()
    with stage_of(bare, "fetch", make_model(), [1, 3, 1]) as stage:
        # A value of rank 0, and plain ones.
        nested = {"a": [inputs, None, 3], "b": ("c", 0.5)} if bare.rank == 0 else None
        assert_same(stage.fetch(nested), {"a": [inputs, None, 3], "b": ("c", 0.5)}, "nested")
        large = torch.arange(300_000) if bare.rank == 0 else None
        assert_same(stage.fetch(large), torch.arange(300_000), "large")
        # A part of a value of the last rank, with what was computed of it.
        part = stage.fetch(stage(inputs).softmax(1)[:2].sum(1))
        assert not part.requires_grad
        assert_same(part, torch.ones(2, dtype=torch.float64), "fetched", 1e-12)


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
        part = other.state_dict()  # with torch's versions of modules
        left_out = next((key for key in expected if key.endswith("tracked")), expected[0])
        del part[left_out]
        with pytest.raises(RuntimeError, match=rf"Missing key\(s\).*{left_out}"):
            stage.load_state_dict(part)
        assert stage.load_state_dict(part, strict=False).missing_keys == [left_out]
        # The stage uses the loaded parameters.
        state = {key: value.to(bare.device) for key, value in other.state_dict().items()}
        stage.load_state_dict(state, assign=True)
        inputs, _ = make_batch()
        other.eval()
        stage.eval()
        assert_same(stage.fetch(stage(inputs).detach()), other(inputs).detach(), "loaded")


# -- being an nn.Sequential ----------------------------------------------------------------------


def check_attributes(bare, balance):
    plain = make_model()
    options: Any = {"chunks": 3, "checkpoint": "always", "deferred_batch_norm": True}
    with stage_of(bare, "attributes", plain, torch.tensor(balance), **options) as stage:
        assert stage.balance == balance
        assert all(type(part) is int for part in stage.balance)
        assert (stage.devices, stage.device) == (bare.devices, bare.device)
        assert (stage.chunks, stage.checkpoint, stage.rank) == (3, "always", bare.rank)
        first = str(sum(balance[: bare.rank]))
        assert [name for name, _ in stage[0:1].named_children()] == [first]

        # Every optimizer accepts parameters(), though layer 1 has none.
        assert len(list(stage.parameters())) == (len(list(stage.named_parameters())) or 1)
        for optimizer_type in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
            optimizer = optimizer_type(stage.parameters(), lr=0.1)
            optimizer.zero_grad()
            optimizer.step()

        assert stage.to(stage.device) is stage
        stage.half().double()
        assert stage.fetch(stage(make_batch()[0])).shape == (10, 3)  # still works


def test_a_norm_that_is_not_finite(ranks):
    for value in (math.nan, math.inf):
        job = ranks(2).run(clip_what_is_not_finite, value, False, world=False)
        assert job.values() == [False, False]
        for error in ranks(2).run(clip_what_is_not_finite, value, True, world=False).errors():
            assert f"the gradients' norm over all stages is {value}" in error.text


def test_state_dicts(ranks):
    ranks(3).run(check_state, [2, 1, 2], world=False).values()


def save_wrongly(bare):
    """All ways to pickle a stage's state dict raise; what does not pickle it works."""
    model = make_model()
    with stage_of(bare, "save wrongly", model, [3, len(model) - 3]) as stage:
        part = stage.state_dict()
        copies = part.copy(), copy.copy(part), copy.deepcopy(part)
        for value in (part, *copies, {"model": part}):
            for save in (torch.save, pickle.dump):
                words = rf"{len(part)} values of one stage .*state\.save.*state\.export.* dict\("
                with pytest.raises(TypeError, match=words):
                    save(value, io.BytesIO())
        with pytest.raises(TypeError, match=r"state\.save.*state\.export"):
            torch.save(stage, io.BytesIO())
        torch.save(dict(part), io.BytesIO())

        for copied in copies:
            assert all(torch.equal(copied[key], part[key]) for key in part)
            assert copied._metadata == part._metadata
        assert not stage.load_state_dict(copies[2]).missing_keys
        assert not stage[:].load_state_dict(part).missing_keys
        assert list(stage.state_dict(prefix="a.")) == [f"a.{key}" for key in part]
        of_parameters = stage.state_dict(keep_vars=True)
        assert all(of_parameters[key] is value for key, value in stage[:].named_parameters())
        mine: dict[str, Any] = {}
        assert stage.state_dict(destination=mine) is mine


@pytest.mark.parametrize(
    ("num_ranks", "check"),
    [(3, check_unfreezing), (3, check_fetch), (2, save_wrongly)],
)
def test_methods_of_a_stage(ranks, num_ranks, check):
    ranks(num_ranks).run(check, world=False).values()


def test_attributes(ranks):
    ranks(4).run(check_attributes, [1, 1, 1, 2], world=False).values()
