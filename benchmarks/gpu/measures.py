"""The measurements of the steps on every rank; each function records its findings.

    versions               of libraries, GPUs and the host
    parity                 largest differences to the plain model, in float64
    against_one_process    parity, and a step's time beside one process
    host                   cost of a task, how far the host is ahead, synchronisations
    messages               latency and bandwidth, by size
    blocks                 the same, by the thread blocks that a transfer by NCCL may take
    trace                  a timeline of all stages, and where its time went

Every rank calls all but the first, with ``devices`` one a rank, and waits for the others.
"""

from __future__ import annotations

import copy
import ctypes
import math
import os
import platform
import statistics
import subprocess
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.boundary import Pass
from benchmarks.gpu.child import Recorder
from benchmarks.gpu.results import RESULTS
from benchmarks.rounds import Step, Times, measure, spread
from procpipe import Stage
from procpipe.channel import nccl
from procpipe.job.world import World

#: A real difference between kernels run in another order is of about 1e-15.
_TOLERANCE = 1e-10

_MANY = 8  # messages in a row

_TIMEOUT_S = 60.0  # of a wait within a pipeline: shorter than most steps' limit


def versions(record: Recorder, **_: Any) -> None:
    """Record versions, GPUs and how they reach one another."""
    gpus = [torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count())]
    if not gpus:
        raise RuntimeError("torch finds no CUDA device: see nvidia-smi, and torch.version.cuda")
    both = [(k, peer) for k in range(len(gpus)) for peer in range(len(gpus)) if peer != k]
    apart = [pair for pair in both if not torch.cuda.can_device_access_peer(*pair)]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = {
        f"GPU {k}": f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB "
        f"({torch.cuda.mem_get_info(k)[0] / 2**30:.1f} free), "
        f"compute capability {gpu.major}.{gpu.minor}"
        for k, gpu in enumerate(gpus)
    } | {
        "peer access": f"not between {apart}" if apart else "between all",
        "driver": _output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"
        ),
        "NCCL": _nccl_version(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "Python": f"{platform.python_version()}, Linux {platform.release()}",
        "host": f"{len(os.sched_getaffinity(0))} cores, {memory_bytes / 2**30:.0f} GiB",
    }
    topology = _output("nvidia-smi", "topo", "-m")
    record("versions", num_gpus=len(gpus), nccl=_nccl_version())
    for name, text in machine.items():
        record("machine", f"{name}: {text}", note=topology)


def parity(
    record: Recorder,
    devices: Sequence[str],
    transport: str | None,
    pairs: Sequence[tuple[str, str]],
    width: int,
) -> None:
    """Compare outputs, losses, gradients and buffers with the plain model's on the same GPU.

    Args:
        record: records a finding.
        devices: one a rank.
        transport: procpipe's.
        pairs: schedules and checkpoint modes.
        width: of the model.

    Raises:
        AssertionError: a difference is larger than floating point explains.
    """
    faults = []
    for schedule, mode in pairs:
        of_all = gathered(_differences(devices, transport, schedule, mode, width))
        largest = {name: max(found[name] for found in of_all) for name in of_all[0]}
        record("parity", f"{_where(devices, transport)}: {schedule}, {mode}", largest)
        if not max(largest.values()) <= _TOLERANCE:
            faults.append(f"{schedule}, {mode}: {largest}")
    if faults:
        raise AssertionError(f"differences to the plain model: {'; '.join(faults)}")


def against_one_process(
    record: Recorder,
    devices: Sequence[str],
    transport: str | None,
    pairs: Sequence[tuple[str, str]],
    num_rounds: int,
    **sizes: int,
) -> None:
    """Compare results, and then the time of a step, with one process that has a GPU for itself."""
    width, m, rows = sizes["width"], sizes["num_micro_batches"], sizes["rows"]
    parity(record, devices, transport, pairs, width=min(width, 64))
    stage, step, (input, target) = _blocks(devices, transport, **sizes)
    is_first = stage.rank == 0
    plain = _layers(width if is_first else 1, stage.device)
    parts = [*zip(input.chunk(m), target.chunk(m), strict=True)] if is_first else []

    def alone() -> None:
        for x, y in parts:
            (F.mse_loss(plain(x), y) / m).backward()

    steps = {"procpipe": _synchronised(step), "one process": _synchronised(alone)}
    times = measure(steps, num_rounds=num_rounds, num_steps=2)
    ours, theirs = times.values()
    cells = {
        "ms a step": median_ms(ours),
        "one process": median_ms(theirs),
        "ratio": spread(ours, theirs),
    }
    what = f"16 x (Linear({width}, {width}), GELU), micro-batch {rows}, m = {m}"
    record("steps", _where(devices, transport), cells, what, times=times)
    stage.close()


def host(record: Recorder, devices: Sequence[str], transport: str | None, **sizes: int) -> None:
    """Measure the host's cost of a task, how far the host runs ahead, and how often it waits."""
    m = 16
    stage, step, _ = _blocks(devices, transport, width=16, rows=4, num_micro_batches=m)
    times = measure({"tiny": _synchronised(step)}, num_rounds=5, num_steps=5)["tiny"]
    stage.close()
    stage, step, _ = _blocks(devices, transport, **sizes)
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
    stage.close()
    ours: dict[str, Any] = {"us a task": median_ms(times) * 1e3 / (2 * m)}
    ours |= {"step() ends, ms": returned_s * 1e3, "device ends, ms": ended_s * 1e3}
    ours |= {"ahead": f"{1 - returned_s / ended_s:.0%}", "waits": num_waits}
    for rank, cells in enumerate(gathered(ours)):
        record("host", f"{_where(devices, transport)}: rank {rank}", cells)


def messages(
    record: Recorder,
    devices: Sequence[str],
    transport: str | None,
    sizes: Sequence[int],
    num_rounds: int,
) -> None:
    """Measure messages of some sizes, in bytes, from the first to the second GPU."""
    World.transport = transport
    one, more = (
        Stage(
            nn.Sequential(Pass(), Pass()), [1, 1], chunks=m, devices=devices,
            loss_fn=torch.sum, timeout_s=_TIMEOUT_S,
        )
        for m in (1, 1 + _MANY)
    )  # fmt: skip
    alone = nn.Sequential(Pass(), Pass()).to(one.device)
    for size in sizes:
        row = torch.zeros(1, size // 4, device=one.device)
        steps = _message_steps(one, more, alone, row)
        times = measure(steps, num_rounds=num_rounds, num_steps=1)
        name = f"{_where(devices, transport).rpartition(', ')[2]}, {size} B"
        record("messages", name, _message_cells(times, size), times=times)
    one.close()
    more.close()


def blocks(record: Recorder, *, most: Sequence[int], **options: Any) -> None:
    """Measure messages with each number of thread blocks that a transfer by NCCL may take."""
    for number in most:
        nccl._MAX_BLOCKS, nccl._PART = number, 1.0
        messages(_with_name(record, f"{number} blocks"), **options)


def _with_name(record: Recorder, more: str) -> Recorder:
    """Return what records under a longer name."""

    def longer(kind: str, name: str = "", *found: Any, **raw: Any) -> None:
        record(kind, f"{name}, {more}", *found, **raw)

    return longer


def _message_steps(one: Stage, more: Stage, alone: nn.Module, row: Tensor) -> dict[str, Step]:
    rows = row.expand(1 + _MANY, -1).contiguous()
    steps: dict[str, Step] = {
        "one": lambda: _evaluate(one, row),
        "many": lambda: _evaluate(more, rows),
        "both ways": lambda: one.train().step(row),
        "alone": lambda: one.rank or torch.sum(alone(row)).backward(),
        "copy": lambda: one.rank or row.clone(),
    }
    return {name: _synchronised(step) for name, step in steps.items()}


def _message_cells(times: Times, size: int) -> dict[str, float | None]:
    turns = [times[name] for name in ("both ways", "alone", "many", "one")]
    way_s = statistics.median((both - alone) / 2 for both, alone, *_ in zip(*turns, strict=True))
    each_s = statistics.median((many - one) / _MANY for *_, many, one in zip(*turns, strict=True))
    copy_s = statistics.median(times["copy"])
    return {
        "one way, us": way_s * 1e6,
        "in a row, us": each_s * 1e6,
        "GB/s": round(size / 1e9 / each_s, 3) if each_s > 0 else None,
        "a copy, GB/s": round(size / 1e9 / copy_s, 3),
    }


def trace(record: Recorder, devices: Sequence[str], transport: str | None, **sizes: int) -> None:
    """Write a timeline beside the results, and record where the time of a step went."""
    path = Path(os.environ[RESULTS]).with_name("trace.json")
    stage, step, _ = _blocks(devices, transport, **sizes, schedule="1f1b", trace=path)
    for _ in range(4):
        step()
    stage.report()
    names = ("busy_s", "bubble_s", "imbalance_s", "communication_s")
    ours: dict[str, Any] = {}
    if split := stage.statistics().split:
        ours = {"step, ms": split.step_s * 1e3}
        ours |= {n.removesuffix("_s"): f"{getattr(split, n) / split.step_s:.0%}" for n in names}
    for k, cells in enumerate(gathered(ours)):
        note = "the whole timeline is in trace.*.json"
        record("trace", f"{_where(devices, transport)}: stage {k}", cells, note)
    stage.close()


def gathered(ours: Any) -> list[Any]:
    """Return what every rank has; all call it."""
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, ours)
    return of_all


# -- models and steps -----------------------------------------------------------------------------


def _layers(width: int, device: torch.device | str) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(16))
    return nn.Sequential(*blocks).to(device)


def _blocks(
    devices: Sequence[str],
    transport: str | None,
    *,
    width: int,
    rows: int,
    num_micro_batches: int,
    **options: Any,
) -> tuple[Stage, Step, tuple[Tensor, Tensor]]:
    """Make a pipeline of sixteen equal layers, its step, and its mini-batch."""
    device = devices[dist.get_rank()]
    World.transport = transport
    stage = Stage(
        _layers(width, device), [16 // len(devices)] * len(devices), chunks=num_micro_batches,
        devices=devices, checkpoint="never", loss_fn=F.mse_loss,
        timeout_s=_TIMEOUT_S, **options,
    )  # fmt: skip
    torch.manual_seed(1)
    input, target = (torch.rand(rows * num_micro_batches, width).to(device) for _ in range(2))
    return stage, lambda: stage.step(input, target), (input, target)


def median_ms(seconds: Sequence[float]) -> float:
    """Return the median, in milliseconds."""
    return statistics.median(seconds) * 1e3


def _evaluate(stage: Stage, input: Tensor) -> None:
    stage.eval()
    with torch.no_grad():
        stage(input)


def _synchronised(step: Step) -> Step:
    def whole() -> None:
        step()
        torch.cuda.synchronize()

    return whole


# -- comparing ------------------------------------------------------------------------------------


def _differences(
    devices: Sequence[str], transport: str | None, schedule: str, mode: str, width: int
) -> dict[str, float]:
    """Train a few steps and the plain model too; return this rank's largest differences."""
    device, n = devices[dist.get_rank()], len(devices)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.ReLU(inplace=True)]
    plain = nn.Sequential(*layers).double().to(device)
    World.transport = transport
    num_partitions = n * (2 if schedule in ("interleaved", "zb-v") else 1)
    stage = Stage(
        copy.deepcopy(plain), [16 // num_partitions] * num_partitions, chunks=4, devices=devices,
        checkpoint=mode, schedule=schedule, loss_fn=F.cross_entropy,
        timeout_s=_TIMEOUT_S,
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


def _where(devices: Sequence[str], transport: str | None) -> str:
    num_gpus, n = len(set(devices)), len(devices)
    is_ipc = num_gpus == 1 and transport is None
    name = "CUDA IPC" if is_ipc else f"NCCL {_nccl_version()}"
    return f"{n} stages on {'one GPU' if num_gpus == 1 else f'{num_gpus} GPUs'}, {name}"


def _nccl_version() -> str:
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
