"""Peak memory of each process that trains, with every contender in processes of its own.

It counts what training adds to a process that has imported everything and holds the data: its
model, gradients and activations. On CPUs the kernel counts pages, without those of code; on GPUs
torch's allocator counts what is allocated, which leaves out slots of CUDA IPC.

    launch of one contender:   import, make data
                               note memory                        before
                               make the model, a first step
                               reset the kernel's peak, a step     peak - before = added

The C library usually keeps some of the freed memory. Here it gives each larger buffer back at once
(``MALLOC_MMAP_THRESHOLD_``), so that only memory in use is counted.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import CONTENDERS, ONE_PROCESS, RECOMPUTED, SCHEDULES
from benchmarks.report import OF_ONE, OF_TORCH, Report, Table
from benchmarks.rounds import Step, launch
from benchmarks.workloads import SIZES, Job, Workload, transformer

DEVICES = ("cpu", "cuda")

_WHOLE = "one process, whole mini-batch"
_BY_MICRO_BATCH = "one process, by micro-batches"
_ONE_STAGE = "procpipe always, one stage"
_PIPELINE = "procpipe always"

#: Contenders with one process, and contenders with a process a stage; each in its own processes.
_OF_ONE = (_WHOLE, _BY_MICRO_BATCH, _ONE_STAGE, "torchgpipe always", "torchgpipe")
_OF_ALL = (
    *RECOMPUTED,
    *(ours for ours, _ in SCHEDULES.values()),
    *(theirs for _, theirs in SCHEDULES.values() if theirs is not None),
)

#: Buffers of 64 KiB or more are pages of their own, given back when they are freed.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10), "MALLOC_TRIM_THRESHOLD_": str(64 << 10)}

_MIB = 1 << 20

_RATIOS = ("of one process, whole", "by micro-batches")


#: For two cores: small parameters, large activations.
_SMALL = Workload(
    "transformer",
    "small parameters, large activations",
    "8 layers, d 128, 128 tokens, micro-batch 8",
    partial(transformer, 128, 4),
    (8, 128, 128),
    (8, 128, 128),
)


@dataclass(frozen=True)
class Use:
    """What training added to one process, in bytes.

    Attributes:
        added: at the peak of a step.
        shared: shared memory in ``added``; both ends of a channel count it.
    """

    added: int
    shared: int


def configure(parser: argparse.ArgumentParser) -> None:
    names = list({name: None for workloads in SIZES.values() for name in workloads})
    parser.add_argument("--workload", choices=names, default="transformer")
    parser.add_argument("--contenders", nargs="+", choices=(*_OF_ALL, *_OF_ONE))
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)


def run(options: argparse.Namespace) -> Report:
    workload = workload_of(options.workload, options.sizes)
    job = Job(workload, options.stages, options.micro_batches, options.device)
    chosen = options.contenders or (*_OF_ALL, *_OF_ONE)
    names = [*dict.fromkeys((*chosen, _PIPELINE, _BY_MICRO_BATCH))]
    absent = {name: reason for name in names if (reason := _why_not(name, job))}
    launched = partial(_launch_all, job=job, sizes=options.sizes)
    uses = launched([name for name in names if name not in absent])
    figures = {name: [vars(use) for use in ranks] for name, ranks in uses.items()}
    settings = vars(options) | {"out": str(options.out)}
    return Report(
        "memory", [tabulate(job, uses, absent)], figures, settings, ratios=ratios_of(uses)
    )


def workload_of(name: str, sizes: str) -> Workload:
    """Return the workload of a name; that for two cores has activations that can be seen."""
    is_own = sizes == "small" and name == _SMALL.name
    return _SMALL if is_own else SIZES[sizes][name]


def ratios_of(uses: Mapping[str, list[Use]]) -> dict[str, dict[str, float]]:
    """Return the ratios of the largest processes by schedule, without recomputation."""
    found = {}
    for schedule, (ours, theirs) in SCHEDULES.items():
        if ours in uses:
            bytes_ = _largest(uses[ours])
            of_schedule = {OF_ONE: bytes_ / _largest(uses[_BY_MICRO_BATCH])}
            if theirs is not None and theirs in uses:
                of_schedule[OF_TORCH] = bytes_ / _largest(uses[theirs])
            found[f"memory, {schedule}"] = of_schedule
    return found


def tabulate(job: Job, uses: Mapping[str, list[Use]], absent: Mapping[str, str]) -> Table:
    """Lay out the memory that each contender adds to each of its processes."""
    n = job.num_stages
    alone = [_largest(uses[name]) if name in uses else None for name in (_WHOLE, _BY_MICRO_BATCH)]
    rows: list[list[Any]] = []
    for name, ranks in uses.items():
        mib = [use.added / _MIB for use in ranks]
        shared = sum(use.shared for use in ranks) / _MIB
        rows.append([name, *mib, *([None] * (n - len(mib)))])
        rows[-1] += [sum(mib) - shared / 2, shared / 2]
        rows[-1] += [None if of is None else _largest(ranks) / of for of in alone]
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


def measure(name: str, workload: str, sizes: str, n: int, m: int) -> list[dict[str, Any]]:
    """Train with one contender in this launch's processes; every rank calls it."""
    import torch.distributed as dist

    device = "cuda" if torch.cuda.is_available() else "cpu"
    job = Job(workload_of(workload, sizes), n, m, device)
    _ = job.input, job.target  # the data are there before
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, vars(_use(name, job)))
    return ranks


def _launch_all(names: Iterable[str], job: Job, sizes: str) -> dict[str, list[Use]]:
    """Train with each contender, some at once: waiting for a core needs no more memory."""

    def launched(name: str) -> list[Use]:
        ranks = launch(
            "benchmarks.memory:measure",
            job.num_stages if name in _OF_ALL else 1,
            ALLOCATOR,
            device=job.device,
            name=name,
            workload=job.workload.name,
            sizes=sizes,
            n=1 if name == _ONE_STAGE else job.num_stages,
            m=job.num_micro_batches,
        )
        return [Use(**of_rank) for of_rank in ranks]

    names = list(names)
    with ThreadPoolExecutor(os.cpu_count() if job.device == "cpu" else 1) as pool:
        return dict(zip(names, pool.map(launched, names), strict=True))


def _use(name: str, job: Job) -> Use:
    """Train, and return what it adds to this process."""
    if job.device == "cuda":
        return _use_of_gpu(name, job)
    before = counted_memory()
    step = _make(name, job)
    step()
    reset_peak()
    step()
    after = counted_memory()
    peak = after["VmHWM"] - after["RssFile"] - before["RssAnon"] - before["RssShmem"]
    return Use(peak, after["RssShmem"] - before["RssShmem"])


def _use_of_gpu(name: str, job: Job) -> Use:
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16, enabled=job.workload.is_autocast):
        step = _make(name, job)
        step()
        torch.cuda.reset_peak_memory_stats()
        step()
    torch.cuda.synchronize()
    return Use(torch.cuda.max_memory_allocated() - before, 0)


def _make(name: str, job: Job) -> Step:
    """Make a contender's step."""
    if name == _WHOLE:
        return _whole(job)
    names = {_BY_MICRO_BATCH: ONE_PROCESS, _ONE_STAGE: _PIPELINE}
    return CONTENDERS[names.get(name, name)].make(job)


def _whole(job: Job) -> Step:
    """Train on all of a mini-batch at once."""
    model, loss_fn = job.model().to(job.own_device), job.workload.loss_fn
    input, target = job.input, job.target
    return lambda: loss_fn(model(input), target).backward()


def _why_not(name: str, job: Job) -> str | None:
    contender = CONTENDERS.get(name)
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
