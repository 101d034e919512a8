"""Imports what the command line of ``procpipe plan`` names: a model, a sample, a loss.

    mymodel:build           the attribute ``build`` of the module ``mymodel``

Modules are also looked for in the current folder. A function is called without arguments, and its
result is used. Each process that measures imports all of it, too.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from procpipe import NoChunk, sequential
from procpipe.balance import Inputs
from procpipe.torch_internals import pytree


class MistakeError(ValueError):
    """The user made a mistake; the message is one sentence."""


@dataclass(frozen=True)
class Named:
    """What the command line names: import paths, "" for none."""

    model: str
    sample: str
    loss: str = ""
    is_cut: bool = False  # whether the model is an ordinary module, to be cut with the sample
    batch: int | None = None  # how many samples the mini-batch gets; None for those of the sample


@dataclass(frozen=True)
class Subject:
    """A model and what it is trained with."""

    model: nn.Sequential
    inputs: tuple[Any, ...]  # a mini-batch's positional inputs
    target: Any  # its target, None if there is none
    loss_fn: Callable[..., Tensor | tuple[Tensor, Any]]
    batch: int  # samples in the mini-batch

    def resized(self, batch: int) -> Subject:
        """Return the same with another number of samples in the mini-batch."""
        inputs, target = (_resized(v, batch, self.batch) for v in (self.inputs, self.target))
        return replace(self, inputs=inputs, target=target, batch=batch)

    def micro_batch(self, num_samples: int) -> tuple[Inputs, Any]:
        """Return the inputs and the target of a micro-batch of this size."""
        inputs, target = (
            _resized(value, num_samples, self.batch, unwrap=True)
            for value in (self.inputs, self.target)
        )
        return Inputs(*inputs), target


def load(named: Named) -> Subject:
    """Import what is named.

    Raises:
        MistakeError: it is not there, or not what it should be.
    """
    model = _get(named.model, "the model", nn.Module)
    inputs, target = _mini_batch(_get(named.sample, "the sample", (Tensor, Inputs)))
    num_samples = _num_samples(named.sample, inputs)
    if named.is_cut:
        size = named.batch or num_samples
        try:
            model = sequential(model, *_resized(inputs, size, num_samples, unwrap=True))
        except Exception as error:  # of the model's own code, too
            reason = f"{type(error).__name__}: {error}"
            raise MistakeError(f"{named.model} cannot be cut: {reason}") from error
    if not isinstance(model, nn.Sequential):
        raise MistakeError(
            f"{named.model} is a {type(model).__qualname__}, but the model must be an "
            "nn.Sequential, or a function without arguments that returns one; --any cuts others"
        )
    loss_fn = load_loss(named.loss) if named.loss else stand_in_loss
    subject = Subject(model, inputs, target, loss_fn, num_samples)
    return subject.resized(named.batch or num_samples)


def load_loss(path: str) -> Any:
    """Import a loss function; ``MistakeError`` as for :func:`load`."""
    loss_fn = _attribute(path, "the loss")
    if not callable(loss_fn):
        raise MistakeError(f"{path} is {loss_fn!r}, but the loss must be a function")
    return loss_fn


def stand_in_loss(output: Any, target: Any = None) -> Tensor:
    """Return the mean of squares of all outputs, where no loss is named."""
    del target
    squares = [t.square().mean() for t in _tensors(output) if t.is_floating_point()]
    if not squares:
        raise MistakeError("the model's output holds no tensor of real numbers: give a --loss")
    return torch.stack(squares).sum()


def _get(path: str, what: str, types: Any) -> Any:
    """Return what a path names; a function that is not of the types is called."""
    value = _attribute(path, what)
    if isinstance(value, types) or not callable(value) or isinstance(value, nn.Module):
        return value
    try:
        return value()
    except (Exception, SystemExit) as error:
        raise MistakeError(f"{what}, {path}(), raised {type(error).__name__}: {error}") from error


def _attribute(path: str, what: str) -> Any:
    module_name, colon, names = path.partition(":")
    if not (module_name and colon and names):
        raise MistakeError(
            f"{what} is given as {path!r}, but must be MODULE:NAME, as in mymodel:build"
        )
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
    try:
        value: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name == module_name:
            reason = f"there is no module {module_name!r} (seen from {folder})"
        raise MistakeError(f"{what}, {path}, cannot be imported: {reason}") from error
    for name in names.split("."):
        if not hasattr(value, name):
            raise MistakeError(f"{what}, {path}, is not there: {module_name} has no {names!r}")
        value = getattr(value, name)
    return value


def _mini_batch(sample: Any) -> tuple[tuple[Any, ...], Any]:
    """Return inputs and target of an input, ``Inputs`` of several, or a pair with a target."""
    target = None
    if isinstance(sample, (tuple, list)):
        if len(sample) != 2:
            raise MistakeError(
                f"the sample is a {type(sample).__name__} of {len(sample)}, but must be an input "
                "or (input, target); several inputs go into procpipe.balance.Inputs(…)"
            )
        sample, target = sample
    return (sample.values if isinstance(sample, Inputs) else (sample,)), target


def _num_samples(path: str, inputs: Any) -> int:
    for tensor in _tensors(inputs):
        if tensor.dim() and len(tensor):
            return len(tensor)
    raise MistakeError(f"the sample, {path}, holds no tensor with samples in dim 0")


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested value, but not those in ``NoChunk``."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf


def _resized(value: Any, num_samples: int, batch: int, *, unwrap: bool = False) -> Any:
    """Return a value with so many samples, from the start again if there are not enough."""

    def resized(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if not leaf.dim() or len(leaf) != batch or num_samples == batch:
                return leaf
            return leaf[torch.arange(num_samples, device=leaf.device) % batch]
        return leaf.tensor if unwrap and isinstance(leaf, NoChunk) else leaf

    return pytree.tree_map(resized, value)
