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
from procpipe.launch.plan_check import rehearse
from procpipe.launch.plan_measure import measure_link, measure_model, sizes_to_measure
from procpipe.launch.plan_subject import MistakeError, Named, load
from procpipe.launch.plan_text import (
    arguments_of,
    best_of_each,
    bytes_text,
    check_table,
    line_to_paste,
    overview_table,
    parse_bytes,
    seconds_text,
    show,
    stages_table,
)
from procpipe.plan.costs_file import Measured, from_text, to_text
from procpipe.plan.propose import (
    Proposal,
    Question,
    alone_s,
    choose,
    default_chunks,
    leanest,
    propose,
)
from procpipe.plan.render import render_timeline_text

__all__ = ["main"]

#: Bytes that an optimizer keeps for each byte of the parameters that it trains.
_STATES = {"adam": 2.0, "momentum": 1.0, "sgd": 0.0, "none": 0.0}

_EPILOG = """\
A step is the forward and backward of a mini-batch, without the optimizer's. Memory is that of
parameters, gradients, optimizer and what is held for backward passes; not what a layer needs
meanwhile, nor what the device itself takes (CUDA's context, for one): leave some room.

exit code: 0; 1 if nothing fits into memory, or --check fails; 2 for a mistake in the command line
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Propose, and tell.

    Args:
        argv: the words after ``procpipe plan``.

    Returns:
        0; 1 if nothing fits, or the check fails; 130 after Ctrl-C.

    Raises:
        SystemExit: the words are wrong (code 2), or ask for help.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        return _Planning(options).main()
    except MistakeError as mistake:
        _refuse(parser, str(mistake))
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
        self._device = torch.device(_device_type(options.device))
        self._named = Named(options.model or "", options.sample, options.loss, options.batch)
        _check_combination(options, self._device)
        self._memory_bytes: int | None = options.memory
        if options.memory is None and self._device.type == "cuda" and not options.costs:
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
                f"-n {options.n}: the model has {len(subject.model)} layers, and each device needs "
                "at least one"
            )
        sizes = sizes_to_measure(subject.batch, chunks)
        name = "one CPU thread"
        if self._device.type == "cuda":
            name = torch.cuda.get_device_name(self._device)
        told = ", ".join(map(str, sizes))
        self._say(
            f"measuring {len(subject.model)} layers on {name}, micro-batches of {told} samples …"
        )
        model = measure_model(subject, sizes, self._device)
        link, story = measure_link(self._device)
        self._say(f"transfers: {link.bytes_per_s / 1e9:.1f} GB/s ({story})")
        if not options.loss:
            self._say(
                "no --loss is given: the mean of squares of the output stands in for it, which "
                "may be cheaper"
            )
        return Measured(model, subject.batch, link, name)

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
                _STATES[options.optimizer],
                tuple(options.chunks or ()),
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
            f"a mini-batch of {question.batch} samples on {_counted(question.num_devices)}; one "
            f"alone, if it had the memory, would take {seconds_text(one_s)}\n"
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
        return 0

    def _line(self, proposal: Proposal, memory_bytes: int | None) -> str:
        loss = self._options.loss.rpartition(":")[2] or "loss_fn"
        line: str = line_to_paste(arguments_of(proposal, memory_bytes), loss)
        return line

    def _say(self, text: str) -> None:
        print(text, flush=True)


def _are_alike(one: Proposal, other: Proposal) -> bool:
    return (one.schedule, one.checkpoint) == (other.schedule, other.checkpoint)


def _counted(num_devices: int) -> str:
    return "1 device" if num_devices == 1 else f"{num_devices} devices"


def _device_type(asked: str | None) -> str:
    there = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and there == "cpu":
        raise MistakeError("--device cuda: there is no GPU that torch can use here")
    return asked or there


def _check_combination(options: argparse.Namespace, device: torch.device) -> None:
    """Check that the options go together."""
    if options.costs:
        for name in ("model", "sample", "save", "check"):
            if getattr(options, name):
                raise MistakeError(
                    f"--costs is in the place of a model, so leave out {_SPELT[name]}"
                )
    elif not options.model:
        raise MistakeError("a model is needed, as in mymodel:build, or --costs with those of one")
    elif not options.sample:
        raise MistakeError(
            "a sample is needed to measure the model on: --sample mymodel:sample, which gives a "
            "mini-batch, (input, target) or the input alone"
        )
    if options.check and device.type == "cuda" and torch.cuda.device_count() < options.n:
        raise MistakeError(
            f"--check: {options.n} GPUs are needed, and there are {torch.cuda.device_count()} here"
        )


_SPELT = {"model": "the model", "sample": "--sample", "save": "--save", "check": "--check"}


def _refuse(parser: argparse.ArgumentParser, told: str) -> NoReturn:
    parser.exit(2, f"procpipe plan: {told}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="procpipe plan",
        description="Propose balance, chunks, checkpoint mode and schedule for a model, predict "
        "what comes of it, and write the line to paste.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODULE:NAME",
        help="an nn.Sequential, or a function that returns one; as in mymodel:build")  # fmt: skip
    add("--sample", default="", metavar="MODULE:NAME",
        help="a mini-batch, (input, target) or the input alone; or a function for it")  # fmt: skip
    add("--loss", default="", metavar="MODULE:NAME",
        help="the loss function, of output and target, or of the output alone")  # fmt: skip
    add("-n", type=_count, required=True, metavar="N", help="how many devices there are")
    add("--memory", type=_memory, metavar="BYTES",
        help="of each device, as in 24GiB; by default a GPU's own, no limit on CPUs")  # fmt: skip
    add("--batch", type=_count, metavar="B",
        help="samples in a mini-batch; by default those of the sample")  # fmt: skip
    add("--chunks", type=_chunks, metavar="M,M,…",
        help="numbers of chunks to try; by default powers of two up to 8 a device")  # fmt: skip
    add("--optimizer", choices=tuple(_STATES), default="adam",
        help="what it keeps for each parameter counts as memory; default: %(default)s")  # fmt: skip
    add("--device", choices=("cuda", "cpu"), help="where to measure; by default a GPU, if any")
    add("--bandwidth", type=_bandwidth, metavar="BYTES/s",
        help="between devices, as in 20GB/s; by default measured here")  # fmt: skip
    add("--check", action="store_true", help="run what was proposed, and compare")
    add("--save", metavar="FILE", help="write the layers' costs, as JSON")
    add("--costs", metavar="FILE", help="read the layers' costs instead of measuring a model")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a number of at least 1")
    return int(text)


def _chunks(text: str) -> list[int]:
    return [_count(part.strip()) for part in text.split(",")]


def _memory(text: str) -> int:
    try:
        num_bytes: int = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return num_bytes


def _bandwidth(text: str) -> float:
    try:
        found = parse_bytes(text.removesuffix("/s"))
    except ValueError:
        found = 0
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a bandwidth; one reads like 20GB/s")
    return float(found)


if __name__ == "__main__":
    sys.exit(main())
