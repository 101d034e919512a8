"""What ``procpipe doctor`` looks at: this host, its limits, and the Python and torch in use.

Only reads; checks.py judges. A driver may hang, so it is queried in a process of its own with a
time limit: ``python -m procpipe.launch.doctor.facts`` prints the GPUs as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch

from procpipe.job.devices import pci_of
from procpipe.job.pin import cores_of_host, shares
from procpipe.words import counted

#: A driver that has to start takes seconds; a broken one never answers.
_GPUS_TIMEOUT_S = 60.0

#: More than any limit.
NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class VisibleGpu:
    """A GPU that torch can use."""

    name: str  # its model
    pci: str  # its address on the PCI bus
    free_bytes: int  # unused memory
    total_bytes: int  # all its memory
    peers: tuple[int, ...]  # the GPUs whose memory it can reach directly, by index


@dataclass(frozen=True)
class TorchBuild:
    """The torch in use: what it was built with, "" and () for nothing."""

    version: str
    is_distributed: bool = True
    cuda: str = ""
    nccl: tuple[int, ...] = ()


@dataclass(frozen=True)
class GroupLimits:
    """What the control group of this process is given; None without a limit."""

    num_cpus: float | None = None  # CPU time, in CPUs
    memory_bytes: int | None = None
    used_bytes: int = 0  # what of that is used, without caches that can be dropped


def limits_of(root: Path = Path("/")) -> GroupLimits:
    """Read the limits of this process's control group, and of those around it."""
    num_cpus: list[float] = []
    memory: list[tuple[int, int]] = []
    for folder in _group_folders(root):
        quota, period = [*_read_text(folder / "cpu.max").split(), "", ""][:2]
        if not quota:  # version 1 of control groups
            quota, period = (_read_text(folder / f"cpu.cfs_{k}_us") for k in ("quota", "period"))
        if quota.isdigit() and period.isdigit():  # "max" and -1 mean no limit
            num_cpus.append(int(quota) / int(period))
        limit = _read_text(folder / "memory.max") or _read_text(folder / "memory.limit_in_bytes")
        if limit.isdigit() and int(limit) < 1 << 60:  # version 1 writes its own infinity
            memory.append((int(limit), _used_bytes(folder)))
    limit_bytes, used_bytes = min(memory, key=lambda pair: pair[0] - pair[1], default=(None, 0))
    return GroupLimits(min(num_cpus, default=None), limit_bytes, used_bytes)


def _group_folders(root: Path) -> list[Path]:
    """Return the folders that may hold limits of this process, of either version of cgroups."""
    folders: list[Path] = []
    mounts = root / "sys/fs/cgroup"
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for mount in (
            [mounts / name for name in controllers.split(",")] if controllers else [mounts]
        ):
            inner = mount / path.strip("/")
            folders += [f for f in (inner, *inner.parents) if f.is_relative_to(mount)]
    return list(dict.fromkeys(folders))


def _read_text(path: Path) -> str:
    """Return a file's text without white space around it, "" if there is none."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _used_bytes(folder: Path) -> int:
    used = _read_text(folder / "memory.current") or _read_text(folder / "memory.usage_in_bytes")
    if not used.isdigit():
        return 0
    parts: dict[str, str] = dict(
        re.findall(r"^(\w+) (\d+)$", _read_text(folder / "memory.stat"), re.MULTILINE)
    )
    # Version 1 has it with the groups inside this one, and without.
    droppable = parts.get("total_inactive_file") or parts.get("inactive_file") or "0"
    return max(0, int(used) - int(droppable))


def _num_nvidia_devices() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    return 0


def _nccl_version() -> tuple[int, ...]:
    try:
        return tuple(torch.cuda.nccl.version())
    except AttributeError:  # this torch was built without NCCL
        return ()


def _gpus() -> tuple[tuple[VisibleGpu, ...], str]:
    """Ask the driver for the GPUs; return them, and what went wrong."""
    words = [sys.executable, "-W", "ignore", "-m", "procpipe.launch.doctor.facts"]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_GPUS_TIMEOUT_S, check=True
        )
        found = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return (), f"no answer in {_GPUS_TIMEOUT_S:.0f} s"
    except subprocess.CalledProcessError as error:
        return (), [f"exit code {error.returncode}", *error.stderr.strip().splitlines()][-1]
    except ValueError:
        return (), "the driver gave no answer"
    return tuple(VisibleGpu(**{**gpu, "peers": tuple(gpu["peers"])}) for gpu in found), ""


def print_gpus() -> None:
    """Print the GPUs that torch can use, as JSON."""
    found = []
    num_gpus = torch.cuda.device_count()
    for index in range(num_gpus):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        reachable = torch.cuda.can_device_access_peer
        peers = tuple(k for k in range(num_gpus) if k != index and reachable(index, k))
        name = torch.cuda.get_device_name(index)
        found.append(asdict(VisibleGpu(name, pci_of(index), free_bytes, total_bytes, peers)))
    print(json.dumps(found))


def _max_files() -> tuple[int, int]:
    soft, hard = (
        NO_LIMIT if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return soft, hard


@dataclass(frozen=True)
class Facts:
    """All that the checks look at.

    The first ones depend on one another and come from ``gather``; the others look by themselves.
    """

    num_processes: int
    torch: TorchBuild
    gpus: tuple[VisibleGpu, ...]
    gpu_error: str  # what went wrong, "" if nothing did
    cores: str  # how many physical ones, in words
    cores_of: tuple[int, ...]  # how many of them each process is pinned to, 0 for none

    python: str = field(default_factory=platform.python_version)
    #: GPUs that the kernel's driver has, whether or not torch can use them.
    num_nvidia_devices: int = field(default_factory=_num_nvidia_devices)
    limits: GroupLimits = field(default_factory=limits_of)
    #: Memory that is free or can be freed.
    available_bytes: int = field(default_factory=lambda: int(psutil.virtual_memory().available))
    #: How many files a process may have open, and up to how many it may allow itself.
    max_files: tuple[int, int] = field(default_factory=_max_files)
    interfaces: tuple[str, ...] = field(default_factory=lambda: tuple(psutil.net_if_addrs()))
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


def gather(num_processes: int | None = None) -> Facts:
    """Look at everything; takes a second or two, of which most is torch's.

    The host is to run ``num_processes``; by default one for each GPU, else one for each core, but 2
    to 4.
    """
    build = TorchBuild(
        str(torch.__version__),
        torch.distributed.is_available(),
        torch.version.cuda or "",
        _nccl_version(),
    )
    gpus, gpu_error = _gpus() if build.cuda else ((), "")
    cores = cores_of_host()
    num_cpus = sum(map(len, cores))
    text = counted(len(cores), "core")
    text += f" ({num_cpus} logical CPUs)" if num_cpus > len(cores) else ""
    number = num_processes or len(gpus) or max(2, min(4, len(cores)))
    cores_of = map(len, shares(number, [gpu.pci for gpu in gpus]))
    return Facts(number, build, gpus, gpu_error, text, tuple(cores_of))


if __name__ == "__main__":
    print_gpus()
