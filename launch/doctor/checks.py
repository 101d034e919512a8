"""The checks of ``procpipe doctor``, one function each: what is found, how good, what to do.

Each looks at one thing that has ended or slowed down runs. A failure keeps a run from starting or
from ending well; a warning makes it slower or fail later.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import re
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from procpipe.job.pin import SWITCH, cores_of_host, shares
from procpipe.launch.doctor.gpus import Gpu
from procpipe.launch.start_ranks import Result
from procpipe.words import bytes_text, counted

#: A process of torch and its libraries alone takes 0.3 GiB.
_MIN_BYTES_PER_PROCESS = 1 << 29

#: On CPUs, 7 are open and 3 for each process; loaders, logs and drivers come on top.
_MIN_FILES = 1024

#: A host that is not overloaded is far better: 0.03 ms and 2 GB/s on a 2-core virtual machine.
_SLOW_LATENCY_S = 1e-3
_SLOW_CPU_BYTES_PER_S, _SLOW_GPU_BYTES_PER_S = 0.25e9, 5e9

#: A pair is an outlier below this share of the best one's bandwidth.
_OUTLIER = 0.4

#: How good something is.
OK, WARNING, FAILURE = "ok", "warning", "failure"


class Verdict(NamedTuple):
    """The outcome of a check."""

    status: str
    found: str
    advice: str = ""  # what to do unless that is good


class Host(NamedTuple):
    """What the checks are given; they look at the rest by themselves."""

    num_processes: int  # those that a run is to have here
    gpus: Sequence[Gpu] = ()  # what torch can use
    gpu_error: str = ""  # why it can use none
    root: Path = Path("/")  # of the files that the kernel writes


def _check_torch(host: Host) -> Verdict:
    what = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
    return Verdict(OK, f"{torch.__version__}, for {what}; Python {platform.python_version()}")


def _check_gpus(host: Host) -> Verdict:
    models = ", ".join(sorted({gpu.name for gpu in host.gpus}))
    found = f"{counted(len(host.gpus), 'GPU')} ({models})"
    used = [
        f"GPU {k}, {bytes_text(gpu.free_bytes)} of {bytes_text(gpu.total_bytes)} free"
        for k, gpu in enumerate(host.gpus)
        if gpu.free_bytes < 0.9 * gpu.total_bytes
    ]
    if host.gpu_error:
        advice = "see whether nvidia-smi works; if not, repair the driver or load it again"
        return Verdict(FAILURE, f"torch cannot ask for them: {host.gpu_error}", advice)
    if used:
        return Verdict(
            WARNING,
            f"{found}; in use already: {', '.join(used)}",
            "nvidia-smi lists the processes that use them; end those, or choose others by "
            "CUDA_VISIBLE_DEVICES",
        )
    if host.gpus:
        least = min(gpu.free_bytes for gpu in host.gpus)
        return Verdict(OK, f"{found}, at least {bytes_text(least)} free")
    if unused := [*(host.root / "proc/driver/nvidia/gpus").glob("*")]:
        cuda, visible = torch.version.cuda, os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
        return Verdict(
            WARNING,
            f"{counted(len(unused), 'GPU')} in this host, none that torch can use",
            f"install a torch for CUDA (this one is for {cuda or 'CPUs only'}), update the driver "
            f"if it is older (nvidia-smi), unset CUDA_VISIBLE_DEVICES (it is {visible})",
        )
    return Verdict(OK, "none: stages run on CPUs")


def _check_peer_access(host: Host) -> Verdict | None:
    gpus = host.gpus[: host.num_processes]
    apart = [
        f"{a}-{b}"
        for a, b in itertools.pairwise(range(len(gpus)))
        if b not in gpus[a].peers or a not in gpus[b].peers
    ]
    if apart:
        return Verdict(
            WARNING,
            f"neighbours that cannot reach one another's memory: GPUs {', '.join(apart)}",
            "their tensors go through the host's memory; nvidia-smi topo -p2p r shows why (in a "
            "virtual machine or with IOMMU on, PCI access control must be off)",
        )
    return Verdict(OK, "between all neighbours") if len(gpus) > 1 else None


def _check_nccl(host: Host) -> Verdict | None:
    settings = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if "NCCL_" in name]
    if not settings and not torch.version.cuda:
        return None
    found = settings or ["no settings in the environment"]
    with contextlib.suppress(AttributeError):  # this torch is built without NCCL
        found = [".".join(map(str, torch.cuda.nccl.version())), *found]
    return Verdict(OK, ", ".join(found))


def _check_cores(host: Host) -> Verdict:
    num_processes = host.num_processes
    shared = [len(share) for share in shares(num_processes, [gpu.pci for gpu in host.gpus])]
    found, quota = counted(len(cores_of_host()), "core"), cpu_quota(host.root)
    if quota < num_processes:
        return Verdict(
            WARNING,
            f"{found}, but CPU time of {quota:g} CPUs only, for "
            f"{counted(num_processes, 'process')}",
            "raise the container's CPU limit (docker run --cpus, a pod's resources.limits.cpu): "
            "when it is used up, all processes stop until the next tenth of a second",
        )
    if min(shared) > 0:
        return Verdict(OK, f"{found}; each process has {min(shared)} of its own")
    if os.environ.get(SWITCH) == "0":
        return Verdict(OK, f"{found}; no process is pinned, because of {SWITCH}=0")
    return Verdict(
        WARNING,
        f"{found}, for {num_processes} processes: none is pinned",
        "start fewer processes, or stages that should run at the same time take turns",
    )


def _check_memory(host: Host) -> Verdict:
    available = int(psutil.virtual_memory().available)
    found = f"{bytes_text(available)} available"
    left, limit = min(memory_left(host.root), default=(available, 0))
    if left < available:
        available, of = left, bytes_text(limit)
        found = f"{bytes_text(left)} left of the {of} that this control group may use"
    if available < host.num_processes * _MIN_BYTES_PER_PROCESS:
        return Verdict(
            WARNING,
            f"{found}, for {counted(host.num_processes, 'process')}",
            "free some, raise the container's limit or start fewer processes: one that finds none "
            "is killed (each takes 0.3 GiB before it has a model)",
        )
    return Verdict(OK, found)


def _check_files(host: Host) -> Verdict:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # each rank raises its own limit to it
    found = "no limit" if hard == resource.RLIM_INFINITY else f"{hard} a process"
    if 0 <= hard < _MIN_FILES:
        advice = "have root allow more (limits.conf, docker run --ulimit nofile=65536)"
        return Verdict(WARNING, f"{found}, which a loader's workers may use up", advice)
    return Verdict(OK, found)


CHECKS: Mapping[str, Callable[[Host], Verdict | None]] = {
    "torch": _check_torch,
    "GPUs": _check_gpus,
    "peer access": _check_peer_access,
    "NCCL": _check_nccl,
    "cores": _check_cores,
    "memory": _check_memory,
    "open files": _check_files,
}


def check_channels(result: Result, num_processes: int) -> dict[str, Verdict]:
    """Judge how the measurement of the channels ended, and what it found between each pair."""
    processes = counted(num_processes, "process")
    if result.value is None:
        found = f"{processes} could not measure the channels between them: {result.reason}"
        advice = "repair what is found above; otherwise see what the processes report"
        return {"start": Verdict(FAILURE, found, advice)}
    found = f"{processes} started, connected and ended in {result.seconds:.1f} s"
    pairs = result.value[:-1]  # each measured by its lower rank
    best = max((pair["bytes_per_s"] for pair in pairs), default=0.0)
    of_pairs = {f"stages {k} - {k + 1}": _judge(pair, best) for k, pair in enumerate(pairs)}
    return {"start": Verdict(OK, found)} | of_pairs


def _judge(pair: Mapping[str, Any], best: float) -> Verdict:
    """Judge one pair; ``best`` is the bandwidth of the best one."""
    latency_s, bytes_per_s, is_cpu = pair["latency_s"], pair["bytes_per_s"], pair["device"] == "cpu"
    found = f"{latency_s * 1e6:.0f} us for 8 B, {bytes_per_s / 1e9:.2f} GB/s"
    usual = _SLOW_CPU_BYTES_PER_S if is_cpu else _SLOW_GPU_BYTES_PER_S
    if latency_s > _SLOW_LATENCY_S or (is_cpu and bytes_per_s < usual):
        advice = "see what else runs on this host (top), and whether its CPU time is limited"
    elif bytes_per_s < usual:
        advice = (
            "run once with NCCL_DEBUG=INFO: 'via SHM' or 'via NET' means that these GPUs cannot "
            "reach one another directly; is NCCL_P2P_DISABLE or NCCL_SHM_DISABLE set?"
        )
    elif bytes_per_s < _OUTLIER * best:
        found += f", where others reach {best / 1e9:.2f} GB/s"
        advice = (
            "choose the order of devices so that neighbours are close (nvidia-smi topo -m), or a "
            "balance that cuts where activations are small"
        )
    else:
        return Verdict(OK, found)
    return Verdict(WARNING, found, advice)


# -- control groups ------------------------------------------------------------------------------


def cpu_quota(root: Path) -> float:
    """Return the CPU time that this process's control group may use, in CPUs."""
    words = [_text(folder / "cpu.max").split() for folder in _groups(root)]
    limits = [int(quota) / int(period) for quota, period in filter(None, words) if quota != "max"]
    return min(limits, default=float("inf"))


def memory_left(root: Path) -> list[tuple[int, int]]:
    """Return what is left of the memory of each control group around this process, and its size."""
    found = []
    for folder in _groups(root):
        limit = _text(folder / "memory.max")
        if limit.isdigit():
            caches = re.search(r"^inactive_file (\d+)", _text(folder / "memory.stat"), re.M)
            used = int(_text(folder / "memory.current")) - int(caches[1] if caches else 0)
            found.append((int(limit) - used, int(limit)))
    return found


def _groups(root: Path) -> list[Path]:
    """Return the folders of this process's control group and those around it (version 2)."""
    mount = root / "sys/fs/cgroup"
    path = re.search(r"^0::/(.*)$", _text(root / "proc/self/cgroup"), re.M)
    inner = mount / path[1] if path else mount
    return [folder for folder in (inner, *inner.parents) if folder.is_relative_to(mount)]


def _text(path: Path) -> str:
    """Return a file's text without white space around it, "" if there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
