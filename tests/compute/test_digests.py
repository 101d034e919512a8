"""A recomputation whose output differs is detected; rounding is no difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from procpipe.compute.digests import difference, digest_of
from tests.cases import for_each

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def compare(first: list[Tensor], again: list[Tensor], is_coarse: bool = False) -> str:
    return difference(digest_of(first), digest_of(again), is_coarse=is_coarse)


def outputs(dtype=torch.float32, shape=(70, 1000)):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]


@for_each("dtype", DTYPES, ids=str)
@for_each("is_coarse", [False, True])
def test_other_values_are_a_difference(dtype, is_coarse):
    torch.manual_seed(1)
    x, y = outputs(dtype)
    assert not compare([x, y], [x.clone(), y.clone()], is_coarse)
    noise = 1 + torch.finfo(dtype).eps * torch.randn(y.shape, dtype=torch.float64)
    assert not compare([y], [(y.double() * noise).to(dtype)])
    dropped = nn.functional.dropout(y, 0.1)
    for other in (y.roll(1), y.roll(1, 0), y.flip(0), dropped, y * 1.2, y.t()):
        assert compare([x, y], [x, other], is_coarse)


def test_a_difference_is_told_in_words():
    x, y = outputs()
    assert compare([x], [x + y]).startswith("values that differ by about 0.")
    assert compare([x], []) == "0 tensors instead of 1"


def test_what_rounding_leaves_of_numbers_that_cancel_is_no_difference():
    """Seen by the fuzzer: the mean of what a batch normalisation gives, 2e-17 and 4e-18."""
    x = torch.randn(5, dtype=torch.float64)
    assert not compare([x, torch.tensor(2e-17).double()], [x, torch.tensor(-4e-18).double()])
    assert compare([x, torch.tensor(2e-7).double()], [x, torch.tensor(-4e-8).double()])


def test_where_rounding_is_coarse_small_differences_count_as_rounding():
    _, y = outputs()
    assert compare([y], [y * 1.01])
    assert not compare([y], [y * 1.01], is_coarse=True)
    assert not compare([y, y.bfloat16()], [y * 1.01, y.bfloat16()])


def test_values_that_are_not_finite_are_equal_to_each_other_only():
    _, y = outputs()
    for value in (float("nan"), float("inf"), -float("inf")):
        changed = y.clone()
        changed[3, 7] = value
        assert not compare([changed], [changed.clone()])
        assert compare([changed], [y])
        assert compare([y], [changed])


@for_each(
    "tensor",
    [
        torch.empty(0, 3),
        torch.tensor(1.0),
        torch.arange(6.0).view(2, 3).T,
        torch.tensor([True, False]),
        torch.zeros(5),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(2, 2).to_sparse(),
        torch.empty(3, device="meta"),
        torch.ones(3).to(torch.float8_e4m3fn),
        nn.Parameter(torch.ones(2)),
        torch.full((3,), 1e300, dtype=torch.float64),
        torch.full((3, 3), 60_000.0, dtype=torch.float16),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_any_output_can_be_compared(tensor):
    assert not compare([tensor], [tensor])


class Sizes(TorchDispatchMode):
    """Records the most bytes of new memory in an operation's result."""

    most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
        made = [t.untyped_storage() for t in tensors_in(result)]
        new = [memory.nbytes() for memory in made if memory.data_ptr() not in given]
        self.most = max(self.most, *new, 0)
        return result


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def test_a_large_output_is_not_copied():
    logits = torch.randn(64, 5000)
    with Sizes() as sizes:
        digest_of([logits])
    assert sizes.most <= 8 * (64 + 5000)  # the random vectors


@pytest.mark.parametrize("autocast", [False, True])
def test_digests_do_not_depend_on_settings_nor_change_generators(autocast):
    x = torch.randn(50, 3, requires_grad=True)
    state = torch.get_rng_state()
    with torch.autocast("cpu", enabled=autocast), torch.device("meta"):
        again = digest_of([x * 2])
    assert not difference(digest_of([x * 2]), again, is_coarse=False)
    assert not again[0][1].requires_grad
    assert torch.equal(torch.get_rng_state(), state)
