"""What the fuzzer compares with: the plain model in one process, over the same micro-batches.

Uses no code of procpipe: a mini-batch is scattered by ``torch.chunk``, each micro-batch's loss
counts by its share, and gradients add up in the schedule's order: all forward first, then backward
in order, or in reverse as fill and drain does. Replicas are more micro-batches of one mini-batch,
except that each begins with the same buffers, and those of the first remain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tests.fuzz.case import NORMS, Case, Run, is_training
from tests.fuzz.data import Batch, loss_fn_of, loss_weight_of, mapped, own_loss, scores_of
from tests.fuzz.layers import build
from tests.fuzz.training import MAX_NORM, Training, grad_mode_of

#: The ``total_weight`` of "step with total", and ``accumulate`` of "step of several".
TOTAL, SEVERAL = 12.0, 3

#: Parameters that reach this have diverged.
LARGEST = 1e3


@dataclass
class Expected:
    """What a call gives.

    Attributes:
        loss: 0-dim, or None.
        weight: what the mini-batch of a step counts.
        outputs: of the model, of each replica; empty for a step.
        losses: the user's own, of each replica.
        gradients: of the floating inputs of each replica.
    """

    loss: Tensor | None = None
    weight: float = 0.0
    outputs: list[Any] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    gradients: list[list[Tensor | None]] = field(default_factory=list)


class Oracle:
    """The plain model of a case, for which :meth:`call` does what a run's ranks do together.

    Attributes:
        model: the model.
        training: its optimizer and more.
    """

    def __init__(self, case: Case) -> None:
        self.model = build(case)
        self.training = Training(self.model, case, self._clip)
        self._case = case
        self.begin(case.runs[0])
        self._loss_fn = loss_fn_of(case)
        self._weight = loss_weight_of(case)

    def begin(self, run: Run) -> None:
        """Begin a run, which has neither gradients nor a scaler's intermediate state."""
        self._chunks, self._is_reversed = run.chunks, run.schedule == "gpipe"
        self.model.zero_grad()
        self.training.renew_scaler()

    def between(self, act: str, numbers: tuple[int, ...]) -> Tensor | None:
        """Do what a run does between mini-batches; return the norm of gradients it has clipped."""
        if act == "chunks":
            (self._chunks,) = numbers
        else:
            return self.training.do(act, self.what_of(act, numbers))
        return None

    def has_gradients(self) -> bool:
        """Return whether any parameter has a gradient."""
        return any(p.grad is not None for p in self.model.parameters())

    def has_diverged(self) -> bool:
        """Return whether updates have made a parameter very large; they begin at 1 or less."""
        return not all(p.abs().max() < LARGEST for p in self.model.parameters())

    def what_of(self, act: str, numbers: tuple[int, ...]) -> Any:
        """Return what a number chooses: a norm, or the name of a parameter with a gradient."""
        if act == "clip":
            return NORMS[numbers[0]]
        if act == "overflow":
            named = [name for name, p in self.model.named_parameters() if p.grad is not None]
            return named[numbers[0] % len(named)]
        return None

    def call(self, act: str, shares: list[Batch]) -> Expected:
        """Do what a run does with a mini-batch, given that of each replica."""
        self.model.train(is_training(act))
        with grad_mode_of(act):
            for batch in shares if act.endswith("for inputs") else ():
                batch.require_gradients()
            found = Expected()
            if act.startswith("output"):
                found.outputs = [mapped(_detached, each) for each in self._outputs(shares)]
            elif act.startswith("loss"):
                found.outputs, found.losses = self._own_loss(shares)
            else:
                total = TOTAL if act == "step with total" else None
                divisor = SEVERAL if act == "step of several" else 1
                found.loss, found.weight = self._step(shares, total, divisor)
        found.gradients = [batch.take_gradients() for batch in shares]
        return found

    def _step(self, shares: list[Batch], total: float | None, divisor: int) -> tuple[Tensor, float]:
        """Do what ``stage.step`` does; return the loss, and what the mini-batch counts."""
        parts = [batch.parts(self._chunks) for batch in shares]
        flat = [part for of_replica in parts for part in of_replica]
        with torch.set_grad_enabled(self.model.training and torch.is_grad_enabled()):
            outputs = self._forward(parts)
            losses = [
                self._loss_fn(output) if part.target is None else self._loss_fn(output, part.target)
                for output, part in zip(outputs, flat, strict=True)
            ]
            weights = self._weights(flat)
            counts = math.fsum(weights)
            total = total or counts or 1.0  # if nothing counts, the loss is 0
            weighted = [
                loss * (weight / total)
                if weight
                else 0 * scores_of(self._case, output).sum()  # even if that loss is NaN
                for output, loss, weight in zip(outputs, losses, weights, strict=True)
            ]
        for loss in reversed(weighted) if self._is_reversed else weighted:
            if loss.requires_grad:
                self.training.scaled(loss / divisor).backward()
        result = weighted[0].detach()
        for loss in weighted[1:]:
            result = result + loss.detach()
        return result / divisor, counts

    def _outputs(
        self, shares: list[Batch], change: Callable[[Any], Any] = lambda output: output
    ) -> list[Any]:
        """Do what ``stage(input)`` does; return the output of each replica.

        ``change`` is called with that of each micro-batch, before they are put together.
        """
        parts = [batch.parts(self._chunks) for batch in shares]
        outputs = map(change, self._forward(parts))
        return [self._joined([next(outputs) for _ in of_replica]) for of_replica in parts]

    def _own_loss(self, shares: list[Batch]) -> tuple[list[Any], list[Tensor]]:
        """Do ``stage(input)`` and the user's own loss, backward; return outputs and losses.

        Each replica has its own; their gradients are averaged, weighted by samples.

        The graph is cut at the outputs, so that the micro-batches go backward in reverse.
        """
        pairs: list[list[tuple[Tensor, Tensor]]] = []

        def cut(tensor: Tensor) -> Tensor:
            leaf = tensor.detach().requires_grad_(tensor.requires_grad)
            pairs[-1].append((tensor, leaf))
            return leaf

        def cut_output(output: Any) -> Any:
            pairs.append([])
            return mapped(cut, output)

        outputs = self._outputs(shares, cut_output)
        num_samples = sum(share.num_samples for share in shares)
        losses = []
        for output, share in zip(outputs, shares, strict=True):
            losses.append(own_loss(self._case, output, share.target))
            if losses[-1].requires_grad:
                part = losses[-1] * (share.num_samples / num_samples)
                self.training.scaled(part).backward()
        for of_micro_batch in reversed(pairs):
            ready = [(root, leaf.grad) for root, leaf in of_micro_batch if leaf.grad is not None]
            if ready:
                roots, gradients = zip(*ready, strict=True)
                torch.autograd.backward(roots, gradients)
        return [mapped(_detached, each) for each in outputs], [loss.detach() for loss in losses]

    def _clip(self, norm_type: float) -> Tensor:
        gradients = [p for p in self.model.parameters() if p.grad is not None]
        return nn.utils.clip_grad_norm_(gradients, MAX_NORM, norm_type)

    def _forward(self, parts: list[list[Batch]]) -> list[Any]:
        """Return the outputs of the micro-batches of all replicas."""
        modules = {m: dict(m.named_buffers(recurse=False)) for m in self.model.modules()}
        before = {m: _clones(buffers) for m, buffers in modules.items()}
        first: dict[nn.Module, dict[str, Tensor]] = {}
        outputs = []
        with self._deferring():
            for of_replica in parts:
                outputs += [self._run(part) for part in of_replica]
                if len(parts) > 1:
                    now = {m: dict(m.named_buffers(recurse=False)) for m in modules}
                    first = first or now
                    for module, buffers in before.items():
                        _set_buffers(module, _clones(buffers))
            for module, buffers in first.items():
                _set_buffers(module, buffers)
        return outputs

    def _run(self, part: Batch) -> Any:
        first, *rest = self.model
        # A first layer that changes its input in place must not change the mini-batch.
        args, named = mapped(lambda tensor: tensor.clone(), (part.inputs, part.named))
        value = first(*args, **named)
        for layer in rest:
            value = layer(value)
        return value

    def _weights(self, parts: list[Batch]) -> list[float]:
        if self._weight is None:
            return [part.num_samples for part in parts]
        return [self._weight(part.target) for part in parts]

    def _joined(self, outputs: list[Any]) -> Any:
        """Put the micro-batches' outputs together."""
        if len(outputs) == 1 or self._case.head != "dict":
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        of_key = {key: [output[key] for output in outputs] for key in outputs[0]}
        first, second = zip(*of_key["l"], strict=True)
        return {
            "scores": torch.cat(of_key["scores"]),
            "ids": torch.cat(of_key["ids"]),
            "mean": torch.stack(of_key["mean"]),
            "none": None,
            "n": of_key["n"],
            "l": [torch.cat(first), (torch.cat([pair[0] for pair in second]),)],
        }

    @contextmanager
    def _deferring(self) -> Iterator[None]:
        """Update running statistics once, by the whole mini-batch, if the case defers it."""
        norms = [module for module in self.model.modules() if isinstance(module, _BatchNorm)]
        if not self._case.is_deferred or not self.model.training:
            norms = []
        seen: dict[nn.Module, list[Tensor]] = {norm: [] for norm in norms}
        handles = [
            norm.register_forward_pre_hook(lambda norm, args: seen[norm].append(args[0].detach()))
            for norm in norms
        ]
        # Each forward updates copies, since autograd may have saved the buffers.
        buffers = [dict(norm.named_buffers()) for norm in norms]
        for norm, of_norm in zip(norms, buffers, strict=True):
            _set_buffers(norm, _clones(of_norm))
        yield
        for norm, handle, of_norm in zip(norms, handles, buffers, strict=True):
            handle.remove()
            _set_buffers(norm, of_norm)
            _update(norm, torch.cat([x.flatten(2) for x in seen[norm]]))


@torch.no_grad()
def _update(norm: _BatchNorm, x: Tensor) -> None:
    """Update running statistics as ``nn.BatchNorm1d`` does for a whole mini-batch."""
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    factor = norm.momentum if norm.momentum is not None else 1 / norm.num_batches_tracked.item()
    for running, new in (
        (norm.running_mean, x.mean((0, 2))),
        (norm.running_var, x.var((0, 2), unbiased=True)),
    ):
        assert running is not None
        running.mul_(1 - factor).add_(new * factor)


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _clones(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in buffers.items()}


def _set_buffers(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        setattr(module, name, buffer)
