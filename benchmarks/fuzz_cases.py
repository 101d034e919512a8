"""Random cases for the fuzzer: plain data, drawn from a seed and a number, and made smaller.

A case says which layers in which partitions, on how many ranks, with which options, and which calls
follow one another. Layers are words (see fuzz_layers.py), any of which may follow any other:

    "gru linear* stash.0 relu_ pop.0"       * is frozen; .0 is the number of a pair of stash and pop

A call is an act with a number: ``"step:7"`` is one step with 7 samples, ``"chunks:3"`` sets the
number of micro-batches. Does not import torch; starts nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

#: The schedule that is a function, ``two_at_a_time``.
PAIRS = "pairs"

#: By schedule, how many partitions each rank may have.
SCHEDULES = {
    "gpipe": (1,),
    "1f1b": (1,),
    "interleaved": (1, 2, 3),
    "zb-h1": (1,),
    "zb-v": (2,),
    PAIRS: (1,),
}

#: What a case may call with a mini-batch, in training and in evaluation.
TRAINING = (
    "step",
    "step on rank 0",
    "step named",
    "step with last target",
    "step for inputs",
    "batches",
    "loss",
    "loss for inputs",
)
EVALUATION = ("evaluate", "output in eval", "step without grad", "output without grad")

#: What a case may call between mini-batches; some use the number.
BETWEEN = ("update", "clip", "zero", "zero to zeros", "chunks")

ACTS = (*TRAINING, *EVALUATION, *BETWEEN)

#: Layers without those that stash and pop; fuzz_layers.py defines them.
WORDS = [
    "affine",
    "linear",
    "tied",
    "twice",
    "relu_",
    "relu_",
    "add_",
    "mlp_",
    "conv",
    "attention",
    "attention-alone",
    "encoder",
    "gru",
    "lstm",
    "layernorm",
    "batchnorm",
    "batchnorm",
    "batchnorm-mean",
    "groupnorm",
    "instancenorm",
    "strided",
    "expanded",
    "transposed",
    "wide",
    "tuple",
    "list",
    "dict",
    "ids",
    "detached",
    "empty",
    "same",
    "weight",
    "floats",
    "embedding",
    "custom",
    "checkpoint",
    "weightnorm",
    "spectralnorm",
    "dropout",
    "counting",
    "drawing",
    "nothing",
]

#: Layers that change the order of later additions and multiplications: a message makes a view
#: contiguous (recurrent layers and attentions return views, too), or a tensor is used twice.
INEXACT = {
    *("conv", "batchnorm", "batchnorm-mean", "groupnorm", "instancenorm"),
    *("attention", "attention-alone", "gru", "lstm", "floats"),
    *("strided", "expanded", "transposed", "wide", "list", "same", "weight", "stash.1", "stash.5"),
}

#: How many skip tensors a case may have; each is of another kind.
MAX_SKIPS = 6


@dataclass(frozen=True)
class Case:
    """One run of a model in a pipeline beside the plain model.

    Attributes:
        seed: of parameters and data.
        layers: the words of all layers but the head, which is the last.
        balance: layers in each partition, the head included.
        num_ranks: processes.
        chunks: as in ``Stage``; so are the next three.
        schedule: a name, or ``PAIRS``.
        checkpoint: the mode.
        transport: the name.
        inputs: ``"one"``, ``"ids"`` (integers) or ``"several"``.
        head: what the model returns: ``"tensor"`` or ``"dict"``.
        loss: ``"classes"``, ``"distance"``, ``"nested"`` or ``"none"``, the kind of target.
        optimizer: ``"sgd"`` or ``"adamw"``.
        is_weighted: with a ``loss_weight``.
        is_deferred: with ``deferred_batch_norm``.
        has_hooks: with hooks on modules and parameters.
        calls: an act and a number each.
    """

    seed: int
    layers: str
    balance: tuple[int, ...]
    num_ranks: int = 1
    chunks: int = 1
    schedule: str = "gpipe"
    checkpoint: str = "never"
    transport: str = "shm"
    inputs: str = "one"
    head: str = "tensor"
    loss: str = "distance"
    optimizer: str = "sgd"
    is_weighted: bool = False
    is_deferred: bool = False
    has_hooks: bool = False
    calls: tuple[str, ...] = ("step:4",)

    @property
    def words(self) -> list[str]:
        """The layers' words."""
        return self.layers.split()

    @property
    def is_exact(self) -> bool:
        """Whether every bit must be the plain model's."""
        words = {word.rstrip("*") for word in self.words}
        has_two_uses = words & {"tied", "twice"} and self.schedule in ("zb-h1", "zb-v")
        return not (words & INEXACT or has_two_uses or self._adds_before_loss_is_known)

    @property
    def _adds_before_loss_is_known(self) -> bool:
        """Whether the first step adds to earlier gradients.

        Whether the loss is a mean is known at its end, except under GPipe. Until then its gradients
        are kept apart from earlier ones, so they are added up in another order.
        """
        has_earlier = False
        for call in () if self.schedule == "gpipe" else self.calls:
            act = call.partition(":")[0]
            if act in ("zero", "zero to zeros"):
                has_earlier = False
            elif act.startswith("loss"):
                has_earlier = True
            elif act.startswith("step") or act == "batches":
                return has_earlier
        return False

    def to_text(self) -> str:
        """Write the case as one line, which ``from_text`` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Case:
        """Read a case that ``to_text`` has written."""
        read = json.loads(text)
        return cls(**read | {key: tuple(read[key]) for key in ("balance", "calls")})


def draw(seed: int, number: int) -> Case:
    """Draw a case; the same for the same seed and number."""
    chance = random.Random(f"{seed}/{number}")
    num_ranks = chance.choice((1, 2, 2, 3, 3, 4))
    schedule = chance.choice(tuple(SCHEDULES))
    num_partitions = num_ranks * chance.choice(SCHEDULES[schedule])
    words = _words(chance, max(num_partitions - 1, chance.randint(2, 8)))
    loss = chance.choice(("classes", "distance", "nested", "none"))
    return Case(
        seed=chance.randrange(1 << 20),
        layers=" ".join(words),
        balance=_balance(chance, len(words) + 1, num_partitions),
        num_ranks=num_ranks,
        chunks=chance.randint(1, 6),
        schedule=schedule,
        checkpoint=chance.choice(("always", "except_last", "never")),
        transport=chance.choice(("shm", "shm", "shm", "gloo")),
        inputs=chance.choice(("one", "one", "ids", "several")),
        head=chance.choice(("tensor", "dict")),
        loss=loss,
        optimizer=chance.choice(("sgd", "adamw")),
        is_weighted=loss in ("classes", "distance") and chance.random() < 0.4,
        is_deferred=chance.random() < 0.3,
        has_hooks=chance.random() < 0.4,
        calls=tuple(_calls(chance)),
    )


def simpler(case: Case) -> Iterator[Case]:
    """Yield smaller cases, each by one change, the largest changes first."""
    for k in range(len(case.calls)):
        if len(case.calls) > 1:
            yield dataclasses.replace(case, calls=case.calls[:k] + case.calls[k + 1 :])
    if case.num_ranks > 1:
        yield _on_fewer_ranks(case)
    ends = [sum(case.balance[: j + 1]) for j in range(len(case.balance))]
    for k in range(len(case.words)):
        part = next(j for j, end in enumerate(ends) if k < end)
        if case.balance[part] > 1 and len(case.words) > 1:
            fewer = " ".join(case.words[:k] + case.words[k + 1 :])
            smaller = [size - (j == part) for j, size in enumerate(case.balance)]
            yield dataclasses.replace(case, layers=fewer, balance=tuple(smaller))
    stock = Case(case.seed, case.layers, case.balance)
    for name in ("schedule", "transport", "checkpoint", "chunks", "inputs", "head", "loss"):
        if name != "schedule" or len(case.balance) == case.num_ranks:
            yield dataclasses.replace(case, **{name: getattr(stock, name)})
    for name in ("optimizer", "is_weighted", "is_deferred", "has_hooks"):
        yield dataclasses.replace(case, **{name: getattr(stock, name)})
    for k, word in enumerate(case.words):
        words = [*case.words[:k], "affine", *case.words[k + 1 :]]
        if word != "affine":
            yield dataclasses.replace(case, layers=" ".join(words))
    for k, call in enumerate(case.calls):
        act, _, size = call.partition(":")
        if int(size or 0) > 2:
            calls = (*case.calls[:k], f"{act}:{int(size) - 1}", *case.calls[k + 1 :])
            yield dataclasses.replace(case, calls=calls)


def _words(chance: random.Random, num_words: int) -> list[str]:
    candidates = [word for word in WORDS if word not in INEXACT] if chance.random() < 0.3 else WORDS
    words = chance.choices(candidates, k=num_words)
    words = [word + "*" if chance.random() < 0.15 else word for word in words]
    if chance.random() < 0.2:  # whole stages are frozen
        first, last = sorted(chance.choices(range(num_words + 1), k=2))
        words = [
            word.rstrip("*") + "*" * (first <= k < last or word.endswith("*"))
            for k, word in enumerate(words)
        ]
    places = list(range(num_words))
    chance.shuffle(places)
    for skip in chance.sample(range(MAX_SKIPS), chance.choice((0, 0, 1, 2))):
        num_pops = chance.choice((1, 1, 2))
        chosen = sorted(places[: num_pops + 1])
        places = places[num_pops + 1 :]
        for place, name in zip(chosen, ("stash", "pop", "pop"), strict=False):
            words[place] = f"{name}.{skip}"
    return words


def _balance(chance: random.Random, num_layers: int, num_partitions: int) -> tuple[int, ...]:
    cuts = [0, *sorted(chance.sample(range(1, num_layers), num_partitions - 1)), num_layers]
    return tuple(b - a for a, b in itertools.pairwise(cuts))


def _calls(chance: random.Random) -> Iterator[str]:
    for k in range(chance.randint(1, 3)):
        if k and chance.random() < 0.3:
            yield f"chunks:{chance.randint(1, 6)}"
        if chance.random() < 0.4:
            yield f"{chance.choice(EVALUATION)}:{chance.randint(1, 9)}"
        yield f"{chance.choice(TRAINING)}:{chance.randint(1, 9)}"
        if chance.random() < 0.3:
            yield "clip"
        if chance.random() < 0.5:
            yield "update"
        if chance.random() < 0.4:
            yield chance.choice(("zero", "zero to zeros"))


def _on_fewer_ranks(case: Case) -> Case:
    """Join the last rank's partitions to the partition before them."""
    num_ranks = case.num_ranks - 1
    num_left = len(case.balance) // case.num_ranks * num_ranks
    balance = (*case.balance[: num_left - 1], sum(case.balance[num_left - 1 :]))
    return dataclasses.replace(case, num_ranks=num_ranks, balance=balance)
