"""Pins each process of a host to physical cores of its own, next to its GPU.

Without pinning, the kernel moves a stage's threads between cores, away from the memory that they
filled first and from their GPU, and stages that run at the same time displace one another.

    GPUs 0 and 1                            GPU 2
    cores 0 1 2 3 4 5 6 7                   cores 8 9 10 11 12 13 14 15     a socket each
          └─ 0 ─┘ └─ 1 ─┘                         └───────── 2 ───────┘     process

Processes whose GPUs are next to the same cores divide these; without GPUs, or where the host does
not report cores for each of them, all processes divide the host's. With fewer cores than processes
none is pinned: the kernel does better. Memory needs no binding: a page is on the node of the core
that first writes to it. Only CPUs that this process may run on count (containers, batch systems).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from procpipe.notes import write_note

#: Set it to 0, and no process is pinned.
SWITCH = "PROCPIPE_PIN"

#: The logical CPUs of a physical core; two with SMT.
Core = tuple[int, ...]


def cores_of_host(root: Path = Path("/")) -> list[Core]:
    """Return the physical cores that this process may use, those of a socket together.

    Where /sys does not list them, each CPU counts as a core.
    """
    found: dict[Core, int] = {}
    allowed = os.sched_getaffinity(0)
    for cpu in sorted(allowed):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _read_cpus(folder / "thread_siblings_list") & allowed | {cpu}
        found[tuple(sorted(siblings))] = min(_read_cpus(folder / "physical_package_id") or {0})
    return sorted(found, key=lambda core: (found[core], core))


def shares(
    num_processes: int, pcis: Sequence[str] = (), root: Path = Path("/")
) -> list[list[Core]]:
    """Divide this host's cores; return those of each process, by local rank: none if not pinned.

    ``pcis`` holds the PCI address of each process's GPU ("0000:3b:00.0"), or is shorter.
    """
    cores = cores_of_host(root)
    if os.environ.get(SWITCH) == "0" or len(cores) < num_processes:
        return [[] for _ in range(num_processes)]
    near = [_near(pci, cores, root) for pci in pcis[:num_processes]]
    if len(near) < num_processes or not all(0 < near.count(each) <= len(each) for each in near):
        near = [cores] * num_processes
    parts = ((each, near[:rank].count(each), near.count(each)) for rank, each in enumerate(near))
    return [each[len(each) * k // n : len(each) * (k + 1) // n] for each, k, n in parts]


def pin_this_process(pcis: Sequence[str] = ()) -> None:
    """Pin this process, with all its threads, to its share of the host's cores.

    Never raises: an error is one line on standard error. ``pcis`` is as for ``shares``. A forked
    child may run on all cores again: a loader's workers would take those of rank 0's layers.

    Does nothing in a process that was not started by torchrun's engine (Slurm and MPI bind their
    processes themselves), in one that may not run on all CPUs of its parent, as something has
    pinned it (``torchrun --numa-binding``, ``numactl``), and if PROCPIPE_PIN is 0.
    """
    try:
        before = os.sched_getaffinity(0)
        if "TORCHELASTIC_RUN_ID" not in os.environ or before != os.sched_getaffinity(os.getppid()):
            return
        share = shares(int(os.environ["LOCAL_WORLD_SIZE"]), pcis)[int(os.environ["LOCAL_RANK"])]
        if cpus := [cpu for core in share for cpu in core]:
            for thread in os.listdir("/proc/self/task"):
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.sched_setaffinity(int(thread), cpus)
            os.register_at_fork(after_in_child=lambda: os.sched_setaffinity(0, before))
    except Exception as error:  # hosts differ, and a run must not fail because of pinning
        write_note(f"procpipe: this process is not pinned to cores: {error!r} ({SWITCH}=0: never)")


def _near(pci: str, cores: Sequence[Core], root: Path) -> list[Core]:
    """Return the cores next to a GPU; [] if unknown."""
    cpus = _read_cpus(root / f"sys/bus/pci/devices/{pci}/local_cpulist")
    return [core for core in cores if cpus.issuperset(core)]


def _read_cpus(path: Path) -> set[int]:
    """Read a file such as "0-2,8", numbers 0, 1, 2 and 8; empty without one."""
    cpus: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus
