"""The open transports of one rank: built, closed, and their waits for the device ended."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from functools import partial

import torch

from procpipe.channel.base import Opened, OpenedDevice, Transport
from procpipe.channel.mesh import Mesh
from procpipe.forks import keep_for_ever
from procpipe.job.device_waits import DeviceWaits, abort_all
from procpipe.job.joining import Start
from procpipe.job.transports import TransportChoice
from procpipe.limits import naming_file_limit
from procpipe.optional import needed

#: How long a leaving rank waits for the others to leave, too. Until then it keeps what they may
#: still receive by NCCL, and memory that they have open.
_PART_TIMEOUT_S = 10.0

#: The frame type of the number of a rank's file of slots.
_SLOT_FILE = 201


class OpenTransports:
    """The transports between this rank and others.

    ``pids`` holds the processes of peers whose open files this process may open, too.

    Attributes:
        caller: the thread that makes the calls of the pipeline.
        mesh, device: set once the ranks are connected, before any transport is opened.
        opened: those that are open.
        is_device_stuck: whether some transfers on the device could not be ended, so that waiting
            for the device would never end.
    """

    mesh: Mesh
    device: torch.device

    def __init__(self, start: Start, pids: Mapping[int, int]) -> None:
        self.caller = threading.main_thread()
        self._start = start
        self._pids = pids
        self.opened: list[Opened] = []
        self._files: list[int] = []  # of slots
        self._device_transports: list[OpenedDevice] = []
        self._device_waits: DeviceWaits | None = None
        self.is_device_stuck = False

    def open(
        self, choice: TransportChoice, channels: Iterable[tuple[int, int, int]]
    ) -> dict[int, Transport | None]:
        """Open the transport to and from each rank with which this one has a channel.

        None where tensors follow their token through the socket. Every rank calls it, and it waits
        for all of them. ``choice`` is what all ranks have agreed on. ``channels`` holds ``(source
        rank, destination rank, channel id)`` of all channels of the job, in an order that all ranks
        share.
        """
        by_name: dict[str, list[tuple[int, int, int]]] = {}
        for channel in channels:
            by_name.setdefault(choice.between(*channel[:2]), []).append(channel)
        found: dict[int, Transport | None] = {}
        for name in sorted(by_name):  # all ranks build them in one order
            transport = None if name == "sockets" else self._new(name, by_name[name])
            for source, destination, _ in by_name[name]:
                if self.mesh.rank in (source, destination):
                    found[source + destination - self.mesh.rank] = transport
        return found

    def _new(self, name: str, channels: Iterable[tuple[int, int, int]]) -> Transport:
        mesh, start = self.mesh, self._start
        if name == "shm":
            from procpipe.channel.shm import ShmTransport

            ours = [channel[:2] for channel in channels if mesh.rank in channel[:2]]
            peers = {rank for ends in ours for rank in ends} - {mesh.rank}
            shm = ShmTransport(*self._open_slot_files(peers))
            self.opened.append(shm)
            return shm
        if name == "cuda_ipc":
            with needed("procpipe.channel.cuda_ipc", "exchanging tensors on one GPU"):
                from procpipe.channel.cuda_ipc import CudaIpcTransport
            from procpipe.channel.gpu import Gpu

            cuda_ipc = CudaIpcTransport(Gpu(self.device), self._pids)
            self.add_of_device(cuda_ipc)
            return cuda_ipc
        store = start.shared_store().under("transport/", check=mesh.poll)
        with needed("procpipe.channel.nccl", "exchanging tensors between GPUs"):
            from procpipe.channel.nccl import NcclTransport

        nccl = NcclTransport(mesh.rank, self.device)
        self.add_of_device(nccl)
        nccl.connect(store.bare(), channels)
        return nccl

    def _open_slot_files(self, peers: set[int]) -> tuple[int, dict[int, int]]:
        """Open this rank's file of slots, and those of peers: each sends the number of its own."""
        mesh, numbers, files = self.mesh, dict[int, int](), dict[int, int]()
        with naming_file_limit("the shared memory of a rank's messages", 1 + len(peers)):
            own = os.memfd_create("procpipe-slots")
            self._files.append(own)
            for peer in peers:
                mesh.on(peer, _SLOT_FILE, partial(_note_number, numbers, peer))
                mesh.send(peer, _SLOT_FILE, 0, own)
            mesh.wait(lambda: len(numbers) == len(peers), lambda: "its peers to open their memory")
            for peer, number in numbers.items():
                files[peer] = os.open(f"/proc/{self._pids[peer]}/fd/{number}", os.O_RDWR)
                self._files.append(files[peer])
        return own, files

    def add_of_device(self, transport: OpenedDevice) -> None:
        """Add what a rank exchanges by its device, where a dead peer would leave transfers.

        It is closed with the others.
        """
        self._device_transports.append(transport)
        if self._device_waits is None:
            self._device_waits = DeviceWaits(
                self.mesh, self._device_transports, lambda: self.caller
            )
        self.opened.append(transport)

    def drain(self) -> None:
        """Wait until this rank's device has no transfer under way."""
        for transport in self.opened:
            transport.drain()

    def stop_watching_device(self) -> None:
        """Stop interrupting waits for the device, as this rank fails or leaves."""
        if self._device_waits is not None:
            self._device_waits.close()
            self._device_waits = None

    def part(self) -> None:
        """Wait a limited time for the other ranks to leave, if they may still use the device."""
        if self._device_transports:
            self.mesh.part(_PART_TIMEOUT_S)

    def close(self) -> None:
        """Close the transports; note whether transfers are left that could not be ended."""
        self.is_device_stuck |= not abort_all(self._device_transports)
        if self.is_device_stuck:
            keep_for_ever([*self.opened])  # close() or their destructors would block
            self.opened.clear()
        self._device_transports.clear()
        while self.opened:
            self.opened.pop().close()
        while self._files:
            os.close(self._files.pop())


def _note_number(
    numbers: dict[int, int], peer: int, number: int, flags: int, body: memoryview
) -> None:
    numbers[peer] = number
