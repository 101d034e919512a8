"""Which cores a process gets: all rules on invented hosts, and real pinning on this one."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from procpipe.job.pinning import (
    ProcessPlace,
    pin,
    pin_this_process,
    places,
    places_of_host,
    table,
)
from procpipe.job.topology import Core, Device, Topology
from tests.cases import for_each

ROOT = Path(__file__).parents[2]
FIRST_CPU = min(os.sched_getaffinity(0))

needs_two_cpus = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) == 1,
    reason="a process can be kept from a CPU only if there are two",
)


def host(*cores_of_node, smt=1, kinds=""):
    """Return a host with these numbers of cores; ``kinds`` has one digit per core."""
    nodes = [node for node, num_cores in enumerate(cores_of_node) for _ in range(num_cores)]
    return Topology(
        tuple(
            Core(
                tuple(range(core, core + smt * len(nodes), len(nodes))),
                node=node,
                package=node,
                core_type=int(kinds[core]) if kinds else 0,
            )
            for core, node in enumerate(nodes)
        )
    )


def gpus(*nodes):
    return [Device(f"0000:{k:02x}:00.0", node) for k, node in enumerate(nodes)]


def drawn(found: list[ProcessPlace], num_cpus: int) -> str:
    """Draw the local rank that has each CPU."""
    owner = {cpu: str(place.local_rank) for place in found for cpu in place.cpus}
    return "".join(owner.get(cpu, ".") for cpu in range(num_cpus))


@for_each(
    ("cores_of_node", "num_processes", "expected"),
    [
        ((4,), 1, "0000"),
        ((4,), 2, "0011"),
        ((4,), 3, "0012"),
        ((4,), 4, "0123"),
        ((1,), 1, "0"),
        ((4, 4), 1, "0000 0000"),
        ((4, 4), 2, "0000 1111"),
        ((4, 4), 3, "0011 2222"),
        ((4, 4), 4, "0011 2233"),
        ((4, 4), 7, "0123 4456"),
        ((6, 2), 4, "001122 33"),
        ((6, 1), 2, "000111 ."),
        ((2, 2, 2, 2), 2, "00 00 11 11"),  # whole nodes
        ((2, 2, 2, 2), 3, "00 00 11 22"),
    ],
)
def test_without_gpus_the_nodes_are_divided(cores_of_node, num_processes, expected):
    found = places(host(*cores_of_node), num_processes)

    assert drawn(found, sum(cores_of_node)) == expected.replace(" ", "")


@for_each(
    ("cores_of_node", "nodes_of_gpus", "expected"),
    [
        ((4, 4), (0, 1), "0000 1111"),
        ((4, 4), (1, 0), "1111 0000"),
        ((4, 4), (1, 1), ".... 0011"),
        ((4, 4), (1,), ".... 0000"),
        ((4, 4), (0, 1, 0, 1), "0022 1133"),
        ((8, 8), (1, 1, 1, 0), "33333333 00011122"),
        ((4, 4), (None, None), "0000 1111"),  # GPUs at unknown nodes
        ((4, 4), (1, None), "1111 0000"),
        ((4, 4), (7, 7), "0000 1111"),  # a node without usable cores
        ((6, 2), (1, 1, 1, 1), "222333 01"),  # more processes than their node has cores
    ],
)
def test_processes_go_to_their_gpus_node(cores_of_node, nodes_of_gpus, expected):
    devices = gpus(*nodes_of_gpus)

    found = places(host(*cores_of_node), len(devices), devices)

    assert drawn(found, sum(cores_of_node)) == expected.replace(" ", "")


def test_the_cpus_of_a_core_stay_together():
    found = places(host(2, 2, smt=2), 4)

    assert [place.cpus for place in found] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert {place.num_cores for place in found} == {1}


@for_each(
    ("kinds", "num_processes", "expected"),
    [
        ("00001111", 2, "00110011"),
        ("00001111", 4, "01230123"),
        ("00000011111111", 4, "00112300112233"),
        ("01", 2, "01"),
        ("01111", 2, "00011"),  # a core left over goes to the process with fewest
        ("011111", 2, "000111"),
    ],
)
def test_each_type_of_core_is_divided(kinds, num_processes, expected):
    found = places(host(len(kinds), kinds=kinds), num_processes)

    assert drawn(found, len(kinds)) == expected


def test_with_fewer_cores_than_processes_none_is_pinned():
    found = places(host(2, smt=2), 3)

    assert [(place.cpus, place.num_cores, place.node) for place in found] == [((), 0, None)] * 3
    assert {place.why for place in found} == {
        "not pinned: 3 processes, and 2 cores (4 logical CPUs), 1 package, 1 NUMA node"
    }


def test_small_hosts_are_divided_evenly():
    """No core is split or given twice, every process has one, and the fewest are maximal."""
    for cores_of_node in itertools.chain.from_iterable(
        itertools.product(range(1, 6), repeat=num_nodes) for num_nodes in (1, 2, 3)
    ):
        topology = host(*cores_of_node, smt=2)
        for num_processes in range(1, sum(cores_of_node) + 1):
            found = places(topology, num_processes)

            case = cores_of_node, num_processes
            assert [place.local_rank for place in found] == list(range(num_processes)), case
            owners = Counter(cpu for place in found for cpu in place.cpus)
            assert set(owners.values()) == {1}, case
            for place in found:
                assert len(place.cpus) == 2 * place.num_cores > 0, case
                cores = [core for core in topology.cores if core.cpus[0] in place.cpus]
                assert all(set(core.cpus) <= set(place.cpus) for core in cores), case
            if num_processes < len(cores_of_node):  # whole nodes: the next test
                continue
            fewest = min(place.num_cores for place in found)
            assert sum(num // (fewest + 1) for num in cores_of_node) < num_processes, case
            for node, num_cores in enumerate(cores_of_node):
                shares = [place.num_cores for place in found if place.node == node]
                if shares:
                    assert max(shares) - min(shares) <= 1, case
                    assert sum(shares) == num_cores, case
                else:
                    assert num_cores <= fewest, case


@for_each("num_nodes", range(2, 9))
def test_fewer_processes_than_nodes_take_whole_nodes(num_nodes):
    for num_processes in range(1, num_nodes):
        topology = host(*[3] * num_nodes)

        found = places(topology, num_processes)

        assert sum(place.num_cores for place in found) == len(topology.cores)
        assert all(place.num_cores % 3 == 0 for place in found)


def test_every_process_has_cores_for_any_places_of_gpus():
    for nodes_of_gpus in itertools.product((None, 0, 1), repeat=4):
        found = places(host(2, 3), 4, gpus(*nodes_of_gpus))

        owners = Counter(cpu for place in found for cpu in place.cpus)
        assert set(owners.values()) == {1}
        assert all(place.num_cores > 0 for place in found)


def test_the_table_shows_each_process_and_why():
    found = places(host(4, 4, smt=2), 3, [*gpus(0, 0), None])

    assert table(found).splitlines() == [
        "process  device            cores  CPUs       NUMA node  why",
        "0        GPU 0000:00:00.0  2      0-1,8-9    0          1/2 of node 0, next to its GPU",
        "1        GPU 0000:01:00.0  2      2-3,10-11  0          1/2 of node 0, next to its GPU",
        "2        CPU               4      4-7,12-15  1          all of node 1",
    ]


def test_the_table_has_the_reason_for_not_pinning():
    why_not = "not pinned: 2 processes, and 1 core, 1 package, 1 NUMA node"
    assert table(places(host(1), 2)).splitlines() == [
        "process  device  cores  CPUs  NUMA node  why",
        f"0        CPU     -      any   -          {why_not}",
        f"1        CPU     -      any   -          {why_not}",
    ]
    (*_, third) = places(host(6, 2), 3, gpus(1, 1, 1))
    assert third.why == "all of node 0: node 1, next to its GPU, has no core left"
    assert places(host(6, 2), 1)[0].why == "all of the host's cores"


RUN = {"TORCHELASTIC_RUN_ID": "a-run", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def pinned(_, changes=(), mask=None):
    """Pin this process; return its place, the CPUs of each of its threads, and its output."""
    cpus_before, environment_before = os.sched_getaffinity(0), dict(os.environ)
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    os.environ.update(RUN | dict(changes))
    try:
        if mask is not None:
            os.sched_setaffinity(0, mask)
        with contextlib.redirect_stderr(io.StringIO()) as written:
            place = pin_this_process()
        cpus = [os.sched_getaffinity(int(name)) for name in os.listdir("/proc/self/task")]
        return place, cpus, written.getvalue()
    finally:
        ended.set()
        thread.join()
        os.environ.clear()
        os.environ.update(environment_before)
        pin(ProcessPlace(0, tuple(cpus_before), 0, None, "CPU", "where it was"))


def test_a_process_is_pinned_with_all_its_threads(ranks):
    ((place, cpus_of_threads, written),) = ranks(1).run(pinned, world=False).values()

    expected = places_of_host(2)[1]
    assert place == expected
    assert len(cpus_of_threads) >= 2
    assert all(cpus == set(expected.cpus or os.sched_getaffinity(0)) for cpus in cpus_of_threads)
    assert written == ""


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"PROCPIPE_PIN": "0"}, ""),
        ({"LOCAL_RANK": "first"}, "not pinned to cores (ValueError: invalid literal"),
        ({"LOCAL_RANK": "5"}, "not pinned to cores (ValueError: LOCAL_RANK is 5, but must be"),
        ({"LOCAL_WORLD_SIZE": "0"}, "not pinned to cores (ValueError: LOCAL_RANK is 1, but"),
    ],
    ids=str,
)
def test_when_a_process_is_not_pinned(ranks, changes, warning):
    ((place, cpus_of_threads, written),) = ranks(1).run(pinned, changes, world=False).values()

    assert place is None
    assert all(cpus == os.sched_getaffinity(0) for cpus in cpus_of_threads)
    assert written.count("\n") == bool(warning)
    assert warning in written


@needs_two_cpus
def test_a_process_that_is_pinned_already_is_not_pinned_again(ranks):
    ((place, _, _),) = ranks(1).run(pinned, mask={FIRST_CPU}, world=False).values()

    assert place is None


def test_without_a_launcher_nothing_is_pinned(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)

    assert pin_this_process() is None


@pytest.mark.dist
@needs_two_cpus
def test_a_wrapper_that_pinned_itself_is_not_the_launcher():
    """The wrapper's CPUs are not those of the whole host, so they must not be divided."""
    child = "from procpipe.job.pinning import pin_this_process; print(pin_this_process())"
    wrapper = (
        f"import os, subprocess, sys; os.sched_setaffinity(0, {{{FIRST_CPU}}}); "
        f"sys.exit(subprocess.call([sys.executable, '-c', {child!r}]))"
    )

    done = subprocess.run(
        [sys.executable, "-c", wrapper],
        env=os.environ | RUN,
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.stdout, done.stderr) == ("None\n", "")
