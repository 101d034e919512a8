"""The open transports of one rank: built, watched, and closed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping

import torch

from procpipe.channel.base import Opened, OpenedDevice, Transport
from procpipe.channel.mesh import Mesh
from procpipe.job.device_waits import DeviceWaits
from procpipe.job.joining import Start
from procpipe.job.transports import TransportChoice
from procpipe.limits import naming_file_limit
from procpipe.optional import needed

#: How long a leaving rank waits for the others to leave, too. Until then it keeps what they may
#: still receive by NCCL, and memory that they have open.
_PART_TIMEOUT_S = 10.0


class OpenTransports:
    """The transports between this rank and others.

    ``pids`` holds the processes of peers whose open files this process may open, too.

    Attributes:
        caller: the thread that makes the calls of the pipeline.
        mesh, device: set once the ranks are connected, before any transport is opened.
        opened: those that are open.
        is_device_stuck: whether transfers on the device may never end, so that waiting for the
            device would not either.
    """

    mesh: Mesh
    device: torch.device

    def __init__(self, start: Start, pids: Mapping[int, int]) -> None:
        self.caller = threading.main_thread()
        self._start = start
        self._pids = pids
        self.opened: list[Opened] = []
        self._device_transports: list[OpenedDevice] = []
        self._device_waits: DeviceWaits | None = None
        self.is_device_stuck = False

    def open(
        self, choice: TransportChoice, channels: Iterable[tuple[int, int, int]]
    ) -> dict[int, Transport]:
        """Open the transport to and from each rank with which this one has a channel.

        Every rank calls it, and it waits for all of them. ``choice`` is what all ranks have agreed
        on. ``channels`` holds ``(source rank, destination rank, channel id)`` of all channels of
        the job, in an order that all ranks share.
        """
        by_name: dict[str, list[tuple[int, int, int]]] = {}
        for channel in channels:
            by_name.setdefault(choice.between(*channel[:2]), []).append(channel)
        found: dict[int, Transport] = {}
        for name in sorted(by_name):  # all ranks build them in one order
            transport = self._new(name, by_name[name])
            for source, destination, _ in by_name[name]:
                if self.mesh.rank in (source, destination):
                    found[source + destination - self.mesh.rank] = transport
        return found

    def _new(self, name: str, channels: Iterable[tuple[int, int, int]]) -> Transport:
        mesh, start = self.mesh, self._start
        if name == "shm":
            from procpipe.channel.shm import ShmTransport

            return self._added(ShmTransport(self._pids))
        if name == "cuda_ipc":
            with needed("procpipe.channel.cuda_ipc", "exchanging tensors on one GPU"):
                from procpipe.channel.cuda_ipc import CudaIpcTransport
            from procpipe.channel.gpu import Gpu

            own_file, files = self._files_of_flags(channels)
            cuda_ipc = CudaIpcTransport(Gpu(self.device), own_file, files)
            for file in (own_file, *files.values()):
                os.close(file)
            self.add_of_device(cuda_ipc)
            return cuda_ipc
        store = start.shared_store().under("transport/", check=mesh.poll)
        if name == "nccl":
            with needed("procpipe.channel.nccl", "exchanging tensors between GPUs"):
                from procpipe.channel.nccl import NcclTransport

            nccl = NcclTransport(mesh.rank, self.device)
            self.add_of_device(nccl)
            nccl.connect(store.bare(), channels)
            return nccl
        with needed("procpipe.channel.gloo", "exchanging tensors between hosts"):
            from procpipe.channel.gloo import GlooTransport

        host = start.network_address or "127.0.0.1"
        return self._added(
            GlooTransport(store, mesh.rank, start.grid.num_ranks, mesh.timeout_s, host)
        )

    def _files_of_flags(
        self, channels: Iterable[tuple[int, int, int]]
    ) -> tuple[int, dict[int, int]]:
        """Make this rank's file of flags, and open those of the peers on its GPU."""
        from procpipe.channel.cuda_ipc import FLAGS_BYTES

        ours = self.mesh.rank
        store = self._start.shared_store().under("cuda_ipc/", check=self.mesh.poll)
        with naming_file_limit("the flags of a GPU's slots", 2 * len(self._pids) + 2):
            own_file = os.memfd_create("procpipe-flags")
            os.ftruncate(own_file, FLAGS_BYTES)
            store.set(str(ours), str(own_file))
            peers = {rank for channel in channels if ours in channel[:2] for rank in channel[:2]}
            files = {}
            for peer in sorted(peers - {ours}):
                path = f"/proc/{self._pids[peer]}/fd/{store.get(str(peer)).decode()}"
                files[peer] = os.open(path, os.O_RDWR)
        store.set(f"{ours} has opened", "")
        store.wait([f"{peer} has opened" for peer in files])
        return own_file, files

    def _added(self, transport: Transport) -> Transport:
        self.opened.append(transport)
        return transport

    def add_of_device(self, transport: OpenedDevice) -> None:
        """Add what a rank exchanges by its device; it is closed with the others."""
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
        """Stop ending the process where it waits for the device, as this rank fails or leaves."""
        if self._device_waits is not None:
            self._device_waits.close()
            self._device_waits = None

    def part(self) -> None:
        """Wait a limited time for the other ranks to leave, if they may still use the device."""
        if self._device_transports:
            self.mesh.part(_PART_TIMEOUT_S)

    def close(self) -> None:
        """Close the transports; note whether transfers are left that may never end."""
        self.is_device_stuck |= any(each.queued_with() for each in self._device_transports)
        self._device_transports.clear()
        while self.opened:
            self.opened.pop().close()
