"""``procpipe plan``: proposes how to run a model on several devices, and predicts time and memory.

    procpipe plan mymodel:build --sample mymodel:sample -n 4 --memory 24GiB

1  measure the layers of the model here, one by one (measure.py), or read saved costs;
   estimate those of a folder of Hugging Face (folder.py)
2  simulate every number of replicas, schedule, checkpoint mode, number of chunks and some balances
   (procpipe.planner)
3  print the best of each, and of the chosen one its stages, timeline and the line to paste
4  with --check, run it and compare (check.py)
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from procpipe.balance import divide
from procpipe.launch.plan.check import rehearse
from procpipe.launch.plan.folder import AttentionOfGpus, load_folder
from procpipe.launch.plan.measure import (
    assumed_link,
    measure_link,
    measure_model,
    measure_rate,
    measure_replica_link,
    sizes_to_measure,
)
from procpipe.launch.plan.options import STATES, check_options, device_type, divisors, parser
from procpipe.launch.plan.report import (
    arguments_of,
    best_of_each,
    check_table,
    line_to_paste,
    overview_table,
    splits_table,
    stages_table,
    ties_table,
)
from procpipe.launch.plan.subject import MistakeError, Named, SizeError, Subject, load
from procpipe.planner.costs_file import Measured, from_text, to_text
from procpipe.planner.model import Link, Model
from procpipe.planner.propose import (
    Proposal,
    Question,
    alone_s,
    choose,
    leanest,
    propose,
)
from procpipe.timeline.text import render_timeline_text
from procpipe.words import bytes_text, counted, seconds_text


def main(argv: Sequence[str]) -> int:
    """Propose plans as the words after ``procpipe plan`` ask; return 1 if nothing fits, else 0."""
    reader = parser()
    options = reader.parse_args(argv)
    try:
        return _Planning(options).main()
    except MistakeError as mistake:
        print(f"procpipe plan: {mistake}", file=sys.stderr)
        raise SystemExit(2) from mistake


class _Planning:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._console = Console()
        is_measured = not options.costs and not (options.hf and options.flops)
        self._device = torch.device(device_type(options.device) if is_measured else "cpu")
        self._named = Named(options.model or "", options.sample, options.loss, options.batch)
        check_options(options, self._device)
        self._loss, self._model = options.loss.rpartition(":")[2] or "loss_fn", "model"
        self._replicas = [options.replicas] if options.replicas else divisors(options.n)
        self._least_samples = 1  # of a micro-batch
        # Of links: measured if this run uses it, or saves it for others.
        self._bandwidth = None if options.save else options.bandwidth
        self._replica_bandwidth = None if options.save else options.replica_bandwidth
        self._memory_bytes: int | None = options.memory
        if options.memory is None and self._device.type == "cuda":
            self._memory_bytes = torch.cuda.get_device_properties(self._device).total_memory

    def main(self) -> int:
        """Measure or read, propose, print, and check."""
        options = self._options
        if options.costs:
            measured = self._read()
        else:
            measured = self._measure() if options.hf is None else self._estimate()
        if options.save:
            self._save(measured)
        link, between = measured.link, measured.replica_link
        if options.bandwidth:
            link, between = replace(link, bytes_per_s=options.bandwidth), None
        if options.replica_bandwidth:
            between = replace(between or link, bytes_per_s=options.replica_bandwidth)
        questions = self._questions(options.batch or measured.batch, link, between)
        proposals = self._propose(measured.model, questions)
        chosen = choose([*map(self._best, proposals)], self._memory_bytes)
        self._print(measured, questions[0], proposals, chosen)
        if chosen is None:
            return 1
        return self._check(chosen) if options.check else 0

    def _propose(self, model: Model, questions: Sequence[Question]) -> list[list[Proposal]]:
        """Return the proposals for each number of replicas that is possible."""
        found, left_out = [], []
        for question in questions:
            try:
                found.append(propose(model, question, divide))
            except ValueError as error:
                left_out.append((question, str(error)))
        if not found:
            raise MistakeError(left_out[0][1])
        for question, reason in left_out:
            replicas = counted(question.num_replicas, "replica")
            name = f"{counted(question.num_stages, 'stage')} x {replicas}"
            _print(f"left out: {name}, as {reason.partition(':')[0]}")
        return found

    def _best(self, proposals: Sequence[Proposal]) -> Proposal:
        return choose(proposals, self._memory_bytes) or leanest(proposals)

    def _measure(self) -> Measured:
        options = self._options
        if self._device.type == "cpu":
            torch.set_num_threads(1)  # as in a process that shares the host with others
        subject = load(self._named)
        splits = self._splits_of(subject)
        name = "one CPU thread"
        if self._device.type == "cuda":
            name = torch.cuda.get_device_name(self._device)
        model = self._measure_layers(subject, splits, name)
        link, source = measure_link(self._device, self._bandwidth)
        _print(f"transfers: {link.bytes_per_s / 1e9:.1f} GB/s ({source})")
        between = self._replica_link(self._device)
        if not options.loss:
            _print(
                "no --loss is given: the mean of squares of the output stands in for it, which "
                "may be cheaper"
            )
        return Measured(model, subject.batch, link, name, between)

    def _estimate(self) -> Measured:
        """Estimate the layers of a folder of Hugging Face."""
        options, device = self._options, self._device
        subject = load_folder(options.hf, options.batch or 8, options.length, options.loss)
        self._loss, self._model = subject.loss, "hf.sequential(model)"
        splits = self._splits_of(subject)
        rate, source = options.flops, "--flops"
        if device.type == "cpu":
            torch.set_num_threads(1)
        if rate is None:
            rate, how = measure_rate(device, subject.dtype)
            source = f"measured: {how}; of other devices: --flops"
        if options.flops and options.device != "cpu" and device.type == "cpu":
            link, link_source = assumed_link(), "assumed: --bandwidth"
        else:
            link, link_source = measure_link(device, self._bandwidth)
        found = sizes_to_measure(size for _, size in splits)
        sizes = (found[0], found[-1]) if len(found) > 1 else found  # between, all is in proportion
        _print(
            f"{subject.words}\ncounting bytes and FLOPs of {counted(len(subject.model), 'layer')}, "
            f"without values, micro-batches of {', '.join(map(str, sizes))} x {subject.length} "
            "tokens with padding …"
        )
        is_cpu = device.type == "cpu" and (options.flops is None or options.device == "cpu")
        with nullcontext() if is_cpu else AttentionOfGpus():
            model = measure_model(subject, sizes, device, rate)
        _print(
            f"times are estimated, not measured: FLOPs at {rate / 1e12:.3g} TFLOP/s ({source}), a "
            f"backward as twice its forward\ntransfers: {link.bytes_per_s / 1e9:.1f} GB/s "
            f"({link_source})"
        )
        between = self._replica_link(device) if is_cpu else None
        return Measured(model, subject.batch, link, f"estimated at {rate:.3g} FLOP/s", between)

    def _replica_link(self, device: torch.device) -> Link | None:
        """Measure what adds up gradients, where that is not what carries messages, nor given."""
        is_given = self._bandwidth or self._replica_bandwidth
        if device.type != "cpu" or self._replicas == [1] or is_given:
            return None
        found: tuple[Link, str] = measure_replica_link()
        link, source = found
        _print(f"all-reduces: {link.bytes_per_s / 1e9:.1f} GB/s ({source})")
        return link

    def _splits_of(self, subject: Subject) -> list[tuple[int, int]]:
        """Return the numbers of chunks to try, each with the samples of a micro-batch.

        Raises:
            MistakeError: the model or the mini-batch cannot be divided so.
        """
        options = self._options
        if most := [count for count in options.chunks or () if count > subject.batch]:
            raise MistakeError(
                f"--chunks {most[0]}: the mini-batch has {subject.batch} samples, so there cannot "
                "be more chunks; ask for fewer, or give a larger --batch"
            )
        fitting = [q for q in self._questions(subject.batch) if q.num_stages <= len(subject.model)]
        if not fitting:
            raise MistakeError(
                f"-n {options.n}: the model has {counted(len(subject.model), 'layer')}, and each "
                f"{'device' if options.replicas == 1 else 'stage'} needs at least one"
            )
        splits = [split for q in fitting if q.num_replicas <= subject.batch for split in q.splits()]
        if not splits:
            raise MistakeError(
                f"the mini-batch has {counted(subject.batch, 'sample')}, too few for "
                f"{counted(fitting[0].num_replicas, 'replica')} of as many chunks; ask for fewer, "
                "or give a larger --batch"
            )
        return splits

    def _measure_layers(
        self, subject: Subject, splits: Sequence[tuple[int, int]], name: str
    ) -> Model:
        """Measure on all sizes; leave out small ones that fail, unless --chunks asks for them."""
        left_out = ""
        while True:
            sizes = sizes_to_measure(size for _, size in splits)
            _print(
                f"measuring {counted(len(subject.model), 'layer')} on {name}, micro-batches of "
                f"{', '.join(map(str, sizes))} {'sample' if sizes == (1,) else 'samples'} …"
            )
            try:
                model: Model = measure_model(subject, sizes, self._device)
            except SizeError as error:
                splits = self._larger_splits(splits, error, subject.batch)
                left_out = left_out or f"{counted(error.num_samples, 'sample')}{error}"
                continue
            if left_out:
                self._least_samples = sizes[0]
                _print(
                    f"left out: micro-batches of less than {sizes[0]}, since the model cannot be "
                    f"run on {left_out}"
                )
            return model

    def _larger_splits(
        self, splits: Sequence[tuple[int, int]], error: SizeError, batch: int
    ) -> list[tuple[int, int]]:
        """Return the splits into larger micro-batches than one that the model cannot be run on.

        Raises:
            MistakeError: there is none, or --chunks asks for one that is left out.
        """
        size, asks = error.num_samples, bool(self._options.chunks)
        larger = [split for split in splits if split[1] > size]
        lost = {count for count, _ in splits} - {count for count, _ in larger}
        if larger and not (asks and lost):
            return larger
        where = "the sample" if size == batch else f"micro-batches of {counted(size, 'sample')}"
        asked = f"--chunks {min(lost)}: " if asks and size != batch else ""
        raise MistakeError(f"{asked}the model cannot be run on {where}{error}") from error

    def _read(self) -> Measured:
        path = Path(self._options.costs)
        try:
            return from_text(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeError) as error:
            raise MistakeError(f"--costs {path} cannot be read: {error}") from error
        except ValueError as error:
            raise MistakeError(f"--costs {path} is not a file of costs: {error}") from error

    def _save(self, measured: Measured) -> None:
        path = Path(self._options.save)
        try:
            path.write_text(to_text(measured), encoding="utf-8")
        except OSError as error:
            raise MistakeError(f"--save {path} cannot be written: {error}") from error
        _print(f"saved the layers' costs: --costs {path}")

    def _questions(
        self, batch: int, link: Link | None = None, between: Link | None = None
    ) -> list[Question]:
        """Return what to plan for, by the number of replicas."""
        options = self._options
        try:
            return [
                Question(
                    options.n,
                    batch,
                    self._memory_bytes,
                    STATES[options.optimizer],
                    tuple(options.chunks or ()),
                    link or Link(),
                    num_replicas,
                    between,
                    self._least_samples,
                )
                for num_replicas in self._replicas
            ]
        except ValueError as error:
            raise MistakeError(str(error)) from error

    def _print(
        self,
        measured: Measured,
        question: Question,
        proposals: Sequence[Sequence[Proposal]],
        chosen: Proposal | None,
    ) -> None:
        memory_bytes, one_s = question.memory_bytes, alone_s(measured.model, question)
        _print(
            f"a mini-batch of {counted(question.batch, 'sample')} on "
            f"{counted(question.num_devices, 'device')}; one alone, if it had the memory, would "
            f"take {seconds_text(one_s)}\n"
        )
        bests = [*map(self._best, proposals)]
        if len(bests) > 1:
            splits_table(bests, chosen, one_s, memory_bytes).print(self._console)
            print()
        least = chosen or leanest(bests)
        best = best_of_each(proposals[bests.index(least)], memory_bytes)
        if chosen is not None:
            kind = chosen.schedule, chosen.checkpoint
            best = [chosen if (p.schedule, p.checkpoint) == kind else p for p in best]
        overview_table(best, chosen, one_s, memory_bytes).print(self._console)
        print()
        if chosen is None:
            assert memory_bytes is not None, "without a limit everything fits"
            needed_bytes = max(least.needed_bytes)
            _print(
                f"nothing fits into {bytes_text(memory_bytes)}: the least is "
                f"{bytes_text(needed_bytes)} ({needed_bytes} bytes) a device, by\n\n"
                f"    {self._line(least)}\n\n"
                f"{self._of_other_replicas(measured.model, question)}"
                "More devices, a smaller --batch, or layers divided into smaller ones need less."
            )
            return
        stages_table(measured.model, chosen, memory_bytes).print(self._console)
        if (ties := ties_table(measured.model, chosen)) is not None:
            print()
            ties.print(self._console)
        width = min(100, shutil.get_terminal_size((100, 24)).columns)
        print(f"\n{render_timeline_text(chosen.timeline, width)}")
        print(f"{self._line(chosen)}\n", flush=True)

    def _of_other_replicas(self, model: Model, question: Question) -> str:
        """Say whether anything fits with another number of replicas than the one asked for."""
        asked = self._options.replicas
        others = [r for r in divisors(self._options.n) if r != asked] if asked else []
        fitting = []
        for num_replicas in others:
            try:
                found = propose(model, replace(question, num_replicas=num_replicas), divide)
            except ValueError:  # too few layers or samples
                continue
            if choose(found, self._memory_bytes) is not None:
                fitting.append(f"--replicas {num_replicas}")
        if not others:
            return ""  # all were planned for
        if not fitting:
            return "Nothing fits with another number of replicas either.\n"
        return f"There are proposals that fit with {' or '.join(fitting)}.\n"

    def _check(self, chosen: Proposal) -> int:
        num_processes = chosen.plan.num_stages * chosen.num_replicas
        num_cores = len(os.sched_getaffinity(0))
        is_cpu = self._device.type == "cpu"
        if is_cpu and num_cores < num_processes:
            _print(
                f"{num_processes} processes share {num_cores} cores here, so what is measured will "
                "be slower than predicted\n"
            )
        try:
            measured = rehearse(chosen, arguments_of(chosen), self._named, self._device.type)
        except RuntimeError as error:
            print(f"procpipe plan: the check failed: {error}", file=sys.stderr)
            return 1
        check_table(chosen, measured, is_cpu=is_cpu).print(self._console)
        return 0

    def _line(self, proposal: Proposal) -> str:
        return str(line_to_paste(arguments_of(proposal), self._loss, self._model))


def _print(text: str) -> None:
    print(text, flush=True)
