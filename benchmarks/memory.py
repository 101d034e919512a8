"""Peak memory of each process that trains, with every contender in processes of its own.

It counts what training adds to a process that has imported everything and holds the data: its
model, gradients and activations, as the kernel counts pages, without those of code.

    launch of one contender:   import, make data
                               note memory                        before
                               [limit memory]
                               make the model, a first step
                               reset the kernel's peak, a step     peak - before = added

The C library usually keeps some of the freed memory. Here it gives each larger buffer back at once
(``MALLOC_MMAP_THRESHOLD_``), so that only memory in use is counted.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import os
import re
import resource
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.report import Report, Table
from benchmarks.rounds import Step, launch
from benchmarks.workloads import WORKLOADS, Job, Workload

_WHOLE = "one process, whole mini-batch"
_BY_MICRO_BATCH = "one process, by micro-batches"
_ONE_STAGE = "procpipe always, one stage"
_PIPELINE = "procpipe always"

#: Contenders with one process, and contenders with a process a stage; each in its own processes.
_OF_ONE = (_WHOLE, _BY_MICRO_BATCH, _ONE_STAGE, "torchgpipe always", "torchgpipe never")
_OF_ALL = (
    *("procpipe always", "procpipe except_last", "procpipe never", "procpipe never, 1F1B"),
    *("torch GPipe", "torch 1F1B", "torch Interleaved1F1B", "torch ZBV"),
)

#: Buffers of 64 KiB or more are pages of their own, given back when they are freed.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10), "MALLOC_TRIM_THRESHOLD_": str(64 << 10)}

_MIB = 1 << 20

_RATIOS = ("of one process, whole", "by micro-batches")


def _transformer() -> nn.Sequential:
    layers = [
        nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(8)
    ]
    return nn.Sequential(*layers)


_WORKLOADS = {
    "transformer": Workload(
        "transformer",
        "small parameters, large activations",
        "8 layers, d 128, 128 tokens, micro-batch 8",
        _transformer,
        (8, 128, 128),
        (8, 128, 128),
    ),
    "unet": WORKLOADS["unet"],
}

#: The same, and those whose speed is measured; see ``schedules.py``.
_ALL_WORKLOADS = {f"speed {name}": workload for name, workload in WORKLOADS.items()} | _WORKLOADS


@dataclass(frozen=True)
class Use:
    """What training added to one process, in bytes.

    Attributes:
        added: at the peak of a step.
        shared: shared memory in ``added``; both ends of a channel count it.
        refused: what could not be allocated, where memory was limited; None if all could.
    """

    added: int
    shared: int
    refused: str | None = None


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", choices=_WORKLOADS, default="transformer")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)


def run(options: argparse.Namespace) -> Report:
    job = Job(_WORKLOADS[options.workload], options.stages, options.micro_batches)
    absent = {name: reason for name in (*_OF_ALL, *_OF_ONE) if (reason := _why_not(name, job))}
    uses = _launch_all((name for name in (*_OF_ALL, *_OF_ONE) if name not in absent), job)
    limit = limit_between(uses)
    limited = {} if limit is None else _launch_all((_PIPELINE, _smallest_alone(uses)), job, limit)
    tables = [tabulate(job, uses, absent), tabulate_limit(limit, limited)]
    figures = {"unlimited": _plain(uses), "limit": limit, "limited": _plain(limited)}
    settings = vars(options) | {"out": str(options.out)}
    return Report("memory", tables, figures, settings, lambda figure: _draw(figure, uses, limit))


def limit_between(uses: Mapping[str, list[Use]]) -> int | None:
    """Return a limit that a pipeline's largest stage keeps to and one process exceeds.

    None where one process needs no more than the largest stage.
    """
    stage, alone = _largest(uses[_PIPELINE]), _largest(uses[_smallest_alone(uses)])
    return (stage + alone) // 2 if stage < alone else None


def _smallest_alone(uses: Mapping[str, list[Use]]) -> str:
    """Return the contender in one process that needs least."""
    return min(_OF_ONE, key=lambda name: _largest(uses[name]) if name in uses else math.inf)


def tabulate(job: Job, uses: Mapping[str, list[Use]], absent: Mapping[str, str]) -> Table:
    """Lay out the memory that each contender adds to each of its processes."""
    n, alone = job.num_stages, [_largest(uses[name]) for name in (_WHOLE, _BY_MICRO_BATCH)]
    rows: list[list[Any]] = []
    for name, ranks in uses.items():
        mib = [use.added / _MIB for use in ranks]
        shared = sum(use.shared for use in ranks) / _MIB
        rows.append([name, *mib, *([None] * (n - len(mib)))])
        rows[-1] += [sum(mib) - shared / 2, shared / 2]
        rows[-1] += [_largest(ranks) / bytes_alone for bytes_alone in alone]
    return Table(
        f"memory that training adds to each process, MiB at the peak of a step: "
        f"{job.workload.name}, {job.workload.sizes}; {n} stages, m = {job.num_micro_batches}",
        ["", *(f"rank {rank}" for rank in range(n)), "all", "shared", *_RATIOS],
        rows,
        [*([".0f"] * (n + 2)), ".2f", ".2f"],
        [
            "a rank's figure has the shared memory that it uses; all has it once",
            "ratios: of the largest process",
            "a model's parameters and gradients are in it; the mini-batch's data are not",
            "torchgpipe: both stages in one process, so its figure is of all, and no rival's",
            *(f"not run: {name}: {reason}" for name, reason in absent.items()),
        ],
    )


def tabulate_limit(limit: int | None, limited: Mapping[str, list[Use]]) -> Table:
    """Lay out which contenders can train when no process may add more than a limit."""
    headings, formats = ["", "processes", "outcome"], ["d", ""]
    if limit is None:
        notes = ["not run: one process needs no more than the largest stage"]
        return Table("memory under a limit", headings, [], formats, notes)
    return Table(
        f"memory under a limit of {limit / _MIB:.0f} MiB that a process may add (RLIMIT_DATA)",
        headings,
        [
            [name, len(ranks), next((use.refused for use in ranks if use.refused), "trains")]
            for name, ranks in limited.items()
        ],
        formats,
        [
            "the limit: halfway from the largest stage to the smallest process that trains alone",
            "the kernel does not limit shared memory so, but the figures above have it",
        ],
    )


def measure(name: str, workload: str, n: int, m: int, limit: int | None) -> list[dict[str, Any]]:
    """Train with one contender in this launch's processes; every rank calls it."""
    import torch.distributed as dist

    job = Job(_ALL_WORKLOADS[workload], n, m)
    _ = job.input, job.target  # the data are there before
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, vars(_use(name, job, limit)))
    return ranks


def _launch_all(names: Iterable[str], job: Job, limit: int | None = None) -> dict[str, list[Use]]:
    """Train with each contender, some at once: waiting for a core needs no more memory."""
    names = list(names)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(
            zip(names, pool.map(lambda name: _launch(name, job, limit), names), strict=True)
        )


def _launch(name: str, job: Job, limit: int | None = None) -> list[Use]:
    """Train in new processes, and return the use of each."""
    ranks = launch(
        "benchmarks.memory:measure",
        job.num_stages if name in _OF_ALL else 1,
        ALLOCATOR,
        name=name,
        workload=job.workload.name,
        n=1 if name == _ONE_STAGE else job.num_stages,
        m=job.num_micro_batches,
        limit=limit,
    )
    return [Use(**of_rank) for of_rank in ranks]


def _use(name: str, job: Job, limit: int | None) -> Use:
    """Train, and return what it adds to this process."""
    before = counted_memory()
    unlimited = resource.getrlimit(resource.RLIMIT_DATA)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (before["VmData"] + limit, unlimited[1]))
    try:
        step = _make(name, job)
        step()
        reset_peak()
        step()
    except (RuntimeError, MemoryError) as error:
        if limit is None or "allocate" not in str(error):
            raise
        return Use(0, 0, refused=_in_a_line(error))
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, unlimited)
    after = counted_memory()
    peak = after["VmHWM"] - after["RssFile"] - before["RssAnon"] - before["RssShmem"]
    return Use(peak, after["RssShmem"] - before["RssShmem"])


def _make(name: str, job: Job) -> Step:
    """Make a contender's step.

    Imports this contender only, so that a launch does not wait for the others.
    """
    library, _, mode = name.partition(", ")[0].partition(" ")
    if library == "procpipe" and mode in ("always", "except_last", "never"):
        from benchmarks.peers.ours import stage_of, step_of

        stage = stage_of(job, mode, schedule="1f1b" if name.endswith("1F1B") else "gpipe")
        return step_of(stage, job)
    if library == "torchgpipe":
        from benchmarks.peers.torchgpipe_peer import torchgpipe

        step = torchgpipe(job, mode)
    elif name == _WHOLE:
        step = _whole(job)
    elif name == _BY_MICRO_BATCH:
        from benchmarks.peers.alone import one_process

        step = one_process(job)
    else:
        from benchmarks.contenders import CONTENDERS

        step = CONTENDERS[name].make(job)
    return step


def _whole(job: Job) -> Step:
    """Train on all of a mini-batch at once."""
    model, loss_fn, input, target = job.model(), job.workload.loss_fn, job.input, job.target
    return lambda: loss_fn(model(input), target).backward()


def _why_not(name: str, job: Job) -> str | None:
    from benchmarks.contenders import CONTENDERS

    contender = CONTENDERS.get(name) or CONTENDERS.get(name.partition(" ")[0])
    return contender.why_not(job) if contender else None


def counted_memory() -> dict[str, int]:
    """Return the kernel's counts for this process, in bytes, after freed memory is returned."""
    _give_back()
    status = Path("/proc/self/status").read_text()
    return {name: int(kib) << 10 for name, kib in re.findall(r"(\w+):\s+(\d+) kB", status)}


def reset_peak() -> None:
    """Reset VmHWM to what is in use now."""
    _give_back()
    Path("/proc/self/clear_refs").write_text("5")


def _give_back() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _largest(ranks: Sequence[Use]) -> int:
    return max(use.added for use in ranks)


def _in_a_line(error: BaseException) -> str:
    """Return what could not be allocated, without the rest of the library's message."""
    text = str(error)
    start = text.find("you tried to allocate")
    return "cannot: " + (text[start:].partition(".")[0] if start >= 0 else type(error).__name__)


def _plain(uses: Mapping[str, list[Use]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [asdict(use) for use in ranks] for name, ranks in uses.items()}


def _draw(figure: Any, uses: Mapping[str, list[Use]], limit: int | None) -> None:
    """Draw the largest process of each contender as a bar, and the others as dots on it."""
    axes = figure.subplots()
    names = list(uses)
    colours = ["tab:blue" if name.startswith("procpipe") else "lightgrey" for name in names]
    axes.barh(names, [_largest(uses[name]) / _MIB for name in names], color=colours)
    for place, ranks in enumerate(uses.values()):
        axes.plot([use.added / _MIB for use in ranks], [place] * len(ranks), "k.", markersize=5)
    if limit is not None:
        axes.axvline(limit / _MIB, color="black", linestyle="--", linewidth=1)
        axes.annotate("  the limit of the second table", (limit / _MIB, -0.6), va="top", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("MiB that training adds to the largest process (dots: each process)")
