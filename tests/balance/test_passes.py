"""Passes over layers, one at a time: what they measure, and what they must not change."""

from __future__ import annotations

import copy
import itertools
import time
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from procpipe.balance import balance_by_time, profile_layers
from procpipe.balance.profile import seconds_of
from procpipe.errors import BoundaryError
from tests.balance.layers import Clock, Taking, float32, held_bytes, layer_times
from tests.compute.segments import Do
from tests.dist.stages import assert_same
from tests.held import hold_for


def conv_model():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(), nn.Flatten()
    )


def profiled(module, sample):
    return list(profile_layers(module, sample, timeout=0).layers)


# -- times ----------------------------------------------------------------------------------------


def test_forward_and_backward_count():
    clock = Clock()
    layers = [Taking(clock, [1.0] * 2, 2.0), Taking(clock, [0.5] * 2, 4.0)]
    sample = torch.ones(1, requires_grad=True)

    assert layer_times(nn.Sequential(*layers), sample, clock=clock) == [3.0, 4.5]


def test_no_backward_where_nothing_requires_a_gradient():
    clock = Clock()
    layers = [Taking(clock, [1.0] * 2, 2.0), nn.Linear(1, 1), Taking(clock, [1.0] * 2, 2.0)]

    times = layer_times(nn.Sequential(*layers), torch.ones(1), clock=clock)

    assert times == [1.0, 0.0, 3.0]


def test_the_median_after_a_round_to_warm_up():
    clock = Clock()
    layer = Taking(clock, [100.0, 1.0, 9.0, 2.0], 0.0)

    # Rounds begin until 111 s have passed: at 0 (not counted), 100, 101 and 110, not at 112.
    assert layer_times(nn.Sequential(layer), torch.ones(1), timeout=111, clock=clock) == [2.0]


def test_the_start_of_a_task_does_not_count():
    ticks = itertools.count()  # each look at the clock takes a second
    sample = torch.ones(1, requires_grad=True)

    times = layer_times(nn.Sequential(nn.Linear(1, 1)), sample, clock=lambda: next(ticks))

    assert times == [0.0]


#: Longer than the host takes for a step on a busy machine.
HELD_S = 1.0


def measured(bare):
    """Return whether a measurement ended when the device had done the work, not when queued."""
    holds = []
    stream = torch.cuda.current_stream()
    seconds_of(lambda: holds.append(hold_for(stream, HELD_S)), bare.device, time.monotonic)
    return holds[0].is_set()


@pytest.mark.gpu
def test_a_measured_time_includes_the_devices_work(ranks):
    assert ranks(2).run(measured, world=False).values() == [True, True]


# -- sizes ----------------------------------------------------------------------------------------


def test_sizes_are_those_of_saved_tensors_and_outputs():
    model = nn.Sequential(
        nn.Linear(10, 20),  # saves its input, which is not its own
        nn.Sigmoid(),  # saves its output
        Do(lambda x: (x * 2).sin().cos()),  # saves x * 2 and its sine, and returns another
        nn.ReLU(inplace=True),  # makes nothing
        nn.Dropout(),  # saves its mask, as bool on CPU or float, and returns another
        Do(lambda x: x[:, :1]),  # a view
    )

    sizes = held_bytes(model, torch.rand(8, 10))

    tensor_bytes = float32(8, 20)
    assert sizes[:4] == [tensor_bytes, tensor_bytes, 3 * tensor_bytes, 0]
    assert sizes[4] in (tensor_bytes + tensor_bytes // 4, 2 * tensor_bytes)
    assert sizes[5] == 0


def test_tensors_that_a_layer_recomputes_are_not_held():
    def costly(x):
        return x.sin().cos().exp()

    plain = nn.Sequential(Do(costly))
    thrifty = nn.Sequential(Do(lambda x: checkpoint(costly, x, use_reentrant=False)))
    sample = torch.rand(10, requires_grad=True)

    assert held_bytes(plain, sample) == [2 * float32(10)]  # the sine, and the output
    assert held_bytes(thrifty, sample) == [float32(10)]


def test_meta_gives_the_sizes_of_the_cpu():
    model = conv_model()
    sample = torch.rand(4, 3, 8, 8)
    with torch.device("meta"):
        model_on_meta, sample_on_meta = conv_model(), torch.rand(4, 3, 8, 8)
    expected = held_bytes(model, sample)

    for a_model, a_sample in [
        (model_on_meta, sample_on_meta),
        (model_on_meta, sample),
        (model, sample_on_meta),
        (model, sample),
    ]:
        assert held_bytes(a_model, a_sample, "meta") == expected


@pytest.mark.gpu
def test_a_gpu_gives_the_sizes_of_the_cpu():
    model = nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.LayerNorm(20), nn.Linear(20, 3))
    sample = torch.rand(64, 10)

    cpu, gpu = held_bytes(model, sample), held_bytes(model, sample, "cuda")

    assert [abs(a - b) <= 4 * 64 * 2 for a, b in zip(cpu, gpu, strict=True)] == [True] * 4


# -- what is not changed --------------------------------------------------------------------------


def test_the_model_is_unchanged():
    model = conv_model()
    model(torch.rand(4, 3, 8, 8)).sum().backward()  # already has gradients
    model[1].eval()
    model[0].bias.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    gradients = copy.deepcopy([p.grad for p in model.parameters()])
    flags = [p.requires_grad for p in model.parameters()]
    sample, random_state = torch.rand(4, 3, 8, 8), torch.get_rng_state()

    profiled(model, sample)

    assert_same(model.state_dict(), before, "state")
    assert_same([p.grad for p in model.parameters()], gradients, "gradients")
    assert [p.requires_grad for p in model.parameters()] == flags
    assert [module.training for module in model] == [True, False, True, True, True]
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(module._forward_hooks for module in model.modules())


def test_the_sample_is_unchanged():
    sample = torch.rand(4, 3, 8, 8, requires_grad=True)
    sample.sum().backward()
    before = sample.detach().clone()

    profiled(nn.Sequential(nn.ReLU(inplace=True), Do(lambda x: x.mul_(2))), sample)

    assert torch.equal(sample, before)
    torch.testing.assert_close(sample.grad, torch.ones_like(sample), rtol=0, atol=0)
    assert sample.requires_grad


@pytest.mark.parametrize("surroundings", [torch.no_grad, torch.inference_mode])
def test_layers_run_in_training_mode(surroundings):
    modes = []

    class Noting(nn.Module):
        def forward(self, x):
            modes.append((self.training, torch.is_grad_enabled(), x.is_inference()))
            return x

    model = nn.Sequential(Noting()).eval()
    with surroundings():
        profiled(model, torch.rand(1))

    assert set(modes) == {(True, True, False)}
    assert not model.training
    assert not model[0].training


@pytest.mark.parametrize("is_autocast", [False, True])
def test_each_layer_is_copied_alone(is_autocast):
    """Autocast keeps casts of the weights, and so all copies, until the user's block ends."""
    copied = []

    class Counted(nn.Linear):
        num_copies = 0

        def __deepcopy__(self, memo):
            Counted.num_copies += 1
            copied.append(Counted.num_copies)
            new = Counted(2, 2)
            weakref.finalize(new.weight, count_down)
            return new

    def count_down():
        Counted.num_copies -= 1

    with torch.autocast("cpu", enabled=is_autocast):
        profiled(nn.Sequential(*(Counted(2, 2) for _ in range(4))), torch.rand(1, 2))

    assert set(copied) == {1}


# -- inputs, and values between layers ------------------------------------------------------------


def test_a_tuple_is_one_input():
    seen = set()

    def add(*inputs):
        seen.add(tuple(map(type, inputs)))
        return inputs[0][0] + inputs[0][1]

    profiled(nn.Sequential(Do(add), nn.Linear(2, 2)), (torch.rand(3, 2), torch.rand(3, 1)))

    assert seen == {(tuple,)}


def test_nested_values_between_layers():
    model = nn.Sequential(
        nn.Linear(2, 2),
        Do(lambda x: (x, [x.detach(), None], {"n": x.argmax(), "s": 0.5, "y": x * 2})),
        Do(lambda v: v[0] + v[1][0] * v[2]["s"] + v[2]["y"]),
    )

    assert len(profiled(model, torch.rand(3, 2))) == 3


def test_an_error_keeps_its_type_and_names_the_layer():
    model = nn.Sequential(nn.Identity())
    model.add_module("bad", nn.Linear(3, 3))

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        profiled(model, torch.rand(2, 2))
    assert caught.value.__notes__ == ["while layer 'bad' (Linear) was profiled on cpu"]


def test_a_value_that_cannot_be_sent_is_refused():
    with pytest.raises(BoundaryError, match=r"builtins\.set") as caught:
        profiled(nn.Sequential(Do(lambda x: {x})), torch.rand(1))
    assert "layer '0' (Do)" in caught.value.__notes__[0]


def test_no_time_on_meta():
    real, sample = nn.Sequential(nn.Linear(1, 1)), torch.rand(1)
    meta = nn.Sequential(nn.Linear(1, 1, device="meta"))

    for arguments in ((meta, sample), (real, sample.to("meta")), (real, sample, "meta")):
        model, x, *device = arguments
        with pytest.raises(ValueError, match=r"^on the meta device nothing .* balance by size"):
            balance_by_time(1, model, x, device=next(iter(device), None))
