"""A Remote takes part in any loss code, and never has a value."""

from __future__ import annotations

import copy
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from procpipe.data.remote import Remote
from procpipe.errors import RemoteValueError
from tests.cases import case, for_each

T = torch.ones(4, 3)
LABELS = torch.tensor([0, 1, 2, 0])


class Calls:
    """Counts the runs of a backward pass."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def a_remote(backward: Callable[[], None] | None = None) -> Remote:
    return Remote(3, "the output of stage(input)", backward)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "cross_entropy": lambda r: F.cross_entropy(r, LABELS),
    "keyword": lambda r: F.mse_loss(input=T, target=r),
    "module": lambda r: nn.CrossEntropyLoss(label_smoothing=0.1)(r, LABELS),
    "module, swapped": lambda r: nn.MSELoss()(T, r),
    "softmax": lambda r: nn.Softmax(dim=1)(r),
    "sequential of losses": lambda r: nn.Sequential(nn.Flatten(), nn.ReLU())(r),
    "linear": lambda r: F.linear(r, T),
    "item of a dict": lambda r: F.mse_loss(r["a"], T),
    "two items": lambda r: F.mse_loss(r[0], T) + F.mse_loss(r[1], T),
    "slice": lambda r: r[:, -1],
    "mask": lambda r: r[LABELS > 0],
    "index by a remote": lambda r: T[r],
    "attribute": lambda r: r.logits,
    "method": lambda r: r.float().view(-1, 3).argmax(1),
    "transposed": lambda r: r.T.mT,
    "stack": lambda r: torch.stack([T, r, r]),
    "cat in a dict": lambda r: torch.cat(tensors=(T, r), dim=0),
    "where": lambda r: torch.where(r > 0, r, T),
    "where condition": lambda r: torch.where(T > 0, T, r),
    "tensor + remote": lambda r: T + r,
    "remote + tensor": lambda r: r + T,
    "number * remote": lambda r: 2 * r,
    "remote / number": lambda r: r / 4,
    "numpy number": lambda r: np.float64(0.1) * r,
    "weighted sum": lambda r: r.mean() + 0.1 * r.sum(),
    "sum": lambda r: sum([r, r]),
    "minus": lambda r: -r,
    "power": lambda r: (1 - r) ** 2,
    "matmul": lambda r: T.T @ r @ T,
    "comparison": lambda r: (r.argmax(1) == LABELS).float().mean(),
    "tensor == remote": lambda r: torch.arange(4) == r.argmax(1),
    "logic": lambda r: ~((r > 0) & (T > 0)) | (r != 0),
    "abs": lambda r: abs(r),
    "to the device of": lambda r: r.to("cpu", non_blocking=True).cpu(),
    "pad_sequence": lambda r: nn.utils.rnn.pad_sequence([r, T]),
    "einsum": lambda r: torch.einsum("bi,bi->b", r, T),
    "vmap-free norm": lambda r: torch.linalg.vector_norm(r),
    "maximum": lambda r: torch.maximum(T, r),
    "field of a result": lambda r: r.max(1).values,
    "stash the grad": lambda r: r.requires_grad_(),
}


def test_operations_give_a_remote_with_the_same_backward() -> None:
    for name, operation in OPERATIONS.items():
        with case(name):
            calls = Calls()
            result = operation(a_remote(calls))
            assert type(result) is Remote
            assert result.rank == 3
            assert result.requires_grad
            result.backward()
            assert calls.count == 1
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert type(operation(a_remote(calls))) is Remote


@for_each("name", ["iadd", "isub", "imul", "itruediv"])
def test_operators_in_place(name: str) -> None:
    change = getattr(operator, name)
    calls = Calls()
    assert type(change(a_remote(), 1.0)) is Remote
    loss = change(torch.tensor(1.0), a_remote(calls))
    assert type(loss) is Remote
    loss.backward()
    assert calls.count == 1


def test_a_change_in_place_of_a_remote_is_ignored() -> None:
    remote = a_remote()
    remote[T > 0] = 0.0
    assert type(remote.masked_fill_(T > 0, 0.0)) is Remote
    assert type(nn.ReLU(inplace=True)(remote)) is Remote


WRITES: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "copy_": lambda t, r: t.copy_(r),
    "setitem": lambda t, r: t.__setitem__(0, r),
    "setitem by index": lambda t, r: t.__setitem__(r, 0.0),
    "masked_scatter_": lambda t, r: t.masked_scatter_(t > 0, r),
    "out": lambda t, r: torch.add(r, 1, out=t),
}


@for_each("write", WRITES.values(), ids=WRITES.keys())
def test_writing_a_remote_into_a_tensor_of_this_rank_is_an_error(
    write: Callable[[torch.Tensor, Any], Any],
) -> None:
    with pytest.raises(RemoteValueError, match=r"into a tensor of this rank.*on rank 3"):
        write(torch.ones(2), a_remote())


READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda r: r.item(),
    "cpu item": lambda r: r.mean().cpu().item(),
    "tolist": lambda r: r.tolist(),
    "numpy": lambda r: r.detach().cpu().numpy(),
    "asarray": np.asarray,
    "float": float,
    "int": int,
    "complex": complex,
    "bool": bool,
    "if": lambda r: 1 if r > 0 else 0,
    "equal to itself": lambda r: bool(r == r),
    "is nan": lambda r: bool(torch.isnan(r)),
    "math.isnan": math.isnan,
    "max of a list": lambda r: max(r, 1.0),
    "len": len,
    "iter": list,
    "unpacking": lambda r: dict([r.max(1)]),
    "in": lambda r: 1 in r,
    "index": lambda r: [1, 2][r],
    "range": range,
    "shape": lambda r: r.shape,
    "size": lambda r: r.view(-1, r.size(-1)),
    "dim": lambda r: r.dim(),
    "ndim": lambda r: r.ndim,
    "numel": lambda r: r.numel(),
    "dtype": lambda r: r.dtype,
    "device": lambda r: T.to(r.device),
    "grad": lambda r: r.grad,
    "grad_fn": lambda r: r.grad_fn,
    "data_ptr": lambda r: r.data_ptr(),
    "hasattr": lambda r: hasattr(r, "shape"),
    "format": lambda r: f"{r:.3f}",
    "tensor": torch.tensor,
    "as_tensor": torch.as_tensor,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "autograd.grad": lambda r: torch.autograd.grad(r, [T]),
}


def test_reading_a_value_names_the_rank_and_the_call_that_fetches_it() -> None:
    message = r"on rank 3 \(the output of stage\(input\)\): call stage\.fetch"
    for name, read in READS.items():
        with case(name), pytest.raises(RemoteValueError, match=message):
            read(a_remote())


def test_the_text_of_a_remote_names_its_value_and_rank() -> None:
    expected = "<Remote: the output of stage(input), on rank 3>"
    remote = a_remote()
    assert repr(remote) == str(remote) == f"{remote}" == expected
    assert repr(a_remote(Calls())).endswith("on rank 3, requires grad>")


def test_a_remote_has_no_attributes_of_protocols() -> None:
    for name in ("__deepcopy__", "__getstate_x__", "__array_interface__", "__len_hint__", "_x"):
        with pytest.raises(AttributeError, match="has no"):
            getattr(a_remote(), name)


def test_a_remote_is_hashable_as_tensors_are() -> None:
    remote = a_remote()
    assert {remote: 1}[remote] == 1


def test_backward_is_shared_and_runs_once() -> None:
    calls = Calls()
    output = a_remote(calls)
    first, second = output[0].sum(), (2 * output[1]).sum()
    first.backward(torch.ones(()), retain_graph=True)
    assert calls.count == 1
    for value in (first, second, output):
        with pytest.raises(RuntimeError, match=r"second time .* on rank 3 .* on the sum"):
            value.backward()
    assert calls.count == 1


def test_losses_of_several_outputs_go_backward_in_autograds_order() -> None:
    order: list[str] = []
    early = Remote(1, "early", lambda: order.append("early"))
    late = Remote(1, "late", lambda: order.append("late"))
    (early.sum() + late.sum() + early.mean()).backward()
    assert order == ["late", "early"]


def test_torch_autograd_backward() -> None:
    order: list[str] = []
    early = Remote(1, "early", lambda: order.append("early"))
    late = Remote(1, "late", lambda: order.append("late"))
    torch.autograd.backward([early.sum(), late.sum()])  # type: ignore[arg-type]
    assert order == ["late", "early"]

    single: Any = a_remote(calls := Calls())
    with torch.no_grad():
        torch.autograd.backward(single)
    assert calls.count == 1
    with pytest.raises(RuntimeError, match=r"1 tensors of this rank .* call backward\(\) on each"):
        torch.autograd.backward([a_remote(calls), T])  # type: ignore[arg-type]


def test_without_grad_there_is_no_backward() -> None:
    remote = a_remote(Calls())
    with torch.no_grad():
        under_no_grad = remote * 2
    for value in (a_remote(), remote.detach().sum(), remote.data, under_no_grad):
        assert not value.requires_grad
        with pytest.raises(RuntimeError, match=r"on rank 3 .* does not require grad"):
            value.backward()
    assert (remote.detach() + remote).requires_grad


def test_a_lost_gradient_is_a_warning() -> None:
    penalty = nn.Parameter(torch.ones(())) ** 2
    for combine in (lambda r: r + penalty, lambda r: penalty + r):
        with pytest.warns(UserWarning, match="gets no gradient here"):
            combine(a_remote(Calls()))
    with torch.no_grad():
        combine(a_remote(Calls()))
