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
from contextlib import contextmanager, nullcontext
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
    measure_rate,
)
from procpipe.launch.plan.options import STATES, check_options, device_type, divisors, parser
from procpipe.launch.plan.report import (
    line_to_paste,
    nothing_fits_text,
    proposals_table,
    stages_table,
    tasks_table,
    ties_table,
)
from procpipe.launch.plan.subject import MistakeError, Named, Subject, load
from procpipe.planner.layers import Profile, from_text, to_text
from procpipe.planner.propose import Proposal, Question, alone_s, best_of_each, propose
from procpipe.timeline.text import render_timeline_text
from procpipe.words import counted, seconds_text

#: How many proposals are printed, and measured.
_NUM_BEST = 5

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
        is_measured = not options.costs and not (options.hf and options.flops)
        device = torch.device(device_type(options.device) if is_measured else "cpu")
        check_options(options, device)
        return _plan(options, device, Console())
    except MistakeError as mistake:
        print(f"procpipe plan: {mistake}", file=sys.stderr)
        raise SystemExit(2) from mistake


def _plan(options: argparse.Namespace, device: torch.device, console: Console) -> int:
    if options.costs:
        source = _read(options)
    elif options.hf is not None:
        source = _estimate(options, device, console)
    else:
        source = _measure(options, device, console)
    profile = source.profile
    if options.save:
        _save(profile, options.save)
    if options.bandwidth:
        machine = replace(profile.machine, send_s=1 / options.bandwidth)
        profile = replace(profile, machine=machine)
    memory_bytes: int | None = options.memory
    if memory_bytes is None and device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        memory_bytes = int((1 - _RESERVED) * total_bytes)
    batch = options.batch or profile.batch
    numbers = [source.replicas] if source.replicas else _replicas(options)
    questions = [_question(options, batch, r, memory_bytes) for r in numbers]
    with _progress(console, "simulating"):
        found_all = _proposals(profile, questions)
    ranked = best_of_each(found_all, memory_bytes)
    one_s = alone_s(profile, questions[0])
    _print(
        f"a mini-batch of {counted(batch, 'sample')} on {counted(options.n, 'device')}; one alone, "
        f"if it had the memory, would take {seconds_text(one_s)}\n"
    )
    if not ranked[0].fits(memory_bytes):
        assert memory_bytes is not None, "without a limit everything fits"
        proposals_table(ranked[:_NUM_BEST], {}, None, one_s, memory_bytes).print(console)
        line = line_to_paste(ranked[0], source.model, source.loss)
        _print(f"\n{nothing_fits_text(ranked[0], memory_bytes, line)}")
        _print(_of_other_replicas(options, profile, questions[0]))
        return 1
    best = [proposal for proposal in ranked if proposal.fits(memory_bytes)][:_NUM_BEST]
    found: dict[Proposal, Measured] = {}
    failure = ""
    if source.named is not None and _can_run(options, device):
        try:
            with _progress(console, "running the best proposals") as show:
                found = try_out(best, profile, source.named, device.type, show)
        except RuntimeError as error:
            failure = f"procpipe plan: the proposals could not be run: {error}"
            print(failure, file=sys.stderr)
    best = sorted(found, key=lambda proposal: found[proposal].step_s) or best
    chosen = best[0]
    proposals_table(best, found, chosen, one_s, memory_bytes).print(console)
    if not found and source.replicas is None:  # not those of a recorded run
        _print(
            "estimated from layers that run alone: beside neighbours on one host they are slower"
        )
    print()
    table = profile.at(chosen.micro_batch)
    stages_table(table.layers, chosen, memory_bytes).print(console)
    if (ties := ties_table(table.ties, chosen)) is not None:
        print()
        ties.print(console)
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    print(f"\n{render_timeline_text(chosen.timeline, width)}")
    print(f"{line_to_paste(chosen, source.model, source.loss)}\n", flush=True)
    if options.check and chosen in found:
        tasks_table(chosen, found[chosen]).print(console)
    return 1 if options.check and failure else 0


# -- what to plan for -----------------------------------------------------------------------------


def _replicas(options: argparse.Namespace) -> list[int]:
    return [options.replicas] if options.replicas else divisors(options.n)


def _question(
    options: argparse.Namespace, batch: int, num_replicas: int, memory_bytes: int | None = None
) -> Question:
    states, chunks = STATES[options.optimizer], tuple(options.chunks or ())
    try:
        return Question(options.n, batch, memory_bytes, states, chunks, num_replicas)
    except ValueError as error:
        raise MistakeError(str(error)) from error


def _proposals(profile: Profile, questions: Sequence[Question]) -> list[Proposal]:
    """Return the proposals for all numbers of replicas that are possible."""
    found, left_out = [], []
    for question in questions:
        try:
            found += propose(profile, question)
        except ValueError as error:
            left_out.append((question, str(error)))
    if not found:
        raise MistakeError(left_out[0][1])
    for question, reason in left_out:
        stages = counted(question.num_stages, "stage")
        replicas = counted(question.num_replicas, "replica")
        _print(f"left out: {stages} x {replicas}, as {reason.partition(':')[0]}")
    return found


def _of_other_replicas(options: argparse.Namespace, profile: Profile, asked: Question) -> str:
    """Say whether anything fits with another number of replicas than the one asked for."""
    others = [r for r in divisors(options.n) if r != options.replicas] if options.replicas else []
    fitting = []
    for num_replicas in others:
        try:
            found = propose(profile, replace(asked, num_replicas=num_replicas))
        except ValueError:  # too few layers or samples
            continue
        if any(proposal.fits(asked.memory_bytes) for proposal in found):
            fitting.append(f"--replicas {num_replicas}")
    more = "More devices, a smaller --batch, or layers divided into smaller ones need less."
    if not others:
        return more  # all were planned for
    if not fitting:
        return f"Nothing fits with another number of replicas either.\n{more}"
    return f"There are proposals that fit with {' or '.join(fitting)}.\n{more}"


# -- costs ----------------------------------------------------------------------------------------


def _sizes_of(options: argparse.Namespace, subject: Subject) -> list[int]:
    """Return the sizes of micro-batches that will be tried.

    Raises:
        MistakeError: the model or the mini-batch cannot be divided so.
    """
    sizes, reasons = set(), []
    for question in (_question(options, subject.batch, r) for r in _replicas(options)):
        try:
            question.check(len(subject.model))
        except ValueError as error:
            reasons.append(str(error))
        else:
            sizes |= {*question.splits().values()}
    if not sizes:
        raise MistakeError(reasons[0])
    return sorted(sizes)


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
        tables = measure_layers(subject, sizes, device, note=_counting(show, 3 * len(sizes)))
    machine, source = measure_machine(device, None if options.save else options.bandwidth)
    _print(f"transfers: {1e-9 / machine.send_s:.1f} GB/s ({source})")
    if not options.loss:
        _print(
            "no --loss is given: the mean of squares of the output stands in for it, which may be "
            "cheaper"
        )
    loss = options.loss.rpartition(":")[2] or "loss_fn"
    model = "procpipe.sequential(model, *inputs)" if options.any else "model"
    return _Source(Profile(subject.batch, tables, machine, name), model, loss, named)


def _estimate(options: argparse.Namespace, device: torch.device, console: Console) -> _Source:
    """Estimate the layers of a folder of Hugging Face."""
    with _progress(console, "building the model"):
        subject = load_folder(options.hf, options.batch or 8, options.length, options.loss)
    sizes = _sizes_of(options, subject)
    rate, source = options.flops, "--flops"
    if device.type == "cpu":
        torch.set_num_threads(1)
    if rate is None:
        rate, how = measure_rate(device, subject.dtype)
        source = f"measured: {how}; of other devices: --flops"
    is_cpu = device.type == "cpu" and (options.flops is None or options.device == "cpu")
    machine, link = assumed_machine(), "assumed: --bandwidth"
    if is_cpu or device.type == "cuda" or options.bandwidth:
        machine, link = measure_machine(device, None if options.save else options.bandwidth)
    _print(
        f"{subject.words}\ncounting bytes and FLOPs of {counted(len(subject.model), 'layer')}, "
        f"without values, micro-batches of {', '.join(map(str, sizes))} x {subject.length} tokens "
        "with padding …"
    )
    with _progress(console, "counting") as show, nullcontext() if is_cpu else AttentionOfGpus():
        tables = measure_layers(subject, sizes, device, rate, _counting(show, len(sizes)))
    _print(
        f"times are estimated, not measured: FLOPs at {rate / 1e12:.3g} TFLOP/s ({source}), a "
        f"backward as twice its forward\ntransfers: {1e-9 / machine.send_s:.1f} GB/s ({link})"
    )
    profile = Profile(subject.batch, tables, machine, f"estimated at {rate:.3g} FLOP/s")
    return _Source(profile, "hf.sequential(model)", subject.loss)


def _read(options: argparse.Namespace) -> _Source:
    """Read saved costs, or the files of a recorded run."""
    paths = [Path(path) for path in options.costs]
    loss = options.loss.rpartition(":")[2] or "loss_fn"
    try:
        texts = [path.read_text(encoding="utf-8") for path in paths]
    except (OSError, UnicodeError) as error:
        raise MistakeError(f"--costs {paths[0]} cannot be read: {error}") from error
    try:
        if replay.is_recording(texts[0]):
            run = replay.usual_of(paths)
            _print(replay.basis(run))
            replicas = options.replicas or run.facts["replicas"]  # gradients are not recorded
            return _Source(replay.profile_of(run), "model", loss, replicas=replicas)
        if len(texts) > 1:
            raise MistakeError("--costs: give one file of costs, or the files of one recorded run")
        return _Source(from_text(texts[0]), "model", loss)
    except MistakeError:
        raise
    except ValueError as error:
        raise MistakeError(
            f"--costs {paths[0]} is neither a file of costs nor of a recorded run: {error}"
        ) from error


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


def _counting(show: Callable[[int, int], object], total: int) -> Callable[[], object]:
    """Return what shows one more of a number of things; of more, if there are more."""
    done = 0

    def note() -> None:
        nonlocal done
        done += 1
        show(done, max(total, done + 1))

    return note


def _print(text: str) -> None:
    print(text, flush=True)
