"""The layers that the fuzzer's words stand for; any of them may follow any other.

A layer may return anything that can be sent: views, tuples, dicts, integers, ``None``. The next
layer first folds that into one tensor ``(batch, time, 8)``, to which every returned value
contributes. All is float64, and no output depends on random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from benchmarks.fuzz_cases import Case
from procpipe import is_recomputing
from procpipe.skip import Namespace, pop, skippable, stash

__all__ = ["TIME", "WIDTH", "build", "fold"]

WIDTH, TIME, NUM_CLASSES = 8, 6, 3

#: Layers that return new memory that autograd has not saved: the next layer may change it.
SAFE = ("affine", "conv", "layernorm")


def fold(value: Any) -> Tensor:
    """Make one tensor ``(batch, time, WIDTH)`` of the values that a layer has returned."""
    if isinstance(value, tuple) and isinstance(value[0], str):  # "transposed"
        return fold(value[1].transpose(1, 2))
    x, *leaves = _leaves(value)
    for k, leaf in enumerate(leaves, 1):
        if isinstance(leaf, Tensor):
            places = torch.linspace(0.5, 1.5, leaf.numel())  # so that order matters
            leaf = (leaf.double().flatten() * places).sum() / (leaf.numel() + 1)
        x = x + leaf * 0.3 / k
    folded: Tensor = x if x.shape[-1] == WIDTH else x[..., :WIDTH]
    return folded


def build(case: Case) -> nn.Sequential:
    """Build a case's model, the same each time."""
    torch.manual_seed(case.seed)
    layers: list[nn.Module] = []
    namespaces: dict[str, Namespace] = {}
    starts = [sum(case.balance[:j]) for j in range(len(case.balance))]
    before = "affine" if case.inputs == "one" else ""
    for k, written in enumerate(case.words):
        word = written.rstrip("*")
        layer = _skip(case, word, namespaces) if "." in word else LAYERS[word]()
        if word == "relu_" and before not in SAFE:
            layer = nn.Sequential(LAYERS["affine"](), layer)
        if word == "tied":
            _tie(layer, layers[max(start for start in starts if start <= k) :])
        layers.append(layer.requires_grad_(word == written))
        before = word
    if case.inputs == "ids":
        layers[0] = nn.Sequential(nn.Embedding(WIDTH, WIDTH), layers[0])
    elif case.inputs == "several":
        layers[0] = Joining(layers[0])
    may_freeze = any(
        parameter.requires_grad for layer in layers for parameter in layer.parameters()
    )
    head = Head(case.head == "dict")
    layers.append(head.requires_grad_(not (may_freeze and case.words[-1].endswith("*"))))
    return nn.Sequential(*layers).double()


class Joining(nn.Module):
    """Gives a layer one tensor made of several inputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Any) -> Any:
        return self.layer(fold(inputs))


class Layer(nn.Module):
    """A layer from a function of itself and the folded input, with modules of its own."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, value: Any) -> Any:
        return self.function(self, fold(value))


class Head(nn.Module):
    """The last layer: scores of classes, alone or beside other values."""

    def __init__(self, is_dict: bool) -> None:
        super().__init__()
        self.f = nn.Linear(WIDTH, NUM_CLASSES)
        self.is_dict = is_dict

    def forward(self, value: Any) -> Any:
        x = fold(value)
        scores = self.f(x.mean(1))
        if not self.is_dict:
            return scores
        extra = [x[:, 0], (scores[:, ::2],)]
        ids = scores.argmax(1)
        return {
            "scores": scores,
            "ids": ids,
            "mean": x.mean(),
            "none": None,
            "n": len(x),
            "l": extra,
        }


class Scale(torch.autograd.Function):
    """A function of the user's own, whose backward is not its forward's derivative."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a)
        return a * 2, b + 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (a,) = ctx.saved_tensors
        return gradients[0] * 2 + 0.1 * a, gradients[1] * 0.5


_scaled: Callable[..., tuple[Tensor, Tensor]] = Scale.apply


class Pop(nn.Module):
    """Adds the value that was stashed under its name; ``_skip`` makes it skippable."""

    def forward(self, value: Any) -> Generator[Any, Any, Any]:
        skip = yield pop("skip")
        return 0.9 * fold((fold(value), skip))  # so that two cannot be exchanged


class Stash(nn.Module):
    """Stashes a value computed from its input, and passes its input on."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.f = _linear() if kind not in (2, 3, 4) else None
        self.kind = kind

    def forward(self, value: Any) -> Generator[Any, Any, Any]:
        x = fold(value)
        yield stash("skip", STASHED[self.kind](self.f, x))
        return x


class Counting(Layer):
    """Counts its forwards in place, and keeps a mean that it replaces; uses both."""

    f: nn.Linear
    count: Tensor
    average: Tensor

    def __init__(self) -> None:
        super().__init__(lambda self, x: x, f=_linear())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, value: Any) -> Any:
        x = fold(value)
        if self.training:
            self.count.add_(1)
            self.average = 0.5 * self.average + 0.5 * x.detach().mean((0, 1))
        return self.f(x - self.average) * (1 + 0.125 * self.count.item())


class Drawing(Layer):
    """Draws random numbers; a recomputation has to draw those of the first forward.

    The output does not depend on them, as the plain model draws other numbers.
    """

    def __init__(self) -> None:
        super().__init__(lambda self, x: self.f(x), f=_linear())
        self.own = torch.Generator()
        self.drawn: set[tuple[float, ...]] = set()

    def forward(self, value: Any) -> Any:
        own = torch.rand((), generator=self.own).item()
        drawn = (torch.rand(()).item(), random.random(), float(np.random.randn()), own)
        assert not is_recomputing() or drawn in self.drawn, "recomputed with other random numbers"
        self.drawn.add(drawn)
        return super().forward(value)


def _linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def _across(module: nn.Module, x: Tensor) -> Tensor:
    """Apply a module that takes ``(batch, channels, time)``."""
    result: Tensor = module(x.transpose(1, 2)).transpose(1, 2)
    return result


def _norm(norm: nn.Module) -> Layer:
    return Layer(lambda s, x: _across(s.norm, x), norm=norm)


def _linked(function: Callable[[nn.Module, Tensor], Any]) -> Callable[[], Layer]:
    return lambda: Layer(lambda s, x: function(s.f, x), f=_linear())


def _seeded_dropout(layer: nn.Module, x: Tensor) -> Tensor:
    """Drop by a mask computed from the input, so that the plain model has the same mask."""
    with torch.random.fork_rng([]):
        torch.manual_seed(int(x.detach().abs().sum() * 1e4) % 2**31)
        mask = torch.rand(x.shape) > 0.3  # ordered by index, not by the strides of x
    return x * mask if layer.training else x


def _in_place(f: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = f(x)
    y.mul_(0.5)
    y[:, :1].add_(x[:, :1])
    return y


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "affine": _linked(lambda f, x: f(x)),
    "linear": _linked(lambda f, x: torch.tanh(f(x))),
    "tied": _linked(lambda f, x: torch.tanh(f(x))),
    "twice": _linked(lambda f, x: x + f(torch.tanh(f(x)))),
    "relu_": lambda: Layer(lambda s, x: s.act(x), act=nn.ReLU(inplace=True)),
    "add_": _linked(_in_place),
    "mlp_": lambda: Layer(
        lambda s, x: x + s.f(x), f=nn.Sequential(_linear(), nn.ReLU(inplace=True), _linear())
    ),
    "conv": lambda: Layer(
        lambda s, x: _across(s.conv, x), conv=nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
    ),
    "attention": lambda: Layer(
        lambda s, x: s.attention(x, x, x),
        attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    ),
    "attention-alone": lambda: Layer(
        lambda s, x: s.attention(x, x, x, need_weights=False),
        attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    ),
    "encoder": lambda: Layer(
        lambda s, x: s.encoder(x),
        encoder=nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
    ),
    "gru": lambda: Layer(lambda s, x: s.rnn(x), rnn=nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "lstm": lambda: Layer(lambda s, x: s.rnn(x), rnn=nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "layernorm": lambda: Layer(lambda s, x: s.norm(x), norm=nn.LayerNorm(WIDTH)),
    "batchnorm": lambda: _norm(nn.BatchNorm1d(WIDTH)),
    "batchnorm-mean": lambda: _norm(nn.BatchNorm1d(WIDTH, momentum=None, affine=False)),
    "groupnorm": lambda: _norm(nn.GroupNorm(2, WIDTH)),
    "instancenorm": lambda: _norm(nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)),
    "strided": _linked(lambda f, x: f(x)[:, ::2] if x.shape[1] > 3 else f(x).flip(1)),
    "expanded": _linked(lambda f, x: (f(x), x.mean(1, keepdim=True).expand(-1, 4, -1))),
    "transposed": _linked(lambda f, x: ("transposed", f(x).transpose(1, 2))),
    "wide": _linked(lambda f, x: f(x).repeat(1, 1, 96)),
    "tuple": _linked(lambda f, x: (f(x), x)),
    "list": _linked(lambda f, x: [x, (f(x), [], None), 0.5, True]),
    "dict": _linked(lambda f, x: {"x": f(x), "none": None, 3: [x * 2, {}], "unused": f(x).exp()}),
    "ids": _linked(lambda f, x: (f(x), x.argmax(-1), x > 0, (x * 9).to(torch.int8))),
    "detached": _linked(lambda f, x: (y := f(x), y.detach(), x.detach().mean())),
    "empty": _linked(lambda f, x: (f(x), x[:, :0], f(x)[..., :0], x.mean())),
    "same": _linked(lambda f, x: (y := f(x), y, x, x)),
    "weight": _linked(lambda f, x: (f(x), f.weight)),
    "floats": _linked(lambda f, x: (f(x), x.float(), f(x).bfloat16(), torch.complex(x, f(x)).real)),
    "embedding": lambda: Layer(
        lambda s, x: x + s.table(x.argmax(-1)), table=nn.Embedding(WIDTH, WIDTH)
    ),
    "custom": _linked(lambda f, x: _scaled(f(x), x)),
    "checkpoint": lambda: Layer(
        lambda s, x: checkpoint(s.f, x, use_reentrant=False),
        f=nn.Sequential(_linear(), nn.Tanh(), _linear()),
    ),
    "weightnorm": lambda: Layer(
        lambda s, x: torch.tanh(s.f(x)), f=parametrizations.weight_norm(_linear())
    ),
    "spectralnorm": lambda: Layer(
        lambda s, x: torch.tanh(s.f(x)), f=parametrizations.spectral_norm(_linear())
    ),
    "dropout": lambda: Layer(_seeded_dropout),
    "counting": Counting,
    "drawing": Drawing,
    "nothing": nn.Identity,
}

#: What is stashed, by the number of the pair: with and without gradient, a view, integers, nothing.
STASHED: tuple[Callable[[Any, Tensor], Tensor | None], ...] = (
    lambda f, x: torch.tanh(f(x)),
    lambda f, x: f(x)[:, ::2],
    lambda f, x: (x > 0).double(),
    lambda f, x: (x * 9).long(),
    lambda f, x: None,
    lambda f, x: f(x).repeat(1, 1, 96),
)


def _leaves(value: Any) -> list[Any]:
    """List the tensors and numbers of a nested value, without those under "unused"."""
    if isinstance(value, dict):
        return [leaf for key in value if key != "unused" for leaf in _leaves(value[key])]
    if isinstance(value, (tuple, list)):
        return [leaf for child in value for leaf in _leaves(child)]
    return [] if value is None else [value]


def _skip(case: Case, word: str, namespaces: dict[str, Namespace]) -> nn.Module:
    """Make a layer that stashes or pops, or a plain layer if the case has only half the pair."""
    name, _, number = word.partition(".")
    words = [written.rstrip("*") for written in case.words]
    num_pops = words.count(f"pop.{number}")
    if f"stash.{number}" not in words or not num_pops:
        return LAYERS["linear"]()
    declare: Any = (
        skippable(stash={"skip": num_pops}) if name == "stash" else skippable(pop=["skip"])
    )
    base: Any = Stash if name == "stash" else Pop
    made = declare(type(base.__name__, (base,), {}))
    layer = made(int(number) % len(STASHED)) if name == "stash" else made()
    isolated: nn.Module = layer.isolate(namespaces.setdefault(number, Namespace()))
    return isolated


def _tie(layer: nn.Module, candidates: list[nn.Module]) -> None:
    """Give a layer the weight of the last plain layer of its partition, if there is one."""
    for candidate in reversed(candidates):
        if isinstance(candidate, Layer) and type(getattr(candidate, "f", None)) is nn.Linear:
            layer.f.weight = candidate.f.weight  # type: ignore[union-attr]
            return
