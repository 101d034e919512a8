"""The layers that the fuzzer's words stand for, in plain torch; any of them may follow any other.

A layer may return anything that can be sent: views, tuples, dicts, integers, ``None``. The next
layer first folds that into one tensor ``(batch, time, 8)``, to which every returned value
contributes. All is float64, and no output depends on random numbers.

Layers that stash and pop are here what any model may have; pipeline.py makes skippable ones.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from tests.fuzz.case import Case

WIDTH, TIME, NUM_CLASSES = 8, 6, 3

#: Layers that return new memory that autograd has not saved: the next layer may change it.
SAFE = ("affine", "conv", "layernorm")


class Pair(NamedTuple):
    """A container of a class of its own."""

    first: Any
    second: Any


@dataclass
class Output:
    """As a model's output in transformers: a container of a registered class."""

    first: Any
    second: Any = None


pytree._register_namedtuple(Pair, serialized_type_name="tests.fuzz.Pair")
pytree.register_dataclass(Output, serialized_type_name="tests.fuzz.Output")


def fold(value: Any) -> Tensor:
    """Make one tensor ``(batch, time, WIDTH)`` of the values that a layer has returned."""
    if isinstance(value, tuple) and isinstance(value[0], str):  # "transposed"
        return fold(value[1].transpose(1, 2))
    leaves = _leaves(value)
    x = leaves.pop(next(k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)))
    if x.dim() == 4:  # "conv2d": (batch, 4, 2, time)
        x = x.flatten(1, 2).transpose(1, 2)
    for k, leaf in enumerate(leaves, 1):
        if isinstance(leaf, Tensor):
            places = torch.linspace(0.5, 1.5, leaf.numel()).to(leaf.device)  # so that order matters
            leaf = (leaf.double().flatten() * places).sum() / (leaf.numel() + 1)
        x = x + leaf * 0.3 / k
    folded: Tensor = x if x.shape[-1] == WIDTH else x[..., :WIDTH]
    return folded


def build(case: Case, make_skip: Callable[..., nn.Module] | None = None) -> nn.Sequential:
    """Build a case's model, the same each time.

    ``make_skip(layer, num_pops)`` returns what takes the place of a plain layer that stashes or
    pops a value, which is popped so many times.
    """
    torch.manual_seed(case.seed)
    place: dict[int, Any] = {}
    layers: list[nn.Module] = []
    before = "affine" if case.inputs == "one" else ""
    for written, kind in zip(case.layers, case.kinds, strict=True):
        name, _, number = kind.partition(".")
        num_pops = case.kinds.count(f"pop.{number}")
        if not number:
            layer = LAYERS[kind]()
        elif f"stash.{number}" in case.kinds and num_pops:
            plain = Stash(int(number), place) if name == "stash" else Pop(int(number), place)
            layer = plain if make_skip is None else make_skip(plain, num_pops)
        else:  # the case has only half the pair
            layer = LAYERS["linear"]()
        if kind == "relu_" and before not in SAFE:
            layer = nn.Sequential(LAYERS["affine"](), layer)
        if kind == "tied":
            _tie(layer, layers)
        layers.append(layer.requires_grad_(kind == written))
        before = kind
    head = Head(case.head)
    # The loss does not always depend on what these train.
    uses = [kind not in ("stash.6", "reentrant") for kind in case.kinds]
    used = compress(layers, uses)
    may_freeze = any(p.requires_grad for layer in used for p in layer.parameters())
    head.requires_grad_(not (may_freeze and case.layers[-1].endswith("*")))
    if case.inputs == "ids":
        table = nn.Embedding(WIDTH, WIDTH)
        layers[0] = nn.Sequential(table, layers[0])
        if case.is_head_tied:
            head.f.weight = table.weight
    elif case.inputs != "one":
        layers[0] = Joining(layers[0])
    return nn.Sequential(*layers, head).double()


class Joining(nn.Module):
    """Gives a layer one tensor made of several inputs, some of them by name."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.layer(fold((inputs, named)))


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
    """The last layer: scores of classes for each sample or time, alone or beside other values."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.f = nn.Linear(WIDTH, WIDTH)  # square, so that it may be an embedding's, too
        self.kind = kind

    def forward(self, value: Any) -> Any:
        x = fold(value)
        if self.kind == "tokens" and x.shape[1] < TIME:
            x = x.repeat(1, TIME // x.shape[1], 1)
        scores = self.f(x if self.kind == "tokens" else x.mean(1))[..., :NUM_CLASSES]
        if self.kind != "dict":
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


class Stash(nn.Module):
    """Computes a value for a later layer from its input, and passes its input on.

    ``place`` is where that layer takes it from; ``number`` says what it is.
    """

    def __init__(self, number: int, place: dict[int, Any]) -> None:
        super().__init__()
        self.f = _linear() if number not in (2, 3, 4) else None
        self.number, self.place = number, place

    def forward(self, value: Any) -> Any:
        x = fold(value)
        self.place[self.number] = self.made(x)
        return x

    def made(self, x: Tensor) -> Tensor | None:
        """Return what is stashed."""
        return STASHED[self.number](self.f, x)


class Pop(nn.Module):
    """Adds a value that was stashed."""

    def __init__(self, number: int, place: dict[int, Any]) -> None:
        super().__init__()
        self.number, self.place = number, place

    def forward(self, value: Any) -> Any:
        return self.joined(value, self.place[self.number])

    def joined(self, value: Any, skip: Any) -> Tensor:
        """Return the output, so that two skip tensors cannot be exchanged."""
        return 0.9 * fold((fold(value), skip))


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
    """Draws random numbers; a recomputation has to draw those of the first forward, and only it.

    The output does not depend on them, as the plain model draws other numbers.
    """

    f: nn.Linear

    def __init__(self) -> None:
        super().__init__(lambda self, x: self.f(x), f=_linear())
        self.is_repeating: Callable[[], bool] = bool  # pipeline.py says when
        self.drawn: set[Any] = set()
        self.repeated: set[Any] = set()

    def forward(self, value: Any) -> Any:
        ones = torch.ones(40, device=self.f.weight.device)
        mask = tuple(F.dropout(ones, 0.5).tolist())
        drawn = (mask, torch.rand(()).item(), random.random(), float(np.random.randn()))
        if self.is_repeating():
            assert drawn in self.drawn, "recomputed with other random numbers"
            assert drawn not in self.repeated, "two recomputed with the same random numbers"
            self.repeated.add(drawn)
        else:
            assert drawn not in self.drawn, "drew the same random numbers twice"
            self.drawn.add(drawn)
        return super().forward(value)


def _linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def _across(module: nn.Module, x: Tensor) -> Tensor:
    """Apply a module that takes ``(batch, channels, time)``."""
    result: Tensor = module(x.transpose(1, 2)).transpose(1, 2)
    return result


def _image(x: Tensor) -> Tensor:
    """Make ``(batch, 4, 2, time)`` in the memory format ``channels_last``."""
    image: Tensor = x.transpose(1, 2).unflatten(1, (4, 2))
    return image.contiguous(memory_format=torch.channels_last)


def _conv2d() -> nn.Module:
    conv = nn.Conv2d(4, 4, (1, 3), padding=(0, 1)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Layer(lambda s, x: s.conv(_image(x)), conv=conv)


def _norm(norm: nn.Module) -> Layer:
    return Layer(lambda s, x: _across(s.norm, x), norm=norm)


def _linked(function: Callable[[nn.Module, Tensor], Any]) -> Callable[[], Layer]:
    return lambda: Layer(lambda s, x: function(s.f, x), f=_linear())


def _seeded_dropout(layer: nn.Module, x: Tensor) -> Tensor:
    """Drop by a mask computed from the input, so that the plain model has the same mask."""
    with torch.random.fork_rng([]):
        torch.manual_seed(int(x.detach().abs().sum() * 1e4) % 2**31)
        mask = torch.rand(x.shape) > 0.3  # ordered by index, not by the strides of x
    return x * mask.to(x.device) if layer.training else x


def _plain(x: Tensor) -> Any:
    """Return one of several equal values of different types, whatever the shape of the input."""
    return (1, True, 1.0)[int(x.detach().abs().sum() * 1e4) % 3]


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
    "conv2d": _conv2d,
    "batchnorm2d": lambda: Layer(lambda s, x: s.norm(_image(x)), norm=nn.BatchNorm2d(4)),
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
    "pair": _linked(lambda f, x: Pair(f(x), {"x": x, 2: Pair(1, None)})),
    "output": _linked(lambda f, x: Output(f(x), Pair(Output(x), {"x": Output(3)}))),
    "list": _linked(lambda f, x: [x, (f(x), [], None), 0.5, True]),
    "dict": _linked(
        lambda f, x: OrderedDict(
            x=f(x), none=None, deep={3: [x * 2, {}], "no": ()}, unused=f(x).exp()
        )
    ),
    "nested": _linked(
        lambda f, x: {
            "a": [(f(x), {"b": (x, []), "word": "of any kind"}), None],
            "c": ({}, ({"d": {"e": [x.mean(1), 2]}}, True)),
        }
    ),
    "plain": _linked(lambda f, x: (f(x), {1: [_plain(x)]})),
    "ids": _linked(lambda f, x: (f(x), x.argmax(-1), x > 0, (x * 9).to(torch.int8))),
    "detached": _linked(lambda f, x: (y := f(x), y.detach(), x.detach().mean())),
    "empty": _linked(lambda f, x: (f(x), x[:, :0], f(x)[..., :0], x.mean())),
    "same": _linked(lambda f, x: (y := f(x), y, x, x)),
    "weight": _linked(lambda f, x: (f(x), f.weight)),
    "floats": _linked(lambda f, x: (f(x), x.float(), f(x).bfloat16(), torch.complex(x, f(x)).real)),
    "varying": _linked(lambda f, x: [f(x), x.float(), x.repeat(1, 1, 96)][: 1 + len(x) % 3]),
    "embedding": lambda: Layer(
        lambda s, x: x + s.table(x.argmax(-1)), table=nn.Embedding(WIDTH, WIDTH)
    ),
    "custom": _linked(lambda f, x: _scaled(f(x), x)),
    "checkpoint": lambda: Layer(
        lambda s, x: checkpoint(s.f, x, use_reentrant=False),
        f=nn.Sequential(_linear(), nn.Tanh(), _linear()),
    ),
    "reentrant": lambda: Layer(  # adds twice to a gradient, in backward passes of its own
        lambda s, x: checkpoint(s.f, checkpoint(s.f, x, use_reentrant=True), use_reentrant=True),
        f=nn.Sequential(_linear(), nn.Tanh()),
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
    lambda f, x: f(x).mean(1, keepdim=True) if len(x) % 2 else None,
)


def _leaves(value: Any) -> list[Any]:
    """List the tensors and numbers of a nested value, but for those under "unused".

    Further numbers say of which types its values, keys and containers are.
    """
    value = getattr(value, "tensor", value)  # one that is not split
    if isinstance(value, Tensor):
        return [value]
    number = len(type(value).__name__) / 16
    if isinstance(value, dict):
        children = [(key, value[key]) for key in value if key != "unused"]
        found = [leaf for key, child in children for leaf in (*_leaves(child), *_leaves(key))]
        return [*found, number]
    if isinstance(value, Output):
        return _leaves((value.first, value.second, number))
    if isinstance(value, (tuple, list)):
        return [*(leaf for child in value for leaf in _leaves(child)), number]
    return [number if isinstance(value, str) or value is None else number + value]


def _tie(layer: nn.Module, before: list[nn.Module]) -> None:
    """Give a layer the weight of the last plain layer before it, if there is one."""
    for candidate in reversed(before):
        if isinstance(candidate, Layer) and type(getattr(candidate, "f", None)) is nn.Linear:
            layer.f.weight = candidate.f.weight  # type: ignore[union-attr]
            return
