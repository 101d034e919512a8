"""A case's mini-batches and losses, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.fuzz.case import Case
from tests.fuzz.layers import NUM_CLASSES, TIME, WIDTH

#: The target of a token that does not count; of -100 a stage without weights warns.
IGNORED = -1


@dataclass(frozen=True)
class Whole:
    """A tensor that every micro-batch gets whole."""

    tensor: Tensor


@dataclass(frozen=True)
class Batch:
    """A mini-batch, or a replica's share of one.

    Attributes:
        inputs: positional inputs.
        named: inputs by name.
        target: for the loss function, or None.
        num_samples: the samples.
    """

    inputs: tuple[Any, ...]
    named: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    num_samples: int = 0

    @classmethod
    def of(cls, case: Case, number: int, replica: int, num_samples: int) -> Batch:
        """Make a case's mini-batch, the same for the same numbers."""
        generator = torch.Generator().manual_seed(case.seed + 7919 * number + 31 * replica)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def randint(most: int, *shape: int) -> Tensor:
            return torch.randint(most, shape, generator=generator)

        n = num_samples
        x = randn(n, TIME, WIDTH)
        named: dict[str, Any] = {}
        inputs: tuple[Any, ...] = (x,)
        if case.inputs == "ids":
            inputs = (randint(WIDTH, n, TIME),)
        elif case.inputs == "several":
            inputs = (x, (randn(n), None), 0.5, Whole(randn(WIDTH)))
        elif case.inputs == "nested":
            ids = {"deep": [None, randint(9, n)]}
            inputs = (({"x": [x, (randn(n, 2), {})], 7: 2}, ids),)  # a pair is one input
        elif case.inputs == "named":
            inputs, named = (), {"x": x, "mask": randint(2, n) > 0, "more": [randn(n), None]}
        elif case.inputs == "images":
            image = randn(n, 4, 2, TIME)
            inputs = (image.contiguous(memory_format=torch.channels_last),)
        return cls(inputs, named, _target_of(case, n, randn, randint), n)

    def parts(self, chunks: int) -> list[Batch]:
        """Return its micro-batches."""
        sizes = [len(part) for part in torch.empty(self.num_samples).chunk(chunks) if len(part)]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        spans = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        return [
            Batch(_part(self.inputs, s), _part(self.named, s), _part(self.target, s), size)
            for s, size in zip(spans, sizes, strict=True)
        ]

    def floats(self) -> list[Tensor]:
        """List the floating tensors among the inputs that are split."""
        leaves = pytree.tree_leaves((self.inputs, self.named))
        return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]

    def require_gradients(self) -> None:
        """Let backward passes give these tensors gradients."""
        for tensor in self.floats():
            tensor.requires_grad_()

    def take_gradients(self) -> list[Tensor | None]:
        """Return their gradients, and leave none."""
        taken = [tensor.grad for tensor in self.floats()]
        for tensor in self.floats():
            tensor.grad = None
        return taken


def _target_of(
    case: Case, n: int, randn: Callable[..., Tensor], randint: Callable[..., Tensor]
) -> Any:
    if case.loss == "classes":
        return randint(NUM_CLASSES, n)
    if case.loss == "tokens":  # padded; without weights each sample has a token that counts
        lengths = randint(TIME + 1, n, 1) if case.is_weighted else 1 + randint(TIME, n, 1)
        return randint(NUM_CLASSES, n, TIME).masked_fill(torch.arange(TIME) >= lengths, IGNORED)
    if case.loss == "nested":
        scale = Whole(randn(1))
        return {"y": randn(n, NUM_CLASSES), "scale": scale, "more": [0.5, None]}
    return None if case.loss == "none" else randn(n, NUM_CLASSES)


def loss_fn_of(case: Case) -> Callable[..., Tensor]:
    """Return the ``loss_fn`` of a case: the mean over a micro-batch, which may be NaN."""

    def loss_fn(output: Any, target: Any = None) -> Tensor:
        scores = scores_of(case, output)
        loss: Tensor
        if case.loss == "tokens":
            if case.head != "tokens":
                scores = scores[:, None].expand(-1, TIME, -1)
            flat = scores.flatten(0, 1)
            loss = F.cross_entropy(flat, target.flatten(), ignore_index=IGNORED)
        else:
            scores = scores.mean(1) if case.head == "tokens" else scores
            loss = of_samples(scores, target)
        if case.head == "dict":
            loss = loss + 0.1 * output["mean"].mean() + output["l"][1][0].square().mean()
        return loss

    def of_samples(scores: Tensor, target: Any) -> Tensor:
        if target is None:
            return scores.square().mean()
        if case.loss == "classes":  # class 0 may weigh nothing
            return F.cross_entropy(scores, target, ignore_index=0 if case.is_weighted else IGNORED)
        if case.loss == "nested":
            scale = target["scale"]
            scale = getattr(scale, "tensor", scale)
            factor: float = target["more"][0]
            return factor * F.mse_loss(scores * scale, target["y"])
        return F.mse_loss(scores, target)

    return loss_fn


def loss_weight_of(case: Case) -> Callable[[Tensor], float] | None:
    """Return the ``loss_weight`` of a case; a micro-batch may weigh nothing."""
    if not case.is_weighted:
        return None
    if case.loss == "classes":
        return lambda target: (target > 0).sum().item()
    if case.loss == "tokens":
        return lambda target: (target != IGNORED).sum().item()
    return lambda target: target[:, 0].relu().sum().item()


def own_loss(case: Case, output: Any, target: Any) -> Any:
    """Compute a loss from a whole output, or from the placeholder of one."""
    return loss_fn_of(case)(output, target) * 3


def scores_of(case: Case, output: Any) -> Any:
    """Return the scores in an output, or in the placeholder of one."""
    return output["scores"] if case.head == "dict" else output


def mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Replace the tensors of a nested value."""
    return pytree.tree_map_only(Tensor, function, value)


def with_whole(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Replace what every micro-batch gets whole."""
    return pytree.tree_map_only(Whole, lambda whole: change(whole.tensor), value)


def _part(value: Any, span: slice) -> Any:
    return mapped(lambda tensor: tensor[span], value)
