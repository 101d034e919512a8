"""Language models of transformers by ``procpipe.hf``, against halves that were cut by hand.

    procpipe.hf             Stage(hf.sequential(model))
    procpipe, two layers    Stage over the two halves of hf_models.py as an nn.Sequential
    torch                   torch.distributed.pipelining over the same halves, output layer untied
    one process             the model as it is, micro-batch by micro-batch, on rank 0

All compute the same loss, which is compared first.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import hf_models
from benchmarks.report import OF_ONE, OF_TORCH, Report, Table
from benchmarks.rounds import Times, launch, measure, ratio

_NUM_STAGES, _NUM_TOKENS = 2, 128

_OURS, _HALVES, _TORCH = "procpipe.hf", "procpipe, two layers", "torch"
_ONE_PROCESS = "one process"

#: Those that are made with each schedule that they have.
_PIPELINES = (_OURS, _HALVES, _TORCH)


def configure(parser: argparse.ArgumentParser) -> None:
    models = list(hf_models.MODELS)
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--batch", type=int, default=16, help=f"sequences of {_NUM_TOKENS} tokens")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=hf_models.WIDTH, help="of the hidden states")


def run(options: argparse.Namespace) -> Report:
    settings = {"batch": options.batch, "m": options.micro_batches, "width": options.width}
    figures = {
        name: launch(
            "benchmarks.hf:measure_model",
            _NUM_STAGES,
            {"HF_HUB_OFFLINE": "1"},
            name=name,
            num_rounds=options.rounds,
            **settings,
        )
        for name in options.models
    }
    return Report(
        "hf",
        [tabulate(name, times, **settings) for name, times in figures.items()],
        figures,
        {**settings, "rounds": options.rounds},
        ratios={f"procpipe.hf, {name}-like": ratios_of(times) for name, times in figures.items()},
        one_process={what: times[_ONE_PROCESS] for what, times in figures.items()},
    )


def ratios_of(times: Times) -> dict[str, float]:
    """Return the ratios of procpipe.hf with its fastest schedule, to torch with its fastest."""
    ours = times[best(times, _OURS)]
    return {
        OF_TORCH: ratio(ours, times[best(times, _TORCH)]),
        OF_ONE: ratio(ours, times[_ONE_PROCESS]),
    }


def best(times: Times, contender: str) -> str:
    """Return the name of a contender with its fastest schedule, by the median of its rounds."""
    return min(
        (name for name in times if name.rpartition(" ")[0] == contender or name == contender),
        key=lambda name: statistics.median(times[name]),
    )


def tabulate(name: str, times: Times, batch: int, m: int, width: int) -> Table:
    """Lay out seconds, and ratios to each contender's best."""
    halves, others = best(times, _HALVES), best(times, _TORCH)
    rows: list[list[Any]] = [
        [
            each,
            statistics.median(seconds) * 1e3,
            ratio(seconds, times[halves]),
            ratio(seconds, times[others]),
            ratio(seconds, times[_ONE_PROCESS]),
        ]
        for each, seconds in times.items()
    ]
    return Table(
        f"{name}: {hf_models.NUM_BLOCKS} blocks of width {width}, {batch} x {_NUM_TOKENS} tokens "
        f"with padding, {_NUM_STAGES} stages, m = {m}, no recomputation",
        ["", "ms a step", f"of {halves}", f"of {others}", "of one process"],
        rows,
        [".1f", ".3f", ".3f", ".3f"],
        ["ratios are medians of those of each round"],
    )


def measure_model(name: str, batch: int, m: int, width: int, num_rounds: int) -> Times:
    """Compare the losses of one model's contenders, and measure them; every rank calls it."""
    steps = contenders(name, batch, m, width)
    reference = torch.zeros(())
    for contender in (_ONE_PROCESS, *(name for name in steps if name != _ONE_PROCESS)):
        loss = steps[contender]()
        if contender == _ONE_PROCESS:
            reference.copy_(loss)
            dist.broadcast(reference, 0)
        elif not loss.isnan():
            message = f"the loss of {contender} is {loss}, of {_ONE_PROCESS} {reference}"
            torch.testing.assert_close(loss, reference, msg=message)
    return measure(steps, num_rounds=num_rounds, num_steps=1)


def contenders(name: str, batch: int, m: int, width: int) -> dict[str, Callable[[], Tensor]]:
    """Make every contender's step.

    Each returns the loss of the mini-batch; NaN on a rank that has none.
    """
    from procpipe import Stage, hf

    data = batch_of(batch)
    tokens, mask, labels = data.values()

    def model() -> Any:
        return hf_models.model_of(name, _NUM_TOKENS, width=width)

    made: dict[str, Callable[[], Tensor]] = {}
    half = hf_models.NUM_BLOCKS // 2
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        options: dict[str, Any] = {
            "chunks": m,
            "checkpoint": "never",
            "schedule": schedule,
            "loss_fn": hf.causal_lm_loss,
        }
        stage = Stage(hf.sequential(model()), [1 + half, half + 1], **options)
        made[f"{_OURS} {schedule}"] = partial(stage.step, **data)
        halves = Stage(hf_models.plain_sequential(name, model()), [1, 1], **options)
        made[f"{_HALVES} {schedule}"] = partial(halves.step, tokens, mask, target=labels)
    made |= {
        f"{_TORCH} {schedule}": _torch_step(
            schedule, name, hf_models.untied(name, _NUM_TOKENS, width=width), data, m
        )
        for schedule in ("gpipe", "1f1b")
    }
    made[_ONE_PROCESS] = _one_process(model(), data, m)
    return made


def batch_of(batch: int) -> dict[str, Tensor]:
    """Return a mini-batch as a loader gives it: every second sequence is padded."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(hf_models.NUM_WORDS, (batch, _NUM_TOKENS), generator=generator)
    mask = torch.ones_like(tokens)
    mask[::2, _NUM_TOKENS * 3 // 4 :] = 0
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }


def _torch_step(
    schedule: str, name: str, model: Any, data: dict[str, Tensor], m: int
) -> Callable[[], Tensor]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    from procpipe import hf

    rank, is_last = dist.get_rank(), dist.get_rank() == _NUM_STAGES - 1
    part = hf_models.Half(name, model, is_last=is_last)
    share = int((data["labels"][:, 1:] != -100).sum()) / m

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        weight = hf.causal_lm_loss.num_counted(labels) / share  # their mean is that of all tokens
        return hf.causal_lm_loss(logits, labels) * weight

    schedule_class = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
    pipeline = schedule_class(
        PipelineStage(part, rank, _NUM_STAGES, torch.device("cpu")),
        n_microbatches=m,
        loss_fn=loss_fn,
    )
    tokens, mask, labels = data.values()

    def step() -> Tensor:
        if not is_last:
            pipeline.step(tokens, attention_mask=mask)
            return torch.tensor(torch.nan)
        losses: list[Tensor] = []
        pipeline.step(attention_mask=mask, target=labels, losses=losses)
        return torch.stack(losses).detach().mean()

    return step


def _one_process(model: Any, data: dict[str, Tensor], m: int) -> Callable[[], Tensor]:
    from procpipe import hf

    num_tokens = int((data["labels"][:, 1:] != -100).sum())
    micro_batches = list(zip(*(value.chunk(m) for value in data.values()), strict=True))

    def step() -> Tensor:
        loss = torch.zeros(())
        for tokens, mask, labels in micro_batches:
            logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
            share = hf.causal_lm_loss.num_counted(labels) / num_tokens
            of_one = hf.causal_lm_loss(logits, labels) * share
            of_one.backward()
            loss += of_one.detach()
        return loss

    return step if dist.get_rank() == 0 else lambda: torch.tensor(torch.nan)
