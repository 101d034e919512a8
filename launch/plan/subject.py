"""What the command line of ``procpipe plan`` names: a model, a sample, a loss; and what it costs.

    mymodel:build           the attribute ``build`` of the module ``mymodel``

Modules are also looked for in the current folder. A function is called without arguments, and its
result is used. Each process that measures imports all of it, too.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from procpipe import NoChunk, sequential
from procpipe.balance import Inputs, profile_layers
from procpipe.model.cut import check_model
from procpipe.planner.costs import Table
from procpipe.torch_internals import pytree
from procpipe.words import counted

#: How long layers are measured, for each size of micro-batch; longer if a round takes longer.
_BUDGET_S = 0.5


class MistakeError(ValueError):
    """The user made a mistake; the message is one sentence."""


@dataclass(frozen=True)
class Subject:
    """A model and what it is trained with."""

    model: nn.Sequential
    inputs: Inputs  # of a mini-batch
    target: Any  # its target, None if there is none
    loss_fn: Callable[..., Any]
    batch: int  # its samples

    def of_size(self, num_samples: int, *, is_for_stage: bool = False) -> tuple[Inputs, Any]:
        """Return inputs and target of so many samples, for the layers or for a stage.

        From the start again if there are not enough samples.
        """

        def resized(leaf: Any) -> Any:
            if isinstance(leaf, NoChunk):
                return leaf if is_for_stage else leaf.tensor
            if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == self.batch != num_samples:
                return leaf[torch.arange(num_samples, device=leaf.device) % self.batch]
            return leaf

        given = self.inputs.values, self.inputs.named, self.target
        values, named, target = pytree.tree_map(resized, given, is_leaf=_is_whole)
        return Inputs(*values, **named), target

    def table(
        self, samples: int, device: torch.device | None = None, flops_per_s: float | None = None
    ) -> Table:
        """Measure the layers on a micro-batch of so many samples; or estimate, by FLOPs.

        Raises:
            MistakeError: the model cannot be run on so many samples.
        """
        inputs, target = self.of_size(samples)
        how: dict[str, Any] = {"device": device, "flops_per_s": flops_per_s, "timeout": _BUDGET_S}
        try:
            return profile_layers(self.model, inputs, target=target, loss_fn=self.loss_fn, **how)
        except Exception as error:
            where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            reason = f"{where}: {type(error).__name__}: {error}"
            if flops_per_s is not None:
                raise MistakeError(
                    f"the model cannot be run without values{reason}; have it measured on real "
                    "ones: procpipe plan mymodel:build --sample mymodel:sample, where build() "
                    "returns hf.sequential(model)"
                ) from error
            raise MistakeError(
                f"the model cannot be run on a micro-batch of {counted(samples, 'sample')}{reason}"
                "; if these are too few, give smaller numbers of --chunks"
            ) from error


def load(model: str, sample: str, loss: str, is_cut: bool = False) -> Subject:
    """Import what is named; with ``is_cut``, cut an ordinary module with the sample.

    Raises:
        MistakeError: it is not there, or not what it should be.
    """
    module = _made(model, "the model")
    inputs, target = _mini_batch(_made(sample, "the sample"))
    loss_fn = load_loss(loss)
    leaves = pytree.tree_leaves((inputs.values, inputs.named), is_leaf=_is_whole)
    batched = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() and len(leaf))
    if (first := next(batched, None)) is None:
        raise MistakeError(f"the sample, {sample}, holds no tensor with samples in dim 0")
    if is_cut:
        whole, _ = Subject(module, inputs, target, loss_fn, len(first)).of_size(len(first))
        try:
            module = sequential(module, *whole.values, **whole.named)
        except Exception as error:  # of the model's own code, too
            reason = f"{type(error).__name__}: {error}"
            raise MistakeError(f"{model} cannot be cut: {reason}") from error
    if not isinstance(module, nn.Sequential):
        raise MistakeError(
            f"{model} is a {type(module).__qualname__}, but the model must be an "
            "nn.Sequential, or a function without arguments that returns one; --any cuts others"
        )
    try:
        check_model(module)
    except ValueError as error:
        raise MistakeError(str(error)) from error
    return Subject(module, inputs, target, loss_fn, len(first))


def load_loss(path: str) -> Any:
    """Import a loss function; ``MistakeError`` as for :func:`load`."""
    loss_fn = _named(path, "the loss")
    if not callable(loss_fn):
        raise MistakeError(f"{path} is {loss_fn!r}, but the loss must be a function")
    return loss_fn


def _is_whole(value: Any) -> bool:
    return isinstance(value, NoChunk)


def _made(path: str, what: str) -> Any:
    """Return what a path names; a function is called."""
    value = _named(path, what)
    if not callable(value) or isinstance(value, nn.Module):
        return value
    try:
        return value()
    except (Exception, SystemExit) as error:
        raise MistakeError(f"{what}, {path}(), raised {type(error).__name__}: {error}") from error


def _named(path: str, what: str) -> Any:
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
    try:
        return pkgutil.resolve_name(path)
    except (Exception, SystemExit) as error:
        raise MistakeError(
            f"{what}, {path}, cannot be imported ({type(error).__name__}: {error}): give "
            f"MODULE:NAME, as in mymodel:build, of a module that is installed or in {folder}"
        ) from error


def _mini_batch(sample: Any) -> tuple[Inputs, Any]:
    """Return inputs and target of an input, ``Inputs`` of several, or a pair with a target."""
    target = None
    if isinstance(sample, (tuple, list)):
        if len(sample) != 2:
            raise MistakeError(
                f"the sample is a {type(sample).__name__} of {len(sample)}, but must be an input "
                "or (input, target); several inputs go into procpipe.balance.Inputs(…)"
            )
        sample, target = sample
    return (sample if isinstance(sample, Inputs) else Inputs(sample)), target
