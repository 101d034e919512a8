"""This process's place in the job: its rank, its device, and its connections to the other ranks.

``torchrun`` sets it in the environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, …). Without a
launcher the job is this one process. ``connect`` connects the ranks to one another (``start.py``).
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, count

import torch

from procpipe.channel.mesh import Mesh
from procpipe.channel.monitor import Monitor
from procpipe.errors import RemoteStageError
from procpipe.job.board import Board
from procpipe.job.devices import devices_of, nccl_shares_gpus, pci_addresses
from procpipe.job.endings import end_with_launcher
from procpipe.job.grid import IN_ORDER, Grid
from procpipe.job.pin import pin_this_process
from procpipe.job.stalls import StallReports
from procpipe.job.start import Meeting, Start, host_identity
from procpipe.job.transports import Offer, Transports

DEFAULT_TIMEOUT_S = 1800.0
DEFAULT_STALL_TIMEOUT_S = 30.0

#: More than the second to which torchrun rounds, and the tenth of a second at which it looks.
_HEAD_START_S = 1.5

#: The size of the file of messages: four times the memory of the largest hosts (see
#: ``channel/shm.py``). No page of it takes memory before it is written to.
_MEMORY_BYTES = 1 << 42

#: Numbers the pipelines of the same ranks, which make them in the same order.
_made: defaultdict[Sequence[int], Iterator[int]] = defaultdict(count)

#: Boards of closed stages: a launcher may read them until there is a newer one.
_closed_boards: list[Board] = []


class World:
    """This process's place in the job.

    ``devices`` holds what each rank computes on, as far as known here. ``may_share`` says whether
    the rank may share its GPU with others.

    Attributes:
        grid: this rank's place among stages and replicas.
        transport: the name of the only transport, in tests, else None (see ``transports.py``). The
            class's, when the world is made.
        mesh: the sockets to the other ranks, which ``connect`` opens.
        address: that of this host on which other ranks reach this one, once connected.
        transports: those to other ranks, opened once the ranks are connected.
    """

    transport: str | None = None
    address: str

    def __init__(
        self,
        grid: Grid,
        devices: Sequence[torch.device],
        meeting: Meeting,
        *,
        is_launched: bool = True,
        may_share: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
    ) -> None:
        self.grid = grid
        self.rank, self.num_ranks = grid.rank, grid.num_ranks
        self.device, self.devices = devices[grid.rank], tuple(devices)
        self.transport = World.transport
        self.is_launched = is_launched
        self._may_share = may_share
        self._meeting = meeting
        while _closed_boards:
            _closed_boards.pop().close()
        self.board = Board.create(grid.job_rank, grid.num_ranks, grid.rank)
        self._stalls = StallReports(self.board, grid)
        monitor = Monitor(
            grid.rank,
            self._stalls,
            timeout_s=timeout_s,
            stall_timeout_s=stall_timeout_s,
            ranks=grid.numbers,
            name_of=lambda rank: self.grid.rank_name(rank),
        )
        self.mesh = Mesh(monitor)
        # Where messages to ranks of this host are, or the flags of those in a GPU's memory.
        self.memory = os.memfd_create("procpipe-memory", os.MFD_CLOEXEC)
        os.ftruncate(self.memory, _MEMORY_BYTES)
        self._files_of: dict[int, list[int]] = {}
        self._is_closed = False
        self.transports = Transports(self.mesh, self.device, self.memory)
        self._stalls.transports = self.transports

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
            ValueError: the devices are of several types, or cannot be used; or the environment does
                not say where the ranks meet.
        """
        is_launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        job_rank = int(os.environ["RANK"]) if is_launched else 0
        job_size = int(os.environ["WORLD_SIZE"]) if is_launched else 1
        if job_size > 1:
            # Streams of one hardware queue wait for one another; by default there are 8, fewer than
            # the streams of a stage that receives from several others. Counts before CUDA starts.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        all_devices = devices_of(job_rank, job_size, devices)
        device = all_devices[job_rank]
        members = range(job_size) if numbers is None else numbers
        is_first, number = not _made, next(_made[numbers or ()])
        if is_launched and is_first:
            end_with_launcher()
            _raise_file_limit()
            pin_this_process(pci_addresses(all_devices, job_rank))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        meeting = Meeting("alone")
        if len(members) > 1:
            meeting = Meeting.from_environment(numbers, number)
        return cls(
            Grid(members.index(job_rank), len(members), numbers=numbers or IN_ORDER),
            [all_devices[member] for member in members],
            meeting,
            is_launched=is_launched,
            may_share=devices is not None,
            timeout_s=timeout_s,
            stall_timeout_s=stall_timeout_s,
        )

    def divide(self, num_replicas: int) -> Grid:
        """Divide the ranks into replicas; return this rank's place."""
        self.grid = replace(self.grid, num_replicas=num_replicas)
        self._stalls.grid = self.grid
        self.board.page.num_replicas = num_replicas
        return self.grid

    def connect(self) -> Mesh:
        """Connect to the other ranks; every rank calls it, and it waits for all of them.

        Raises:
            RemoteStageError: another rank failed before it connected.
            WaitTimeoutError: a rank did not come within the timeout.
        """
        files = self.board.descriptor, self.memory
        start = Start(self.mesh, self.grid, self._meeting, files)
        self._files_of = start.files_of
        if self.num_ranks > 1:
            self.board.start_call("Stage")
            start.connect()
            self.board.end_call()
        self.address = start.host
        self._stalls.open_boards(self._files_of)
        self.transports.memory_of = {peer: files[1] for peer, files in self._files_of.items()}
        return self.mesh

    def offer(self) -> Offer:
        """Return what matters for the choice of this rank's transports."""
        gpu, shares_by_nccl = "", False
        if self.device.type == "cuda":
            gpu = str(torch.cuda.get_device_properties(self.device).uuid)
            shares_by_nccl = nccl_shares_gpus()
        return Offer(host_identity(), gpu, shares_by_nccl, self._may_share, self.transport)

    def give_up(self, story: str, error: BaseException) -> None:
        """Send this rank's failure to the others; record it where torchrun looks for the cause.

        Never raises, and waits a moment at most.
        """
        self.mesh.fail(RemoteStageError(self.grid.job_rank, story))
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            try:
                raise error  # torchrun records the exception that is being handled
            except BaseException:
                with contextlib.suppress(BaseException):  # its __str__ may raise anything
                    get_error_handler().record_exception(error)

    def let_others_end_first(self) -> None:
        """Wait a moment when the process ends because another one failed.

        Torchrun names the process that ended first, by whole seconds, and terminates all others,
        also the one with the cause before that is written. Usually it ends this process here.
        """
        if "TORCHELASTIC_RUN_ID" in os.environ:
            with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C interrupts all ranks
                time.sleep(_HEAD_START_S)

    def close(self) -> None:
        """Send a goodbye to the peers, unless there was a failure, and close every connection."""
        if self._is_closed:
            return
        self.transports.close()
        for descriptor in chain([self.memory], *self._files_of.values()):
            os.close(descriptor)
        self._stalls.close()
        self._is_closed = True
        _closed_boards.append(self.board)


def _raise_file_limit() -> None:
    """Let this process, and its children, open as many files as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may refuse it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
