"""``procpipe plan``: proposes how to run a model on several devices, and predicts time and memory.

    procpipe plan mymodel:build --sample mymodel:sample --loss mymodel:loss -n 4 --memory 24GiB

1  the costs of the layers: measure them here, one by one (subject.py); or take those of a recorded
   run (replay.py); or estimate those of a folder of Hugging Face (folder.py)
2  simulate every number of replicas, schedule, checkpoint mode, number of chunks and some balances
   (procpipe.planner)
3  where this machine has a core or GPU for each process, run the best in a real pipeline, with a
   calibration, from which they are predicted once more (trial.py)
4  print them, and the line to paste
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from procpipe.launch.plan import replay
from procpipe.launch.plan.folder import AttentionOfGpus, load_folder
from procpipe.launch.plan.options import STATES, check_options, parser
from procpipe.launch.plan.report import (
    balances_table,
    line_to_paste,
    proposals_table,
    tasks_table,
)
from procpipe.launch.plan.subject import MistakeError, load
from procpipe.launch.plan.trial import try_out
from procpipe.notes import progress
from procpipe.planner.costs import Machine, Table
from procpipe.planner.propose import Proposal, Question, alone_s, best_of_each, propose
from procpipe.timeline.chrome import read
from procpipe.words import bytes_text, counted, seconds_text

#: What is assumed before anything was measured in a pipeline: between GPUs of one host, at least 16
#: lanes of PCIe 4; between its processes, a copy in memory.
_MACHINES = {
    "cuda": Machine(host_s=200e-6, send_s=1 / 20e9, hop_s=20e-6),
    "cpu": Machine(host_s=200e-6, send_s=1 / 5e9, hop_s=50e-6),
}

#: How many proposals are printed, and measured.
_NUM_BEST = 5

#: What a GPU reaches of dense products in bfloat16, if --flops does not say.
_FLOPS_PER_S = 300e12

#: The share of a GPU's memory that is left for what is not counted.
_RESERVED = 0.1


@dataclass(frozen=True)
class Source:
    """Where the costs of layers come from."""

    what: str  # in words
    batch: int  # samples of a mini-batch
    num_layers: int
    table: Callable[[int], Table]  # makes that of a micro-batch of so many samples
    machine: Machine
    model: str = "model"  # the model in the line to paste
    loss: str = "loss_fn"  # the loss function in it
    named: tuple[str, str, str, bool] | None = None  # what can be run here: for ``load``
    device_type: str = ""  # and on what: "cpu" or "cuda"
    replicas: int | None = None  # the only number that can be planned for


def main(argv: Sequence[str]) -> int:
    """Propose plans as the words after ``procpipe plan`` ask.

    Returns 1 if nothing fits, or if --check fails, else 0.
    """
    options = parser().parse_args(argv)
    try:
        check_options(options)
        source_of = _recorded if options.costs else _measured if options.model else _of_folder
        return plan(source_of(options), options)
    except MistakeError as mistake:
        print(f"procpipe plan: {mistake}", file=sys.stderr)
        raise SystemExit(2) from mistake


def plan(source: Source, options: argparse.Namespace) -> int:
    """Propose plans from the costs of a source; return the exit code."""
    memory_bytes: int | None = options.memory
    if memory_bytes is None and source.device_type == "cuda":
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        memory_bytes = int((1 - _RESERVED) * total_bytes)
    questions = _questions(source, options, memory_bytes)
    sizes = sorted({size for question in questions for size in question.splits().values()})
    machine = source.machine
    if options.bandwidth:
        machine = replace(machine, send_s=1 / options.bandwidth)
    print(f"{source.what}\nmicro-batches of {', '.join(map(str, sizes))} samples are tried")
    if machine.send_s:
        print(f"transfers: {1e-9 / machine.send_s:.1f} GB/s (another: --bandwidth)")
    tables, found = {}, []
    with progress("costs of layers", len(sizes)) as advance:
        for size in reversed(sizes):  # what no size can be run on is an error of the first
            tables[size] = source.table(size)
            advance()
    with progress("simulating", len(questions)) as advance:
        for question in questions:
            found += propose(tables, machine, question)
            advance()
    ranked = best_of_each(found, memory_bytes)
    one_s = alone_s(tables, machine, questions[0])
    print(
        f"a mini-batch of {counted(questions[0].batch, 'sample')} on "
        f"{counted(options.n, 'device')}; one alone, if it had the memory, would take "
        f"{seconds_text(one_s)}\n"
    )
    best = [proposal for proposal in ranked if proposal.fits(memory_bytes)][:_NUM_BEST]
    if memory_bytes is not None and not best:
        least = max(ranked[0].needed_bytes)
        print(
            f"{proposals_table(ranked[:_NUM_BEST], {}, None, one_s)}\n\n"
            f"nothing fits into {bytes_text(memory_bytes)}: the least is {bytes_text(least)} "
            f"({least} bytes) a device, by\n\n"
            f"    {line_to_paste(ranked[0], source.model, source.loss)}\n\n"
            "More devices, a smaller --batch, or layers divided into smaller ones need less"
            + ("; or another number of --replicas." if options.replicas else ".")
        )
        return 1
    measured: dict[Proposal, replay.Usual] = {}
    has_failed = False
    if source.named is not None and _can_run(source, options):
        try:
            with progress("running the best proposals"):
                measured = try_out(best, tables, questions[0], source.named, source.device_type)
        except RuntimeError as error:
            has_failed = True
            print(f"procpipe plan: the proposals could not be run: {error}", file=sys.stderr)
    best = sorted(measured, key=lambda proposal: measured[proposal].step_s) or best
    chosen = best[0]
    print(proposals_table(best, measured, chosen, one_s))
    if not measured and not options.costs:
        print(
            "estimated from layers that run alone; left out is what processes of one host take "
            "from each other,\nwhat splitting a backward costs, and the exchange of shared "
            "parameters' gradients"
        )
    print(f"\n{balances_table(best)}\n\n{line_to_paste(chosen, source.model, source.loss)}\n")
    if options.check and measured:
        print(tasks_table(chosen, measured[chosen]))
    return int(options.check and has_failed)


def _questions(
    source: Source, options: argparse.Namespace, memory_bytes: int | None
) -> list[Question]:
    """Return what to plan for: each number of replicas for which layers and samples are enough.

    Raises:
        MistakeError: there is none.
    """
    given = source.replicas or options.replicas
    divisors = [number for number in range(1, options.n + 1) if options.n % number == 0]
    states, chunks = STATES[options.optimizer], tuple(options.chunks or ())
    batch = options.batch or source.batch
    asked = [
        Question(options.n, batch, memory_bytes, states, chunks, number)
        for number in ([given] if given else divisors)
    ]
    found = [question for question in asked if question.is_possible(source.num_layers)]
    if not found:
        raise MistakeError(
            f"{counted(source.num_layers, 'layer')} and {counted(batch, 'sample')} cannot be "
            f"divided among {counted(options.n, 'device')} as asked: each replica has as many "
            "stages, each stage at least one layer, and each micro-batch at least one sample"
        )
    return found


def _can_run(source: Source, options: argparse.Namespace) -> bool:
    """Say whether the proposals are to be run here."""
    is_on_gpu = source.device_type == "cuda"
    num_places = torch.cuda.device_count() if is_on_gpu else len(os.sched_getaffinity(0))
    if options.check and num_places < options.n:
        print(
            f"{options.n} processes share {num_places} cores here, so what is measured will be "
            "slower than predicted\n"
        )
    return bool(options.check) or (num_places >= options.n and not options.estimate)


# -- costs ----------------------------------------------------------------------------------------


def _measured(options: argparse.Namespace) -> Source:
    """Have the layers measured of the model that is named."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = "one CPU thread"
    if device.type == "cpu":
        torch.set_num_threads(1)  # as in a process that shares the host with others
    else:
        where, num_gpus = torch.cuda.get_device_name(device), torch.cuda.device_count()
        if options.check and num_gpus < options.n:
            raise MistakeError(f"--check: {options.n} GPUs are needed, and there are {num_gpus}")
    named = (options.model, options.sample, options.loss, options.any)
    subject = load(*named)
    return Source(
        f"measuring {counted(len(subject.model), 'layer')} on {where}",
        subject.batch,
        len(subject.model),
        partial(subject.table, device=device),
        _MACHINES[device.type],
        "procpipe.sequential(model, *inputs)" if options.any else "model",
        options.loss.rpartition(":")[2],
        named,
        device.type,
    )


def _of_folder(options: argparse.Namespace) -> Source:
    """Have the layers estimated of a folder of Hugging Face, on GPUs."""
    with progress("building the model"):
        subject, loss, words = load_folder(
            options.hf, options.batch or 8, options.length, options.loss
        )
    rate = options.flops or _FLOPS_PER_S

    def table_of(samples: int) -> Table:
        with AttentionOfGpus():
            table: Table = subject.table(samples, flops_per_s=rate)
        return table

    return Source(
        f"{words}\ntimes are estimated, not measured: FLOPs at {rate / 1e12:.3g} TFLOP/s "
        "(--flops), a backward as twice its forward\ncounting bytes and FLOPs of "
        f"{counted(len(subject.model), 'layer')}, without values",
        subject.batch,
        len(subject.model),
        table_of,
        _MACHINES["cuda"],
        "hf.sequential(model)",
        loss.rpartition(":")[2],
    )


def _recorded(options: argparse.Namespace) -> Source:
    """Take the costs of layers from the files of recorded runs."""
    try:
        with progress("merging the files"):
            runs = replay.usual_of_runs(read(Path(path)) for path in options.costs)
    except (OSError, ValueError) as error:
        raise MistakeError(f"--costs {' '.join(options.costs)}: {error}") from error
    run = runs[0]
    return Source(
        replay.basis(runs),
        sum(run.samples) * run.facts["replicas"],
        sum(run.facts["balance"]),
        partial(replay.table_of, runs),
        replay.machine_of(run, replay.table_of(runs, max(run.samples))),
        loss=options.loss.rpartition(":")[2] or "loss_fn",
        replicas=options.replicas or run.facts["replicas"],  # gradients are not recorded
    )
