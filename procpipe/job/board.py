"""A process's board: what it is doing now, in memory that other processes of its host can read.

A rank that is stopped, deep in a layer, or dead cannot answer questions. So each writes its state
to a page of shared memory as it goes, a few stores per task, and other processes read it:

    rank 1:  board.start_task("F", 3); board.page.layer = 4; …     about 0.1 us a store
    rank 0, the launcher:  Board.of_process(pid).read()            at any time

The page is an anonymous file (memfd) of its process. Readers find it among the process's open
files, so no name can be left behind; a reader's mapping outlives the process. Only processes that
may look into one another's ``/proc`` entry, those of the same user, can read.

Each number is one aligned 8-byte word, so it is never read half written. A text may be, once: the
next reading shows it whole. A reading as a whole is not of a single moment.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from ctypes import Structure, c_double, c_int64, c_wchar, sizeof

_NAME = "procpipe-board"

#: The longest texts, in characters; longer ones are cut.
_MAX_TEXT, _MAX_WAIT = 128, 640


class Page(Structure):
    """What is in the file; times are of the monotonic clock, 0 for never, and texts "" for none.

    Attributes:
        now_ns: of what was read, the moment from which durations are counted.
    """

    now_ns: int

    _fields_ = (
        ("pid", c_int64),  # written last; 0 before
        ("rank", c_int64),  # in the job
        ("num_ranks", c_int64),  # of the pipeline and its replicas
        ("num_replicas", c_int64),
        ("place", c_int64),  # the rank among those
        ("written_ns", c_int64),
        ("num_steps", c_int64),  # mini-batches done
        ("num_samples", c_int64),  # in them, of this replica
        ("num_micro_batches", c_int64),  # of the newest mini-batch
        ("micro_batch", c_int64),  # of the newest task
        ("since_ns", c_int64),  # when the task began
        ("wait_since_ns", c_int64),
        ("busy_s", c_double),  # in tasks, over all mini-batches done
        ("step_s", c_double),  # in mini-batches
        ("device_bytes", c_int64),  # memory of the device in use by tensors; 0 on a CPU
        ("reported_ns", c_int64),  # when it reported a stall
        ("has_failed", c_int64),  # whether a call has failed
        ("device", c_wchar * _MAX_TEXT),  # what it computes on; "" before its first call
        ("call", c_wchar * _MAX_TEXT),  # "step"
        ("task", c_wchar * _MAX_TEXT),  # "F3"
        ("layer", c_wchar * _MAX_TEXT),  # "layer 'conv2' (Conv2d)"
        ("waits_for", c_wchar * _MAX_WAIT),  # if that has lasted for more than a moment
    )

    def seconds_since(self, at_ns: int) -> float:
        """Return the time from then to this reading."""
        return max(0, self.now_ns - at_ns) / 1e9

    @property
    def heard_s(self) -> float:
        """The time since the process last wrote."""
        return self.seconds_since(self.written_ns)

    @property
    def task_s(self) -> float:
        """The time since its task began."""
        return self.seconds_since(self.since_ns)

    @property
    def waited_s(self) -> float:
        """The time since its wait began."""
        return self.seconds_since(self.wait_since_ns)

    def where(self) -> str:
        """Describe where the process is: "in F3, layer 'conv2' (Conv2d), for 2.1 s"."""
        if self.waits_for:
            place = self.task or (f"{self.call}()" if self.call else "the user's code")
            return f"in {place}, waiting {self.waited_s:.1f} s for {self.waits_for}"
        if self.task:
            place = f"{self.task}, {self.layer}" if self.layer else self.task
            return f"in {place}, for {self.task_s:.1f} s"
        if self.call:
            return f"in {self.call}(), last active {self.heard_s:.1f} s ago"
        return f"between calls, in the user's code, for {self.heard_s:.1f} s"


class Board:
    """One process's board: the end that writes, or one that reads.

    Attributes:
        page: what the process writes; only at that end.
        descriptor: of its file there, to pass on.
    """

    page: Page
    descriptor: int

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def create(cls, rank: int, num_ranks: int, place: int | None = None) -> Board:
        """Create this process's board; it lasts as long as the object or its process.

        ``place`` is the rank within the pipeline, if that has not all ranks of the job.
        """
        descriptor = os.memfd_create(_NAME)
        os.ftruncate(descriptor, sizeof(Page))
        board = cls(mmap.mmap(descriptor, sizeof(Page)))  # has a descriptor of its own
        board.descriptor = descriptor
        page = board.page = Page.from_buffer(board._memory)
        page.rank, page.num_ranks, page.num_replicas = rank, num_ranks, 1
        page.place = rank if place is None else place
        page.written_ns = time.monotonic_ns()
        page.pid = os.getpid()
        return board

    @classmethod
    def opened(cls, descriptor: int) -> Board:
        """Map the board of another process, which has passed its descriptor."""
        return cls(mmap.mmap(descriptor, sizeof(Page), access=mmap.ACCESS_READ))

    @classmethod
    def of_process(cls, pid: int) -> Board | None:
        """Find the board of another process of this host, the newest if there are several.

        Returns None if the process has none, has ended or may not be read.
        """
        found: list[tuple[int, Board]] = []
        folder = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                with contextlib.suppress(OSError, ValueError):  # closed meanwhile, or still empty
                    if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{_NAME}"):
                        with open(f"{folder}/{name}", "rb") as file:
                            board = cls.opened(file.fileno())
                        page = Page.from_buffer_copy(board._memory)
                        if page.pid == pid:  # a forked child has its parent's board open, too
                            found.append((page.written_ns, board))
        return max(found, key=lambda each: each[0], default=(0, None))[1]

    def close(self) -> None:
        """Free the descriptors of its file and mapping; keep its content for this process."""
        os.close(self.descriptor)
        shared, self._memory = self._memory, mmap.mmap(-1, sizeof(Page))
        self._memory[:] = shared[:]
        self.page = Page.from_buffer(self._memory)
        shared.close()

    def start_call(self, name: str) -> None:
        """Note that a call begins."""
        page = self.page
        page.task = page.layer = page.waits_for = ""
        page.call = name[:_MAX_TEXT]
        page.written_ns = time.monotonic_ns()

    def end_call(self) -> None:
        """Note that the call is over."""
        self.page.call = ""
        self.page.written_ns = time.monotonic_ns()

    def fail(self) -> None:
        """Note that the call failed; what was being done stays readable."""
        self.page.has_failed = 1
        self.page.written_ns = time.monotonic_ns()

    def start_task(self, letter: str, micro_batch: int) -> None:
        """Note that a task begins."""
        page = self.page
        page.task, page.micro_batch, page.layer = f"{letter}{micro_batch}", micro_batch, ""
        page.since_ns = page.written_ns = time.monotonic_ns()

    def note_wait(self, what: str, since_ns: int = 0) -> None:
        """Note what this process waits for, and since when on the monotonic clock; "" for none."""
        self.page.wait_since_ns, self.page.waits_for = since_ns, what[:_MAX_WAIT]
        self.page.written_ns = time.monotonic_ns()

    def read(self) -> Page:
        """Read the board as it is now, or as it was when its process ended."""
        reading = Page.from_buffer_copy(self._memory)
        reading.now_ns = time.monotonic_ns()
        return reading
