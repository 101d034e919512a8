"""Which cores a process gets: the rules on invented hosts, and real pinning on this one."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from procpipe.job.pin import cores_of_host, pin_this_process, shares
from procpipe.words import cpus_text
from tests.cases import for_each
from tests.test_forks import in_child

ROOT = Path(__file__).parents[2]
FIRST_CPU = min(os.sched_getaffinity(0))

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
                write(folder / "thread_siblings_list", cpus_text(core))
                write(folder / "physical_package_id", str(number))
        for cpus, pcis in zip(cpus_of_socket, gpus_of_socket, strict=False):
            for pci in pcis:
                write(tmp_path / f"sys/bus/pci/devices/{pci}/local_cpulist", cpus_text(cpus))
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
    ("num_cores", "num_processes", "expected"),
    [(4, 1, "0000"), (4, 2, "0011"), (4, 3, "0122"), (4, 4, "0123"), (1, 1, "0"), (4, 5, "....")],
)
def test_without_gpus_all_cores_are_divided(host, num_cores, num_processes, expected):
    root = host(sockets(num_cores))

    assert drawn(shares(num_processes, root=root), num_cores) == expected


@for_each(
    ("cores_of_socket", "sockets_of_gpus", "expected"),
    [
        ((4, 4), (0, 1), "0000 1111"),
        ((4, 4), (1, 0), "1111 0000"),
        ((4, 4), (1, 1), ".... 0011"),
        ((4, 4), (1,), ".... 0000"),
        ((4, 4), (0, 1, 0, 1), "0022 1133"),
        ((8, 8), (1, 1, 1, 0), "33333333 00111222"),
        ((4, 4), (None, None), "0000 1111"),  # GPUs whose cores are unknown
        ((4, 4), (1, None), "0000 1111"),
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
    root = host([[(0, 4), (1, 5)], [(2, 6), (3, 7)]])

    assert shares(4, root=root) == [[(0, 4)], [(1, 5)], [(2, 6)], [(3, 7)]]
    assert [len(cores) for cores in shares(5, root=root)] == [0] * 5


def test_cpus_that_alternate_between_sockets_are_ordered_by_socket(host):
    assert cores_of_host(host([[(0,), (2,)], [(1,), (3,)]])) == [(0,), (2,), (1,), (3,)]


def test_only_allowed_cpus_count(host):
    """A container's cpuset, or a batch system's share of a host."""
    root = host([[(0, 8), (1, 9), (2, 10)], [(5, 13)]], allowed={1, 2, 10, 5})

    assert cores_of_host(root) == [(1,), (2, 10), (5,)]


def test_without_sys_each_cpu_is_a_core(host, tmp_path):
    host([], allowed={0, 3})
    write(tmp_path / "sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0-x")

    assert cores_of_host(tmp_path) == [(0,), (3,)]


def test_this_host_is_read_like_psutil():
    cores = cores_of_host()

    assert set(itertools.chain(*cores)) == os.sched_getaffinity(0)
    if len(os.sched_getaffinity(0)) == psutil.cpu_count():
        assert len(cores) == psutil.cpu_count(logical=False)


RUN = {"TORCHELASTIC_RUN_ID": "a-run", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def pinned(_, changes=(), mask=None):
    """Pin this process; return the CPUs of each of its threads, of a child, and its output."""
    cpus_before, environment_before = os.sched_getaffinity(0), dict(os.environ)
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    os.environ.update(RUN | dict(changes))
    try:
        if mask is not None:
            os.sched_setaffinity(0, mask)
        with contextlib.redirect_stderr(io.StringIO()) as written:
            pin_this_process()
        cpus = [os.sched_getaffinity(thread_id) for thread_id in (0, thread.native_id or 0)]
        return cpus, in_child(lambda: os.sched_getaffinity(0)), written.getvalue()
    finally:
        for thread_id in (0, thread.native_id or 0):
            os.sched_setaffinity(thread_id, cpus_before)
        ended.set()
        thread.join()
        os.environ.clear()
        os.environ.update(environment_before)


@needs_two_cpus
def test_a_process_is_pinned_with_all_its_threads_but_not_its_children(ranks):
    ((cpus_of_threads, of_child, written),) = ranks(1).run(pinned, world=False).values()

    expected = set(itertools.chain(*shares(2)[1])) or os.sched_getaffinity(0)
    assert cpus_of_threads == [expected] * 2
    assert of_child == str(os.sched_getaffinity(0))
    assert written == ""


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"PROCPIPE_PIN": "0"}, ""),
        ({"LOCAL_RANK": "first"}, "not pinned to cores: ValueError("),
        ({"LOCAL_RANK": "5"}, "not pinned to cores: IndexError("),
    ],
    ids=str,
)
def test_when_a_process_is_not_pinned(ranks, changes, warning):
    ((cpus_of_threads, _, written),) = ranks(1).run(pinned, changes, world=False).values()

    assert cpus_of_threads == [os.sched_getaffinity(0)] * 2
    assert written.count("\n") == bool(warning)
    assert warning in written


@needs_two_cpus
def test_a_process_that_is_pinned_already_is_not_pinned_again(monkeypatch):
    for name, value in (RUN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    masks: list[object] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {FIRST_CPU})  # the launcher has more
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, mask: masks.append(mask))

    pin_this_process()

    assert masks == []


@pytest.mark.dist
@needs_two_cpus
def test_a_wrapper_that_pinned_itself_is_not_the_launcher():
    """The wrapper's CPUs are not those of the whole host, so they must not be divided."""
    child = "from procpipe.job.pin import _cpus_of_launcher; print(_cpus_of_launcher('a-run'))"
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

    assert (done.stdout, done.stderr) == (f"{os.sched_getaffinity(0)}\n", "")
