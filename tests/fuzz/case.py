"""Random cases for the fuzzer: plain data, drawn from a seed and a number, and made smaller.

A case says which layers a model has, how it is trained, and in which runs. The first run begins
with new values; each other one resumes what the run before it has saved, perhaps on another number
of stages. Layers are words (see layers.py), any of which may follow any other:

    ("gru", "linear*", "stash.0", "relu_", "pop.0")     * is frozen; .0 is the number of a pair

A call is an act with numbers: ``("step", ((7,),))`` is one step with 7 samples, ``("step", ((7,
2),))`` one with 7 that the first replica has read and 2 that the second has, ``("loop", ((7, 2),
(4, 0)))`` a loop whose second mini-batch only the first replica has; ``("chunks", (3,))`` sets the
number of micro-batches. Imports neither torch nor procpipe; starts nothing.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

#: An act, and its numbers: of a call with mini-batches the samples of each, replica by replica.
Call = tuple[str, tuple[Any, ...]]

#: The schedule that is a function, ``two_at_a_time``.
PAIRS = "pairs"

#: By schedule, how many partitions each rank may have.
SCHEDULES = {
    "gpipe": (1,),
    "1f1b": (1,),
    "interleaved": (1, 2, 3, 4),
    "zb-h1": (1,),
    "zb-v": (2,),
    PAIRS: (1,),
}

#: Numbers of stages and of replicas of a run, which has four ranks at most.
GRIDS = ((1, 1), (2, 1), (2, 1), (3, 1), (3, 1), (4, 1), (1, 2), (2, 2), (1, 3))

#: What a case may call with a mini-batch, in training.
TRAINING = (
    "step",
    "step for inputs",
    "step of several",
    "step with total",
    "step unsynced",
    "loss",
    "loss for inputs",
    "step on rank 0",
    "step named",
    "step with last target",
    "loop",
    "loss in a loop",
)

#: Those with several mini-batches.
LOOPS = ("loop", "loss in a loop", "evaluate in a loop")

#: The same in evaluation.
EVALUATION = (
    "evaluate",
    "evaluate in a loop",
    "step without grad",
    "output in eval",
    "output in inference mode",
    "output without grad",
)

#: What a case may call between mini-batches.
BETWEEN = ("update", "clip", "zero", "zero to zeros", "chunks", "overflow")

#: Those of them that have a number.
NUMBERED = ("clip", "chunks", "overflow")

ACTS = {*TRAINING, *EVALUATION, *BETWEEN}

#: Layers without those that stash and pop; layers.py defines them.
WORDS = [
    *("affine", "linear", "tied", "tied", "twice", "relu_", "relu_", "add_", "mlp_"),
    *("conv", "conv2d", "conv2d", "batchnorm2d"),
    *("attention", "attention-alone", "encoder", "gru", "lstm"),
    *("layernorm", "batchnorm", "batchnorm", "batchnorm-mean", "groupnorm", "instancenorm"),
    *("strided", "expanded", "transposed", "wide"),
    *("tuple", "pair", "output", "list", "dict", "nested", "plain"),
    *("ids", "detached", "empty", "same", "weight", "floats"),
    *("embedding", "custom", "checkpoint", "weightnorm", "spectralnorm"),
    *("dropout", "counting", "drawing", "drawing", "nothing", "varying", "reentrant"),
]

#: Layers that change the order of later additions and multiplications: a message makes a view
#: contiguous (recurrent layers and attentions return views, too), or a tensor is used twice.
INEXACT = {
    *("conv", "conv2d", "batchnorm2d", "batchnorm", "batchnorm-mean", "groupnorm", "instancenorm"),
    *("attention", "attention-alone", "gru", "lstm", "floats", "nested"),
    *("strided", "expanded", "transposed", "wide", "list", "same", "weight", "stash.1", "stash.5"),
    *("varying", "reentrant"),
}

#: Fields that have no default to be simplified to.
KEPT = ("seed", "layers", "runs", "calls")

#: How many skip tensors a case may have; each is of another kind.
MAX_SKIPS = 7

#: Kinds of inputs, of which the last two are drawn less often.
INPUTS = ("one", "ids", "several", "nested", "named", "images")

#: Kinds of targets; only the first three have a ``loss_weight``.
LOSSES = ("classes", "tokens", "distance", "nested", "none")
MAY_WEIGH = LOSSES[:3]

#: The norms by which gradients are clipped.
NORMS = (2.0, 1.0, math.inf)

#: Divisions of parameters into groups with options of their own.
GROUPS = ("one", "decay", "head", "both")


class _Written:
    """Is written as Python, without what has its default."""

    def __repr__(self) -> str:
        values = [(each, getattr(self, each.name)) for each in fields(self)]  # type: ignore[arg-type]
        changed = [f"{each.name}={value!r}" for each, value in values if value != each.default]
        return f"{type(self).__name__}({', '.join(changed)})"


@dataclass(frozen=True, repr=False)
class Run(_Written):
    """How a model runs, from its building or from a saved state on.

    Attributes:
        cuts: before which layers a partition begins; of a model that has become shorter, the last
            of them are as far behind as they can.
        each: how many partitions each rank has, if the schedule allows that.
        replicas: as in ``Stage``; so are the next four.
        chunks: before the first call.
        schedule: a name, or ``PAIRS``.
        checkpoint: the mode.
        transport: the name; "" for that of the devices.
        calls: what is called.
    """

    cuts: tuple[int, ...] = ()
    each: int = 1
    replicas: int = 1
    chunks: int = 1
    schedule: str = "gpipe"
    checkpoint: str = "never"
    transport: str = "shm"
    calls: tuple[Call, ...] = (("step", ((4,),)),)

    @property
    def num_stages(self) -> int:
        """How many processes each replica has."""
        allowed = SCHEDULES[self.schedule]
        return (len(self.cuts) + 1) // (self.each if self.each in allowed else allowed[0])

    @property
    def num_ranks(self) -> int:
        """How many processes there are."""
        return self.num_stages * self.replicas

    def balance(self, num_layers: int) -> tuple[int, ...]:
        """Return how many layers each partition has, the head included."""
        num_cuts = len(self.cuts)
        ends = [min(cut, num_layers - num_cuts + k) for k, cut in enumerate(self.cuts)]
        return tuple(b - a for a, b in itertools.pairwise([0, *ends, num_layers]))

    def rounds(self, sizes: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
        """Return the numbers of samples of each mini-batch of a call, replica by replica."""
        return [(*of_round, *(0,) * self.replicas)[: self.replicas] for of_round in sizes]

    def is_valid(self, num_layers: int) -> bool:
        """Return whether there is such a run."""
        return (
            0 < self.num_ranks <= max(n * replicas for n, replicas in GRIDS)
            and (len(self.cuts) + 1) % self.num_stages == 0
            and min(self.balance(num_layers)) > 0
            and all(map(self._is_valid_call, self.calls))
        )

    def _is_valid_call(self, call: tuple[Any, ...]) -> bool:
        act, numbers = call if len(call) == 2 else ("chunks", ())
        if act in BETWEEN:
            return len(numbers) == (act in NUMBERED)
        rounds = self.rounds(numbers)
        if act in LOOPS:
            return bool(rounds) and all(map(any, rounds))
        return len(rounds) == 1 and all(rounds[0])


@dataclass(frozen=True, repr=False)
class Case(_Written):
    """A model, how it is trained, and its runs in a pipeline beside the plain model.

    Attributes:
        seed: of parameters and data.
        layers: the words of all layers but the head, which is the last.
        runs: each but the first resumes what the one before has saved.
        inputs: one of ``INPUTS``.
        head: what the model returns: ``"tensor"``, ``"dict"`` or ``"tokens"``.
        is_head_tied: whether an embedding of the inputs, if there is one, is the head's weight.
        loss: one of ``LOSSES``.
        optimizer: ``"sgd"`` or ``"adamw"``.
        groups: one of ``GROUPS``.
        scheduler: of learning rates: ``"none"``, ``"steps"`` or ``"cycle"``.
        scale: the first scale of a ``GradScaler``, a power of two; 0 for none.
        is_weighted: with a ``loss_weight``.
        is_deferred: with ``deferred_batch_norm``.
        has_hooks: with hooks on modules and parameters.
    """

    seed: int
    layers: tuple[str, ...]
    runs: tuple[Run, ...] = (Run(),)
    inputs: str = "one"
    head: str = "tensor"
    is_head_tied: bool = False
    loss: str = "distance"
    optimizer: str = "sgd"
    groups: str = "one"
    scheduler: str = "none"
    scale: float = 0.0
    is_weighted: bool = False
    is_deferred: bool = False
    has_hooks: bool = False

    @property
    def kinds(self) -> list[str]:
        """The layers' words, whether frozen or not."""
        return [word.rstrip("*") for word in self.layers]

    @property
    def is_exact(self) -> bool:
        """Whether every bit must be the plain model's: where additions are in the same order.

        Those over replicas, and of a parameter that several tasks or stages use, are not.
        """
        kinds = {*self.kinds}
        is_tied = "tied" in kinds or self.is_head_tied
        inexact = (
            kinds & INEXACT
            or self.inputs == "images"
            or any(run.replicas > 1 for run in self.runs)
            or (is_tied and any(run.cuts for run in self.runs))
            or (
                (is_tied or "twice" in kinds)
                and any(run.schedule in ("zb-h1", "zb-v") for run in self.runs)
            )
        )
        return not inexact

    def is_valid(self) -> bool:
        """Return whether there is such a case."""
        return (
            bool(self.layers and self.runs)
            and (self.inputs == "ids" or not self.is_head_tied)
            and (self.loss in MAY_WEIGH or not self.is_weighted)
            and all(run.is_valid(len(self.layers) + 1) for run in self.runs)
        )


def is_training(act: str) -> bool:
    """Return whether a call with a mini-batch is made in training mode."""
    return not act.startswith(("evaluate", "output in"))


def draw(seed: int, number: int) -> Case:
    """Draw a case; the same for the same seed and number."""
    chance = random.Random(f"{seed}/{number}")
    may_be_exact = chance.random() < 0.25  # a case of which every bit can be compared
    choices = [grid for grid in GRIDS if grid[1] == 1 or not may_be_exact]
    grids = [chance.choice(choices) for _ in range(chance.choice((1, 1, 1, 1, 1, 2, 2, 3)))]
    schedules = [chance.choice(tuple(SCHEDULES)) for _ in grids]
    num_partitions = [
        num_stages * chance.choice(SCHEDULES[schedule])
        for (num_stages, _), schedule in zip(grids, schedules, strict=True)
    ]
    num_words = max(*num_partitions, chance.randint(3, 9)) - 1
    words = _words(chance, num_words, may_be_exact=may_be_exact)
    if any(replicas > 1 for _, replicas in grids):  # which may refuse a layer that adds twice
        words = [word.replace("reentrant", "checkpoint") for word in words]
    loss = chance.choice(LOSSES)
    inputs = chance.choice(("one", "ids", *(INPUTS[:-1] if may_be_exact else INPUTS)))
    scale = chance.choice((0.0, 0.0, 0.0, 2.0**4, 2.0**10))
    return Case(
        seed=chance.randrange(1 << 20),
        layers=tuple(words),
        runs=tuple(
            Run(
                cuts=tuple(sorted(chance.sample(range(1, len(words) + 1), parts - 1))),
                each=parts // num_stages,
                replicas=replicas,
                chunks=chance.randint(1, 6),
                schedule=schedule,
                checkpoint=chance.choice(("always", "except_last", "never")),
                transport=chance.choice(("shm", "shm", "shm", "sockets")),
                calls=tuple(_calls(chance, replicas, is_scaled=scale > 0)),
            )
            for (num_stages, replicas), schedule, parts in zip(
                grids, schedules, num_partitions, strict=True
            )
        ),
        inputs=inputs,
        head=chance.choice(("tensor", "dict", "tokens")),
        is_head_tied=inputs == "ids" and not may_be_exact and chance.random() < 0.5,
        loss=loss,
        optimizer=chance.choice(("sgd", "adamw")),
        groups=chance.choice(("one", *GROUPS)),
        scheduler=chance.choice(("none", "steps", "cycle")),
        scale=scale,
        is_weighted=loss in MAY_WEIGH and chance.random() < 0.5,
        is_deferred=chance.random() < (0.5 if "batchnorm" in " ".join(words) else 0.1),
        has_hooks=chance.random() < 0.4,
    )


def simpler(case: Case) -> Iterator[Case]:
    """Yield smaller cases, each by one change, the largest changes first."""
    plain = (
        replace(case, layers=(*case.layers[:k], "affine", *case.layers[k + 1 :]))
        for k, kind in enumerate(case.kinds)
        if kind != "affine"
    )
    return (each for each in (*_smaller(case), *plain) if each.is_valid())


def _smaller(value: Any) -> Iterator[Any]:
    """Yield values with fewer entries, with a field's default, or with a smaller number."""
    if isinstance(value, tuple):
        for size in sorted({len(value) // 2 or 1, 2, 1}, reverse=True):
            yield from (value[:k] + value[k + size :] for k in range(len(value) - size + 1))
        for k, entry in enumerate(value):
            yield from ((*value[:k], each, *value[k + 1 :]) for each in _smaller(entry))
    elif isinstance(value, Case | Run):
        defaults: dict[str, Any] = {each.name: each.default for each in fields(value)}
        changed = [name for name in defaults if getattr(value, name) != defaults[name]]
        for name in changed:
            if name != "seed":
                smaller = _smaller(getattr(value, name))
                yield from (replace(value, **{name: each}) for each in smaller)
        for name in changed:
            if name not in KEPT:
                yield replace(value, **{name: defaults[name]})
    elif isinstance(value, int) and value > 1:
        yield from {1, value // 2, value - 1}


def _words(chance: random.Random, num_words: int, *, may_be_exact: bool) -> list[str]:
    exact = [word for word in WORDS if word not in INEXACT and word != "tied"]
    candidates = exact if may_be_exact else WORDS
    words = chance.choices(candidates, k=num_words)
    if not may_be_exact and chance.random() < 0.15:  # several layers share one weight
        for place in chance.sample(range(num_words), min(num_words, chance.choice((2, 3, 4)))):
            words[place] = "tied"
    words = [word + "*" if chance.random() < 0.15 else word for word in words]
    if chance.random() < 0.2:  # whole stages are frozen
        first, last = sorted(chance.choices(range(num_words + 1), k=2))
        words = [
            word.rstrip("*") + "*" * (first <= k < last or word.endswith("*"))
            for k, word in enumerate(words)
        ]
    places = list(range(num_words))
    chance.shuffle(places)
    skips = [k for k in range(MAX_SKIPS) if not (may_be_exact and f"stash.{k}" in INEXACT)]
    for skip in chance.sample(skips, chance.choice((0, 0, 1, 2))):
        num_pops = chance.choice((1, 1, 2))
        chosen = sorted(places[: num_pops + 1])
        places = places[num_pops + 1 :]
        for place, name in zip(chosen, ("stash", "pop", "pop"), strict=False):
            words[place] = f"{name}.{skip}"
    return words


def _calls(chance: random.Random, replicas: int, *, is_scaled: bool) -> Iterator[Call]:
    for k in range(chance.randint(1, 3)):
        if k and chance.random() < 0.3:
            yield "chunks", (chance.randint(1, 6),)
        if chance.random() < 0.4:
            act = chance.choice(EVALUATION)
            yield act, _sizes(chance, replicas, chance.randint(1, 3) if act in LOOPS else 1)
        act = chance.choice(TRAINING)
        if act == "step unsynced":  # its gradients are added up by the next call
            yield act, _sizes(chance, replicas)
            if chance.random() < 0.3:
                yield chance.choice(("zero", "zero to zeros")), ()
            act = "step"
        yield act, _sizes(chance, replicas, chance.randint(1, 3) if act in LOOPS else 1)
        if is_scaled and chance.random() < 0.2:
            yield "overflow", (chance.randrange(100),)
        if chance.random() < 0.3:
            yield "clip", (chance.randrange(len(NORMS)),)
        if chance.random() < 0.6:
            yield "update", ()
        if chance.random() < 0.4:
            yield chance.choice(("zero", "zero to zeros")), ()


def _sizes(
    chance: random.Random, replicas: int, num_rounds: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Draw the sizes of mini-batches, round by round; a replica's loader may end earlier."""
    lengths = [num_rounds] * replicas
    if num_rounds > 1 and replicas > 1 and chance.random() < 0.5:
        lengths[chance.randrange(replicas)] = chance.randrange(num_rounds)
    return tuple(
        tuple(chance.randint(1, 9) if k < length else 0 for length in lengths)
        for k in range(num_rounds)
    )
