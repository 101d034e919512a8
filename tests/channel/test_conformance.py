"""Every transport passes the cases in ``conformance.py``."""

from __future__ import annotations

import queue
import threading
import traceback
from datetime import timedelta

import pytest
import torch

from procpipe.channel.link import Receiver, Sender
from tests.channel.conformance import CASES, KINDS
from tests.channel.meshes import make_meshes

CPU = torch.device("cpu")
TIMEOUT_S = 40.0


class Side:
    """One rank's end: channels of every kind to and from the other rank, and ``meet``.

    ``transport`` is what the cases of ``test_gpu_order.py`` look at.
    """

    def __init__(self, rank, channels, meet, device=CPU, transport=None):
        senders, receivers = channels
        self.rank = rank
        self.device = device
        self.meet = meet
        self.transport = transport
        self.sender = lambda kind=1: senders[kind]
        self.receiver = lambda kind=1: receivers[kind]


def socket_sides():
    """Two meshes in one process, one thread each; all data is on their socket."""
    barrier = threading.Barrier(2, timeout=TIMEOUT_S)
    meshes = make_meshes(2, timeout_s=TIMEOUT_S)
    sides = [Side(mesh.rank, links(mesh, None), barrier.wait) for mesh in meshes]
    return sides, lambda: [mesh.close() for mesh in meshes]


def links(mesh, transport):
    (peer,) = mesh.peers
    senders = {kind: Sender(mesh, peer, kind, transport) for kind in KINDS}
    receivers = {kind: Receiver(mesh, peer, kind, transport, f"kind {kind}") for kind in KINDS}
    return senders, receivers


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_in_one_process(case):
    sides, close = socket_sides()
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


def run_all(world, transport_name, cases):
    """Run cases on this rank, each with new channels, until one fails.

    A failure leaves the channels in an unknown state. Returns what each case raised, by its name;
    None if it raised nothing.
    """
    if transport_name in ("nccl", "cuda_ipc"):
        world.device = torch.device("cuda", world.rank if transport_name == "nccl" else 0)
        world.transports._device = world.device
        torch.cuda.set_device(world.device)
    mesh = world.connect()
    routes = [(a, 1 - a, kind) for kind in KINDS for a in (0, 1)]
    (transport,) = world.transports.open([[transport_name] * 2] * 2, routes).values()
    errors: dict[str, str | None] = {}
    for case in cases:
        channels, meet = links(mesh, transport), Meeting(world, case.__name__)
        try:
            meet()  # the channels of this case exist on both ranks
            side = Side(world.rank, channels, meet, world.device, transport)
            case(side)
            side.sender().settle()
            meet()
            errors[case.__name__] = None
        except Exception:
            errors[case.__name__] = traceback.format_exc()
            return errors
    world.transports.drain()
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


def check(ranks, transport_name, cases):
    """Run cases over a transport, in two processes."""
    for errors in ranks(2).run(run_all, transport_name, cases).values():
        assert errors == {case.__name__: None for case in cases}, "\n".join(
            error for error in errors.values() if error
        )


@pytest.mark.parametrize(
    "transport_name",
    [
        "shm",
        pytest.param("cuda_ipc", marks=pytest.mark.gpu),  # both ranks on one GPU
        pytest.param("nccl", marks=pytest.mark.gpu(2)),
    ],
)
def test_between_processes(ranks, transport_name):
    check(ranks, transport_name, CASES)
