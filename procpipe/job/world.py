"""This process's place in the job: its rank, its device, and its connections to the other ranks.

``torchrun`` sets it in the environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, …). Without a
launcher the job is this one process. Nothing is connected before ``connect``, which every rank
calls once: the ranks connect to one another (``joining.py``) and then open the transports for large
tensors. A rank that cannot come leaves a note (``give_up``), so that the others do not wait for it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from procpipe.channel.mesh import Mesh
from procpipe.channel.sockets import host_identity
from procpipe.errors import RemoteStageError
from procpipe.forks import give_up_in_children, keep_for_ever
from procpipe.job.attendance import announce
from procpipe.job.board import Board
from procpipe.job.devices import devices_of, nccl_shares_gpus, of_this_host, pci_addresses
from procpipe.job.endings import end_with_launcher, print_victims_briefly
from procpipe.job.grid import IN_ORDER, Grid
from procpipe.job.joining import FIRST_CALL, Start
from procpipe.job.open_transports import OpenTransports
from procpipe.job.pinning import pin_this_process
from procpipe.job.stalls import StallReports
from procpipe.job.transports import Offer
from procpipe.limits import naming_file_limit, raise_file_limit
from procpipe.notes import write_note

if TYPE_CHECKING:
    from torch.distributed import Store

    from procpipe.job.store import JobStore

DEFAULT_TIMEOUT_S = 1800.0
DEFAULT_STALL_TIMEOUT_S = 30.0

#: More than the second to which torchrun rounds, and the tenth of a second at which it looks.
_HEAD_START_S = 1.5

#: The frame type of values of ``agreed``: no channel's, and not the control plane's.
_AGREED = 200

#: Numbers the pipelines of the same ranks, which make them in the same order.
_made: defaultdict[Sequence[int], Iterator[int]] = defaultdict(itertools.count)

#: Boards of closed stages: a launcher may read them until there is a newer one.
_closed_boards: list[Board] = []


class World:
    """This process's place in the job.

    ``devices`` holds what each rank computes on, as far as known here. ``store`` is one that all
    ranks share, or None to open the launcher's when it is needed. ``number`` says which of the
    script's pipelines this is. ``may_share`` says whether the rank may share its GPU with others.

    Attributes:
        transport: the name of the only transport, in tests, else None (see ``transports.py``). The
            class's, when the world is made.
        grid: this rank's place among stages and replicas.
        transports: those to other ranks, opened once the ranks are connected.
    """

    transport: str | None = None

    def __init__(
        self,
        grid: Grid,
        devices: Sequence[torch.device],
        store: Store | None,
        *,
        number: int = 0,
        is_launched: bool = True,
        may_share: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
    ) -> None:
        self.grid = grid
        self.transport = World.transport
        self.rank, self.num_ranks = grid.rank, grid.num_ranks
        self.device, self.devices = devices[grid.rank], tuple(devices)
        self.number = number
        self.is_launched = is_launched
        self._may_share = may_share
        while _closed_boards:
            _closed_boards.pop().close()
        with naming_file_limit("the board of a stage", 2):
            self.board = Board.create(grid.job_rank, grid.num_ranks, grid.rank)
        self._stalls = StallReports(self.board, grid)
        self._start = Start(grid, store, timeout_s)
        self._timeout_s = timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._mesh: Mesh | None = None
        self.transports = OpenTransports(self._start, self._stalls.pids)
        give_up_in_children(self)

    @classmethod
    def from_environment(
        cls,
        devices: Sequence[torch.device | str | int] | None = None,
        numbers: Sequence[int] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
    ) -> World:
        """Read torchrun's variables; without them the job is this process alone.

        ``devices`` holds one device per rank of the job; by default it is this host's GPUs in the
        order of local ranks, or the CPU where there are none. ``numbers`` holds the ranks of the
        job that make this pipeline, among them this one, if not all do.

        Raises:
            IndexError: there are fewer devices than ranks.
            ValueError: the devices are of several types, or cannot be used.
        """
        is_launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        job_rank = int(os.environ["RANK"]) if is_launched else 0
        job_size = int(os.environ["WORLD_SIZE"]) if is_launched else 1
        all_devices = devices_of(job_rank, job_size, devices)
        device = all_devices[job_rank]
        members = range(job_size) if numbers is None else numbers
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if is_launched:
            raise_file_limit()
        is_first = not _made
        world = cls(
            Grid(members.index(job_rank), len(members), numbers=numbers or IN_ORDER),
            [all_devices[member] for member in members],
            store=None,
            number=next(_made[numbers or ()]),
            is_launched=is_launched,
            may_share=devices is not None,
            timeout_s=timeout_s,
            stall_timeout_s=stall_timeout_s,
        )
        if is_launched and is_first:
            end_with_launcher()
            pin_this_process(pci_addresses(of_this_host(all_devices, job_rank)))
        if len(members) > 1:
            print_victims_briefly(job_rank, world.board, members[0])
            announce(job_rank, timeout_s)
        return world

    def divide(self, num_replicas: int) -> Grid:
        """Divide the ranks into replicas; return this rank's place."""
        self.grid = replace(self.grid, num_replicas=num_replicas)
        self._stalls.grid = self.grid
        self.board.divide(num_replicas)
        return self.grid

    def connect(self) -> Mesh:
        """Connect to the other ranks; every rank calls it, and it waits for all of them.

        Raises:
            RemoteStageError: another rank failed before it connected.
            WaitTimeoutError: a rank did not come within the timeout.
        """
        return self._mesh or self._connect_for(FIRST_CALL)

    def _connect_for(self, purpose: str) -> Mesh:
        sockets: dict[int, socket.socket] = {}
        if self.num_ranks > 1:
            with naming_file_limit("the connections to other ranks", self.num_ranks):
                sockets = self._start.connect(purpose)
        self._mesh = Mesh(
            self.rank,
            sockets,
            timeout_s=self._timeout_s,
            stall_timeout_s=self._stall_timeout_s,
            reports=self._stalls,
            ranks=self.grid.numbers,
            name_of=self.grid.rank_name,
        )
        self.transports.mesh, self.transports.device = self._mesh, self.device
        self._stalls.find_boards(self._mesh)  # fills pids
        return self._mesh

    def offer(self) -> Offer:
        """Return what matters for the choice of this rank's transports."""
        gpu, shares_by_nccl = "", False
        if self.device.type == "cuda":
            gpu = str(torch.cuda.get_device_properties(self.device).uuid)
            shares_by_nccl = nccl_shares_gpus()
        return Offer(self._host(), gpu, shares_by_nccl, self._may_share, self.transport)

    def _host(self) -> str:
        """Return a text that is equal for ranks which may open one another's files."""
        assert self._mesh is not None, "the ranks are connected first"
        sockets = map(self._mesh.socket_of, self._mesh.peers)
        num_local = sum(sock.family == socket.AF_UNIX for sock in sockets)
        host = host_identity()
        return host if 0 < len(self._stalls.pids) == num_local else f"{host}/{self.rank}"

    def store_for_group(self, name: str) -> tuple[JobStore, str]:
        """Return a store for a group of some ranks, and the address on which this one listens.

        The ranks are connected first. Raises in waits of the store if another rank has failed.
        """
        assert self._mesh is not None, "the ranks are connected first"
        store = self._start.shared_store().under(f"group/{name}/", check=self._mesh.poll)
        return store, self._start.network_address or "127.0.0.1"

    def agreed(self, key: str, make: Callable[[], Any]) -> Any:
        """Make a value, plain JSON, on rank 0 and return it on every rank; every rank calls it.

        ``key`` names the value in errors. ``make`` runs on rank 0 only, while the others wait.

        Raises:
            ValueError: not every rank asks for it.
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
            mesh.poll()  # raises if a rank has ended meanwhile
            return value
        found: list[Any] = []
        mesh.on(0, _AGREED, lambda sequence, flags, body: found.append(json.loads(bytes(body))))
        mesh.wait(lambda: found, lambda: f"the {key} that rank 0 finds", peer=0)
        return found[0]

    def give_up(self, story: str) -> None:
        """Send this rank's failure to the other ranks, whether or not they are connected yet.

        Never raises and waits a few seconds at most: it is called while an error is handled.
        """
        if self.num_ranks == 1:
            return
        failure = RemoteStageError(self.grid.job_rank, story)
        if self._mesh is not None:
            self._mesh.send_failure(failure)
            return
        try:
            self._start.leave_note(failure)
        except (RuntimeError, OSError, ValueError) as error:
            write_note(
                f"procpipe: {self.grid.rank_name(self.rank)} could not send its failure to the "
                f"others: {error}"
            )

    def record(self, error: BaseException) -> None:
        """Record the error where torchrun looks for the cause of the job's end."""
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            try:
                raise error  # torchrun records the exception that is being handled
            except BaseException:
                with contextlib.suppress(BaseException):  # its __str__ may raise anything
                    get_error_handler().record_exception(error)

    def let_others_end_first(self) -> None:
        """Wait a moment when the process ends because another one failed.

        Torchrun names the process that failed first, by whole seconds, and terminates all others.
        Without this wait it often names a rank that only received the failure, and ends the one
        with the cause before that is written. Usually torchrun ends this process here.
        """
        if "TORCHELASTIC_RUN_ID" in os.environ:
            with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C interrupts all ranks
                time.sleep(_HEAD_START_S)

    def give_up_in_child(self) -> None:
        """In a forked child, leave the board, the store and the transports to the parent."""
        self.board.give_up_in_child()
        keep_for_ever(self)

    def close(self) -> None:
        """Send a goodbye to the peers and close every connection."""
        self.transports.stop_watching_device()
        if self._mesh is not None:
            self.transports.part()
            self._mesh.close()
            self.transports.close()
        self._start.close()
        self._mesh = None
        self._stalls.close()
        if self.board not in _closed_boards:
            _closed_boards.append(self.board)
