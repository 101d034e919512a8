"""The bytes that travel in a step where the embedding and the output layer share a matrix.

    embedding ─ blocks │ blocks ─ output        two stages, m micro-batches

    shared parameter   each stage has the matrix, and sends its gradient once       2 matrices
    skip tensor        the embedding stashes the matrix, the output layer pops it  2m matrices

The second is what one did before stages could share a parameter.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.report import Report, Table, bars
from benchmarks.rounds import Times, launch, measure, ratio
from procpipe import Stage
from procpipe.skip import pop, skippable, stash

_NUM_STAGES = 2
_BATCH, _TOKENS, _WIDTH, _NUM_BLOCKS = 32, 16, 64, 4

_SHARED, _SKIP = "shared parameter", "skip tensor"

#: What carries the matrix, or its gradient.
_PAYLOADS = {_SHARED: ("tied gradient",), _SKIP: ("skip", "skip gradient")}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--words", type=int, default=8192, help="rows of the matrix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="steps a turn")


def run(options: argparse.Namespace) -> Report:
    settings = {name: getattr(options, name) for name in ("chunks", "words", "rounds", "steps")}
    figures = launch("benchmarks.ties:measure_all", _NUM_STAGES, **settings)
    by_chunks = dict(zip(options.chunks, figures, strict=True))
    return Report(
        "ties",
        [tabulate(by_chunks, options.words)],
        by_chunks,
        settings,
        draw=lambda figure: bars(
            figure,
            {f"m = {m}": of_m["times"] for m, of_m in by_chunks.items()},
            _SKIP,
            f"time of a step, of {_SKIP}",
        ),
    )


def tabulate(by_chunks: dict[int, Any], num_words: int) -> Table:
    """Lay out bytes and times, by the number of micro-batches."""
    mib = num_words * _WIDTH * 4 / (1 << 20)
    rows: list[list[Any]] = []
    for m, found in by_chunks.items():
        times: Times = found["times"]
        for name, seconds in times.items():
            of_matrix, of_all = found["bytes"][name]
            numbers = [of_matrix / (1 << 20), of_all / (1 << 20), statistics.median(seconds) * 1e3]
            rows.append([f"m = {m}, {name}", *numbers, ratio(seconds, times[_SKIP])])
    return Table(
        f"ties: a matrix of {mib:g} MiB in the embedding and the output layer, {_NUM_STAGES} "
        f"stages, {_BATCH} x {_TOKENS} tokens in m micro-batches, GPipe, no recomputation",
        ["", "MiB of it a step", "of all messages", "ms a step", f"of {_SKIP}"],
        rows,
        [".2f", ".2f", ".1f", ".2f"],
        ["bytes: what both stages have sent, by their own statistics"],
    )


def measure_all(chunks: list[int], words: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Measure each number of micro-batches; every rank calls it."""
    return [_measure(m, words, rounds, steps) for m in chunks]


def _measure(m: int, words: int, rounds: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(1)
    tokens = torch.randint(words, (_BATCH, _TOKENS))
    stages = {
        name: Stage(
            _model(words, is_shared=name == _SHARED),
            [1 + _NUM_BLOCKS // 2, 1 + _NUM_BLOCKS // 2],
            chunks=m,
            checkpoint="never",
            loss_fn=_loss,
        )
        for name in _PAYLOADS
    }
    losses = {name: float(stage.step(tokens, tokens)) for name, stage in stages.items()}
    if dist.get_rank() == 0:
        gradients = [stage.get_parameter("0.weight").grad for stage in stages.values()]
        torch.testing.assert_close(*gradients)
    torch.testing.assert_close(*losses.values())
    sent = {name: _bytes_a_step(name, stage) for name, stage in stages.items()}
    runs = {name: lambda s=stage: s.step(tokens, tokens) for name, stage in stages.items()}
    times = measure(runs, num_rounds=rounds, num_steps=steps)
    for stage in stages.values():
        stage.close()
    return {"bytes": sent, "times": times}


def _bytes_a_step(name: str, stage: Stage) -> list[int]:
    """Return the bytes of the matrix and of all messages, from all stages, after one step."""
    ours = stage.statistics().sent_bytes
    numbers = torch.tensor([sum(ours.get(p, 0) for p in _PAYLOADS[name]), sum(ours.values())])
    dist.all_reduce(numbers)
    return numbers.tolist()


def _model(words: int, *, is_shared: bool) -> nn.Sequential:
    torch.manual_seed(0)
    embedding = (nn.Embedding if is_shared else Stashing)(words, _WIDTH)
    blocks = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(_NUM_BLOCKS)]
    output: nn.Module = Popping()
    if is_shared:
        output = nn.Linear(_WIDTH, words, bias=False)
        output.weight = embedding.weight
    return nn.Sequential(embedding, *blocks, output)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@skippable(stash=["matrix"])
class Stashing(nn.Embedding):
    """An embedding that stashes its matrix."""

    def forward(self, tokens: Tensor) -> Generator[Any, Any, Tensor]:  # type: ignore[override]
        """Stash, and look up."""
        yield stash("matrix", self.weight)
        return super().forward(tokens)


@skippable(pop=["matrix"])
class Popping(nn.Module):
    """An output layer with a matrix of another layer."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        """Multiply by it."""
        matrix = yield pop("matrix")
        return F.linear(x, matrix)
