"""Balances of whole models, as in torchgpipe's own tests."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from procpipe import NoChunk
from procpipe.balance import Inputs, balance_by_size, balance_by_time, profile_layers
from procpipe.errors import BalanceError


class Busy(nn.Module):
    """Computes much more than the other layers."""

    def forward(self, x):
        for _ in range(2000):
            x = x + 0.5
        return x


class Expand(nn.Module):
    """Holds ``num_copies`` copies of its input until backward."""

    def __init__(self, num_copies):
        super().__init__()
        self.num_copies = num_copies

    def forward(self, x):
        for _ in range(self.num_copies):
            x = x + torch.rand_like(x, requires_grad=True)
        return x


def test_by_time():
    model = nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU(), nn.ReLU(), Busy())
    mirrored = nn.Sequential(Busy(), nn.ReLU(), nn.ReLU(), nn.ReLU(), nn.ReLU())
    sample = torch.rand(2, 2, requires_grad=True)

    assert balance_by_time(2, model, sample, timeout=0) == [4, 1]
    assert balance_by_time(2, mirrored, sample, timeout=0) == [1, 4]


def test_by_size_param_scale():
    class Tradeoff(nn.Module):
        def __init__(self, num_parameters, num_copies):
            super().__init__()
            self.parameter = nn.Parameter(torch.ones(num_parameters))
            self.expand = Expand(num_copies)

        def forward(self, x):
            return self.expand(x)

    model = nn.Sequential(*[Tradeoff(100 * k, 7 - k) for k in (1, 2, 3, 4, 5, 6)])
    sample = torch.rand(1, 100)

    assert balance_by_size(2, model, sample, param_scale=0) == [2, 4]
    assert balance_by_size(2, model, sample, param_scale=100) == [4, 2]


def test_chunks_divide_the_activations():
    model = nn.Sequential(nn.Linear(100, 100), *[nn.Sigmoid() for _ in range(5)])
    sample = torch.rand(200, 100)

    assert balance_by_size(2, model, sample, chunks=1) == [2, 4]
    assert balance_by_size(2, model, sample, chunks=200) == [1, 5]
    for chunks, scale in ((0, 2.0), (1, -1.0), (1, float("nan"))):
        with pytest.raises(ValueError, match=f"chunks is {chunks} and param_scale {scale}: give"):
            balance_by_size(2, model, sample, chunks=chunks, param_scale=scale)


def test_what_a_stage_does_not_scatter_is_whole():
    seen = []

    class Noting(nn.Module):
        def forward(self, x, table):
            seen.append((len(x), len(table)))
            return x

    inputs = Inputs(torch.rand(10, 2), NoChunk(torch.rand(5)))
    balance_by_size(1, nn.Sequential(Noting()), inputs, chunks=4)

    assert seen == [(3, 5)]


def test_by_size_on_meta_needs_no_memory():
    with torch.device("meta"):  # 4 TB of parameters, and activations of 4 GB a layer
        model = nn.Sequential(*[nn.Linear(500_000, 500_000) for _ in range(4)])
        sample = torch.empty(2_000, 500_000)

    assert balance_by_size(2, model, sample) == [2, 2]


@pytest.mark.parametrize("balance_by", [balance_by_time, balance_by_size])
def test_wrong_number_of_partitions_is_reported_before_any_layer_runs(balance_by):
    class Failing(nn.Module):
        def forward(self, x):
            raise AssertionError

    model = nn.Sequential(Failing(), Failing())

    with pytest.raises(BalanceError, match="cannot divide 2 layers into 3 partitions"):
        balance_by(3, model, torch.rand(1))
    with pytest.raises(BalanceError, match="cannot divide 2 layers into 0 partitions"):
        balance_by(0, model, torch.rand(1))


@pytest.mark.parametrize("profile", [profile_layers, balance_by_time, balance_by_size])
def test_a_model_that_is_not_sequential_is_refused(profile):
    arguments = nn.Linear(1, 1), torch.rand(1)
    with pytest.raises(TypeError, match=r"the model is a Linear: pass an nn\.Sequential"):
        profile(*([] if profile is profile_layers else [1]), *arguments)
