"""Which transport carries tensors between two ranks, and the open transports of this one.

It follows from where the ranks compute:

    CPUs of one host        shm
    CPUs of several hosts   sockets    (no transport of its own: a block behind the token)
    one GPU                 cuda_ipc   (nccl, if NCCL takes several ranks on a GPU for all ranks)
    different GPUs          nccl

So in a job of four ranks on two GPUs, or on CPUs of two hosts, each rank may use two of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch

from procpipe.channel.base import DeviceTransfers, Transport
from procpipe.channel.mesh import Mesh
from procpipe.errors import StageClosedError
from procpipe.forks import keep_for_ever
from procpipe.job.devices import HOW_TO_SHARE

if TYPE_CHECKING:
    from procpipe.channel.store import MeshStore

_Added = TypeVar("_Added", bound="Opened")

#: How long a leaving rank waits for the others to leave, too. Until then it keeps what they may
#: still receive by NCCL, and memory that they have open.
_PART_TIMEOUT_S = 10.0

#: What stages that failed have left on this process's devices.
_left_behind: list[DeviceTransfers] = []


class Offer(NamedTuple):
    """What matters of one rank; plain JSON."""

    host: str  # equal for ranks that can share memory
    gpu: str = ""  # what identifies its GPU; "" on a CPU
    shares_by_nccl: bool = False  # whether NCCL accepts several ranks on its GPU
    may_share: bool = True  # whether its user chose its GPU, perhaps that of another rank
    forced: str | None = None  # the only transport, in tests


#: The name of the transport between any two ranks: ``choice[a][b]``.
TransportChoice = list[list[str]]


def choose(of_all: Sequence[Sequence[Any]]) -> TransportChoice:
    """Return the transports of a job for all ranks' offers, which JSON makes lists.

    Raises:
        IndexError: ranks would share a GPU without being allowed to.
        ValueError: some ranks compute on GPUs and others on CPUs, or ranks of different hosts (or
            containers) on one GPU.
    """
    offers = [Offer(*of_one) for of_one in of_all]
    on_gpus = [rank for rank, offer in enumerate(offers) if offer.gpu]
    on_cpus = [rank for rank, offer in enumerate(offers) if not offer.gpu]
    if on_gpus and on_cpus:
        raise ValueError(
            f"ranks {on_gpus} compute on GPUs and ranks {on_cpus} on CPUs: give all ranks devices "
            "of one kind"
        )
    if on_gpus:
        _check_shared(offers)

    on_one_gpu = "nccl" if all(offer.shares_by_nccl for offer in offers) else "cuda_ipc"

    def between(a: Offer, b: Offer) -> str:
        if not a.gpu:
            return "shm" if a.host == b.host else "sockets"
        return on_one_gpu if a.gpu == b.gpu else "nccl"

    return [[a.forced or between(a, b) for b in offers] for a in offers]


def _check_shared(offers: Sequence[Offer]) -> None:
    """Check that ranks share a GPU only if their user gave it to them, and within a host."""
    first_on: dict[str, int] = {}
    for rank, offer in enumerate(offers):
        first = first_on.setdefault(offer.gpu, rank)
        if first != rank and not (offer.may_share and offers[first].may_share):
            raise IndexError(
                f"ranks {first} and {rank} see one GPU each, and it is the same (cuda:0, "
                f"{offer.gpu}): {HOW_TO_SHARE}; or let each process see a GPU of its own "
                "(CUDA_VISIBLE_DEVICES, --gpus-per-task=1)"
            )
        if offers[first].host != offer.host:
            raise ValueError(
                f"ranks {first} and {rank} share a GPU, but not their host's sockets: run them as "
                "one user in one container, or give each a GPU of its own"
            )


class Opened(Protocol):
    """What a rank has open to others: a transport, or a group of torch's."""

    def close(self) -> None:
        """Drop it, without waiting for other ranks."""


class Transports:
    """The open transports between this rank and others.

    ``memory`` is a descriptor of the file in which this rank's messages to ranks of its host are.

    Attributes:
        memory_of: the same of each other rank of this host, set once the ranks are connected.
        opened: what was opened, also after ``close``.
    """

    def __init__(self, mesh: Mesh, device: torch.device, memory: int) -> None:
        self.memory_of: dict[int, int] = {}
        self.opened: list[Opened] = []
        self._mesh = mesh
        self._device = device
        self._memory = memory

    @cached_property
    def store(self) -> MeshStore:
        """Where torch's groups find their processes; every rank opens it, once connected."""
        from procpipe.channel.store import MeshStore

        return MeshStore(self._mesh)

    def open(
        self, choice: TransportChoice, channels: Iterable[tuple[int, int, int]]
    ) -> dict[int, Transport | None]:
        """Open the transport to and from each rank with which this one has a channel.

        Every rank calls it with the same, and it waits for all of them. ``channels`` holds
        ``(source rank, destination rank, channel id)`` of all channels of the job.
        """
        by_name: dict[str, list[tuple[int, int, int]]] = {}
        for channel in channels:
            by_name.setdefault(choice[channel[0]][channel[1]], []).append(channel)
        found: dict[int, Transport | None] = {}
        for name in sorted(by_name):  # all ranks build them in one order
            transport = None if name == "sockets" else self._new(name, by_name[name])
            for source, destination, _ in by_name[name]:
                if self._mesh.rank in (source, destination):
                    found[source + destination - self._mesh.rank] = transport
        return found

    def _new(self, name: str, channels: Iterable[tuple[int, int, int]]) -> Transport:
        if name == "shm":
            from procpipe.channel.shm import ShmTransport

            return self.add(ShmTransport(self._memory, self.memory_of))
        if name == "cuda_ipc":
            from procpipe.channel.cuda_ipc import CudaIpcTransport
            from procpipe.channel.gpu import Gpu

            return self.add(CudaIpcTransport(Gpu(self._device), self._memory, self.memory_of))
        from procpipe.channel.nccl import NcclTransport

        nccl = self.add(NcclTransport(self._mesh.rank, self._device))
        nccl.connect(self.store, channels)
        return nccl

    def add(self, transport: _Added) -> _Added:
        """Add what a rank has open; it is closed with the others.

        Raises ``StageClosedError`` where a stage that failed has left transfers on its device.
        """
        if isinstance(transport, DeviceTransfers):
            self._check_device()
        self.opened.append(transport)
        return transport

    def _check_device(self) -> None:
        """Check that nothing on the device waits for a peer that may have gone."""
        if not all(each.are_over() for each in _left_behind):
            raise StageClosedError(
                f"rank {self._mesh.ranks[self._mesh.rank]} cannot open another stage: on "
                f"{self._device} are transfers of a stage that failed, which may never end. "
                "Start the processes again (torchrun does so with --max-restarts)"
            )
        _left_behind.clear()

    def _of_device(self) -> list[DeviceTransfers]:
        return [each for each in tuple(self.opened) if isinstance(each, DeviceTransfers)]

    def busy_with(self) -> list[int]:
        """Return the ranks with which transfers are not known to be over; safe in any thread."""
        busy = set[int]().union(*(each.queued_with() for each in self._of_device()))
        return sorted(busy - {self._mesh.rank})

    def drain(self) -> None:
        """Wait until this rank's device has no transfer under way."""
        for transport in self._of_device():
            transport.drain()

    def close(self) -> None:
        """Leave the mesh, and close the transports.

        If others may still use what this rank has open, that waits for their goodbyes. After a
        failure, transports of the device stay as they are.
        """
        of_device = self._of_device()
        self._mesh.leave(_PART_TIMEOUT_S if of_device else 0.0)
        self._mesh.close()
        has_failed = self._mesh.monitor.failure is not None
        stay = of_device and (has_failed or not all(each.are_over() for each in of_device))
        if stay:
            keep_for_ever(of_device)  # close() or their destructors would wait for the device
            _left_behind.extend(of_device)
        for each in reversed(self.opened):
            if not (stay and each in of_device):
                each.close()
