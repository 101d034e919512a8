"""Ordinary modules, cut by ``procpipe.sequential`` and by torch's ``pipeline()``, in one process.

Each model of ``python -m tests.cutting`` that can be imported here is recorded with a mini-batch of
four samples, in train mode. What comes out is run as a whole, and must be the model: the output and
the gradients of every parameter, in float64

    recorded size     of that mini-batch
    another size      of one of three samples
    eval              the output in eval mode, after training

The outcome is "equal" (differences of rounding aside), "WRONG" if other numbers come out without an
error, or the kind of the error. torch's cuts the model in two, before the module in the middle.
"""

from __future__ import annotations

import argparse
import copy
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

import procpipe
from benchmarks.report import Report, Table
from tests.cutting.cases import CASES, Case

_RECORDED, _ANOTHER = 4, 3

#: The order of additions in gradients of what several layers use.
_TOLERANCE = 1e-12

_EQUAL, _WRONG = "equal", "WRONG"

#: From a model and its arguments to what runs in its place, and to the model's names of parameters.
Cutter = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


def configure(parser: argparse.ArgumentParser) -> None:
    names = [name for name, case in CASES.items() if case.is_here]
    parser.add_argument("--models", nargs="+", choices=names, default=names)


def run(options: argparse.Namespace) -> Report:
    columns = ("recorded size", "another size", "eval")
    found = {
        name: {
            who: outcomes(CASES[name], cutter)
            for who, cutter in (("sequential", _by_procpipe), ("pipeline()", _by_torch))
        }
        for name in options.models
    }
    headings = ["", *(f"{who}, {column}" for who in ("procpipe", "torch") for column in columns)]
    rows = [[name, *of["sequential"], *of["pipeline()"]] for name, of in found.items()]
    counts = [
        f"{title}: {sum(row[k] == _EQUAL for row in rows)} of {len(rows)} equal, "
        f"{sum(row[k] == _WRONG for row in rows)} wrong"
        for k, title in enumerate(headings)
        if k > 0
    ]
    title = f"any module: {len(rows)} models as they are, recorded with {_RECORDED} samples"
    return Report("any_module", [Table(title, headings, rows, ["s"] * 6, counts)], found)


def outcomes(case: Case, cutter: Cutter) -> list[str]:
    """Return what comes out of the recorded size, another size, and eval mode."""
    torch.manual_seed(0)
    plain = case.make().double().train()
    names = dict(plain.named_parameters(remove_duplicate=False))
    args, named = case.inputs(_RECORDED)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layers, name_of = cutter(copy.deepcopy(plain), args, named)
    except Exception as error:
        return [type(error).__name__] * 3

    def result(of: nn.Module, inputs: Any) -> list[Tensor]:
        """Return outputs, and the gradient of each of the model's parameters."""
        of.zero_grad()
        outputs = _outputs(of, inputs)
        torch.stack([output.square().mean() for output in outputs]).sum().backward()
        totals = {p: torch.zeros_like(p) for p in names.values()}
        for name, parameter in of.named_parameters():
            own = names[name if of is plain else name_of(name)]
            totals[own] += 0 if parameter.grad is None else parameter.grad
        return [*(output.detach() for output in outputs), *totals.values()]

    found = [
        _compared(partial(result, inputs=case.inputs(size)), plain, layers)
        for size in (_RECORDED, _ANOTHER)
    ]
    if False not in case.modes:
        return [*found, "-"]
    plain.eval()
    layers.eval()
    with torch.no_grad():
        inputs = case.inputs(_RECORDED)
        return [*found, _compared(partial(_outputs, inputs=inputs), plain, layers)]


def _by_procpipe(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    layers = procpipe.sequential(model, *args, **named)
    return layers, layers.keys


def _by_torch(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    from torch.distributed.pipelining import SplitPoint, pipeline

    names = _called(copy.deepcopy(model), args, named)
    middle = names[len(names) // 2]
    made = pipeline(model, args, named, {middle: SplitPoint.BEGINNING})
    made.executor = fx.Interpreter(made.split_gm)  # type: ignore[assignment]  # its own detaches
    # Copies of a parameter ("block@1.0@2.weight"), whose gradients a user adds up, have one name.
    return made, lambda name: re.sub(r"@\d+", "", name.removeprefix("split_gm.")).partition(".")[2]


def _called(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> list[str]:
    """Return the names of the modules with parameters of their own, in the order of their calls."""
    found: dict[str, None] = {}
    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(partial(_note, found, name))
    model(*args, **named)
    return list(found)


def _note(found: dict[str, None], name: str, *_: Any) -> None:
    found[name] = None


def _outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    """Return the floating-point tensors of what a model returns, however it nests them."""
    args, named = inputs
    leaves = torch.utils._pytree.tree_leaves(model(*args, **named))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _compared(result_of: Callable[[nn.Module], list[Tensor]], plain: nn.Module, cut: Any) -> str:
    expected = result_of(plain)
    try:
        found = result_of(cut)
    except Exception as error:
        return type(error).__name__
    pairs = [*zip(found, expected, strict=False)] if len(found) == len(expected) else []
    is_equal = bool(pairs) and all(
        a.shape == b.shape and torch.allclose(a, b, _TOLERANCE, _TOLERANCE) for a, b in pairs
    )
    return _EQUAL if is_equal else _WRONG
