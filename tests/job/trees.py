"""Invented hosts: the files under /sys that describe a host's hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from procpipe.job.topology import cpus_text


def write_host(
    root: Path,
    nodes: Mapping[int, Sequence[Sequence[int]]],
    *,
    packages: Sequence[Sequence[int]] = (),
    gpus: Mapping[str, int] | None = None,
    online: Sequence[int] | None = None,
    is_old: bool = False,
) -> Path:
    """Write a host's files and return ``root``.

    Args:
        root: the folder that will contain ``sys``.
        nodes: the cores of each NUMA node, each core a list of its logical CPUs.
        packages: the nodes of each package; by default each node is a package.
        gpus: the node of the GPU at each PCI address.
        online: the CPUs that are online; by default all.
        is_old: use the file names of Linux before 5.5.
    """
    core_name = "thread_siblings_list" if is_old else "core_cpus_list"
    cpus_of = {node: [cpu for core in cores for cpu in core] for node, cores in nodes.items()}
    all_cpus = sorted(cpu for cpus in cpus_of.values() for cpu in cpus)
    cpu_folder = root / "sys/devices/system/cpu"
    for number, package in enumerate(packages or [[node] for node in nodes]):
        for core in (core for node in package for core in nodes[node]):
            for cpu in core:
                write(cpu_folder / f"cpu{cpu}/topology/{core_name}", cpus_text(core))
                write(cpu_folder / f"cpu{cpu}/topology/physical_package_id", str(number))
    for node, cpus in cpus_of.items():
        write(root / f"sys/devices/system/node/node{node}/cpulist", cpus_text(cpus))
    write(cpu_folder / "online", cpus_text(all_cpus if online is None else online))
    for pci, node in (gpus or {}).items():
        write(root / f"sys/bus/pci/devices/{pci}/numa_node", str(node))
        near = all_cpus if node < 0 else cpus_of[node]
        write(root / f"sys/bus/pci/devices/{pci}/local_cpulist", cpus_text(near))
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def smt_cores(first: int, num_cores: int, sibling: int) -> list[list[int]]:
    """Return cores with two CPUs each, numbered as Linux does: 0 and 4, 1 and 5, …"""
    return [[cpu, cpu + sibling] for cpu in range(first, first + num_cores)]
