"""Which cores a process gets: the rules on invented hosts, and real pinning on this one."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import threading
from pathlib import Path

import pytest

from procpipe.job.pin import cores_of_host, pin_this_process, shares
from procpipe.timeline.steps import ranges_text
from tests.cases import for_each
from tests.forked import in_child

needs_two_cpus = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) == 1,
    reason="a process can be kept from a CPU only if there are two",
)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Write the files under /sys of an invented host: the cores and the GPUs of each socket."""

    def write_host(cores_of_socket, gpus_of_socket=(), allowed=None):
        cpus_of_socket = [[cpu for core in cores for cpu in core] for cores in cores_of_socket]
        placed = [(k, core) for k, cores in enumerate(cores_of_socket) for core in cores]
        for number, core in placed:
            for folder in (tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology" for cpu in core):
                write(folder / "thread_siblings_list", ranges_text(core))
                write(folder / "physical_package_id", str(number))
        for cpus, pcis in zip(cpus_of_socket, gpus_of_socket, strict=False):
            for pci in pcis:
                write(tmp_path / f"sys/bus/pci/devices/{pci}/local_cpulist", ranges_text(cpus))
        usable = set(allowed or itertools.chain(*cpus_of_socket))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: usable)
        return tmp_path

    monkeypatch.delenv("PROCPIPE_PIN", raising=False)
    return write_host


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def sockets(*sizes):
    """Return sockets with these numbers of cores, of one CPU each."""
    cpus = iter(range(sum(sizes)))
    return [[[next(cpus)] for _ in range(size)] for size in sizes]


def drawn(found, num_cpus):
    """Draw the local rank that has each CPU."""
    owner = {cpu: str(rank) for rank, cores in enumerate(found) for cpu in itertools.chain(*cores)}
    return "".join(owner.get(cpu, ".") for cpu in range(num_cpus))


@for_each(
    ("num_cores", "num_processes", "expected"), [(4, 3, "0122"), (4, 4, "0123"), (4, 5, "....")]
)
def test_without_gpus_all_cores_are_divided(host, num_cores, num_processes, expected):
    root = host(sockets(num_cores))

    assert drawn(shares(num_processes, root=root), num_cores) == expected


@for_each(
    ("cores_of_socket", "sockets_of_gpus", "expected"),
    [
        ((4, 4), (1, 0), "1111 0000"),
        ((4, 4), (0, 1, 0, 1), "0022 1133"),
        ((8, 8), (1, 1, 1, 0), "33333333 00111222"),
        ((4, 4), (1, None), "0000 1111"),  # a GPU whose cores are unknown
        ((6, 2), (1, 1, 1, 1), "001122 33"),  # more processes than cores next to their GPUs
    ],
)
def test_processes_get_cores_next_to_their_gpus(host, cores_of_socket, sockets_of_gpus, expected):
    pcis = [f"0000:{k:02x}:00.0" for k in range(len(sockets_of_gpus))]
    gpus = [
        [pci for pci, its_socket in zip(pcis, sockets_of_gpus, strict=True) if its_socket == socket]
        for socket in range(2)
    ]
    root = host(sockets(*cores_of_socket), gpus)

    found = shares(len(pcis), pcis, root)

    assert drawn(found, sum(cores_of_socket)) == expected.replace(" ", "")


def test_processes_that_share_a_gpu_divide_its_cores(host):
    root = host(sockets(4, 4), [[], ["0000:3b:00.0"]])

    assert drawn(shares(3, ["0000:3b:00.0"] * 3, root), 8) == "....0122"


def test_the_cpus_of_a_core_stay_together(host):
    """Also where CPUs alternate between sockets, as their numbers do on some hosts."""
    root = host([[(0, 4), (2, 6)], [(1, 5), (3, 7)]])

    assert shares(4, root=root) == [[(0, 4)], [(2, 6)], [(1, 5)], [(3, 7)]]
    assert [len(cores) for cores in shares(5, root=root)] == [0] * 5


def test_only_allowed_cpus_count(host):
    """A container's cpuset, or a batch system's share of a host."""
    root = host([[(0, 8), (1, 9), (2, 10)], [(5, 13)]], allowed={1, 2, 10, 5})

    assert cores_of_host(root) == [(1,), (2, 10), (5,)]


RUN = {"TORCHELASTIC_RUN_ID": "a-run", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def pinned(changes=()):
    """Pin a process; return the CPUs of each of its threads, those of a child, and its output."""

    def pin():
        os.environ.update(RUN | dict(changes))
        thread = threading.Thread(target=threading.Event().wait, daemon=True)
        thread.start()
        with contextlib.redirect_stderr(io.StringIO()) as written:
            pin_this_process()
        of_threads = [os.sched_getaffinity(number) for number in (0, thread.native_id or 0)]
        return of_threads, eval(in_child(lambda: os.sched_getaffinity(0))), written.getvalue()

    return eval(in_child(pin))


@pytest.mark.dist
@needs_two_cpus
def test_a_process_is_pinned_with_all_its_threads_but_not_its_children():
    expected = set(itertools.chain(*shares(2)[1])) or os.sched_getaffinity(0)

    assert pinned() == ([expected] * 2, os.sched_getaffinity(0), "")


@pytest.mark.dist
@for_each(
    ("changes", "warning"),
    [({"PROCPIPE_PIN": "0"}, ""), ({"LOCAL_RANK": "5"}, "not pinned to cores: IndexError(")],
)
def test_when_a_process_is_not_pinned(changes, warning):
    cpus_of_threads, _, written = pinned(changes)

    assert cpus_of_threads == [os.sched_getaffinity(0)] * 2
    assert written.count("\n") == bool(warning)
    assert warning in written


FIRST_CPU = min(os.sched_getaffinity(0))


@needs_two_cpus
def test_a_process_that_is_pinned_already_is_not_pinned_again(monkeypatch):
    for name, value in (RUN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    masks: list[object] = []
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda of: {FIRST_CPU, *([FIRST_CPU + 1] if of else [])}
    )
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, mask: masks.append(mask))

    pin_this_process()

    assert masks == []
