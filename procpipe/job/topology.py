"""What a host has: physical cores, their NUMA nodes, and which of these is next to a GPU.

    /sys/devices/system/cpu/cpu<k>/topology/   which logical CPUs are one core, in which package
    /sys/devices/system/cpu/cpu<k>/cpu_capacity, /sys/devices/cpu_atom/     which are slower
    /sys/devices/system/node/node<k>/cpulist   the CPUs of a NUMA node
    /sys/bus/pci/devices/<id>/                 the NUMA node of a GPU, and its CPUs

Only CPUs that this process may run on count: a container or a batch system may restrict them.
Parts of /sys may be missing (containers, other systems); then each CPU is a core of its own, all in
one node. Every process reads this as it starts, so with few system calls.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from procpipe.words import counted

_NODE_FOLDER = re.compile(r"node(\d+)")
_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?")


@dataclass(frozen=True)
class Core:
    """A physical core."""

    cpus: tuple[int, ...]  # logical CPUs that may be used; two with SMT
    package: int = 0  # socket
    node: int = 0  # NUMA node
    core_type: int = 0  # 0 for a host's fastest cores, 1 for the next slower ones, …


@dataclass(frozen=True)
class Device:
    """A GPU."""

    pci: str  # its address on the PCI bus: "0000:3b:00.0"
    node: int | None  # the NUMA node it is next to, None if unknown


@dataclass(frozen=True)
class Topology:
    """The cores that may be used, sorted by node, then by logical CPUs."""

    cores: tuple[Core, ...]

    @property
    def num_cpus(self) -> int:
        """The number of logical CPUs."""
        return sum(len(core.cpus) for core in self.cores)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The NUMA nodes that have cores, in order."""
        return tuple(sorted({core.node for core in self.cores}))

    def cores_of(self, node: int) -> tuple[Core, ...]:
        """Return the cores of a node."""
        return tuple(core for core in self.cores if core.node == node)

    def summary(self) -> str:
        """Describe it: "64 cores (128 logical CPUs), 2 packages, 2 NUMA nodes"."""
        text = counted(len(self.cores), "core")
        if self.num_cpus != len(self.cores):
            text += f" ({self.num_cpus} logical CPUs)"
        types = Counter(core.core_type for core in self.cores)
        if len(types) > 1:
            text += f", {types[0]} of them faster than the others"
        packages = {core.package for core in self.cores}
        return (
            f"{text}, {counted(len(packages), 'package')}, {counted(len(self.nodes), 'NUMA node')}"
        )


def read_topology(root: Path = Path("/"), allowed: Collection[int] | None = None) -> Topology:
    """Read what this host has, in less than 0.1 ms a core.

    The ``allowed`` logical CPUs count, by default those this process may run on.
    """
    folder = f"{root}/sys/devices/system/cpu"
    cpus = set(os.sched_getaffinity(0) if allowed is None else allowed)
    cpus = (cpus & _read_cpus(f"{folder}/online")) or cpus  # a mask may have offline CPUs
    node_of = _nodes(f"{root}/sys/devices/system/node")
    slower = _read_cpus(f"{root}/sys/devices/cpu_atom/cpus")
    found: list[tuple[tuple[int, ...], int, int]] = []  # CPUs, package, capacity
    seen: set[int] = set()
    for cpu in sorted(cpus):
        if cpu not in seen:
            siblings = _read_cpus(f"{folder}/cpu{cpu}/topology/core_cpus_list") or _read_cpus(
                f"{folder}/cpu{cpu}/topology/thread_siblings_list"  # before Linux 5.5
            )
            group = (siblings & cpus - seen) | {cpu}
            seen |= group
            package = _read_number(f"{folder}/cpu{cpu}/topology/physical_package_id") or 0
            capacity = _read_number(f"{folder}/cpu{cpu}/cpu_capacity")
            if capacity is None:
                capacity = -1 if cpu in slower else 0
            found.append((tuple(sorted(group)), package, capacity))
    fastest_first = sorted({capacity for _, _, capacity in found}, reverse=True)
    cores = [
        Core(group, package, node_of.get(group[0], 0), fastest_first.index(capacity))
        for group, package, capacity in found
    ]
    return Topology(tuple(sorted(cores, key=lambda core: (core.node, core.cpus))))


def read_device(pci: str, root: Path = Path("/")) -> Device:
    """Read which node a GPU is next to; any usual spelling of its address will do."""
    pci = normal_pci(pci)
    folder = f"{root}/sys/bus/pci/devices/{pci}"
    node = _read_number(f"{folder}/numa_node")
    if node is None or node < 0:  # often on a virtual machine, which may still list near CPUs
        cpus = _read_cpus(f"{folder}/local_cpulist")
        of_cpu = _nodes(f"{root}/sys/devices/system/node")
        near = {of_cpu.get(cpu) for cpu in cpus}
        node = near.pop() if len(near) == 1 else None
    return Device(pci, node)


def normal_pci(text: str) -> str:
    """Return a PCI address as /sys spells it: "00000000:3B:00.0" is "0000:3b:00.0"."""
    match = _PCI.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a PCI address like '0000:3b:00.0'")
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{bus:0>2}:{device:0>2}.{function or 0}"


def parse_cpus(text: str) -> set[int]:
    """Return the CPUs of a list as the kernel writes it: "0-2,8" is 0, 1, 2 and 8."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def cpus_text(cpus: Iterable[int]) -> str:
    """Write CPUs as the kernel does: 0, 1, 2 and 8 are "0-2,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs)


def _nodes(folder: str) -> dict[int, int]:
    """Return the NUMA node of each CPU; {} where the host does not say."""
    node_of: dict[int, int] = {}
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    for name in names:
        match = _NODE_FOLDER.fullmatch(name)
        if match is not None:
            cpus = _read_cpus(f"{folder}/{name}/cpulist")
            node_of |= dict.fromkeys(cpus, int(match[1]))
    return node_of


def _read_cpus(path: str) -> set[int]:
    try:
        return parse_cpus(read_text(path))
    except ValueError:
        return set()


def _read_number(path: str) -> int | None:
    try:
        return int(read_text(path))
    except ValueError:
        return None


def read_text(path: Path | str) -> str:
    """Return a file's text without white space around it, "" if there is none."""
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
