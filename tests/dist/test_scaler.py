"""Training in float16 with a ``GradScaler`` skips, scales and steps as one process does.

Truth is the plain model under the same autocast with torch's own scaler. A gradient of one layer
overflows float16 while the scale is large, and so on one rank only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler

from procpipe import Remote
from procpipe.data.microbatch import scatter_like
from tests.dist.stages import assert_same, plain_forward, stage_of

pytestmark = pytest.mark.on_gpus

NUM_STEPS = 5


class Layer(nn.Module):
    """A linear layer; if it is a spike, its weight has large gradients, and no others have."""

    def __init__(self, factor: float = 1.0):
        super().__init__()
        self.factor = factor
        self.linear = nn.Linear(8, 8)
        with torch.no_grad():
            self.linear.weight /= factor

    def forward(self, input):
        return torch.tanh(self.linear(input * self.factor))


@dataclass(frozen=True)
class Case:
    """What differs between two trainings.

    Attributes:
        schedule: of the stages.
        spike: the layer whose weight's gradient overflows; None for none.
        tied: layers that share a weight.
        optimizers: "one", one for "each kind" of parameters, or a "fused" one.
        style: "step", or one's "own loss".
        clips: whether gradients are unscaled and clipped before the optimizer's step.
    """

    schedule: str = "gpipe"
    spike: int | None = 1
    tied: tuple[int, ...] = ()
    optimizers: str = "one"
    style: str = "step"
    clips: bool = True


def make_model(case):
    torch.manual_seed(1)
    spikes = case.tied if case.spike in case.tied else (case.spike,)
    factors = [512.0] * 5 + [32.0]  # the last layer's gradients are larger
    model: Any = nn.Sequential(*(Layer(factors[k] if k in spikes else 1.0) for k in range(6)))
    for k in case.tied:
        model[k].linear.weight = model[case.tied[0]].linear.weight
    return model


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
    return GradScaler(device.type, init_scale=2.0**16, growth_interval=2)


def plain_backward(plain, scaler, batch, device, *, is_reversed):
    """Run a plain model backward from the scaled loss of each micro-batch; return the loss."""
    input, target = batch
    with torch.autocast(device.type, dtype=torch.float16):
        outputs, sizes = plain_forward(plain, (input,), 4)
        losses = [
            F.mse_loss(output, part) * (size / sum(sizes))
            for output, part, size in zip(outputs, scatter_like(target, sizes), sizes, strict=True)
        ]
    for loss in reversed(losses) if is_reversed else losses:
        scaler.scale(loss).backward()
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total.detach()


def stage_backward(stage, scaler, batch, style):
    """The same by a stage."""
    with torch.autocast(stage.device.type, dtype=torch.float16):
        if style != "own loss":
            return stage.step(*batch)
        loss = F.mse_loss(stage(batch[0]), batch[1])
    scaler.scale(loss).backward()
    return stage.fetch(loss)


def finish(module, clip, scaler, optimizers, clips):
    """Unscale, clip and step; return the norm, and whether a gradient here is not finite."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    has_overflow = not all(gradient.isfinite().all() for gradient in gradients)
    norm = None
    if clips:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norm = clip(0.5)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return norm, has_overflow


def train(bare, case, name):
    """Train a stage beside the plain model; return what each step's scale and overflow were."""
    plain = make_model(case)
    balance = [1, 2, 1, 2] if case.schedule == "zb-v" else [2, 4]
    options: Any = {"chunks": 4, "schedule": case.schedule, "loss_fn": F.mse_loss}
    # Stages add up a shared gradient, and own losses are divided, in another order.
    tolerance = 2e-3 if case.tied or case.style == "own loss" else 0.0
    seen = []
    with stage_of(bare, name, plain, balance, **options) as stage:
        plain.to(bare.device)
        truth = make_scaler(bare.device)
        given = make_scaler(bare.device)
        scaler = stage.scaler(given)
        assert scaler is given
        optimizers, plain_optimizers = (make_optimizers(m, case.optimizers) for m in (stage, plain))
        for step in range(NUM_STEPS):
            for optimizer in optimizers + plain_optimizers:
                optimizer.zero_grad()
            batch = tuple(part.to(bare.device) for part in make_batch(step))
            expected = plain_backward(
                plain, truth, batch, bare.device, is_reversed=case.schedule == "gpipe"
            )
            found = stage_backward(stage, scaler, batch, case.style)
            assert_same(found, expected, f"loss of step {step}", tolerance)
            scale = scaler.get_scale()
            norm, has_overflow = finish(
                stage, stage.clip_grad_norm_, scaler, optimizers, case.clips
            )
            expected, _ = finish(
                plain,
                lambda most: nn.utils.clip_grad_norm_(plain.parameters(), most),
                truth,
                plain_optimizers,
                case.clips,
            )
            if norm is not None and norm.isfinite():
                assert_same(norm, expected, f"norm of step {step}", tolerance)
            assert scaler.state_dict() == truth.state_dict(), f"step {step}"
            expected = dict(plain.named_parameters())
            for key, parameter in stage.named_parameters():
                what = f"{key} after step {step}"
                assert_same(parameter.detach(), expected[key].detach(), what, tolerance)
            seen.append((scale, has_overflow))
    return seen


CASES = {
    "gpipe": Case(),
    "zb-v": Case(schedule="zb-v"),
    "own loss": Case(style="own loss"),
    # Clipping by the norm of all would make the others' gradients NaN, in one process, too.
    "each kind": Case(optimizers="each kind", clips=False),
    "fused": Case(optimizers="fused", clips=False),
    "fused and clipping": Case(optimizers="fused"),
    "spike is tied": Case(tied=(1, 4)),
}


def check_training(bare):
    return {name: train(bare, case, name) for name, case in CASES.items()}


def test_training_with_a_scaler_equals_the_plain_model(ranks):
    of_ranks = ranks(2).run(check_training, world=False).values()
    for name, case in CASES.items():
        each_step = list(zip(*(of_rank[name] for of_rank in of_ranks), strict=True))
        scales = [{scale for scale, _ in of_step} for of_step in each_step]
        assert all(len(of_step) == 1 for of_step in scales), f"{name}: scales differ: {scales}"
        num_overflows = [sum(has_overflow for _, has_overflow in of_step) for of_step in each_step]
        where = 2 if case.tied else 1
        assert {where, 0} == set(num_overflows), f"{name}: ranks with an overflow: {num_overflows}"


# -- what is wrong -------------------------------------------------------------------------------


def misuse(bare, what):
    case = Case(spike=None)
    with stage_of(bare, what, make_model(case), [2, 4], loss_fn=F.mse_loss) as stage:
        scaler: Any = make_scaler(bare.device)
        if bare.rank == 1:
            scaler = {
                "other options": GradScaler(bare.device.type, init_scale=2.0, growth_interval=2),
                "disabled": GradScaler(bare.device.type, enabled=False),
                "no scaler": "float16",
            }.get(what, scaler)
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
    "other options": [r"the scaler's scale is 65536.0 on rank 0 and 2.0 on rank 1: give every"] * 2,
    "disabled": [r"the scaler's enabled is True on rank 0 and False on rank 1"] * 2,
    "no scaler": [r"rank 1 failed", r"stage.scaler\(\) takes a torch.amp.GradScaler, not .*str"],
    "no call": [r"is in step\(\) while rank 0 is in scaler\(\)"] * 2,
    "other scale": [r"the scaler's scale is 65536.0 on rank 0 and 2.0 on rank 1: give every"] * 2,
    "half": [r"rank 1 failed:\n.*in scaler.unscale_\(\)", r"Attempting to unscale FP16 gradients"],
}


def test_each_misuse_of_a_scaler_ends_every_rank_with_its_reason(ranks):
    for what, expected in MISUSES.items():
        errors = ranks(2).run(misuse, what, world=False).errors()
        for error, message in zip(errors, expected, strict=True):
            assert re.search(message, error.text), f"{what}: {error.text}"


def step_without_gradients(bare):
    with stage_of(bare, "none", make_model(Case(spike=None)), [2, 4], loss_fn=F.mse_loss) as stage:
        scaler = stage.scaler(make_scaler(bare.device))
        (optimizer,) = make_optimizers(stage, "one")
        with pytest.raises(AssertionError, match="No inf checks were recorded"):  # torch's own
            scaler.step(optimizer)
        stage.step(*make_batch(1))
        return scaler.get_scale()


def test_a_step_without_any_gradient_is_the_error_of_one_process(ranks):
    assert ranks(2).run(step_without_gradients, world=False).values() == [2.0**16] * 2


# -- what stays as in one process ----------------------------------------------------------------


class Noted(GradScaler):
    """A class derived from torch's, as users write them, too."""

    def update(self, new_scale=None):
        super().update(new_scale)
        self.num_updates = getattr(self, "num_updates", 0) + 1


def use_other_scalers(bare):
    """One that is off; one of the user's own class; one that scales several losses."""
    with stage_of(bare, "other", make_model(Case(spike=None)), [2, 4], loss_fn=F.mse_loss) as stage:
        (optimizer,) = make_optimizers(stage, "one")
        scaler: Any
        for scaler in (
            GradScaler(bare.device.type, enabled=False),
            Noted(bare.device.type, init_scale=8.0),
        ):
            before = [parameter.detach().clone() for parameter in stage.parameters()]
            assert stage.scaler(scaler) is scaler
            stage.scaler(scaler)
            gradients = []
            for style in ("step", "losses"):
                optimizer.zero_grad()
                if style == "step":
                    stage.step(*make_batch(1))
                else:
                    loss = F.mse_loss(stage(make_batch(1)[0]), make_batch(1)[1].to(bare.device))
                    losses: Any = [loss, (loss, loss)]
                    scaled, (again, *_) = scaler.scale(losses)
                    assert (
                        isinstance(scaled, Remote) == isinstance(again, Remote) == (not bare.rank)
                    )
                    scaled.backward()
                gradients.append([parameter.grad for parameter in stage.parameters()])
            assert_same(gradients[0], gradients[1], "gradients", 1e-6)
            scaler.step(optimizer)
            scaler.update()
            assert not any(map(torch.equal, before, stage.parameters()))
        return scaler.num_updates, scaler.get_scale()


def test_scalers_that_are_off_or_of_a_derived_class(ranks):
    assert ranks(2).run(use_other_scalers, world=False).values() == [(1, 8.0)] * 2


def step_with_loss_in_float16(bare, scale):
    """The scale alone overflows float16; times the share of a micro-batch it does not."""
    model = make_model(Case(spike=None)).half()
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


def step_with_float64_by_default(bare):
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with stage_of(bare, "float64", model, [1, 1], loss_fn=F.mse_loss) as stage:
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        scaler = stage.scaler(GradScaler(bare.device.type, init_scale=4.0, growth_interval=1))
        stage.step(torch.ones(2, 3), torch.ones(2, 3))
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()


def test_a_scaler_works_with_float64_as_the_default_dtype(ranks):
    assert ranks(2).run(step_with_float64_by_default, world=False).values() == [8.0, 8.0]
