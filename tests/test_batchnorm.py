"""DeferredBatchNorm ends each mini-batch with the statistics of nn.BatchNorm for all of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from procpipe.batchnorm import DeferredBatchNorm
from tests.cases import for_each

SHAPES = {nn.BatchNorm1d: (10, 3), nn.BatchNorm2d: (10, 3, 4, 2), nn.BatchNorm3d: (10, 3, 2, 2, 2)}
KINDS: Any = pytest.mark.parametrize("kind", SHAPES, ids=lambda kind: kind.__name__)


def batches(shape: Sequence[int], num: int = 3, seed: int = 0) -> list[Tensor]:
    """Mini-batches with another mean and scale in each sample."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    each_sample = (shape[0], *(1 for _ in shape[1:]))
    return [normal(*shape) * normal(*each_sample) + normal(*each_sample) for _ in range(num)]


def feed(norm: DeferredBatchNorm, batch: Tensor, sizes: Sequence[int]) -> Tensor:
    """Run one mini-batch through the layer as the pipeline does."""
    norm.begin()
    outputs = [norm(micro_batch) for micro_batch in batch.split(list(sizes))]
    norm.commit()
    return torch.cat(outputs)


def assert_same_state(norm: nn.Module, expected: nn.Module, tolerance: float = 1e-12) -> None:
    state, expected_state = norm.state_dict(), expected.state_dict()
    assert list(state) == list(expected_state)
    torch.testing.assert_close(state, expected_state, rtol=tolerance, atol=tolerance)


@KINDS
@for_each(
    ("momentum", "sizes"),
    product([0.1, 0.9, None], [[10], [5, 5], [4, 4, 2], [2, 2, 2, 2, 2]]),
)
def test_running_statistics_are_those_of_the_whole_mini_batch(
    kind: Any, momentum: float | None, sizes: list[int]
) -> None:
    plain = kind(3, momentum=momentum, dtype=torch.float64)
    deferred = DeferredBatchNorm(3, momentum=momentum, dtype=torch.float64)
    for batch in batches(SHAPES[kind]):
        plain(batch)
        feed(deferred, batch, sizes)
        assert_same_state(deferred, plain)
    assert deferred.num_batches_tracked == 3


def test_statistics_are_precise_where_squares_would_cancel() -> None:
    batch = 1e8 + torch.arange(8.0, dtype=torch.float64).view(8, 1)
    norm = DeferredBatchNorm(1, momentum=1.0, dtype=torch.float64)
    feed(norm, batch, [3, 3, 2])
    assert norm.running_var is not None
    assert norm.running_var.item() == pytest.approx(6.0, rel=1e-12)


def test_an_unfinished_mini_batch_is_forgotten() -> None:
    first, second = batches((10, 3), num=2)
    plain, deferred = nn.BatchNorm1d(3).double(), DeferredBatchNorm(3).double()

    deferred.begin()
    deferred(first[:5])  # ... and an error elsewhere ends the mini-batch
    deferred.eval()
    feed(deferred, second, [5, 5])
    deferred.train()
    assert_same_state(deferred, plain)

    plain(second)
    feed(deferred, second, [5, 5])
    assert_same_state(deferred, plain)


@for_each("dtype", [torch.float16, torch.bfloat16])
@for_each("is_module_low", [False, True])
def test_low_precision_is_added_up_in_float32(dtype: torch.dtype, is_module_low: bool) -> None:
    (batch,) = (batch.float() for batch in batches((64, 3, 2), num=1))
    low = batch.to(dtype).requires_grad_()
    plain, deferred = nn.BatchNorm1d(3, momentum=1.0), DeferredBatchNorm(3, momentum=1.0)
    if is_module_low:
        deferred.to(dtype)
    deferred.begin()
    outputs = [deferred(micro_batch) for micro_batch in low.split(2)]
    moments = deferred._moments
    assert moments is not None
    assert {tensor.dtype for tensor in moments[1:]} == {torch.float32}
    deferred.commit()
    torch.cat(outputs).sum().backward()
    plain(low.detach().float())

    assert outputs[0].dtype == dtype
    assert deferred.weight.grad is not None
    assert deferred.weight.grad.dtype == deferred.weight.dtype
    expected = plain if not is_module_low else plain.to(dtype)
    assert_same_state(deferred, expected, tolerance=1e-5)


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}], ids=str)
def test_without_parameters_or_statistics(options: dict[str, bool]) -> None:
    (batch,) = batches((10, 3), num=1)
    plain = nn.BatchNorm1d(3, dtype=torch.float64, **options)
    deferred = DeferredBatchNorm(3, dtype=torch.float64, **options)
    assert torch.equal(feed(deferred, batch, [10]), plain(batch))
    assert_same_state(deferred, plain)
    assert torch.allclose(deferred.eval()(batch), plain.eval()(batch), rtol=1e-12)


def test_input_without_channels() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\): give it at least 2 dimensions"):
        DeferredBatchNorm(3)(torch.ones(3))


def test_convert_keeps_everything_but_the_class() -> None:
    others = DeferredBatchNorm(2), nn.InstanceNorm2d(2), nn.SyncBatchNorm(3)
    norm = nn.BatchNorm2d(3, eps=1e-3, momentum=None).eval()
    bare = nn.BatchNorm1d(2, affine=False, track_running_stats=False)
    model = nn.Sequential(nn.Sequential(nn.Conv2d(1, 3, 1), norm, norm), bare, *others)
    expected = model.state_dict(keep_vars=True)

    assert DeferredBatchNorm.convert_deferred_batch_norm(model) is model

    state = model.state_dict(keep_vars=True)
    assert list(state) == list(expected)
    assert all(state[key] is expected[key] for key in expected)
    converted: Any = model[0][1]  # type: ignore[index]
    assert type(converted) is type(model[1]) is DeferredBatchNorm
    assert converted is model[0][2]  # type: ignore[index]
    assert (converted.eps, converted.momentum, converted.training) == (1e-3, None, False)
    assert (converted.affine, converted.track_running_stats) == (True, True)
    assert model[1].training
    assert tuple(model.children())[2:] == others


class Activated(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def test_convert_leaves_forwards_of_their_own() -> None:
    model = nn.Sequential(nn.SyncBatchNorm(3), Activated(3))
    DeferredBatchNorm.convert_deferred_batch_norm(model)
    assert [type(layer) for layer in model] == [nn.SyncBatchNorm, Activated]


def test_convert_keeps_hooks() -> None:
    norm, seen = nn.BatchNorm1d(3), list[Any]()
    norm.register_forward_hook(lambda *given: seen.append(given))
    DeferredBatchNorm.convert_deferred_batch_norm(norm)(torch.ones(2, 3))
    assert len(seen) == 1
