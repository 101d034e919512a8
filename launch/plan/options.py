"""The command line of ``procpipe plan``: its options, and which of them go together."""

from __future__ import annotations

import argparse
import re

from procpipe.launch.main import positive
from procpipe.launch.plan.subject import MistakeError

#: Bytes that an optimizer keeps for each byte of the parameters that it trains.
STATES = {"adam": 2.0, "momentum": 1.0, "sgd": 0.0, "none": 0.0}

_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?)b|b?)(?:/s)?")

_EPILOG = """\
A step is the forward and backward of a mini-batch, without the optimizer. Memory is that of
parameters, gradients, optimizer and what is held for backward passes. Leave some room: what a layer
needs while it runs, and what the device itself needs (CUDA's context), is not counted.

exit code: 0; 1 if nothing fits into memory, or --check fails; 2 for a mistake in the command line
"""


def check_options(options: argparse.Namespace) -> None:
    """Check that the options go together."""
    if options.model and not (options.sample and options.loss):
        raise MistakeError(
            "--sample and --loss are needed to measure the model with: --sample mymodel:sample, a "
            "mini-batch (input, target) or the input alone, and --loss mymodel:loss"
        )
    if options.hf is None and (options.length or options.flops):
        raise MistakeError("--length and --flops are for a folder of Hugging Face, --hf FOLDER")
    if options.check and not options.model:
        raise MistakeError(
            "--check runs the model, so it needs MODULE:NAME, --sample and --loss; for "
            "transformers, a function that returns hf.sequential(model)"
        )


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
    what = made.add_mutually_exclusive_group(required=True)
    what.add_argument("model", nargs="?", metavar="MODULE:NAME",
        help="an nn.Sequential, or a function that returns one; as in mymodel:build")  # fmt: skip
    what.add_argument("--hf", metavar="FOLDER",
        help="instead of a model and a sample, a folder with a config.json of "
        "transformers")  # fmt: skip
    what.add_argument("--costs", nargs="+", metavar="FILE", default=[],
        help="instead of a model, the files of recorded runs: Stage(trace=…)")  # fmt: skip
    add("--sample", default="", metavar="MODULE:NAME",
        help="a mini-batch, (input, target) or the input alone; or a function for it")  # fmt: skip
    add("--loss", default="", metavar="MODULE:NAME",
        help="the loss function, of output and target, or of the output alone")  # fmt: skip
    add("--any", action="store_true",
        help="the model is no nn.Sequential: cut it by procpipe.sequential")  # fmt: skip
    add("--length", type=positive, metavar="L",
        help="with --hf, tokens of a sample; by default at most 1024")  # fmt: skip
    add("--flops", type=float, metavar="FLOPS",
        help="with --hf, FLOPs/s of a device; by default 300e12")  # fmt: skip
    add("-n", type=positive, required=True, metavar="N", help="number of devices")
    add("--replicas", type=positive, metavar="R",
        help="number of pipelines, of N/R stages each; by default all that divide N")  # fmt: skip
    add("--memory", type=parse_bytes, metavar="BYTES",
        help="of each device, as in 24GiB; by default 90%% of a GPU's, on CPUs "
        "no limit")  # fmt: skip
    add("--batch", type=positive, metavar="B",
        help="samples in a mini-batch; by default those of the sample, with --hf 8")  # fmt: skip
    add("--chunks", type=_chunks, metavar="M,M,…",
        help="numbers of chunks of a replica to try; by default powers of two up to 8 a "
        "stage")  # fmt: skip
    add("--optimizer", choices=tuple(STATES), default="adam",
        help="the optimizer, whose state counts as memory; default: %(default)s")  # fmt: skip
    add("--bandwidth", type=parse_bytes, metavar="BYTES/s",
        help="between devices, as in 20GB/s")  # fmt: skip
    processes = made.add_mutually_exclusive_group()
    processes.add_argument("--estimate", action="store_true",
        help="start no processes, to measure the best proposals in")  # fmt: skip
    processes.add_argument("--check", action="store_true",
        help="measure also where processes share a core, and compare each task")  # fmt: skip
    return made


def _chunks(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def parse_bytes(text: str) -> int:
    """Read an amount of bytes, or of bytes per second: "24GiB", "500MB", "20GB/s".

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    match = _AMOUNT.fullmatch(text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an amount of bytes; one reads like 24GiB, 500MB or 20GB/s"
        )
    base, power = 1024 if match[3] else 1000, " kmgt".index(match[2] or " ")
    return int(float(match[1]) * base**power)
