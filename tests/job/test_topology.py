"""The topology of invented hosts, and of this one."""

from __future__ import annotations

import os

import psutil
import pytest

from procpipe.job.topology import (
    Core,
    Device,
    cpus_text,
    normal_pci,
    parse_cpus,
    read_device,
    read_topology,
)
from tests.cases import for_each
from tests.job.trees import smt_cores, write, write_host


def test_one_package_without_smt(tmp_path):
    root = write_host(tmp_path, {0: [[0], [1], [2], [3]]})

    topology = read_topology(root, range(4))

    assert topology.cores == (Core((0,)), Core((1,)), Core((2,)), Core((3,)))
    assert topology.summary() == "4 cores, 1 package, 1 NUMA node"


@pytest.mark.parametrize("is_old", [False, True])
def test_two_packages_with_smt(tmp_path, is_old):
    nodes = {0: smt_cores(0, 2, sibling=4), 1: smt_cores(2, 2, sibling=4)}
    root = write_host(tmp_path, nodes, is_old=is_old)

    topology = read_topology(root, range(8))

    assert topology.cores == (
        Core((0, 4), package=0, node=0),
        Core((1, 5), package=0, node=0),
        Core((2, 6), package=1, node=1),
        Core((3, 7), package=1, node=1),
    )
    assert topology.summary() == "4 cores (8 logical CPUs), 2 packages, 2 NUMA nodes"


def test_cpus_that_alternate_between_nodes_are_ordered_by_node(tmp_path):
    root = write_host(tmp_path, {0: [[0], [2]], 1: [[1], [3]]})

    topology = read_topology(root, range(4))

    assert [core.cpus for core in topology.cores] == [(0,), (2,), (1,), (3,)]
    assert [core.package for core in topology.cores] == [0, 0, 1, 1]


def test_a_package_of_several_nodes(tmp_path):
    root = write_host(tmp_path, {0: [[0]], 1: [[1]], 2: [[2]], 3: [[3]]}, packages=[[0, 1], [2, 3]])

    topology = read_topology(root, range(4))

    assert [(core.package, core.node) for core in topology.cores] == [
        (0, 0),
        (0, 1),
        (1, 2),
        (1, 3),
    ]


def test_a_mask_with_whole_and_half_cores(tmp_path):
    """A container's cpuset, or a batch system's share of a host."""
    nodes = {0: smt_cores(0, 4, sibling=8), 1: smt_cores(4, 4, sibling=8)}
    root = write_host(tmp_path, nodes)

    topology = read_topology(root, {1, 2, 10, 5})

    assert topology.cores == (Core((1,)), Core((2, 10)), Core((5,), package=1, node=1))


def test_offline_cpus_are_not_used(tmp_path):
    root = write_host(tmp_path, {0: [[0], [1], [2], [3]]}, online=[0, 1, 3])

    assert [core.cpus for core in read_topology(root, range(4)).cores] == [(0,), (1,), (3,)]


def test_hybrid_cores_by_their_capacity(tmp_path):
    root = write_host(tmp_path, {0: [[0, 1], [2, 3], [4], [5]]})
    for cpu, capacity in enumerate((1024, 1024, 1024, 1024, 512, 512)):
        write(root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", str(capacity))

    topology = read_topology(root, range(6))

    assert [core.core_type for core in topology.cores] == [0, 0, 1, 1]
    assert topology.summary() == (
        "4 cores (6 logical CPUs), 2 of them faster than the others, 1 package, 1 NUMA node"
    )


def test_hybrid_cores_as_intel_names_them(tmp_path):
    root = write_host(tmp_path, {0: [[0, 1], [2, 3], [4], [5]]})
    write(root / "sys/devices/cpu_core/cpus", "0-3")
    write(root / "sys/devices/cpu_atom/cpus", "4-5")

    assert [core.core_type for core in read_topology(root, range(6)).cores] == [0, 0, 1, 1]


def test_a_single_core(tmp_path):
    assert read_topology(write_host(tmp_path, {0: [[0]]}), {0}).cores == (Core((0,)),)


def test_without_sys_each_cpu_is_a_core(tmp_path):
    assert read_topology(tmp_path, {0, 3}).cores == (Core((0,)), Core((3,)))


def test_invalid_files_count_as_missing(tmp_path):
    write(tmp_path / "sys/devices/system/cpu/online", "all of them")
    write(tmp_path / "sys/devices/system/cpu/cpu0/topology/core_cpus_list", "0-x")
    write(tmp_path / "sys/devices/system/cpu/cpu0/cpu_capacity", "")
    write(tmp_path / "sys/devices/system/node/node0/cpulist", "\x00")
    write(tmp_path / "sys/devices/system/node/online", "0")

    assert read_topology(tmp_path, {0, 1}).cores == (Core((0,)), Core((1,)))


def test_this_host_is_read_like_psutil():
    topology = read_topology()

    assert {cpu for core in topology.cores for cpu in core.cpus} == os.sched_getaffinity(0)
    if len(os.sched_getaffinity(0)) == psutil.cpu_count():
        assert len(topology.cores) == psutil.cpu_count(logical=False)


@for_each("text", ["0000:3b:00.0", "00000000:3B:00.0", "3b:00.0", "0000:3b:00", " 0000:3B:0.0\n"])
def test_the_spellings_of_a_pci_address(text):
    assert normal_pci(text) == "0000:3b:00.0"


@for_each("text", ["", "cuda:0", "0000:3g:00.0", "../../etc"])
def test_invalid_pci_addresses(text):
    with pytest.raises(ValueError, match="is not a PCI address like"):
        normal_pci(text)


def test_the_numa_nodes_of_gpus(tmp_path):
    gpus = {"0000:3b:00.0": 0, "0001:af:00.0": 1, "0000:01:00.0": -1}
    root = write_host(tmp_path, {0: [[0], [1]], 1: [[2], [3]]}, gpus=gpus)

    assert read_device("00000001:AF:00.0", root) == Device("0001:af:00.0", 1)
    assert read_device("0000:3b:00.0", root) == Device("0000:3b:00.0", 0)
    assert read_device("0000:01:00.0", root) == Device("0000:01:00.0", None)
    assert read_device("0000:77:00.0", root) == Device("0000:77:00.0", None)


def test_a_gpu_without_a_node_is_next_to_its_cpus(tmp_path):
    root = write_host(tmp_path, {0: [[0], [1]], 1: [[2], [3]]})
    write(root / "sys/bus/pci/devices/0000:3b:00.0/numa_node", "-1")
    write(root / "sys/bus/pci/devices/0000:3b:00.0/local_cpulist", "2-3")

    assert read_device("0000:3b:00.0", root).node == 1


@for_each(
    ("text", "cpus"), [("0", {0}), ("0-2,8", {0, 1, 2, 8}), ("\n", set()), ("3,5-6", {3, 5, 6})]
)
def test_lists_of_cpus(text, cpus):
    assert parse_cpus(text) == cpus
    assert cpus_text(cpus) == text.strip()
