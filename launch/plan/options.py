"""The command line of ``procpipe plan``: its options, and which of them go together."""

from __future__ import annotations

import argparse
import math
import os
import re
from pathlib import Path

import torch

from procpipe.launch.console import positive
from procpipe.launch.plan.subject import MistakeError
from procpipe.words import counted

#: Bytes that an optimizer keeps for each byte of the parameters that it trains.
STATES = {"adam": 2.0, "momentum": 1.0, "sgd": 0.0, "none": 0.0}

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{infix}b": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?b|b?)")

_EPILOG = """\
A step is the forward and backward of a mini-batch, without the optimizer. Memory is that of
parameters, gradients, optimizer and what is held for backward passes. Leave some room: what a layer
needs while it runs, and what the device itself needs (CUDA's context), is not counted.

exit code: 0; 1 if nothing fits into memory, or --check fails; 2 for a mistake in the command line
"""


def device_type(asked: str | None) -> str:
    """Return the type of device that is asked for; by default a GPU's, if there is one."""
    present = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and present == "cpu":
        raise MistakeError("--device cuda: there is no GPU that torch can use here")
    return asked or present


def check_options(options: argparse.Namespace, device: torch.device) -> None:
    """Check that the options go together, and that what is measured can be saved."""
    if options.save and not os.access(folder := Path(options.save).absolute().parent, os.W_OK):
        raise MistakeError(
            f"--save {options.save} cannot be written: "
            + ("this user may not write in" if folder.is_dir() else "there is no folder")
            + f" {folder}"
        )
    if options.save and Path(options.save).is_dir():
        raise MistakeError(f"--save {options.save} cannot be written: it is a folder")
    if options.hf is None:
        for name in ("length", "flops"):
            if getattr(options, name):
                raise MistakeError(f"--{name} is for a folder of Hugging Face, --hf FOLDER")
    elif options.check:
        raise MistakeError(
            "--check runs the model, but --hf reads no weights: plan mymodel:build --sample "
            "mymodel:sample --check, where build() returns hf.sequential(model)"
        )
    if options.costs:
        _check_left_out(
            options, "--costs replaces a model", "model", "sample", "any", "save", "check", "hf"
        )
    elif options.hf is not None:
        _check_left_out(options, "--hf gives model and sample", "model", "sample", "any")
    elif not options.model:
        raise MistakeError(
            "a model is needed, as in mymodel:build, or --hf FOLDER, or --costs FILE with its costs"
        )
    elif not options.sample:
        raise MistakeError(
            "a sample is needed to measure the model on: --sample mymodel:sample, which gives a "
            "mini-batch, (input, target) or the input alone"
        )
    if options.estimate and options.check:
        raise MistakeError("--check runs the model, and --estimate does not: leave out one")
    if options.replicas and options.n % options.replicas:
        fitting = ", ".join(map(str, divisors(options.n)))
        raise MistakeError(
            f"--replicas {options.replicas}: all replicas have equally many stages, so of "
            f"{counted(options.n, 'device')} there can be {fitting} replicas"
        )
    if options.check and device.type == "cuda" and torch.cuda.device_count() < options.n:
        raise MistakeError(
            f"--check: {options.n} GPUs are needed, and there are {torch.cuda.device_count()} here"
        )


def divisors(count: int) -> list[int]:
    """List the numbers that divide a number, in ascending order."""
    return [divisor for divisor in range(1, count + 1) if count % divisor == 0]


def _check_left_out(options: argparse.Namespace, reason: str, *names: str) -> None:
    for name in names:
        if getattr(options, name):
            option = "the model" if name == "model" else f"--{name}"
            raise MistakeError(f"{reason}, so leave out {option}")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="procpipe plan",
        description="Propose balance, chunks, checkpoint mode and schedule for a model, predict "
        "its times and memory, and print the line to paste.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("model", nargs="?", metavar="MODULE:NAME",
        help="an nn.Sequential, or a function that returns one; as in mymodel:build")  # fmt: skip
    add("--sample", default="", metavar="MODULE:NAME",
        help="a mini-batch, (input, target) or the input alone; or a function for it")  # fmt: skip
    add("--loss", default="", metavar="MODULE:NAME",
        help="the loss function, of output and target, or of the output alone")  # fmt: skip
    add("--any", action="store_true",
        help="the model is no nn.Sequential: cut it by procpipe.sequential")  # fmt: skip
    add("--hf", metavar="FOLDER",
        help="instead of both, a folder with a config.json of transformers")  # fmt: skip
    add("--length", type=positive, metavar="L",
        help="with --hf, tokens of a sample; by default at most 1024")  # fmt: skip
    add("--flops", type=_flops, metavar="FLOPS",
        help="with --hf, FLOPs/s of a device, as in 300e12; by default measured")  # fmt: skip
    add("-n", type=positive, required=True, metavar="N", help="number of devices")
    add("--replicas", type=positive, metavar="R",
        help="number of pipelines, of N/R stages each; by default all that divide N")  # fmt: skip
    add("--memory", type=_memory, metavar="BYTES",
        help="of each device, as in 24GiB; by default 90%% of a GPU's, on CPUs "
        "no limit")  # fmt: skip
    add("--batch", type=positive, metavar="B",
        help="samples in a mini-batch; by default those of the sample, with --hf 8")  # fmt: skip
    add("--chunks", type=_chunks, metavar="M,M,…",
        help="numbers of chunks of a replica to try; by default powers of two up to 8 a "
        "stage")  # fmt: skip
    add("--optimizer", choices=tuple(STATES), default="adam",
        help="the optimizer, whose state counts as memory; default: %(default)s")  # fmt: skip
    add("--device", choices=("cuda", "cpu"), help="where to measure; by default a GPU, if any")
    add("--bandwidth", type=_bandwidth, metavar="BYTES/s",
        help="between devices, as in 20GB/s; by default measured here")  # fmt: skip
    add("--estimate", action="store_true",
        help="start no processes, to measure the best proposals in")  # fmt: skip
    add("--check", action="store_true",
        help="measure also where processes share a core, and compare each task")  # fmt: skip
    add("--save", metavar="FILE", help="write the layers' costs, as JSON")
    add("--costs", nargs="+", metavar="FILE", default=[],
        help="instead of a model: its layers' costs, or the files of a recorded run")  # fmt: skip
    return made


def _chunks(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if "" in parts:
        raise argparse.ArgumentTypeError(
            f"{text!r} has a comma without a number on each side; numbers of chunks read like 8,16"
        )
    return [positive(part) for part in parts]


def parse_bytes(text: str) -> int:
    """Read an amount of bytes: "24GiB", "80GB", "500MiB".

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    match = _AMOUNT.fullmatch(text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an amount of bytes; one reads like 24GiB or 500MB"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def _memory(text: str) -> int:
    num_bytes = parse_bytes(text)
    if not num_bytes:
        raise argparse.ArgumentTypeError(f"{text}: a device needs memory")
    return num_bytes


def _flops(text: str) -> float:
    try:
        flops_per_s = float(text)
    except ValueError:
        flops_per_s = 0.0
    if not 0 < flops_per_s < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of FLOPs per second; one is 300e12"
        )
    return flops_per_s


def _bandwidth(text: str) -> float:
    try:
        num_bytes = parse_bytes(text.removesuffix("/s"))
    except argparse.ArgumentTypeError:
        num_bytes = 0
    if not num_bytes:
        raise argparse.ArgumentTypeError(f"{text!r} is not a bandwidth; one reads like 20GB/s")
    return float(num_bytes)
