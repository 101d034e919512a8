"""Training in float16 with a ``GradScaler`` skips, scales and steps as one process does.

Truth is the plain model under the same autocast with torch's own scaler. A gradient overflows on
one rank only. Schedules, losses of one's own and shared weights with a scaler: tests/fuzz.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler

from procpipe import Remote
from tests.dist.stages import assert_same, plain_step, stage_of

pytestmark = pytest.mark.on_gpus

NUM_STEPS = 5


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))


def make_batch(seed, size=10):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, size, 8, generator=generator).unbind()


def make_optimizers(module, kind):
    parameters = [p for p in module.parameters() if p.requires_grad]
    if kind == "each kind":
        weights = [p for p in parameters if p.dim() == 2]
        biases = [p for p in parameters if p.dim() == 1]
        return [torch.optim.SGD(weights, lr=0.01), torch.optim.SGD(biases, lr=0.02)]
    if kind == "fused":
        return [torch.optim.Adam(parameters, lr=1e-3, fused=True)]
    return [torch.optim.SGD(parameters, lr=0.01, momentum=0.9)]


def make_scaler(device):
    return GradScaler(device.type, init_scale=256.0, growth_interval=2)


def finish(module, clip, scaler, optimizers, overflowing):
    """Let a gradient overflow, if it is here; clip, if this is given; and step."""
    gradient = dict(module.named_parameters()).get(overflowing)
    if gradient is not None:
        gradient.grad[0] = torch.inf
    norm = None
    if clip is not None:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norm = clip(0.5)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return norm


def train(bare, kind, clips):
    """Train a stage beside the plain model; return the scale of each step."""
    plain = make_model()
    scales = []
    with stage_of(bare, kind, plain, [2, 4], chunks=4, loss_fn=F.mse_loss) as stage:
        plain.to(bare.device)
        truth = make_scaler(bare.device)
        given = make_scaler(bare.device)
        scaler = stage.scaler(given)
        assert scaler is given
        optimizers, plain_optimizers = (make_optimizers(m, kind) for m in (stage, plain))
        clip = stage.clip_grad_norm_ if clips else None
        clip_plain = partial(nn.utils.clip_grad_norm_, list(plain.parameters())) if clips else None
        for step in range(NUM_STEPS):
            for optimizer in optimizers + plain_optimizers:
                optimizer.zero_grad()
            input, target = (part.to(bare.device) for part in make_batch(step))
            with torch.autocast(bare.device.type, dtype=torch.float16):
                expected = plain_step(plain, (input,), target, 4, F.mse_loss, truth.scale)
                found = stage.step(input, target)
            assert_same(found, expected, f"loss of step {step}")
            scales.append(scaler.get_scale())
            overflowing = "1.0.weight" if step == 1 else ""
            norm = finish(stage, clip, scaler, optimizers, overflowing)
            expected = finish(plain, clip_plain, truth, plain_optimizers, overflowing)
            if norm is not None and norm.isfinite():
                assert_same(norm, expected, f"norm of step {step}")
            assert scaler.state_dict() == truth.state_dict(), f"step {step}"
            for key, parameter in stage.named_parameters():
                theirs = plain.get_parameter(key).detach()
                assert_same(parameter.detach(), theirs, f"{key} after step {step}")
    return scales


@pytest.mark.parametrize(
    ("kind", "clips"),
    [
        ("one", True),
        # Clipping by the norm of all would make the others' gradients NaN, in one process, too.
        ("each kind", False),
        ("fused", True),
    ],
)
def test_training_with_a_scaler_equals_the_plain_model(ranks, kind, clips):
    of_ranks = ranks(2).run(train, kind, clips, world=False).values()
    assert of_ranks == [[256.0, 256.0, 128.0, 128.0, 256.0]] * 2


# -- what is wrong -------------------------------------------------------------------------------


def misuse(bare, what):
    with stage_of(bare, what, make_model(), [2, 4], loss_fn=F.mse_loss) as stage:
        scaler: Any = make_scaler(bare.device)
        if bare.rank == 1 and what == "other options":
            scaler = GradScaler(bare.device.type, init_scale=2.0, growth_interval=2)
        elif bare.rank == 1 and what == "disabled":
            scaler = GradScaler(bare.device.type, enabled=False)
        if what == "no call" and bare.rank == 1:
            stage.step(*make_batch(1))
        stage.scaler(scaler)
        (optimizer,) = make_optimizers(stage, "one")
        stage.step(*make_batch(1))
        if bare.rank == 1 and what == "other scale":
            scaler.update(2.0)
        if bare.rank == 1 and what == "half":
            stage.half()
            for parameter in stage.parameters():
                parameter.grad = torch.zeros_like(parameter)
        scaler.step(optimizer)


MISUSES = {
    "other options": [r"the scaler's scale is 256.0 on rank 0 and 2.0 on rank 1: give every"] * 2,
    "disabled": [r"the scaler's enabled is True on rank 0 and False on rank 1"] * 2,
    "no call": [r"is in step\(\) while rank 0 is in scaler\(\)"] * 2,
    "other scale": [r"the scaler's scale is 256.0 on rank 0 and 2.0 on rank 1: give every"] * 2,
    "half": [r"rank 1 failed:\n.*in scaler.unscale_\(\)", r"Attempting to unscale FP16 gradients"],
}


def test_each_misuse_of_a_scaler_ends_every_rank_with_its_reason(ranks):
    for what, expected in MISUSES.items():
        errors = ranks(2).run(misuse, what, world=False).errors()
        for error, message in zip(errors, expected, strict=True):
            assert re.search(message, error.text), f"{what}: {error.text}"


def step_without_gradients(bare):
    with stage_of(bare, "none", make_model(), [2, 4], loss_fn=F.mse_loss) as stage:
        scaler = stage.scaler(make_scaler(bare.device))
        (optimizer,) = make_optimizers(stage, "one")
        with pytest.raises(AssertionError, match="No inf checks were recorded"):  # torch's own
            scaler.step(optimizer)
        stage.step(*make_batch(1))
        return scaler.get_scale()


def test_a_step_without_any_gradient_is_the_error_of_one_process(ranks):
    assert ranks(2).run(step_without_gradients, world=False).values() == [256.0] * 2


# -- what stays as in one process ----------------------------------------------------------------


class Noted(GradScaler):
    """A class derived from torch's, as users write them, too."""


def use_other_scalers(bare):
    """One that is off, and one of the user's own class; each scales several losses."""
    with stage_of(bare, "other", make_model(), [2, 4], loss_fn=F.mse_loss) as stage:
        (optimizer,) = make_optimizers(stage, "one")
        for scaler in (
            GradScaler(bare.device.type, enabled=False),
            Noted(bare.device.type, init_scale=8.0),
        ):
            before = [parameter.detach().clone() for parameter in stage.parameters()]
            assert stage.scaler(scaler) is scaler
            loss: Any = F.mse_loss(stage(make_batch(1)[0]), make_batch(1)[1].to(bare.device))
            losses: Any = [loss, (loss, loss)]
            scaled, (again, *_) = scaler.scale(losses)
            assert isinstance(scaled, Remote) == isinstance(again, Remote) == (not bare.rank)
            scaled.backward()
            scaler.step(optimizer)
            scaler.update()
            assert not any(map(torch.equal, before, stage.parameters()))


def test_scalers_that_are_off_or_of_a_derived_class(ranks):
    ranks(2).run(use_other_scalers, world=False).values()


def step_with_loss_in_float16(bare, scale):
    """The scale alone overflows float16; times the share of a micro-batch it does not."""
    model = make_model().half()
    options: Any = {"chunks": 4, "loss_fn": lambda output: output.mean()}
    with stage_of(bare, "float16", model, [2, 4], **options) as stage:
        stage.scaler(GradScaler(bare.device.type, init_scale=scale))
        loss = stage.step(make_batch(1)[0].half())
        assert loss.dtype == torch.float16
        return all(
            p.grad is not None and p.grad.isfinite().all().item() for p in stage.parameters()
        )


def test_a_scale_beyond_float16_overflows_only_if_the_scaled_gradient_does(ranks):
    for scale, is_finite in ((2.0**17, True), (2.0**20, False)):
        outcomes = ranks(2).run(step_with_loss_in_float16, scale, world=False)
        assert outcomes.values() == [is_finite] * 2, scale
