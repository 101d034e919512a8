"""What the fuzzer compares with: the plain model in one process, over the same micro-batches.

It uses no code of procpipe: a mini-batch is scattered by ``torch.chunk``, each micro-batch's loss
counts by its share, and gradients add up in the schedule's order: all forward first, then backward
in order, or in reverse as fill and drain does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.fuzz_cases import Case
from benchmarks.fuzz_layers import NUM_CLASSES, TIME, WIDTH
from procpipe import NoChunk


@dataclass(frozen=True)
class Batch:
    """A mini-batch: a stage's arguments, and how they are split.

    Attributes:
        inputs: positional inputs; a tensor that is not split is in ``NoChunk``.
        target: for the loss function, or None.
        num_samples: the samples.
    """

    inputs: tuple[Any, ...]
    target: Any
    num_samples: int

    @classmethod
    def of(cls, case: Case, number: int, num_samples: int) -> Batch:
        """Make a case's mini-batch, the same for the same number."""
        generator = torch.Generator().manual_seed(case.seed + 7919 * number)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        inputs: tuple[Any, ...] = (randn(num_samples, TIME, WIDTH),)
        if case.inputs == "ids":
            inputs = (torch.randint(WIDTH, (num_samples, TIME), generator=generator),)
        elif case.inputs == "several":
            inputs = (*inputs, (randn(num_samples), None), 0.5, NoChunk(randn(WIDTH)))
        target: Any = None
        if case.loss == "classes":
            target = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
            target[0] = 1  # so that not all weights are 0
        elif case.loss != "none":
            target = randn(num_samples, NUM_CLASSES)
        if case.loss == "nested":
            target = {"y": target, "scale": NoChunk(randn(1)), "more": [0.5, None]}
        return cls(inputs, target, num_samples)

    def parts(self, chunks: int) -> list[tuple[tuple[Any, ...], Any, int]]:
        """Return each micro-batch's inputs, target and number of samples."""
        sizes = [len(part) for part in torch.empty(self.num_samples).chunk(chunks)]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        spans = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        return [
            (_part(self.inputs, span), _part(self.target, span), size)
            for span, size in zip(spans, sizes, strict=True)
        ]


class Plain:
    """The plain model, called as a stage is.

    Args:
        model: run as it is.
        case: with what options.
    """

    def __init__(self, model: nn.Sequential, case: Case) -> None:
        self.model = model
        self._case = case
        self._loss_fn = loss_fn_of(case)
        self._weight = loss_weight_of(case)

    def step(self, batch: Batch, chunks: int) -> Tensor:
        """Do what ``stage.step`` does."""
        has_grad = self.model.training and torch.is_grad_enabled()
        parts = batch.parts(chunks)
        with torch.set_grad_enabled(has_grad):
            outputs = self._forward(parts)
            losses = [
                self._loss_fn(output) if target is None else self._loss_fn(output, target)
                for output, (_, target, _) in zip(outputs, parts, strict=True)
            ]
            shares = self._shares(parts)
            weighted = [
                loss * share
                if share
                else 0 * _scores(output, self._case).sum()  # even if that loss is NaN
                for output, loss, share in zip(outputs, losses, shares, strict=True)
            ]
        for loss in reversed(weighted) if self._case.schedule == "gpipe" else weighted:
            if loss.requires_grad:
                loss.backward()
        total = weighted[0].detach()
        for loss in weighted[1:]:
            total = total + loss.detach()
        return total

    def output(self, batch: Batch, chunks: int) -> Any:
        """Do what ``stage(input)`` does."""
        output = self._joined(self._forward(batch.parts(chunks)))
        return _mapped(lambda tensor: tensor.detach(), output)

    def loss(self, batch: Batch, chunks: int) -> tuple[Any, Tensor]:
        """Do ``stage(input)`` and the user's own loss, backward; return output and loss.

        The graph is cut at the outputs, so that the micro-batches go backward in reverse.
        """
        outputs = self._forward(batch.parts(chunks))
        pairs: list[list[tuple[Tensor, Tensor]]] = []

        def cut(tensor: Tensor) -> Tensor:
            leaf = tensor.detach().requires_grad_(tensor.requires_grad)
            pairs[-1].append((tensor, leaf))
            return leaf

        leaves = []
        for output in outputs:
            pairs.append([])
            leaves.append(_mapped(cut, output))
        output = self._joined(leaves)
        loss = own_loss(self._case, output, batch.target)
        if loss.requires_grad:
            loss.backward()
        for of_micro_batch in reversed(pairs):
            ready = [(root, leaf.grad) for root, leaf in of_micro_batch if leaf.grad is not None]
            if ready:
                roots, gradients = zip(*ready, strict=True)
                torch.autograd.backward(roots, gradients)
        return _mapped(lambda tensor: tensor.detach(), output), loss.detach()

    def _forward(self, parts: list[tuple[tuple[Any, ...], Any, int]]) -> list[Any]:
        with self._deferring():
            return [self._run(inputs) for inputs, _, _ in parts]

    def _run(self, inputs: tuple[Any, ...]) -> Any:
        first, *rest = self.model
        # A first layer that changes its input in place must not change the mini-batch.
        value = first(*_mapped(lambda tensor: tensor.clone(), inputs))
        for layer in rest:
            value = layer(value)
        return value

    def _shares(self, parts: list[tuple[tuple[Any, ...], Any, int]]) -> list[float]:
        if self._weight is None:
            weights: list[float] = [size for _, _, size in parts]
        else:
            weights = [self._weight(target) for _, target, _ in parts]
        return [weight / math.fsum(weights) for weight in weights]

    def _joined(self, outputs: list[Any]) -> Any:
        """Put the micro-batches' outputs together."""
        if len(outputs) == 1 or self._case.head == "tensor":
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
        norms = [module for module in self.model.modules() if isinstance(module, nn.BatchNorm1d)]
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
            _set_buffers(norm, {name: buffer.clone() for name, buffer in of_norm.items()})
        yield
        for norm, handle, of_norm in zip(norms, handles, buffers, strict=True):
            handle.remove()
            _set_buffers(norm, of_norm)
            _update(norm, torch.cat(seen[norm]))


def loss_fn_of(case: Case) -> Callable[..., Tensor]:
    """Return the ``loss_fn`` of a case."""

    def loss_fn(output: Any, target: Any = None) -> Tensor:
        scores = _scores(output, case)
        if target is None:
            loss = scores.square().mean()
        elif case.loss == "classes":
            # Class 0 weighs nothing, so the loss is NaN where all are of class 0.
            loss = F.cross_entropy(scores, target, ignore_index=0 if case.is_weighted else -100)
        elif case.loss == "nested":
            scale = target["scale"]
            scale = scale.tensor if isinstance(scale, NoChunk) else scale
            loss = F.mse_loss(scores * scale, target["y"]) * target["more"][0]
        else:
            loss = F.mse_loss(scores, target)
        if case.head == "dict":
            loss = loss + 0.1 * output["mean"].mean() + output["l"][1][0].square().mean()
        result: Tensor = loss
        return result

    return loss_fn


def _scores(output: Any, case: Case) -> Any:
    return output["scores"] if case.head == "dict" else output


def own_loss(case: Case, output: Any, target: Any) -> Any:
    """Compute a loss from a whole output, or from the placeholder of one."""
    return loss_fn_of(case)(output, target) * 3


def loss_weight_of(case: Case) -> Callable[[Tensor], float] | None:
    """Return the ``loss_weight`` of a case; a micro-batch of classes may weigh nothing."""
    if not case.is_weighted or case.loss not in ("classes", "distance"):
        return None
    if case.loss == "classes":
        return lambda target: (target > 0).sum().item()
    return lambda target: target[:, 0].abs().sum().item()


@torch.no_grad()
def _update(norm: nn.BatchNorm1d, x: Tensor) -> None:
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


def _set_buffers(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        setattr(module, name, buffer)


def _part(value: Any, span: slice) -> Any:
    if isinstance(value, Tensor):
        return value[span]
    if isinstance(value, NoChunk):
        return value.tensor
    return _descended(value, lambda child: _part(child, span))


def _mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    return _descended(value, lambda child: _mapped(function, child))


def _descended(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: function(child) for key, child in value.items()}
    if isinstance(value, (tuple, list)):
        children: Sequence[Any] = [function(child) for child in value]
        return type(value)(children)
    return value
