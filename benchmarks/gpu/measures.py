"""What the steps measure on every rank; each function records what it finds.

    versions               what is there
    parity                 largest differences to the plain model, in float64
    against_one_process    parity, and a step's time beside one process
    host                   cost of a task, how far the host is ahead, synchronisations
    messages               latency and bandwidth, by size
    trace                  a timeline of all stages, and where its time went

In all but the first every rank calls, with ``devices`` one a rank, and waits for the others.
"""

from __future__ import annotations

import copy
import ctypes
import math
import os
import platform
import subprocess
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.boundary import Pass
from benchmarks.gpu.child import Recorder
from benchmarks.gpu.results import RESULTS
from benchmarks.rounds import Step, Times, measure
from procpipe import Stage

__all__ = ["against_one_process", "host", "messages", "parity", "trace", "versions"]

#: A real difference between kernels run in another order is of about 1e-15.
_TOLERANCE = 1e-10

_MANY = 8  # messages in a row

_TIMEOUT_S = 60.0  # of a wait within a pipeline: shorter than most steps' limit


def versions(record: Recorder, **_: Any) -> None:
    """Record versions, GPUs and how they reach one another."""
    count = torch.cuda.device_count()
    if count == 0:
        raise RuntimeError("torch finds no CUDA device: see nvidia-smi, and torch.version.cuda")
    gpus = [torch.cuda.get_device_properties(k) for k in range(count)]
    free_bytes = [torch.cuda.mem_get_info(k)[0] for k in range(count)]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    record(
        "versions",
        num_gpus=count,
        gpus=[
            f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB ({free / 2**30:.1f} free), "
            f"compute capability {gpu.major}.{gpu.minor}"
            for gpu, free in zip(gpus, free_bytes, strict=True)
        ],
        peer_access=[
            [k == other or torch.cuda.can_device_access_peer(k, other) for other in range(count)]
            for k in range(count)
        ],
        nccl=_nccl_version(),
        driver=_output(ask).partition("\n")[0],
        topology=_output(["nvidia-smi", "topo", "-m"]),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        python=platform.python_version(),
        kernel=platform.release(),
        cores=len(os.sched_getaffinity(0)),
        memory=f"{memory_bytes / 2**30:.0f} GiB",
    )


def parity(
    record: Recorder,
    devices: Sequence[str],
    transport: str | None,
    combinations: Sequence[tuple[str, str]],
    width: int,
) -> None:
    """Compare outputs, losses, gradients and buffers with the plain model's on the same GPU.

    Raises:
        AssertionError: a difference is larger than floating point explains.
    """
    faults = []
    for schedule, mode in combinations:
        ours = _differences(devices, transport, schedule, mode, width)
        of_all: list[dict[str, float]] = [{}] * len(devices)
        dist.all_gather_object(of_all, ours)
        largest = {name: max(found[name] for found in of_all) for name in ours}
        record("parity", where=_where(devices, transport), pair=[schedule, mode], **largest)
        if not max(largest.values()) <= _TOLERANCE:
            faults.append(f"{schedule}, {mode}: {largest}")
    if faults:
        raise AssertionError(f"differences to the plain model: {'; '.join(faults)}")


def against_one_process(
    record: Recorder,
    devices: Sequence[str],
    transport: str | None,
    combinations: Sequence[tuple[str, str]],
    width: int,
    rows: int,
    num_micro_batches: int,
    num_rounds: int,
) -> None:
    """Compare results, and then the time of a step, with one process that has a GPU for itself."""
    _check_nccl(record, devices, transport)
    parity(record, devices, transport, combinations, width=min(width, 64))
    stage, step, (input, target) = _blocks(devices, transport, width, rows, num_micro_batches)
    steps = {"procpipe": step, "one process": _nothing}
    if dist.get_rank() == 0:
        plain = _layers(width, stage.device)
        pairs = [*zip(input.chunk(num_micro_batches), target.chunk(num_micro_batches), strict=True)]
        steps["one process"] = lambda: _run_plain(plain, pairs)
    times = measure(
        {name: _synchronised(step) for name, step in steps.items()},
        num_rounds=num_rounds,
        num_steps=2,
    )
    what = f"16 x (Linear({width}, {width}), GELU), micro-batch {rows}, m = {num_micro_batches}"
    record("steps", where=_where(devices, transport), what=what, times=times)
    stage.close()


def host(
    record: Recorder,
    devices: Sequence[str],
    transport: str | None,
    width: int,
    rows: int,
    num_micro_batches: int,
) -> None:
    """Measure what a task costs the host, how far it runs ahead, and how often it waits."""
    m = 16
    stage, step, _ = _blocks(devices, transport, 16, 4, m)
    times = measure({"tiny": _synchronised(step)}, num_rounds=5, num_steps=5)["tiny"]
    stage.close()
    stage, step, _ = _blocks(devices, transport, width, rows, num_micro_batches)
    for _ in range(3):
        step()
    ours: dict[str, Any] = _synchronisations(step)
    torch.cuda.synchronize()
    dist.barrier()
    begun_s = time.perf_counter()
    step()
    returned_s = time.perf_counter() - begun_s
    torch.cuda.synchronize()
    ours |= {"returned_s": returned_s, "ended_s": time.perf_counter() - begun_s}
    stage.close()
    of_all: list[Any] = [None] * len(devices)
    dist.all_gather_object(of_all, ours)
    where = _where(devices, transport)
    record("host", where=where, task_s=[s / (2 * m) for s in times], m=m, ranks=of_all)


def messages(
    record: Recorder,
    devices: Sequence[str],
    transport: str | None,
    sizes: Sequence[int],
    num_rounds: int,
) -> None:
    """Measure messages of some sizes, in bytes, from the first to the second GPU."""
    _check_nccl(record, devices, transport)
    is_first = dist.get_rank() == 0
    one, more = (
        Stage(
            nn.Sequential(Pass(), Pass()), [1, 1], chunks=m, devices=devices, transport=transport,
            loss_fn=torch.sum, timeout_s=_TIMEOUT_S,
        )
        for m in (1, 1 + _MANY)
    )  # fmt: skip
    alone = nn.Sequential(Pass(), Pass()).to(one.device)
    for size in sizes:
        row = torch.zeros(1, size // 4 if is_first else 1, device=one.device)
        times = _message_times(one, more, alone, row, num_rounds)
        record("message", where=_where(devices, transport), bytes=size, many=_MANY, times=times)
    one.close()
    more.close()


def _message_times(
    one: Stage, more: Stage, alone: nn.Module, row: Tensor, num_rounds: int
) -> Times:
    rows = row.expand(1 + _MANY, -1).contiguous()
    steps: dict[str, Step] = {
        "one": lambda: _evaluate(one, row),
        "many": lambda: _evaluate(more, rows),
        "both ways": lambda: one.train().step(row),
        "alone": lambda: torch.sum(alone(row)).backward(),
        "copy": row.clone,
    }
    if one.rank > 0:
        steps |= {"alone": _nothing, "copy": _nothing}
    steps = {name: _synchronised(step) for name, step in steps.items()}
    return measure(steps, num_rounds=num_rounds, num_steps=1)


def trace(
    record: Recorder,
    devices: Sequence[str],
    transport: str | None,
    width: int,
    rows: int,
    num_micro_batches: int,
) -> None:
    """Write a timeline beside the results, and record where the time of a step went."""
    path = Path(os.environ[RESULTS]).with_name("trace.json")
    stage, step, _ = _blocks(
        devices, transport, width, rows, num_micro_batches, schedule="1f1b", trace=path
    )
    for _ in range(4):
        step()
    stage.report()
    split = stage.statistics().split
    of_all: list[Any] = [None] * len(devices)
    dist.all_gather_object(of_all, vars(split) if split else None)
    stage.close()
    record("trace", where=_where(devices, transport), file=path.name, splits=of_all)


# -- models and steps -----------------------------------------------------------------------------


def _layers(width: int, device: torch.device | str) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(16))
    return nn.Sequential(*blocks).to(device)


def _blocks(
    devices: Sequence[str], transport: str | None, width: int, rows: int, m: int, **options: Any
) -> tuple[Stage, Step, tuple[Tensor, Tensor]]:
    """Make a pipeline of sixteen equal layers, its step, and its mini-batch."""
    device = devices[dist.get_rank()]
    stage = Stage(
        _layers(width, device),
        [16 // len(devices)] * len(devices),
        chunks=m,
        devices=devices,
        transport=transport,
        checkpoint="never",
        loss_fn=F.mse_loss,
        timeout_s=_TIMEOUT_S,
        **options,
    )
    torch.manual_seed(1)
    input, target = (torch.rand(rows * m, width).to(device) for _ in range(2))
    return stage, lambda: stage.step(input, target), (input, target)


def _run_plain(model: nn.Module, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for x, y in pairs:
        (F.mse_loss(model(x), y) / len(pairs)).backward()


def _evaluate(stage: Stage, input: Tensor) -> None:
    stage.eval()
    with torch.no_grad():
        stage(input)


def _synchronised(step: Step) -> Step:
    def whole() -> None:
        step()
        torch.cuda.synchronize()

    return whole


def _nothing() -> None:
    """Leave the step to rank 0."""


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
    num_parts = n * (2 if schedule in ("interleaved", "zb-v") else 1)
    stage = Stage(
        copy.deepcopy(plain), [16 // num_parts] * num_parts, chunks=4, devices=devices,
        transport=transport, checkpoint=mode, schedule=schedule, loss_fn=F.cross_entropy,
        timeout_s=_TIMEOUT_S,
    )  # fmt: skip
    largest: dict[str, float] = {}

    def compare(name: str, ours: Tensor, truth: Tensor) -> None:
        found = (ours.cpu().double() - truth.cpu().double()).abs().max().item()
        found = math.inf if math.isnan(found) else found
        largest[name] = max(found, largest.get(name, 0.0))

    for input, target in _mini_batches(width, device):
        loss, parts = (
            stage.step(input, target),
            [*zip(input.chunk(4), target.chunk(4), strict=True)],
        )
        losses = [F.cross_entropy(plain(x), y) * (len(x) / len(input)) for x, y in parts]
        for part in losses:
            part.backward()
        compare("loss", loss, torch.stack(losses).sum().detach())
    stage.eval()
    plain.eval()
    with torch.no_grad():
        compare("output", stage.fetch(stage(input)), plain(input))
    parameters, buffers = dict(plain.named_parameters()), dict(plain.named_buffers())
    for name, parameter in stage.named_parameters():
        assert parameter.grad is not None, name
        truth = parameters[name].grad
        assert truth is not None, name
        compare("gradients", parameter.grad, truth)
    for name, buffer in stage.named_buffers():
        compare("buffers", buffer, buffers[name])
    stage.close()
    return {name: largest.get(name, 0.0) for name in ("loss", "output", "gradients", "buffers")}


def _mini_batches(width: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Make mini-batches that cannot be split evenly, the last one smaller."""
    generator = torch.Generator().manual_seed(1)
    for size in (11, 11, 6):
        input = torch.randn(size, width, generator=generator, dtype=torch.float64)
        target = torch.randint(width, (size,), generator=generator)
        yield input.to(device), target.to(device)


def _synchronisations(step: Step) -> dict[str, int | None]:
    """Count how often the host waits for the device in one step."""
    torch.cuda.set_sync_debug_mode("warn")
    counted = getattr(ctypes.CDLL(None), "emulated_gpu_synchronizations", None)
    before = counted() if counted else 0
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
    return {"warnings": found, "counted": counted() - before if counted else None}


def _where(devices: Sequence[str], transport: str | None) -> str:
    num_gpus, n = len(set(devices)), len(devices)
    name = {"nccl": "NCCL", None: "CUDA IPC" if num_gpus == 1 else "NCCL"}[transport]
    gpus = "one GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
    return f"{n} stages on {gpus}, {name}"


def _check_nccl(record: Recorder, devices: Sequence[str], transport: str | None) -> None:
    """Record the NCCL that is loaded, where it is to take several ranks on a GPU."""
    if transport == "nccl" and len(set(devices)) < len(devices):
        found = _nccl_version()
        record("nccl", version=found)
        if found < [2, 30]:
            raise RuntimeError(f"NCCL {found} is loaded, but two ranks on a GPU need 2.30")


def _nccl_version() -> list[int]:
    """Ask the library that is loaded; torch knows the one that it was compiled with."""
    version = ctypes.c_int(0)
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return [version.value // 10000, version.value // 100 % 100, version.value % 100]


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10.0, check=True)
    except FileNotFoundError:
        return f"not known, without {command[0]}"
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known: {error}"
    return done.stdout.strip()
