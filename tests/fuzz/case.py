"""Random cases for the fuzzer: plain data, drawn from a seed and a number, and made smaller.

A case says which layers a model has, how it is trained, and in which runs. The first run begins
with new values; each other one resumes what the run before it has saved, perhaps on another number
of stages. Layers are words (see layers.py), any of which may follow any other:

    "gru linear* stash.0 relu_ pop.0"       * is frozen; .0 is the number of a pair of stash and pop

A call is an act with numbers: ``("step", (7,))`` is one step with 7 samples, ``("step", (7, 2))``
one with 7 that the first replica has read and 2 that the second has, ``("loop", (7, 2, 4, 0))``
a loop whose second mini-batch only the first replica has; ``("chunks", (3,))`` sets the number of
micro-batches. Imports neither torch nor procpipe; starts nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

#: An act and its numbers.
Call = tuple[str, tuple[int, ...]]

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

#: Numbers of stages and of replicas of a run.
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


@dataclass(frozen=True)
class Run:
    """How a model runs, from its building or from a saved state on.

    Attributes:
        balance: layers in each partition, the head included.
        num_stages: of each replica.
        replicas: as in ``Stage``; so are the next three.
        chunks: before the first call.
        schedule: a name, or ``PAIRS``.
        checkpoint: the mode.
        transport: the name.
        calls: what is called.
    """

    balance: tuple[int, ...]
    num_stages: int = 1
    replicas: int = 1
    chunks: int = 1
    schedule: str = "gpipe"
    checkpoint: str = "never"
    transport: str = "shm"
    calls: tuple[Call, ...] = (("step", (4,)),)

    @property
    def num_ranks(self) -> int:
        """How many processes there are."""
        return self.num_stages * self.replicas

    def rounds(self, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the numbers of samples of each mini-batch of a call, replica by replica."""
        return [*zip(*[iter(sizes)] * self.replicas, strict=True)]


@dataclass(frozen=True)
class Case:
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
    layers: str
    runs: tuple[Run, ...]
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
    def words(self) -> list[str]:
        """The layers' words."""
        return self.layers.split()

    @property
    def kinds(self) -> list[str]:
        """The layers' words, whether frozen or not."""
        return [word.rstrip("*") for word in self.words]

    @property
    def num_ranks(self) -> int:
        """How many processes there are in the run with the most."""
        return max(run.num_ranks for run in self.runs)

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
            or (is_tied and any(len(run.balance) > 1 for run in self.runs))
            or (
                (is_tied or "twice" in kinds)
                and any(run.schedule in ("zb-h1", "zb-v") for run in self.runs)
            )
        )
        return not inexact

    def __str__(self) -> str:
        """Write the case as Python, without what has its default."""
        return _written(self)


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
        layers=" ".join(words),
        runs=tuple(
            Run(
                balance=_balance(chance, len(words) + 1, parts),
                num_stages=num_stages,
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
    for r in range(len(case.runs)):
        if len(case.runs) > 1:
            yield replace(case, runs=case.runs[:r] + case.runs[r + 1 :])
    for r, run in enumerate(case.runs):
        for smaller in (*_with_fewer_calls(run), *_on_fewer_ranks(run)):
            yield _with_run(case, r, smaller)
    for k in range(len(case.words)):
        words = case.words[:k] + case.words[k + 1 :]
        if words and all(run.balance[_part_of(run, k)] > 1 for run in case.runs):
            runs = tuple(replace(run, balance=_without(run, k)) for run in case.runs)
            yield replace(case, layers=" ".join(words), runs=runs)
    for r, run in enumerate(case.runs):
        for name in ("schedule", "transport", "checkpoint", "chunks"):
            if name != "schedule" or len(run.balance) == run.num_stages:
                yield _with_run(case, r, replace(run, **{name: _default(Run, name)}))
    for name in (each.name for each in dataclasses.fields(Case)[3:]):
        if name != "inputs" or not case.is_head_tied:
            yield replace(case, **{name: _default(Case, name)})
    for k, kind in enumerate(case.kinds):
        if kind != "affine":
            words = [*case.words[:k], "affine", *case.words[k + 1 :]]
            yield replace(case, layers=" ".join(words))
    for r, run in enumerate(case.runs):
        for k, (act, sizes) in enumerate(run.calls):
            if max(sizes, default=0) > 2:
                fewer = (act, tuple(min(size, max(sizes) - 1) for size in sizes))
                calls = (*run.calls[:k], fewer, *run.calls[k + 1 :])
                yield _with_run(case, r, replace(run, calls=calls))


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


def _balance(chance: random.Random, num_layers: int, num_partitions: int) -> tuple[int, ...]:
    cuts = [0, *sorted(chance.sample(range(1, num_layers), num_partitions - 1)), num_layers]
    return tuple(b - a for a, b in itertools.pairwise(cuts))


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


def _sizes(chance: random.Random, replicas: int, num_rounds: int = 1) -> tuple[int, ...]:
    """Draw the sizes of mini-batches, round by round; a replica's loader may end earlier."""
    lengths = [num_rounds] * replicas
    if num_rounds > 1 and replicas > 1 and chance.random() < 0.5:
        lengths[chance.randrange(replicas)] = chance.randrange(num_rounds)
    return tuple(
        chance.randint(1, 9) if k < length else 0 for k in range(num_rounds) for length in lengths
    )


def _with_run(case: Case, r: int, run: Run) -> Case:
    return replace(case, runs=(*case.runs[:r], run, *case.runs[r + 1 :]))


def _with_fewer_calls(run: Run) -> Iterator[Run]:
    for k, (act, sizes) in enumerate(run.calls):
        yield replace(run, calls=run.calls[:k] + run.calls[k + 1 :])
        if act in LOOPS and len(sizes) > run.replicas:
            fewer = (act, sizes[run.replicas :])
            yield replace(run, calls=(*run.calls[:k], fewer, *run.calls[k + 1 :]))


def _on_fewer_ranks(run: Run) -> Iterator[Run]:
    """Yield the run without the last replica, and without the last stage.

    The partitions of that stage are joined to the partition before them.
    """
    if run.replicas > 1:
        calls = tuple(
            (act, tuple(map(max, run.rounds(sizes))) if act not in BETWEEN else sizes)
            for act, sizes in run.calls
        )
        yield replace(run, replicas=1, calls=calls)
    if run.num_stages > 1:
        num_left = len(run.balance) // run.num_stages * (run.num_stages - 1)
        balance = (*run.balance[: num_left - 1], sum(run.balance[num_left - 1 :]))
        yield replace(run, num_stages=run.num_stages - 1, balance=balance)


def _part_of(run: Run, k: int) -> int:
    """Return the partition of a layer."""
    return next(j for j, end in enumerate(itertools.accumulate(run.balance)) if k < end)


def _without(run: Run, k: int) -> tuple[int, ...]:
    """Return the balance without a layer."""
    return tuple(size - (j == _part_of(run, k)) for j, size in enumerate(run.balance))


def _default(kind: type, name: str) -> Any:
    return next(each.default for each in dataclasses.fields(kind) if each.name == name)


def _written(value: Any, indent: str = "") -> str:
    """Write a case or run as Python."""
    deeper = indent + "    "
    if isinstance(value, tuple) and value and isinstance(value[0], Run):
        return f"({''.join(_written(run, indent) + ', ' for run in value).rstrip()})"
    if not isinstance(value, (Case, Run)):
        return repr(value)
    lines = [
        f"{deeper}{each.name}={_written(getattr(value, each.name), deeper)},\n"
        for each in dataclasses.fields(value)
        if getattr(value, each.name) != each.default
    ]
    return f"{type(value).__name__}(\n{''.join(lines)}{indent})"
