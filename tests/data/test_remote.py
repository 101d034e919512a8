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
from tests.cases import case

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


#: What loss code computes from sizes, and dtype and device, of a placeholder and of tensors here.
DESCRIPTIONS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda r: r.shape,
    "part of the shape": lambda r: operator.add((1, 2), r.shape[:-1]),
    "arithmetic": lambda r: (
        2 * r.size(0) % 3 - r.dim() // 2 + 7 // r.size(1) + 1.0 / r.size(0) + r.numel()
    ),
    "quotient and remainder": lambda r: divmod(r.size(0), 2)[0] + divmod(7, r.size(1))[1],
    "comparison": lambda r: r.size(0) > 3,
    "view": lambda r: LABELS.view(-1, r.size(-1)),
    "zeros of a shape": lambda r: torch.zeros(r.shape, device=r.device, dtype=r.dtype),
    "one_hot": lambda r: F.one_hot(LABELS, r.size(-1)).permute(1, 0).float(),
    "pad": lambda r: F.pad(LABELS, (0, r.size(1)), value=-100),
    "to device and dtype": lambda r: LABELS.to(device=r.device, dtype=r.dtype),
    "device type": lambda r: r.device.type,
}


def test_sizes_dtype_and_device_are_placeholders_without_backward() -> None:
    for name, describe in DESCRIPTIONS.items():
        with case(name):
            result = describe(a_remote(Calls()))
            assert type(result) is Remote
            assert result.rank == 3
            assert not result.requires_grad


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "cross_entropy": lambda r: F.cross_entropy(r, LABELS),
    "keyword": lambda r: F.mse_loss(input=T, target=r),
    "module": lambda r: nn.CrossEntropyLoss(label_smoothing=0.1)(r, LABELS),
    "item of a dict": lambda r: F.mse_loss(r["a"], T),
    "index by a remote": lambda r: T[r],
    "attribute": lambda r: r.logits,
    "method": lambda r: r.float().view(-1, 3).argmax(1),
    "stack": lambda r: torch.stack([T, r, r]),
    "where": lambda r: torch.where(r > 0, r, T),
    "tensor + remote": lambda r: T + r,
    "numpy number": lambda r: np.float64(0.1) * r,
    "sum": lambda r: sum([r, r]),
    "power": lambda r: (1 - r) ** 2,
    "matmul": lambda r: T.T @ r @ T,
    "tensor == remote": lambda r: torch.arange(4) == r.argmax(1),
    "logic": lambda r: ~((r > 0) & (T > 0)) | (r != 0),
    "field of a result": lambda r: r.max(1).values,
    "shifted": lambda r: r[..., : r.size(-2) - 1, :].contiguous(),
    "targets of its dtype": lambda r: F.mse_loss(r, T.to(r.dtype)),
    "stash the grad": lambda r: r.requires_grad_(),
    "tensor += remote": lambda r: operator.iadd(torch.tensor(1.0), r),
    "remote *= number": lambda r: operator.imul(r, 2.0),
    "method in place": lambda r: r.masked_fill_(T > 0, 0.0),
    "key of a dict": lambda r: {r: r}[r],
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


WRITES: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "copy_": lambda t, r: t.copy_(r),
    "setitem": lambda t, r: t.__setitem__(0, r),
    "out": lambda t, r: torch.add(r, 1, out=t),
}


def test_writing_a_remote_into_a_tensor_of_this_rank_is_an_error() -> None:
    for name, write in WRITES.items():
        message = r"into a tensor of this rank.*on rank 3"
        with case(name), pytest.raises(RemoteValueError, match=message):
            write(torch.ones(2), a_remote())


READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda r: r.item(),
    "asarray": np.asarray,
    "float": float,
    "bool": bool,
    "math.isnan": math.isnan,
    "len": len,
    "iter": list,
    "in": lambda r: 1 in r,
    "range": range,
    "ceil": lambda r: math.ceil(r.size(0) / 8),
    "slice by a size": lambda r: T[: r.size(0)],
    "grad_fn": lambda r: r.grad_fn,
    "data_ptr": lambda r: r.data_ptr(),
    "format": lambda r: f"{r:.3f}",
    "as_tensor": torch.as_tensor,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "autograd.grad": lambda r: torch.autograd.grad(r, [T]),
    "autograd.backward": lambda r: torch.autograd.backward([r.sum(), T.sum()]),
}


def test_reading_a_value_names_the_rank_and_the_call_that_fetches_it() -> None:
    message = (
        r"on rank 3 \(the output of stage\(input\)\): move this into loss_fn, or call stage\.fetch"
    )
    for name, read in READS.items():
        with case(name), pytest.raises(RemoteValueError, match=message):
            read(a_remote())


def test_the_text_of_a_remote_names_its_value_and_rank() -> None:
    expected = "<Remote: the output of stage(input), on rank 3>"
    remote = a_remote()
    assert repr(remote) == str(remote) == f"{remote}" == expected
    assert repr(a_remote(Calls())).endswith("on rank 3, requires grad>")


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


def test_values_that_no_rank_has_together() -> None:
    output: Any = a_remote(calls := Calls())
    target: Any = Remote(0, "entry 1 of the mini-batch", None, others=[3])
    results: Any = (F.mse_loss(output, target), F.mse_loss(target, output), target[output > 0])
    for result in results:
        assert result.rank == 3
        assert "the output of stage(input)" in str(result)
    F.mse_loss(target.view(-1, output.size(1)), output).backward()
    assert calls.count == 1
    assert (target + target).rank == 0

    input: Any = Remote(0, "entry 0 of the mini-batch", None)
    both = r"no rank has both\. .*\(x, x\), or use loss_fn"
    for combine in (
        lambda: F.mse_loss(output, input),
        lambda: F.mse_loss(input, target=output),
        lambda: input * output,
        lambda: output[input > 0],
        lambda: output.view(input.size(0), -1),
        lambda: torch.cat([T, output, target, input]),
    ):
        with pytest.raises(RemoteValueError, match=both) as caught:
            combine()
        assert "rank 3 (the output of stage(input))" in str(caught.value)
        assert "rank 0 (entry 0 of the mini-batch)" in str(caught.value)

    real = nn.Linear(3, 3)(T)
    on_both = (
        r"rank 0 \(entry 0 of the mini-batch\) with one of this rank \(computed from the output"
    )
    with pytest.raises(RemoteValueError, match=on_both + f".*{both}"):
        F.mse_loss(real, input)
    with torch.no_grad():
        F.mse_loss(real, input)
    F.mse_loss(real.detach(), input)


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
