"""What a host has: physical cores, their NUMA nodes, and which of these is next to a GPU.

    /sys/devices/system/cpu/cpu<k>/topology/   which logical CPUs are one core, which a package
    /sys/devices/system/cpu/cpu<k>/cpu_capacity, /sys/devices/cpu_atom/     which are slower
    /sys/devices/system/node/node<k>/cpulist   the CPUs of a NUMA node
    /sys/bus/pci/devices/<id>/                 the NUMA node of a GPU, and its CPUs

Only CPUs that this process may run on count: a container or a batch system may restrict them.
Parts of /sys may be missing (containers, other systems); then each CPU is a core of its own, all in
one node. Every process reads this as it starts, so with few system calls: one file per core.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
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
    """Read what this host has, about 30 us a core.

    The ``allowed`` logical CPUs count, by default those this process may run on.
    """
    cpu_folder = f"{root}/sys/devices/system/cpu"
    cpus = set(os.sched_getaffinity(0) if allowed is None else allowed)
    online = _read_cpus(f"{cpu_folder}/online")
    cpus = (cpus & online) or cpus  # an offline CPU may stay in a mask that was set before
    groups = _cores(cpu_folder, sorted(cpus))
    packages = _packages(cpu_folder, groups)
    nodes = _nodes(f"{root}/sys/devices/system/node")
    types = _core_types(root, groups)
    cores = [
        Core(group, package, nodes.get(group[0], 0), core_type)
        for group, package, core_type in zip(groups, packages, types, strict=True)
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
        raise ValueError(f"{text!r} is no PCI address like '0000:3b:00.0'")
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


def _cores(folder: str, cpus: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the CPUs grouped by physical core, reading one file per core."""
    groups: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for cpu in cpus:
        if cpu not in seen:
            siblings = _first_cpus(
                f"{folder}/cpu{cpu}/topology/core_cpus_list",
                f"{folder}/cpu{cpu}/topology/thread_siblings_list",  # before Linux 5.5
            )
            group = (siblings.intersection(cpus) - seen) | {cpu}
            seen |= group
            groups.append(tuple(sorted(group)))
    return groups


def _packages(folder: str, groups: Sequence[tuple[int, ...]]) -> list[int]:
    """Return each core's package, counted from 0, reading one file per package."""
    package_of: dict[int, int] = {}
    num_packages = 0
    for group in groups:
        if group[0] not in package_of:
            members = _first_cpus(
                f"{folder}/cpu{group[0]}/topology/package_cpus_list",
                f"{folder}/cpu{group[0]}/topology/core_siblings_list",  # before Linux 5.5
            )
            if not members and num_packages:  # unknown: assume one package
                num_packages -= 1
            package_of |= dict.fromkeys({*members, *group}, num_packages)
            num_packages += 1
    return [package_of[group[0]] for group in groups]


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


def _core_types(root: Path, groups: Sequence[tuple[int, ...]]) -> list[int]:
    """Return each core's type, 0 the fastest."""
    folder = f"{root}/sys/devices/system/cpu"
    capacities: list[int] = [0] * len(groups)
    if groups and _read_number(f"{folder}/cpu{groups[0][0]}/cpu_capacity") is not None:
        paths = (f"{folder}/cpu{group[0]}/cpu_capacity" for group in groups)
        capacities = [_read_number(path) or 0 for path in paths]
    elif slower := _read_cpus(f"{root}/sys/devices/cpu_atom/cpus"):
        capacities = [-1 if group[0] in slower else 0 for group in groups]
    fastest_first = sorted(set(capacities), reverse=True)
    return [fastest_first.index(capacity) for capacity in capacities]


def _first_cpus(*paths: str) -> set[int]:
    for path in paths:
        if cpus := _read_cpus(path):
            return cpus
    return set()


def _read_cpus(path: str) -> set[int]:
    try:
        return parse_cpus(_read(path))
    except ValueError:
        return set()


def _read_number(path: str) -> int | None:
    try:
        return int(_read(path))
    except ValueError:
        return None


def _read(path: str) -> str:
    """Return a file's text, "" if there is none."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""
