"""The open transports of one rank: built and closed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from procpipe.channel.base import DeviceTransfers, Transport
from procpipe.channel.mesh import Mesh
from procpipe.errors import StageClosedError
from procpipe.forks import keep_for_ever
from procpipe.job.transports import TransportChoice
from procpipe.optional import needed

if TYPE_CHECKING:
    from procpipe.channel.store import MeshStore

#: How long a leaving rank waits for the others to leave, too. Until then it keeps what they may
#: still receive by NCCL, and memory that they have open.
_PART_TIMEOUT_S = 10.0

#: How long transfers of a stage that failed may take to end before this process opens others.
_END_TIMEOUT_S, _LOOK_EVERY_S = 2.0, 0.01

#: What stages that failed have left on this process's devices.
_left_behind: list[DeviceTransfers] = []


class OpenTransports:
    """The transports between this rank and others.

    ``memory`` is a descriptor of the file in which this rank's messages to ranks of its host are.

    Attributes:
        memory_of: the same of each other rank of this host, set once the ranks are connected.
        opened: those that are open.
    """

    def __init__(self, mesh: Mesh, device: torch.device, memory: int) -> None:
        self.memory_of: dict[int, int] = {}
        self.opened: list[Transport | DeviceTransfers] = []
        self._mesh = mesh
        self._device = device
        self._memory = memory
        self._of_device: list[DeviceTransfers] = []
        self._store: MeshStore | None = None

    @property
    def store(self) -> MeshStore:
        """Where torch's groups find their processes; every rank opens it, once connected."""
        if self._store is None:
            from procpipe.channel.store import MeshStore

            self._store = MeshStore(self._mesh)
        return self._store

    def open(
        self, choice: TransportChoice, channels: Iterable[tuple[int, int, int]]
    ) -> dict[int, Transport | None]:
        """Open the transport to and from each rank with which this one has a channel.

        Every rank calls it with the same, and it waits for all of them. ``channels`` holds
        ``(source rank, destination rank, channel id)`` of all channels of the job.
        """
        by_name: dict[str, list[tuple[int, int, int]]] = {}
        for channel in channels:
            by_name.setdefault(choice.between(*channel[:2]), []).append(channel)
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

            shm = ShmTransport(self._memory, self.memory_of)
            self.opened.append(shm)
            return shm
        if name == "cuda_ipc":
            with needed("procpipe.channel.cuda_ipc", "exchanging tensors on one GPU"):
                from procpipe.channel.cuda_ipc import CudaIpcTransport
            from procpipe.channel.gpu import Gpu

            cuda_ipc = CudaIpcTransport(Gpu(self._device), self._memory, self.memory_of)
            self.add_of_device(cuda_ipc)
            return cuda_ipc
        with needed("procpipe.channel.nccl", "exchanging tensors between GPUs"):
            from procpipe.channel.nccl import NcclTransport

        nccl = NcclTransport(self._mesh.rank, self._device)
        self.add_of_device(nccl)
        nccl.connect(self.store, channels)
        return nccl

    def add_of_device(self, transport: DeviceTransfers) -> None:
        """Add what a rank exchanges by its device; it is closed with the others.

        Raises ``StageClosedError`` where a stage that failed has left transfers there.
        """
        self._check_device()
        self._of_device.append(transport)
        self.opened.append(transport)

    def _check_device(self) -> None:
        """Check that nothing on the device waits for a peer that may have gone."""
        deadline_s = time.monotonic() + _END_TIMEOUT_S
        while not all(each.are_over() for each in _left_behind):
            if time.monotonic() >= deadline_s:
                raise StageClosedError(
                    f"rank {self._mesh.ranks[self._mesh.rank]} cannot open another stage: on "
                    f"{self._device} are transfers of a stage that failed, which may never end. "
                    "Start the processes again (torchrun does so with --max-restarts)"
                )
            time.sleep(_LOOK_EVERY_S)
        _left_behind.clear()

    def busy_with(self) -> list[int]:
        """Return the ranks with which transfers are not known to be over; safe in any thread."""
        busy = set[int]().union(*(each.queued_with() for each in tuple(self._of_device)))
        return sorted(busy - {self._mesh.rank})

    def drain(self) -> None:
        """Wait until this rank's device has no transfer under way."""
        for transport in self._of_device:
            transport.drain()

    def leave(self) -> None:
        """Send a goodbye; if others may still use what this rank has open, wait for theirs."""
        self._mesh.leave(_PART_TIMEOUT_S if self._of_device else 0.0)

    def close(self) -> None:
        """Close the transports; after a failure those of the device stay as they are."""
        has_failed = self._mesh.monitor.failure is not None
        if self._of_device and (has_failed or not all(each.are_over() for each in self._of_device)):
            keep_for_ever([*self.opened])  # close() or their destructors would wait for the device
            self.opened.clear()
            _left_behind.extend(self._of_device)
        while self.opened:
            self.opened.pop().close()
