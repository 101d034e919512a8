"""What only a GPU shows: parity, how far the host is ahead, NCCL's blocks, a trace.

    versions     of libraries, GPUs and the host
    parity       largest differences to the plain model on the same GPU, in float64
    host         how far the host is ahead of the device, and how often it waits for it
    blocks       messages by the thread blocks that a transfer by NCCL may take
    trace        a timeline of all stages, and where the time of its last step went

Each but the first runs in processes of its own; without as many GPUs, stages share them.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import math
import os
import platform
import subprocess
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.boundary import measure_sizes, seconds_a_message
from benchmarks.peers.ours import stage_of, step_of
from benchmarks.report import Report, Table
from benchmarks.rounds import Step, launch
from benchmarks.workloads import SIZES, Job
from procpipe import Stage
from procpipe.channel import nccl
from procpipe.job.world import World

DEVICES = ("cuda",)

#: A real difference between kernels run in another order is of about 1e-15.
_TOLERANCE = 1e-10

#: Schedules and checkpoint modes whose results are compared.
_PAIRS = (
    *(("gpipe", "never"), ("1f1b", "except_last"), ("zb-h1", "always"), ("zb-v", "except_last")),
    *(("interleaved", "always"), ("gpipe", "always"), ("zb-h1", "never")),
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--stages", type=int, nargs="+", default=[2])
    parser.add_argument("--transport", help="of procpipe's large tensors")


def run(options: argparse.Namespace) -> Report:
    return Report("gpu_checks", [CHECKS[name](options) for name in options.only])


def gathered(ours: Any) -> list[Any]:
    """Return what every rank has; all call it."""
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, ours)
    return of_all


# -- versions -------------------------------------------------------------------------------------


def _versions(options: argparse.Namespace) -> Table:
    gpus = [torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count())]
    if not gpus:
        raise RuntimeError("torch finds no CUDA device: see nvidia-smi, and torch.version.cuda")
    pairs = [(k, peer) for k in range(len(gpus)) for peer in range(len(gpus)) if peer != k]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    rows = [
        *(
            f"GPU {k}: {gpu.name}, {gpu.total_memory / 2**30:.1f} GiB "
            f"({torch.cuda.mem_get_info(k)[0] / 2**30:.1f} free), "
            f"compute capability {gpu.major}.{gpu.minor}"
            for k, gpu in enumerate(gpus)
        ),
        f"peer access: {f'not between {apart}' if apart else 'between all'}",
        f"driver: {driver}",
        f"NCCL: {nccl_version()}",
        f"torch: {torch.__version__}, CUDA {torch.version.cuda}",
        f"Python: {platform.python_version()}, Linux {platform.release()}",
        f"host: {len(os.sched_getaffinity(0))} cores, {memory_bytes / 2**30:.0f} GiB",
    ]
    title = "machine, as torch and nvidia-smi see it"
    return Table(title, [""], [[row] for row in rows], [], [_output("nvidia-smi", "topo", "-m")])


def nccl_version() -> str:
    """Return the loaded library's version; torch's is that of the build."""
    version = ctypes.c_int(0)
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return f"{version.value // 10000}.{version.value // 100 % 100}.{version.value % 100}"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10.0, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known: {error}"
    return done.stdout.strip()


# -- parity ---------------------------------------------------------------------------------------


def _parity(options: argparse.Namespace) -> Table:
    """Compare outputs, losses, gradients and buffers with the plain model's on the same GPU.

    Raises:
        RuntimeError: a difference is larger than floating point explains.
    """
    rows: list[list[Any]] = []
    faults = []
    for n in options.stages:
        for pair, largest in zip(_PAIRS, _launched("parity", n, options), strict=True):
            rows.append([f"{n} stages: {', '.join(pair)}", *largest.values()])
            if not max(largest.values()) <= _TOLERANCE:
                faults.append(f"{rows[-1][0]}: {largest}")
    headings = ["", "loss", "output", "gradients", "buffers"]
    notes = ["in three steps, of batches that cannot be split evenly"]
    title = "parity: largest difference to the plain model on the same GPU, float64"
    table = Table(title, headings, rows, [".3g"] * 4, notes)
    if faults:
        raise RuntimeError(f"{table.to_text()}\n\ndifferences to the plain model: {faults}")
    return table


def parity(transport: str | None, sizes: str) -> list[dict[str, float]]:
    """Return all ranks' largest differences, for each schedule and mode; every rank calls it."""
    World.transport = transport
    found = []
    for schedule, mode in _PAIRS:
        of_all = gathered(_differences(schedule, mode, 8 if sizes == "tiny" else 64))
        found.append({name: max(of_rank[name] for of_rank in of_all) for name in of_all[0]})
    return found


def _differences(schedule: str, mode: str, width: int) -> dict[str, float]:
    """Train a few steps and the plain model too; return this rank's largest differences."""
    n = dist.get_world_size()
    devices = [torch.device("cuda", rank % torch.cuda.device_count()) for rank in range(n)]
    device = devices[dist.get_rank()]
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.ReLU(inplace=True)]
    plain = nn.Sequential(*layers).double().to(device)
    num_partitions = n * (2 if schedule in ("interleaved", "zb-v") else 1)
    stage = Stage(
        copy.deepcopy(plain), [16 // num_partitions] * num_partitions, chunks=4, devices=devices,
        checkpoint=mode, schedule=schedule, loss_fn=F.cross_entropy, timeout_s=60.0,
    )  # fmt: skip
    largest = dict.fromkeys(("loss", "output", "gradients", "buffers"), 0.0)

    def compare(name: str, ours: Tensor | None, truth: Tensor | None) -> None:
        assert ours is not None, name
        assert truth is not None, name
        found = (ours.cpu().double() - truth.cpu().double()).abs().max().item()
        largest[name] = max(math.inf if math.isnan(found) else found, largest[name])

    random = torch.Generator().manual_seed(1)
    for size in (11, 11, 6):  # they cannot be split evenly, and the last one is smaller
        input = torch.randn(size, width, generator=random, dtype=torch.float64).to(device)
        target = torch.randint(width, (size,), generator=random).to(device)
        loss = stage.step(input, target)
        truth = torch.zeros_like(loss)
        for x, y in zip(input.chunk(4), target.chunk(4), strict=True):
            part = F.cross_entropy(plain(x), y) * (len(x) / size)
            part.backward()
            truth += part.detach()
        compare("loss", loss, truth)
    stage.eval()
    plain.eval()
    with torch.no_grad():
        compare("output", stage.fetch(stage(input)), plain(input))
    for name, parameter in stage.named_parameters():
        compare("gradients", parameter.grad, plain.get_parameter(name).grad)
    for name, buffer in stage.named_buffers():
        compare("buffers", buffer, plain.get_buffer(name))
    stage.close()
    return largest


# -- host, blocks, trace --------------------------------------------------------------------------


def _host(options: argparse.Namespace) -> Table:
    rows = [[f"rank {rank}", *of] for rank, of in enumerate(_launched("host", 2, options))]
    return Table(
        "host: how far it is ahead of the device, how often it waits for it",
        ["", "step() ends, ms", "device ends, ms", "ahead", "waits"],
        rows,
        [".2f", ".2f", ".0%", "d"],
        [
            "ahead: the part of the step for which the host was free again",
            "waits: in a steady step, those that torch counts",
        ],
    )


def host(transport: str | None, sizes: str) -> list[list[float]]:
    """Return of each rank what the columns of the table say; every rank calls it."""
    step = _blocks_step(transport, sizes)
    for _ in range(3):
        step()
    num_waits = _count_waits(step)
    torch.cuda.synchronize()
    dist.barrier()
    begun_s = time.perf_counter()
    step()
    returned_s = time.perf_counter() - begun_s
    torch.cuda.synchronize()
    ended_s = time.perf_counter() - begun_s
    return gathered([returned_s * 1e3, ended_s * 1e3, 1 - returned_s / ended_s, num_waits])


def _count_waits(step: Step) -> int:
    """Count how often the host waits for the device in one step, as torch counts it."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def _blocks(options: argparse.Namespace) -> Table:
    kib = [1, 4] if options.sizes == "tiny" else [1024, 65536]
    found = _launched("blocks", 2, options, kib=kib)
    rows = [[str(number), *(s * 1e6 for s in seconds)] for number, seconds in found]
    title = "blocks: us a message over NCCL, by the thread blocks that it may take"
    return Table(title, ["", *(f"{k} KiB" for k in kib)], rows, [".0f"] * len(kib))


def blocks(transport: str | None, sizes: str, kib: list[int]) -> list[tuple[int, list[float]]]:
    """Return seconds a message for each number of thread blocks; every rank calls it."""
    found = []
    for number in (1, 4) if sizes == "tiny" else (1, 2, 4, 8, 16):
        nccl._MAX_BLOCKS, nccl._PART = number, 1.0
        times = measure_sizes(kib, 3, transport)
        found.append((number, [seconds_a_message(of, 4)["procpipe"] for of in times]))
    return found


def _trace(options: argparse.Namespace) -> Table:
    path = (options.out / "trace.json").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    found = _launched("trace", 2, options, path=str(path))
    rows = [[f"stage {k}", *of.values()] for k, of in enumerate(found)]
    title = "trace: where the time of a step went"
    notes = ["the whole timeline is in trace.*.json, for https://ui.perfetto.dev"]
    return Table(title, ["", *found[0]], rows, [".2f", ".0%", ".0%", ".0%", ".0%"], notes)


def trace(transport: str | None, sizes: str, path: str) -> list[dict[str, float]]:
    """Return of each stage the parts of its step's time; every rank calls it."""
    job = _blocks_job(transport, sizes)
    stage = stage_of(job, schedule="1f1b", trace=path)
    step = step_of(stage, job)
    for _ in range(4):
        step()
    stage.report()
    split = stage.statistics().split
    assert split is not None, "report() has brought the times together"
    names = ("busy_s", "bubble_s", "imbalance_s", "communication_s")
    ours = {n.removesuffix("_s"): getattr(split, n) / split.step_s for n in names}
    stage.close()
    return gathered({"step, ms": split.step_s * 1e3, **ours})


def _blocks_job(transport: str | None, sizes: str) -> Job:
    return Job(SIZES[sizes]["blocks"], dist.get_world_size(), 8, "cuda", transport)


def _blocks_step(transport: str | None, sizes: str) -> Step:
    job = _blocks_job(transport, sizes)
    return step_of(stage_of(job), job)


def _launched(name: str, n: int, options: argparse.Namespace, **more: Any) -> Any:
    return launch(
        f"benchmarks.gpu.checks:{name}",
        n,
        device="cuda",
        transport=options.transport,
        sizes=options.sizes,
        **more,
    )


CHECKS: dict[str, Callable[[argparse.Namespace], Table]] = {
    "versions": _versions,
    "parity": _parity,
    "host": _host,
    "blocks": _blocks,
    "trace": _trace,
}
