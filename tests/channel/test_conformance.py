"""Every transport passes the cases in ``conformance.py``."""

from __future__ import annotations

import queue
import threading
import traceback
from datetime import timedelta

import pytest
import torch

from procpipe.channel.link import Receiver, Sender
from procpipe.job.transports import TransportChoice
from tests.channel.conformance import CASES, KINDS
from tests.channel.memory import MemoryChannel
from tests.channel.meshes import make_meshes
from tests.channel.simulated import Device, Process, transports_on

CPU = torch.device("cpu")
TIMEOUT_S = 40.0

NAMES = [case.__name__ for case in CASES]


class Side:
    """One rank's end: channels of every kind to and from the other rank, and ``meet``."""

    def __init__(self, rank, channels, meet, device=CPU):
        senders, receivers = channels
        self.rank = rank
        self.device = device
        self.meet = meet
        self.sender = lambda kind=1: senders[kind]
        self.receiver = lambda kind=1: receivers[kind]


def memory_sides():
    barrier = threading.Barrier(2, timeout=TIMEOUT_S)
    down = {kind: MemoryChannel(timeout_s=TIMEOUT_S) for kind in KINDS}
    up = {kind: MemoryChannel(timeout_s=TIMEOUT_S) for kind in KINDS}
    return [Side(0, (down, up), barrier.wait), Side(1, (up, down), barrier.wait)], lambda: None


def link_sides(transports=(None, None)):
    """Two meshes in one process, one thread each; by default all data is on their socket."""
    barrier = threading.Barrier(2, timeout=TIMEOUT_S)
    meshes = make_meshes(2, timeout_s=TIMEOUT_S)
    sides = [
        Side(rank, links(meshes[rank], transports[rank], CPU), barrier.wait) for rank in (0, 1)
    ]
    return sides, lambda: [mesh.close() for mesh in meshes]


def simulated_gpu_sides():
    """The same, but with CUDA IPC on a simulated GPU for tensors."""
    gpu = Device()
    return link_sides(transports_on([Process(gpu), Process(gpu)]))


def links(mesh, transport, device):
    (peer,) = mesh.peers
    senders = {kind: Sender(mesh, peer, kind, transport, device) for kind in KINDS}
    receivers = {kind: Receiver(mesh, peer, kind, transport, f"kind {kind}") for kind in KINDS}
    return senders, receivers


@pytest.mark.parametrize("case", CASES, ids=NAMES)
@pytest.mark.parametrize("make", [memory_sides, link_sides, simulated_gpu_sides])
def test_in_one_process(make, case):
    sides, close = make()
    failures: queue.Queue[str] = queue.Queue()

    def run(side):
        try:
            case(side)
        except BaseException:
            failures.put(f"rank {side.rank}: {traceback.format_exc()}")

    threads = [threading.Thread(target=run, args=[side], daemon=True) for side in sides]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    close()

    assert not any(thread.is_alive() for thread in threads)
    assert failures.empty(), list(failures.queue)


def run_all(world, transport_name):
    """Run every case over one transport, in real processes; return what each one raised."""
    device = CPU
    if transport_name in ("nccl", "cuda_ipc"):
        device = torch.device("cuda", world.rank if transport_name == "nccl" else 0)
        torch.cuda.set_device(device)
    world.device = world.transports._device = device
    mesh = world.connect()
    routes = [(a, 1 - a, kind) for kind in KINDS for a in (0, 1)]
    (transport,) = world.transports.open(
        TransportChoice(transport_name, transport_name, ["", ""]), routes
    ).values()
    errors = errors_of(CASES, world, lambda: links(mesh, transport, device))
    if not any(errors.values()):
        world.transports.drain()
    return errors


def errors_of(cases, world, channels):
    """Run cases on this rank until one fails, which leaves the channels in an unknown state.

    Args:
        cases: functions of a ``Side``.
        world: this rank's world.
        channels: returns new channels, for each case.

    Returns:
        What each case raised, by its name; None if it raised nothing.
    """
    errors: dict[str, str | None] = {}
    for case in cases:
        side = Side(world.rank, channels(), Meeting(world, case.__name__), world.device)
        try:
            side.meet()  # the channels of this case exist on both ranks
            case(side)
            side.meet()
            errors[case.__name__] = None
        except Exception:
            errors[case.__name__] = traceback.format_exc()
            break
    return errors


class Meeting:
    """Waits for the other rank by the store, without reading the sockets."""

    def __init__(self, world, name):
        self._world = world
        self._name = name
        self._num_meetings = 0

    def __call__(self):
        self._num_meetings += 1
        store, key = self._world.store, f"{self._name} {self._num_meetings}"
        store.set(f"{key} {self._world.rank}", "here")
        store.wait([f"{key} {1 - self._world.rank}"], timedelta(seconds=TIMEOUT_S))


@pytest.fixture(scope="module")
def sockets_errors(ranks):
    return ranks(2).run(run_all, "sockets").values()


@pytest.mark.parametrize("name", NAMES)
def test_sockets(sockets_errors, name):
    assert [by_case.get(name, "did not run") for by_case in sockets_errors] == [None, None]


@pytest.fixture(scope="module")
def shm_errors(ranks):
    return ranks(2).run(run_all, "shm").values()


@pytest.mark.parametrize("name", NAMES)
def test_shm(shm_errors, name):
    assert [by_case.get(name, "did not run") for by_case in shm_errors] == [None, None]


@pytest.mark.gpu
def test_cuda_ipc(ranks):
    """Both ranks on one GPU."""
    for errors in ranks(2).run(run_all, "cuda_ipc").values():
        assert errors == dict.fromkeys(NAMES), "\n".join(filter(None, errors.values()))


@pytest.mark.gpu(2)
def test_nccl(ranks):
    for errors in ranks(2).run(run_all, "nccl").values():
        assert errors == dict.fromkeys(NAMES), "\n".join(filter(None, errors.values()))
