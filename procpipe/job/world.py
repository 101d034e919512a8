"""Where this process stands: its rank among the job's processes, its device, and its ways to them.

``torchrun`` says it in the environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, …). Without a
launcher the job is this one process. Nothing is connected before ``connect``, which every rank
calls once: the ranks find one another (see ``starting.py``), and then build the transports for
large tensors. A rank that cannot come leaves a note (``give_up``), so that nobody waits for it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from procpipe.channel.base import DeviceTransport, Transport
from procpipe.channel.mesh import Mesh
from procpipe.forks import give_up_in_children, keep_for_ever
from procpipe.job.board import Board
from procpipe.job.device_waits import DeviceWatch, abort_all
from procpipe.job.devices import devices_of, nccl_shares_gpus, of_this_host, pci_addresses
from procpipe.job.endings import end_with_launcher, print_victims_briefly
from procpipe.job.joining import FIRST_CALL, Start, announce
from procpipe.job.pinning import pin_this_process
from procpipe.job.stalls import Watch
from procpipe.job.transports import Choice, Offer
from procpipe.limits import naming_file_limit, raise_file_limit
from procpipe.notes import write_note
from procpipe.optional import needed

if TYPE_CHECKING:
    from torch.distributed import Store

    from procpipe.job.store import JobStore

DEFAULT_TIMEOUT_S = 1800.0
DEFAULT_STALL_TIMEOUT_S = 30.0

#: More than the second to which torchrun rounds, and the tenth in which it looks.
_HEAD_START_S = 1.5

#: How long a rank that leaves waits for the others to be done, too: till then it keeps what they
#: may still receive by NCCL, and memory that they have open.
_PART_TIMEOUT_S = 10.0

#: The mesh's kind for values of ``agreed``: no channel's, and not the control plane's.
_AGREED = 200

#: Every rank makes its pipelines in the same order: so these numbers agree.
_made = itertools.count()

#: Boards of stages that are closed: a launcher may look at them until there is a newer one.
_closed_boards: list[Board] = []


class World:
    """This process's place in the job.

    Args:
        rank: this process's rank.
        num_ranks: the number of processes.
        store: a store all ranks share, or None to open the launcher's when it is needed.
        device: what this process computes on.
        devices: what each rank computes on, as far as this one knows; by default like this one.
        number: which of the script's pipelines this is, counted from 0 in the order they are made.
        is_launched: False for a script started without a launcher.
        may_share: whether it may share its GPU with other ranks.
        timeout_s: how long any wait for a peer may last.
        stall_timeout_s: how long a wait lasts before it is reported on standard error.

    Attributes:
        caller: the thread that makes the calls of the pipeline.
        is_device_stuck: whether transfers are left on the device that could not be ended: what
            waits for the device would wait for ever.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        store: Store | None,
        device: torch.device,
        devices: Sequence[torch.device] | None = None,
        number: int = 0,
        is_launched: bool = True,
        may_share: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = device
        self.devices = tuple(devices) if devices is not None else (device,) * num_ranks
        self.number = number
        self.is_launched = is_launched
        self._may_share = may_share
        while _closed_boards:
            _closed_boards.pop().close()
        with naming_file_limit("the board of a stage", 2):
            self.board = Board.create(rank, num_ranks)
        self._watch = Watch(self.board, rank)
        self._start = Start(rank, num_ranks, store, timeout_s)
        self._timeout_s = timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._mesh: Mesh | None = None
        self._transports: list[Transport] = []
        self._device_transports: list[DeviceTransport] = []
        self._device_watch: DeviceWatch | None = None
        self.caller = threading.main_thread()
        self.is_device_stuck = False
        give_up_in_children(self)

    @classmethod
    def from_environment(
        cls,
        devices: Sequence[torch.device | str | int] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
    ) -> World:
        """Read torchrun's variables; without them the job is this process alone.

        Args:
            devices: one device a rank; by default this host's GPUs in the order of local ranks,
                or the CPU where there are none.
            timeout_s: as for the class.
            stall_timeout_s: as for the class.

        Raises:
            IndexError: there are fewer devices than ranks.
            ValueError: the devices are of several types, or cannot be used.
        """
        is_launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        rank = int(os.environ["RANK"]) if is_launched else 0
        num_ranks = int(os.environ["WORLD_SIZE"]) if is_launched else 1
        all_devices = devices_of(rank, num_ranks, devices)
        device = all_devices[rank]
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if is_launched:
            raise_file_limit()
        world = cls(
            rank=rank,
            num_ranks=num_ranks,
            store=None,
            device=device,
            devices=all_devices,
            number=next(_made),
            is_launched=is_launched,
            may_share=devices is not None,
            timeout_s=timeout_s,
            stall_timeout_s=stall_timeout_s,
        )
        if is_launched and world.number == 0:
            end_with_launcher()
            pin_this_process(pci_addresses(of_this_host(all_devices, rank)))
        if num_ranks > 1:
            print_victims_briefly(rank, world.board)
            announce(rank, timeout_s)
        return world

    def connect(self) -> Mesh:
        """Join the other ranks; every rank calls it, and it waits for all of them.

        Raises:
            RemoteStageError: another rank gave up before it came here.
            WaitTimeoutError: a rank did not come within the timeout.
        """
        return self._mesh or self._connect_for(FIRST_CALL)

    def _connect_for(self, purpose: str) -> Mesh:
        """Connect; every rank does it for the same purpose."""
        sockets: dict[int, socket.socket] = {}
        if self.num_ranks > 1:
            with naming_file_limit("the connections to other ranks", self.num_ranks):
                sockets = self._start.connect(purpose)
        self._mesh = Mesh(
            self.rank,
            sockets,
            timeout_s=self._timeout_s,
            stall_timeout_s=self._stall_timeout_s,
            onlooker=self._watch,
        )
        self._watch.look_at(self._mesh)
        return self._mesh

    def offer(self) -> Offer:
        """Return what this rank can use to exchange large tensors."""
        sees = sorted(self._watch.pids)
        if self.device.type == "cuda":
            gpu = str(torch.cuda.get_device_properties(self.device).uuid)
            shares = nccl_shares_gpus()
            return Offer(["nccl", "cuda_ipc"], gpu, sees, shares, self._may_share)
        return Offer(["shm", "gloo"] if len(sees) == self.num_ranks - 1 else ["gloo"])

    def open_transports(
        self, choice: Choice, channels: Iterable[tuple[int, int, int]]
    ) -> dict[int, Transport]:
        """Build what carries large tensors; every rank calls it, and it waits for all of them.

        Args:
            choice: what all ranks have agreed on.
            channels: ``(source rank, destination rank, kind)`` of all channels of the job, in an
                order that all ranks share.

        Returns:
            The transport to and from each rank with which this one has a channel.
        """
        by_name: dict[str, list[tuple[int, int, int]]] = {}
        for channel in channels:
            by_name.setdefault(choice.between(*channel[:2]), []).append(channel)
        found: dict[int, Transport] = {}
        for name in sorted(by_name):  # all ranks build them in one order
            transport = self._new_transport(name, by_name[name])
            for source, destination, _ in by_name[name]:
                if self.rank in (source, destination):
                    found[source + destination - self.rank] = transport
        return found

    def agreed(self, key: str, make: Callable[[], Any]) -> Any:
        """Make a value on rank 0 and return it on every rank; every rank calls it.

        Args:
            key: names the value in errors.
            make: makes plain JSON; runs on rank 0 only, while the others wait.

        Raises:
            ValueError: not every rank wants it.
            RemoteStageError: rank 0 failed.
            WaitTimeoutError: it took longer than the timeout.
        """
        if self.num_ranks == 1:
            return make()
        mesh = self._mesh or self._connect_for(key)
        if self.rank == 0:
            value = make()
            for peer in mesh.peers:
                mesh.send(peer, _AGREED, 0, 0, json.dumps(value).encode())
            mesh.poll()  # a rank may have ended meanwhile
            return value
        found: list[Any] = []
        mesh.on(0, _AGREED, lambda sequence, flags, body: found.append(json.loads(bytes(body))))
        mesh.wait_for(0, lambda: found, lambda: f"the {key} that rank 0 finds")
        return found[0]

    def give_up(self, story: str) -> None:
        """Tell the other ranks that this one failed, whether or not they are connected yet.

        Never raises and waits a few seconds at most: it is called while an error is on its way.
        """
        if self.num_ranks == 1:
            return
        if self._mesh is not None:
            self._mesh.send_failure(self.rank, story)
            return
        try:
            self._start.leave_note(story)
        except (RuntimeError, OSError, ValueError) as error:
            write_note(
                f"procpipe: rank {self.rank} could not tell the others that it failed: {error}"
            )

    def record(self, error: BaseException) -> None:
        """Leave the error where torchrun looks for what ended the job."""
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            try:
                raise error  # what is recorded is the exception that is being handled
            except BaseException:
                with contextlib.suppress(BaseException):  # its __str__ may raise anything
                    get_error_handler().record_exception(error)

    def let_others_end_first(self) -> None:
        """Wait a moment, as the process ends because another one failed.

        Torchrun names the process that failed first, by whole seconds, and terminates all others:
        without this often one that only heard of the failure, while the one that could tell of it
        is cut off. Usually torchrun ends this process here.
        """
        if "TORCHELASTIC_RUN_ID" in os.environ:
            with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C reaches all ranks
                time.sleep(_HEAD_START_S)

    def drain(self) -> None:
        """Wait until this rank's device has no transfer under way."""
        for transport in self._transports:
            transport.drain()

    def stop_watching_device(self) -> None:
        """Interrupt waits for the device no more, as this rank fails or leaves."""
        if self._device_watch is not None:
            self._device_watch.close()
            self._device_watch = None

    def give_up_in_child(self) -> None:
        """Leave a forked child's parent its board, its store and its transports."""
        self.board.give_up_in_child()
        keep_for_ever(self)

    def close(self) -> None:
        """Say goodbye to the peers and let go of every connection."""
        self.stop_watching_device()
        if self._mesh is not None:
            if self._device_transports:
                self._mesh.part(_PART_TIMEOUT_S)
            self._mesh.close()
        if not abort_all(self._device_transports):
            self.is_device_stuck = True
            keep_for_ever([*self._transports])  # closing them, or their destructors, would wait
            self._transports.clear()
        self._device_transports.clear()
        while self._transports:
            self._transports.pop().close()
        self._start.close()
        self._mesh = None
        self._watch.close()
        if self.board not in _closed_boards:
            _closed_boards.append(self.board)

    # -- steps 0 to 4 ---------------------------------------------------------------------------

    def _new_transport(self, name: str, channels: Iterable[tuple[int, int, int]]) -> Transport:
        """Build one transport for the channels that it is to carry."""
        assert self._mesh is not None, "the ranks are connected first"
        if name == "shm":
            from procpipe.channel.shm import ShmTransport

            return self._added(ShmTransport(self._watch.pids))
        if name == "cuda_ipc":
            with needed("procpipe.channel.cuda_ipc", "exchanging tensors on one GPU"):
                from procpipe.channel.cuda_ipc import CudaIpcTransport
            from procpipe.channel.gpu import Gpu

            return self._added_of_device(CudaIpcTransport(Gpu(self.device), self._watch.pids))
        store = self._shared_store().under("transport/", check=self._mesh.poll)
        if name == "nccl":
            with needed("procpipe.channel.nccl", "exchanging tensors between GPUs"):
                from procpipe.channel.nccl import NcclTransport

            nccl = NcclTransport(self.rank, self.device)
            self._added_of_device(nccl)
            nccl.connect(store.bare(), channels)
            return nccl
        with needed("procpipe.channel.gloo", "exchanging tensors between hosts"):
            from procpipe.channel.gloo import GlooTransport

        host = self._start.network_address or "127.0.0.1"
        return self._added(GlooTransport(store, self.rank, self.num_ranks, self._timeout_s, host))

    def _added(self, transport: Transport) -> Transport:
        self._transports.append(transport)
        return transport

    def _added_of_device(self, transport: DeviceTransport) -> Transport:
        """Add a transport whose transfers a dead peer would leave on the device, and watch it."""
        assert self._mesh is not None, "the ranks are connected first"
        self._device_transports.append(transport)
        if self._device_watch is None:
            self._device_watch = DeviceWatch(
                self._mesh,
                self._device_transports,
                lambda: self.caller,
                self._watch,
                timeout_s=self._timeout_s,
                stall_timeout_s=self._stall_timeout_s,
            )
        return self._added(transport)

    def _shared_store(self) -> JobStore:
        return self._start.shared_store()
