"""``procpipe plan``: proposes how to run a model on several devices, and predicts time and memory.

    procpipe plan mymodel:build --sample mymodel:sample -n 4 --memory 24GiB

1  the costs of the layers: measure them here, one by one (measure.py); or read them, or those of
   a recorded run (replay.py); or estimate those of a folder of Hugging Face (folder.py)
2  simulate every number of replicas, schedule, checkpoint mode, number of chunks and some balances
   (procpipe.planner)
3  where this machine has a core or GPU for each process, run the best in a real pipeline, with a
   calibration, from which they are predicted once more (best.py, trial.py)
4  print them, and of the best its stages, timeline and the line to paste
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from procpipe.launch.plan import replay
from procpipe.launch.plan.best import Measured, try_out
from procpipe.launch.plan.folder import AttentionOfGpus, load_folder
from procpipe.launch.plan.measure import (
    assumed_machine,
    measure_layers,
    measure_machine,
)
from procpipe.launch.plan.options import STATES, check_options, device_type, divisors, parser
from procpipe.launch.plan.report import (
    line_to_paste,
    proposals_table,
    stages_table,
    tasks_table,
)
from procpipe.launch.plan.subject import MistakeError, Named, Subject, load
from procpipe.planner.layers import Machine, Profile, from_text, to_text
from procpipe.planner.propose import Proposal, Question, alone_s, best_of_each, propose
from procpipe.timeline.text import render_timeline_text
from procpipe.words import bytes_text, counted, seconds_text

#: How many proposals are printed, and measured.
_NUM_BEST = 5

#: What a GPU reaches of dense products in bfloat16, if --flops does not say.
_FLOPS_PER_S = 300e12

#: The share of a GPU's memory that is left for what is not counted.
_RESERVED = 0.1


@dataclass(frozen=True)
class _Source:
    """Where the costs of layers come from."""

    profile: Profile
    model: str  # the model in the line to paste
    loss: str  # the loss function in it
    named: Named | None = None  # what can be run here
    replicas: int | None = None  # the only number that can be planned for


def main(argv: Sequence[str]) -> int:
    """Propose plans as the words after ``procpipe plan`` ask.

    Returns 1 if nothing fits, or if --check fails, else 0.
    """
    options = parser().parse_args(argv)
    try:
        device = torch.device(device_type(options.device) if options.model else "cpu")
        check_options(options, device)
        return _plan(options, device, Console())
    except MistakeError as mistake:
        print(f"procpipe plan: {mistake}", file=sys.stderr)
        raise SystemExit(2) from mistake


def _plan(options: argparse.Namespace, device: torch.device, console: Console) -> int:
    if options.costs:
        source = _read(options)
    elif options.hf is not None:
        source = _estimate(options, console)
    else:
        source = _measure(options, device, console)
    profile = source.profile
    if options.save:
        _save(profile, options.save)
    memory_bytes: int | None = options.memory
    if memory_bytes is None and device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        memory_bytes = int((1 - _RESERVED) * total_bytes)
    batch, num_layers = options.batch or profile.batch, len(profile.tables[0].layers)
    questions = _questions(options, batch, num_layers, memory_bytes, source.replicas)
    found: list[Proposal] = []
    with _progress(console, "simulating") as show:
        for k, question in enumerate(questions):
            show(k, len(questions))
            found += propose(profile, question)
    ranked = best_of_each(found, memory_bytes)
    one_s = alone_s(profile, questions[0])
    _print(
        f"a mini-batch of {counted(batch, 'sample')} on {counted(options.n, 'device')}; one alone, "
        f"if it had the memory, would take {seconds_text(one_s)}\n"
    )
    if not ranked[0].fits(memory_bytes):
        assert memory_bytes is not None, "without a limit everything fits"
        proposals_table(ranked[:_NUM_BEST], {}, None, one_s, memory_bytes).print(console)
        least = max(ranked[0].needed_bytes)
        _print(
            f"\nnothing fits into {bytes_text(memory_bytes)}: the least is {bytes_text(least)} "
            f"({least} bytes) a device, by\n\n"
            f"    {line_to_paste(ranked[0], source.model, source.loss)}\n\n"
            "More devices, a smaller --batch, or layers divided into smaller ones need less"
            + ("; or another number of --replicas." if options.replicas else ".")
        )
        return 1
    best = [proposal for proposal in ranked if proposal.fits(memory_bytes)][:_NUM_BEST]
    measured: dict[Proposal, Measured] = {}
    failure = ""
    if source.named is not None and _can_run(options, device):
        try:
            with _progress(console, "running the best proposals") as show:
                measured = try_out(best, profile, source.named, device.type, show)
        except RuntimeError as error:
            failure = f"procpipe plan: the proposals could not be run: {error}"
            print(failure, file=sys.stderr)
    best = sorted(measured, key=lambda proposal: measured[proposal].step_s) or best
    chosen = best[0]
    proposals_table(best, measured, chosen, one_s, memory_bytes).print(console)
    if not measured and source.replicas is None:  # not those of a recorded run
        _print(
            "estimated from layers that run alone: beside neighbours on one host they are slower"
        )
    print()
    stages_table(profile.at(chosen.micro_batch).layers, chosen, memory_bytes).print(console)
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    print(f"\n{render_timeline_text(chosen.timeline, width)}")
    print(f"{line_to_paste(chosen, source.model, source.loss)}\n", flush=True)
    if options.check and chosen in measured:
        tasks_table(chosen, measured[chosen]).print(console)
    return 1 if options.check and failure else 0


def _questions(
    options: argparse.Namespace,
    batch: int,
    num_layers: int,
    memory_bytes: int | None = None,
    num_replicas: int | None = None,
) -> list[Question]:
    """Return what to plan for: each number of replicas for which layers and samples are enough.

    Raises:
        MistakeError: there is none.
    """
    given = num_replicas or options.replicas
    states, chunks = STATES[options.optimizer], tuple(options.chunks or ())
    found, reasons = [], []
    for number in [given] if given else divisors(options.n):
        question = Question(options.n, batch, memory_bytes, states, chunks, number)
        try:
            question.check(num_layers)
        except ValueError as error:
            reasons.append(str(error))
        else:
            found.append(question)
    if not found:
        raise MistakeError(reasons[0])
    return found


# -- costs ----------------------------------------------------------------------------------------


def _sizes_of(options: argparse.Namespace, subject: Subject) -> list[int]:
    """Return the sizes of micro-batches that will be tried."""
    questions = _questions(options, subject.batch, len(subject.model))
    return sorted({size for question in questions for size in question.splits().values()})


def _measure(options: argparse.Namespace, device: torch.device, console: Console) -> _Source:
    """Measure the layers of the model that is named."""
    named = Named(options.model, options.sample, options.loss, options.any, options.batch)
    name = "one CPU thread"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        torch.set_num_threads(1)  # as in a process that shares the host with others
    subject = load(named)
    sizes = _sizes_of(options, subject)
    _print(
        f"measuring {counted(len(subject.model), 'layer')} on {name}, micro-batches of "
        f"{', '.join(map(str, sizes))} {'sample' if sizes == [1] else 'samples'} …"
    )
    with _progress(console, "measuring layers") as show:
        tables = measure_layers(subject, sizes, device, show=show)
    machine = _linked(options, *measure_machine(device))
    if not options.loss:
        _print(
            "no --loss is given: the mean of squares of the output stands in for it, which may be "
            "cheaper"
        )
    loss = options.loss.rpartition(":")[2] or "loss_fn"
    model = "procpipe.sequential(model, *inputs)" if options.any else "model"
    return _Source(Profile(subject.batch, tables, machine), model, loss, named)


def _estimate(options: argparse.Namespace, console: Console) -> _Source:
    """Estimate the layers of a folder of Hugging Face, on GPUs."""
    with _progress(console, "building the model"):
        subject = load_folder(options.hf, options.batch or 8, options.length, options.loss)
    sizes = _sizes_of(options, subject)
    rate = options.flops or _FLOPS_PER_S
    source = "--flops" if options.flops else "assumed: --flops"
    _print(
        f"{subject.words}\ncounting bytes and FLOPs of {counted(len(subject.model), 'layer')}, "
        f"without values, micro-batches of {', '.join(map(str, sizes))} x {subject.length} tokens "
        "with padding …"
    )
    with _progress(console, "counting") as show, AttentionOfGpus():
        tables = measure_layers(subject, sizes, None, rate, show)
    _print(
        f"times are estimated, not measured: FLOPs at {rate / 1e12:.3g} TFLOP/s ({source}), a "
        "backward as twice its forward"
    )
    machine = _linked(options, assumed_machine(), "assumed: --bandwidth")
    return _Source(Profile(subject.batch, tables, machine), "hf.sequential(model)", subject.loss)


def _linked(options: argparse.Namespace, machine: Machine, source: str = "") -> Machine:
    """Return a machine with the link that is asked for, and print what it is."""
    if options.bandwidth:
        machine, source = replace(machine, send_s=1 / options.bandwidth), "--bandwidth"
    if source:
        _print(f"transfers: {1e-9 / machine.send_s:.1f} GB/s ({source})")
    return machine


def _read(options: argparse.Namespace) -> _Source:
    """Read saved costs, or the files of a recorded run."""
    paths = [Path(path) for path in options.costs]
    loss, replicas = options.loss.rpartition(":")[2] or "loss_fn", None
    try:
        texts = [path.read_text(encoding="utf-8") for path in paths]
        if replay.is_recording(texts[0]):
            run = replay.usual_of(paths)
            _print(replay.basis(run))
            profile = replay.profile_of(run)
            replicas = options.replicas or run.facts["replicas"]  # gradients are not recorded
        elif len(texts) == 1:
            profile = from_text(texts[0])
        else:
            raise ValueError("give one file of costs, or the files of one recorded run")
    except (OSError, ValueError) as error:
        raise MistakeError(f"--costs {' '.join(options.costs)}: {error}") from error
    profile = replace(profile, machine=_linked(options, profile.machine))
    return _Source(profile, "model", loss, replicas=replicas)


def _save(profile: Profile, path: str) -> None:
    try:
        Path(path).write_text(to_text(profile), encoding="utf-8")
    except OSError as error:
        raise MistakeError(f"--save {path} cannot be written: {error}") from error
    _print(f"saved the layers' costs: --costs {path}")


# -- in real pipelines ----------------------------------------------------------------------------


def _can_run(options: argparse.Namespace, device: torch.device) -> bool:
    """Say whether the proposals are to be run here."""
    if device.type == "cuda":
        return not options.estimate and torch.cuda.device_count() >= options.n
    num_cores = len(os.sched_getaffinity(0))
    if options.check and num_cores < options.n:
        _print(
            f"{options.n} processes share {num_cores} cores here, so what is measured will be "
            "slower than predicted\n"
        )
    return bool(options.check) or (num_cores >= options.n and not options.estimate)


# -- on the screen --------------------------------------------------------------------------------


@contextmanager
def _progress(console: Console, what: str) -> Iterator[Callable[[int, int], object]]:
    """Show a bar while something runs, on a terminal; yields what sets how much is done, of all."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield show


def _print(text: str) -> None:
    print(text, flush=True)
