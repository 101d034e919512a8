"""Balances from parameters and estimated work, without a run on real data."""

from __future__ import annotations

import copy
import random
import re
import resource
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe.balance import Inputs, balance_by_size
from procpipe.balance.balances import estimated_balance
from procpipe.planner.divide import divide
from procpipe.skip import pop, skippable, stash
from tests.dist.stages import assert_same


def balance_of(module: nn.Sequential, num_partitions: int = 2, sample: Any = None) -> list[int]:
    """Return the balance, which must not depend on the device of the model."""
    found, basis = estimated_balance(num_partitions, module, sample)
    with torch.device("meta"):
        on_meta = copy.deepcopy(module).to("meta")
    on_meta.__dict__.update(module.__dict__ | {"_modules": on_meta._modules})
    assert estimated_balance(num_partitions, on_meta, sample) == (found, basis)
    assert "by parameters and estimated work" in basis
    return found


def layers(*sizes: int) -> list[nn.Module]:
    return [nn.Linear(size, size, bias=False) for size in sizes]


class Repeated(nn.Linear):
    """Has the work of several layers, and the parameters of one."""

    def __init__(self, times: int) -> None:
        super().__init__(64, 64)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = super().forward(x)
        return x


class Fails(nn.Linear):
    """Cannot run on the meta device."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


@skippable(stash=["x"])
class Stash(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        yield stash("x", x)
        return super().forward(x)


@skippable(pop=["x"])
class Pop(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("x")
        return super().forward(x) + skip


class Named(nn.Embedding):
    def forward(self, ids: Tensor, *, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids) * mask.unsqueeze(-1)


def test_parameters_and_work_are_divided() -> None:
    even, uneven = (nn.Linear(8, 8) for _ in range(6)), map(Repeated, (1, 1, 1, 1, 40, 1))
    assert balance_of(nn.Sequential(*even), 3, torch.ones(2, 8)) == [2, 2, 2]
    assert balance_of(nn.Sequential(*uneven), 3, torch.ones(2, 64)) == [4, 1, 1]
    # A convolution computes much with few parameters, and a linear layer little with many.
    images = nn.Sequential(
        *(nn.Conv2d(num, 16, 3, padding=1) for num in (3, 16, 16)),
        *(nn.Flatten(), nn.Linear(16 * 32 * 32, 10)),
    )
    assert balance_of(images, 2, torch.ones(2, 3, 32, 32)) == [2, 3]
    num_parameters = [sum(p.numel() for p in layer.parameters()) for layer in images]
    assert divide(num_parameters, 2) == [3, 2]


def test_an_input_is_given_or_the_models_own() -> None:
    model = nn.Sequential(Named(3, 4), *layers(4, 4))
    ids, mask = torch.zeros(3, 7, dtype=torch.long), torch.ones(3, 7)
    batch = {"ids": ids, "mask": mask, "labels": ids}
    for name, sample in (("dict", batch), ("Inputs", Inputs(ids, mask=mask))):
        assert balance_of(model, sample=sample) == [2, 1], name
        assert balance_by_size(1, model, sample) == [3], name
    model.sample = {"ids": ids.to("meta"), "mask": mask.to("meta")}  # type: ignore[assignment]
    assert balance_of(model) == [2, 1]
    assert "(3, 7) torch.int64, (3, 7) torch.float32" in estimated_balance(2, model)[1]

    pair = nn.Sequential(nn.Bilinear(3, 4, 5), nn.Linear(5, 5))
    pair.sample = (torch.ones(2, 3), torch.ones(2, 4))  # type: ignore[assignment]
    assert balance_of(pair) == [1, 1]
    a_layer = nn.Sequential()
    a_layer.add_module("sample", nn.Linear(3, 3))
    a_layer.add_module("other", nn.Linear(3, 3))
    assert "no input is known" in estimated_balance(2, a_layer)[1]


def test_skips_and_shared_parameters() -> None:
    model = nn.Sequential(Stash(16, 16), *layers(16, 16, 16, 16), Pop(16, 16))
    assert balance_of(model, sample=torch.ones(2, 16)) == [3, 3]
    tied = nn.Sequential(nn.Embedding(50, 16), *layers(16), nn.Linear(16, 50, bias=False))
    tied[2].weight = tied[0].weight
    assert balance_of(tied, sample=torch.zeros(2, 4, dtype=torch.long)) == [2, 1]


def test_parameters_alone_where_no_input_is_known_or_none_runs() -> None:
    norms = nn.Sequential(*[nn.LayerNorm(n) for n in (300, 100, 100, 100)])
    for model, sample, balance, reason in (
        (norms, None, [1, 3], r"no input is known \(give sample=x"),
        (nn.Sequential(*[nn.ReLU() for _ in range(4)]), None, [2, 2], "no input is known"),
        (
            nn.Sequential(nn.Linear(4, 4), Fails(4, 4), nn.Linear(4, 24)),
            torch.ones(2, 4),
            [2, 1],
            r"cannot run on the meta device \(\w+ while layer '1' \(Fails\) was profiled on meta: ",
        ),
    ):
        found, basis = estimated_balance(2, model, sample)
        assert found == balance
        assert re.search(f"^balance .*, by parameters alone, as .*{reason}", basis), basis
        assert "\n" not in basis


class Draws(nn.Linear):
    """Draws from all kinds of generators, and keeps tensors that are no buffers."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.generator = torch.Generator().manual_seed(1)
        self.table = torch.ones(4) * self.weight[0]  # a result, which cannot be copied
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if torch.rand(1) + torch.rand(1, generator=self.generator) + random.random() < 0:
            return x
        return F.dropout(super().forward(x), 0.5) * self.table


def test_nothing_of_the_model_changes() -> None:
    model = nn.Sequential(first := Draws(), nn.BatchNorm1d(4), Draws())
    model.sample = torch.rand(3, 4)
    model.eval()
    before = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), first.generator.get_state(), random.getstate()
    found, basis = estimated_balance(2, model)
    assert (found, "by parameters and estimated work" in basis) == ([1, 2], True)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(first.generator.get_state(), states[1])
    assert random.getstate() == states[2]
    assert first.num_calls == 0
    assert not any(module.training for module in model.modules())
    assert_same(model.state_dict(), before, "state")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_no_tensor_is_copied() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 13, 1 << 15), nn.Linear(1 << 15, 1 << 13))
    model.to_empty(device="cpu")  # 2 GB that take no memory until they are read or written
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert estimated_balance(2, model, torch.ones(2, 1 << 13))[0] == [1, 1]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kb < 100_000
