"""``procpipe plan``: proposes how to run a model on several devices, and predicts what comes of it.

    procpipe plan mymodel:build --sample mymodel:sample -n 4 --memory 24GiB

1  measure the layers of the model here, one by one (plan_measure.py), or read what was measured
2  simulate every schedule, checkpoint mode, number of chunks and some balances (procpipe.plan)
3  tell the best of each, and all of the chosen one: stages, timeline, the line to paste
4  with --check, run it and put what is measured beside it (plan_check.py)
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console

from procpipe.balance import divide
from procpipe.launch.plan.check import rehearse
from procpipe.launch.plan.measure import measure_link, measure_model, sizes_to_measure
from procpipe.launch.plan.options import STATES, check_options, device_type, parser
from procpipe.launch.plan.report import (
    arguments_of,
    best_of_each,
    check_table,
    has_run,
    line_to_paste,
    overview_table,
    show,
    stages_table,
)
from procpipe.launch.plan.subject import MistakeError, Named, SizeError, Subject, load
from procpipe.timeline.pictures import render_timeline_text
from procpipe.tuning.costs_file import Measured, from_text, to_text
from procpipe.tuning.model import Model
from procpipe.tuning.propose import (
    Proposal,
    Question,
    alone_s,
    choose,
    default_chunks,
    leanest,
    propose,
)
from procpipe.words import bytes_text, counted, seconds_text


def main(argv: Sequence[str] | None = None) -> int:
    """Propose, and tell.

    Args:
        argv: the words after ``procpipe plan``.

    Returns:
        0; 1 if nothing fits, or the check fails; 130 after Ctrl-C.

    Raises:
        SystemExit: the words are wrong (code 2), or ask for help.
    """
    reader = parser()
    options = reader.parse_args(argv)
    try:
        return _Planning(options).main()
    except MistakeError as mistake:
        _refuse(reader, str(mistake))
    except KeyboardInterrupt:
        print("procpipe plan: interrupted", file=sys.stderr)
        return 130


class _Planning:
    """One run of the command.

    Args:
        options: its command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._console = Console()
        is_measured = not options.costs
        self._device = torch.device(device_type(options.device) if is_measured else "cpu")
        self._named = Named(options.model or "", options.sample, options.loss, options.batch)
        check_options(options, self._device)
        self._chunks: tuple[int, ...] = tuple(options.chunks or ())
        self._memory_bytes: int | None = options.memory
        if options.memory is None and self._device.type == "cuda":
            self._memory_bytes = torch.cuda.get_device_properties(self._device).total_memory

    def main(self) -> int:
        """Measure or read, propose, tell, and check."""
        options = self._options
        measured = self._read() if options.costs else self._measure()
        if options.save:
            self._save(measured)
        question = self._question(measured)
        try:
            proposals = propose(measured.model, question, divide)
        except ValueError as error:
            raise MistakeError(str(error)) from error
        chosen = choose(proposals, question.memory_bytes)
        self._tell(measured, question, proposals, chosen)
        if chosen is None:
            return 1
        return self._check(chosen) if options.check else 0

    def _measure(self) -> Measured:
        options = self._options
        if self._device.type == "cpu":
            torch.set_num_threads(1)  # as many as a process has that shares the host with others
        subject = load(self._named)
        chunks = options.chunks or default_chunks(subject.batch, options.n)
        if most := [count for count in chunks if count > subject.batch]:
            raise MistakeError(
                f"--chunks {most[0]}: the mini-batch has {subject.batch} samples, so it cannot be "
                "split into more; ask for fewer, or give a larger --batch"
            )
        if options.n > len(subject.model):
            raise MistakeError(
                f"-n {options.n}: the model has {counted(len(subject.model), 'layer')}, and each "
                "device needs at least one"
            )
        name = "one CPU thread"
        if self._device.type == "cuda":
            name = torch.cuda.get_device_name(self._device)
        model = self._measure_layers(subject, chunks, name)
        link, story = measure_link(self._device)
        self._say(f"transfers: {link.bytes_per_s / 1e9:.1f} GB/s ({story})")
        if not options.loss:
            self._say(
                "no --loss is given: the mean of squares of the output stands in for it, which "
                "may be cheaper"
            )
        return Measured(model, subject.batch, link, name)

    def _measure_layers(self, subject: Subject, chunks: Sequence[int], name: str) -> Model:
        """Measure on all sizes, but for small ones that only the default asks for and that fail."""
        batch, left_out = subject.batch, ""
        while True:
            sizes = sizes_to_measure(batch, chunks)
            told = ", ".join(map(str, sizes))
            self._say(
                f"measuring {counted(len(subject.model), 'layer')} on {name}, micro-batches of "
                f"{told} {'sample' if sizes == (1,) else 'samples'} …"
            )
            try:
                model: Model = measure_model(subject, sizes, self._device)
            except SizeError as error:
                size = error.num_samples
                larger = [count for count in chunks if -(-batch // count) > size]
                if larger and not self._options.chunks:
                    left_out = left_out or f"{counted(size, 'sample')}{error}"
                    chunks = larger
                    continue
                if size == batch:
                    raise MistakeError(f"the model cannot be run on the sample{error}") from error
                count = next(count for count in chunks if -(-batch // count) == size)
                raise MistakeError(
                    f"--chunks {count}: the model cannot be run on micro-batches of "
                    f"{counted(size, 'sample')}{error}"
                ) from error
            if left_out:
                self._chunks = tuple(chunks)
                self._say(
                    f"left out: micro-batches of less than {sizes[0]}, since the model cannot be "
                    f"run on {left_out}"
                )
            return model

    def _read(self) -> Measured:
        path = Path(self._options.costs)
        try:
            return from_text(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeError) as error:
            raise MistakeError(f"--costs {path} cannot be read: {error}") from error
        except ValueError as error:
            raise MistakeError(f"--costs {path} is no file of costs: {error}") from error

    def _save(self, measured: Measured) -> None:
        path = Path(self._options.save)
        try:
            path.write_text(to_text(measured), encoding="utf-8")
        except OSError as error:
            raise MistakeError(f"--save {path} cannot be written: {error}") from error
        self._say(f"saved the layers' costs: --costs {path}")

    def _question(self, measured: Measured) -> Question:
        options = self._options
        link = measured.link
        if options.bandwidth:
            link = replace(link, bytes_per_s=options.bandwidth)
        try:
            return Question(
                options.n,
                options.batch or measured.batch,
                self._memory_bytes,
                STATES[options.optimizer],
                self._chunks,
                link,
            )
        except ValueError as error:
            raise MistakeError(str(error)) from error

    def _tell(
        self,
        measured: Measured,
        question: Question,
        proposals: Sequence[Proposal],
        chosen: Proposal | None,
    ) -> None:
        memory_bytes, one_s = question.memory_bytes, alone_s(measured.model, question)
        self._say(
            f"a mini-batch of {counted(question.batch, 'sample')} on "
            f"{counted(question.num_devices, 'device')}; one alone, if it had the memory, would "
            f"take {seconds_text(one_s)}\n"
        )
        best = best_of_each(proposals, memory_bytes)
        if chosen is not None:
            best = [chosen if _are_alike(chosen, other) else other for other in best]
        show(self._console, overview_table(best, chosen, one_s, memory_bytes))
        print()
        if chosen is None:
            least = leanest(proposals)
            assert memory_bytes is not None, "without a limit everything fits"
            needed_bytes = max(least.needed_bytes)
            self._say(
                f"nothing fits into {bytes_text(memory_bytes)}: the least is "
                f"{bytes_text(needed_bytes)} ({needed_bytes} bytes) a device, by\n\n"
                f"    {self._line(least, needed_bytes)}\n\n"
                "More devices, a smaller --batch, or layers divided into smaller ones need less."
            )
            return
        show(self._console, stages_table(measured.model, chosen, memory_bytes))
        width = min(100, shutil.get_terminal_size((100, 24)).columns)
        print(f"\n{render_timeline_text(chosen.timeline, width)}")
        print(f"{self._line(chosen, memory_bytes)}\n", flush=True)

    def _check(self, chosen: Proposal) -> int:
        num_processes, num_cores = chosen.plan.num_stages, len(os.sched_getaffinity(0))
        is_cpu = self._device.type == "cpu"
        if is_cpu and num_cores < num_processes:
            self._say(
                f"{num_processes} processes share {num_cores} cores here, so what is measured will "
                "be slower than predicted\n"
            )
        try:
            measured = rehearse(
                chosen, arguments_of(chosen, self._memory_bytes), self._named, self._device.type
            )
        except RuntimeError as error:
            print(f"procpipe plan: the check failed: {error}", file=sys.stderr)
            return 1
        show(self._console, check_table(chosen, measured, is_cpu=is_cpu))
        if not has_run(chosen, measured):
            self._say(
                f"\n{measured.schedule} came to another plan than was predicted, so idle time and "
                "what is held are not compared."
            )
        return 0

    def _line(self, proposal: Proposal, memory_bytes: int | None) -> str:
        loss = self._options.loss.rpartition(":")[2] or "loss_fn"
        line: str = line_to_paste(arguments_of(proposal, memory_bytes), loss)
        return line

    def _say(self, text: str) -> None:
        print(text, flush=True)


def _are_alike(one: Proposal, other: Proposal) -> bool:
    return (one.schedule, one.checkpoint) == (other.schedule, other.checkpoint)


def _refuse(reader: argparse.ArgumentParser, told: str) -> NoReturn:
    reader.exit(2, f"procpipe plan: {told}\n")


if __name__ == "__main__":
    sys.exit(main())
