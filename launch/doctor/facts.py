"""What ``procpipe doctor`` looks at: this host, its limits, and the Python and torch in use.

Only looks, and judges nothing (see checks.py). What may hang, a driver or a name service, is asked
in a process of its own with a time limit:

    python -m procpipe.launch.doctor.facts     the GPUs, as JSON
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from procpipe.job.pinning import Place, places_of_host
from procpipe.job.topology import gpu_pcis, read_topology

#: A driver that has to start takes seconds; one that is broken takes for ever.
_GPUS_TIMEOUT_S = 60.0
_NAME_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch can use.

    Attributes:
        name: its model.
        pci: its address on the PCI bus; None if torch does not tell.
        free_bytes: memory nobody uses.
        total_bytes: all its memory.
        peers: the GPUs whose memory it can reach directly, by index.
    """

    name: str
    pci: str | None
    free_bytes: int
    total_bytes: int
    peers: tuple[int, ...]


@dataclass(frozen=True)
class Torch:
    """The torch in use.

    Attributes:
        version: "2.13.0+cpu".
        is_distributed: whether it was built with torch.distributed.
        cuda: the CUDA it was built for; "" for a build without.
        nccl: NCCL's version; empty without.
    """

    version: str
    is_distributed: bool = True
    cuda: str = ""
    nccl: tuple[int, ...] = ()


@dataclass(frozen=True)
class Limits:
    """What the control group of this process is given; None without a limit.

    Attributes:
        num_cpus: CPU time, in CPUs.
        memory_bytes: memory.
        used_bytes: what of that is used, without caches that can be dropped.
    """

    num_cpus: float | None = None
    memory_bytes: int | None = None
    used_bytes: int = 0


@dataclass(frozen=True)
class Facts:
    """All that is looked at. Texts called ``…_error`` are "" where all is well.

    Attributes:
        num_processes: how many processes the host is to run.
        python: its version.
        torch: the torch in use.
        num_nvidia_devices: GPUs that the kernel's driver has, whether or not torch can use them.
        gpus: those torch can use.
        gpu_error: why torch could not be asked.
        topology: cores in words.
        places: where each process would run.
        limits: the control group's.
        available_bytes: the host's memory that is free or can be freed.
        swapped_bytes: what is swapped out.
        shm_bytes: size of /dev/shm, None without one.
        shm_free_bytes: what is free of it.
        max_files: how many files a process may have open.
        max_files_hard: what it may raise that to.
        max_address_bytes: limit of a process's address space, None without.
        memfd_error: why memory cannot be shared as a file without a name.
        unix_error: why abstract unix sockets cannot be used.
        loopback_error: why a process cannot reach another over 127.0.0.1.
        host_name: this host's.
        name_error: why its address is not found.
        name_s: seconds that took.
        interfaces: the network interfaces.
        environment: variables that matter, those that are set.
    """

    num_processes: int
    python: str
    torch: Torch
    num_nvidia_devices: int
    gpus: tuple[Gpu, ...]
    gpu_error: str
    topology: str
    places: tuple[Place, ...]
    limits: Limits
    available_bytes: int
    swapped_bytes: int
    shm_bytes: int | None
    shm_free_bytes: int
    max_files: int
    max_files_hard: int
    max_address_bytes: int | None
    memfd_error: str
    unix_error: str
    loopback_error: str
    host_name: str
    name_error: str
    name_s: float
    interfaces: tuple[str, ...]
    environment: Mapping[str, str]


#: The variables that change what happens.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_P2P_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "PROCPIPE_PIN",
)


def gather(num_processes: int | None = None) -> Facts:
    """Look at everything; takes a second or two, of which most is torch's.

    Args:
        num_processes: how many processes the host is to run; by default one a GPU, else one a core,
            but 2 to 4.
    """
    torch = _torch()
    num_devices = _num_nvidia_devices()
    gpus, gpu_error = _gpus() if torch.cuda else ((), "")
    topology = read_topology()
    if num_processes is None:
        num_processes = len(gpus) or max(2, min(4, len(topology.cores)))
    name_error, name_s = _look_up_own_name()
    shm_bytes, shm_free_bytes = _shared_memory()
    max_files, max_files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_address, _ = resource.getrlimit(resource.RLIMIT_AS)
    return Facts(
        num_processes=num_processes,
        python=platform.python_version(),
        torch=torch,
        num_nvidia_devices=num_devices,
        gpus=gpus,
        gpu_error=gpu_error,
        topology=topology.summary(),
        places=tuple(places_of_host(num_processes, [gpu.pci for gpu in gpus][:num_processes])),
        limits=limits_of(),
        available_bytes=psutil.virtual_memory().available,
        swapped_bytes=psutil.swap_memory().used,
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        max_files=_or_huge(max_files),
        max_files_hard=_or_huge(max_files_hard),
        max_address_bytes=None if max_address == resource.RLIM_INFINITY else max_address,
        memfd_error=_try_memfd(),
        unix_error=_try_socket(socket.AF_UNIX, f"\0procpipe-doctor-{os.getpid()}"),
        loopback_error=_try_socket(socket.AF_INET, ("127.0.0.1", 0)),
        host_name=socket.gethostname(),
        name_error=name_error,
        name_s=name_s,
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def limits_of(root: Path = Path("/")) -> Limits:
    """Read the limits of this process's control group, and of those around it.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    num_cpus: list[float] = []
    memory: list[tuple[int, int]] = []
    for folder in _group_folders(root):
        quota, period = [*_words(folder / "cpu.max"), "", ""][:2]
        if not quota:  # version 1 of control groups
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():  # "max" and -1 are no limit
            num_cpus.append(int(quota) / int(period))
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        if limit.isdigit() and int(limit) < 1 << 60:  # version 1 writes its own infinity
            memory.append((int(limit), _used_bytes(folder)))
    limit_bytes, used_bytes = min(memory, key=lambda pair: pair[0] - pair[1], default=(None, 0))
    return Limits(min(num_cpus, default=None), limit_bytes, used_bytes)


def _group_folders(root: Path) -> list[Path]:
    """Return the folders that may hold limits of this process, of either version of cgroups."""
    folders: list[Path] = []
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for mount in (
            [mounts / name for name in controllers.split(",")] if controllers else [mounts]
        ):
            inner = mount / path.strip("/")
            folders += [f for f in (inner, *inner.parents) if f.is_relative_to(mount)]
    return list(dict.fromkeys(folders))


def _used_bytes(folder: Path) -> int:
    used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
    if not used.isdigit():
        return 0
    parts: dict[str, str] = dict(
        re.findall(r"^(\w+) (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
    )
    # Version 1 tells it with the groups inside this one, and without.
    droppable = parts.get("total_inactive_file") or parts.get("inactive_file") or "0"
    return max(0, int(used) - int(droppable))


def _torch() -> Torch:
    import torch

    return Torch(
        version=str(torch.__version__),
        is_distributed=torch.distributed.is_available(),
        cuda=torch.version.cuda or "",
        nccl=_nccl_version(),
    )


def _nccl_version() -> tuple[int, ...]:
    import torch

    try:
        return tuple(torch.cuda.nccl.version())
    except AttributeError:  # this torch was built without NCCL
        return ()


def _num_nvidia_devices() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    return 0


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    """Ask for the GPUs in another process; return them, and what went wrong."""
    command = [sys.executable, "-W", "ignore", "-m", "procpipe.launch.doctor.facts"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_GPUS_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return (), f"the driver has not answered in {_GPUS_TIMEOUT_S:.0f} s"
    try:
        told = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return (), lines[-1]
    return tuple(Gpu(**{**gpu, "peers": tuple(gpu["peers"])}) for gpu in told), ""


def print_gpus() -> None:
    """Print the GPUs that torch can use, as JSON."""
    import torch

    found = []
    num_gpus = torch.cuda.device_count()
    for index, pci in enumerate(gpu_pcis()):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        reachable = torch.cuda.can_device_access_peer
        peers = tuple(k for k in range(num_gpus) if k != index and reachable(index, k))
        name = torch.cuda.get_device_name(index)
        found.append(asdict(Gpu(name, pci, free_bytes, total_bytes, peers)))
    print(json.dumps(found))


def _shared_memory() -> tuple[int | None, int]:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return None, 0
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def _try_memfd() -> str:
    try:
        os.close(os.memfd_create("procpipe-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except (OSError, AttributeError) as error:  # no such call outside Linux
        return _told(error)
    return ""


def _try_socket(family: socket.AddressFamily, address: str | tuple[str, int]) -> str:
    """Send a byte from one socket to another."""
    try:
        with socket.socket(family) as listener, socket.socket(family) as ours:
            listener.settimeout(5)
            ours.settimeout(5)
            listener.bind(address)
            listener.listen()
            ours.connect(listener.getsockname())
            with listener.accept()[0] as theirs:
                theirs.settimeout(5)
                ours.sendall(b"x")
                if theirs.recv(1) != b"x":
                    return "what was sent did not arrive"
    except OSError as error:
        return _told(error)
    return ""


def _look_up_own_name() -> tuple[str, float]:
    """Look up this host's address by its name; return what went wrong, and the seconds taken."""
    code = "import socket; socket.getaddrinfo(socket.gethostname(), None)"
    start_s = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-S", "-c", code],
            capture_output=True,
            text=True,
            timeout=_NAME_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {_NAME_TIMEOUT_S:.0f} s", _NAME_TIMEOUT_S
    lines = done.stderr.strip().splitlines()
    return (lines[-1] if done.returncode and lines else ""), time.monotonic() - start_s


def _told(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return f"{errno.errorcode.get(error.errno, error.errno)}: {error.strerror}"
    return f"{type(error).__name__}: {error}"


def _or_huge(limit: int) -> int:
    return 1 << 62 if limit == resource.RLIM_INFINITY else limit


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


if __name__ == "__main__":
    print_gpus()
