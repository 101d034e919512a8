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


#: What loss code computes from sizes, and dtype and device, of a placeholder and of tensors here.
DESCRIPTIONS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda r: r.shape,
    "part of the shape": lambda r: operator.add((1, 2), r.shape[:-1]),
    "numel": lambda r: r.numel() // r.size(0),
    "arithmetic": lambda r: 2 * r.size(0) % 3 - r.dim() // 2 + 7 // r.size(1) + 1.0 / r.size(0),
    "quotient and remainder": lambda r: divmod(r.size(0), 2)[0] + divmod(7, r.size(1))[1],
    "comparison": lambda r: r.size(0) > 3,
    "view": lambda r: LABELS.view(-1, r.size(-1)),
    "reshape": lambda r: LABELS.reshape(r.shape),
    "expand": lambda r: LABELS.expand(2, r.size(0)),
    "repeat": lambda r: LABELS.repeat(r.size(0)),
    "zeros of a shape": lambda r: torch.zeros(r.shape, device=r.device, dtype=r.dtype),
    "arange": lambda r: torch.arange(r.size(1)),
    "eye": lambda r: torch.eye(r.size(1))[LABELS],
    "one_hot": lambda r: F.one_hot(LABELS, r.size(-1)).permute(1, 0).float(),
    "pad": lambda r: F.pad(LABELS, (0, r.size(1)), value=-100),
    "interpolate": lambda r: F.interpolate(T[None, None], size=r.shape[-2:], mode="nearest"),
    "to device and dtype": lambda r: LABELS.to(device=r.device, dtype=r.dtype),
    "type_as": lambda r: LABELS.type_as(r.detach()),
    "divide by": lambda r: T.sum() / r.size(0),
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
    "sequential of losses": lambda r: nn.Sequential(nn.Flatten(), nn.ReLU())(r),
    "item of a dict": lambda r: F.mse_loss(r["a"], T),
    "index by a remote": lambda r: T[r],
    "attribute": lambda r: r.logits,
    "method": lambda r: r.float().view(-1, 3).argmax(1),
    "transposed": lambda r: r.T.mT,
    "stack": lambda r: torch.stack([T, r, r]),
    "where": lambda r: torch.where(r > 0, r, T),
    "tensor + remote": lambda r: T + r,
    "number * remote": lambda r: 2 * r,
    "numpy number": lambda r: np.float64(0.1) * r,
    "weighted sum": lambda r: r.mean() + 0.1 * r.sum(),
    "sum": lambda r: sum([r, r]),
    "power": lambda r: (1 - r) ** 2,
    "matmul": lambda r: T.T @ r @ T,
    "comparison": lambda r: (r.argmax(1) == LABELS).float().mean(),
    "tensor == remote": lambda r: torch.arange(4) == r.argmax(1),
    "logic": lambda r: ~((r > 0) & (T > 0)) | (r != 0),
    "to the device of": lambda r: r.to("cpu", non_blocking=True).cpu(),
    "einsum": lambda r: torch.einsum("bi,bi->b", r, T),
    "vmap-free norm": lambda r: torch.linalg.vector_norm(r),
    "field of a result": lambda r: r.max(1).values,
    "view by its size": lambda r: r.view(-1, r.size(-1)),
    "flat cross_entropy": lambda r: F.cross_entropy(r.view(-1, r.size(-1)), LABELS.view(-1)),
    "shifted": lambda r: r[..., : r.size(-2) - 1, :].contiguous(),
    "mean by its size": lambda r: r.sum() / r.shape[0],
    "targets of its dtype": lambda r: F.mse_loss(r, T.to(r.dtype)),
    "stash the grad": lambda r: r.requires_grad_(),
    "tensor += remote": lambda r: operator.iadd(torch.tensor(1.0), r),
    "remote *= number": lambda r: operator.imul(r, 2.0),
    "method in place": lambda r: r.masked_fill_(T > 0, 0.0),
    "layer in place": lambda r: nn.ReLU(inplace=True)(r),
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
    "tolist": lambda r: r.tolist(),
    "asarray": np.asarray,
    "float": float,
    "bool": bool,
    "if": lambda r: 1 if r > 0 else 0,
    "is nan": lambda r: bool(torch.isnan(r)),
    "math.isnan": math.isnan,
    "len": len,
    "iter": list,
    "unpacking": lambda r: dict([r.max(1)]),
    "in": lambda r: 1 in r,
    "index": lambda r: [1, 2][r],
    "range": range,
    "unpacking a shape": lambda r: dict([r.shape]),
    "if size": lambda r: 1 if r.size(0) > 3 else 0,
    "equal shapes": lambda r: bool(r.shape == T.shape),
    "length of a shape": lambda r: len(r.shape),
    "ceil": lambda r: math.ceil(r.size(0) / 8),
    "slice by a size": lambda r: T[: r.size(0)],
    "grad": lambda r: r.grad,
    "grad_fn": lambda r: r.grad_fn,
    "data_ptr": lambda r: r.data_ptr(),
    "format": lambda r: f"{r:.3f}",
    "tensor": torch.tensor,
    "as_tensor": torch.as_tensor,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "autograd.grad": lambda r: torch.autograd.grad(r, [T]),
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
