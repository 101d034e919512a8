"""A process's board: what it is doing now, in memory that other processes of its host can read.

A rank that is stopped, deep in a layer, or dead cannot answer questions. So each writes its state
to a page of shared memory as it goes, a few stores per task, and other processes read it:

    rank 1:  board.start_task("F", 3); board.enter_layer(4); …     about 0.1 us a store
    rank 0, the launcher:  Board.of_process(pid).read()            at any time

The page is an anonymous file (memfd) of its process. Readers find it among the process's open
files, so no name can be left behind; a reader's mapping outlives the process. Only processes that
may look into one another's ``/proc`` entry, those of the same user, can read.

Each number is one aligned 8-byte word, so it is never read half written. A text may be, once: the
next reading shows it whole. A reading as a whole is not of a single moment.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import time
from ctypes import Structure, c_char, c_int64, sizeof
from dataclasses import dataclass
from typing import Any

_NAME = "procpipe-board"
_SIZE_BYTES = 1 << 20  # pages that are never touched take no memory

_MAX_CALL, _MAX_WAIT = 128, 640  # bytes


class _Page(Structure):
    """What is in the file, before the facts."""

    _fields_ = (
        ("pid", c_int64),  # written last; 0 before
        ("rank", c_int64),
        ("num_ranks", c_int64),
        ("num_replicas", c_int64),
        ("place", c_int64),
        ("written_ns", c_int64),  # times are of the monotonic clock; 0 for never
        ("num_steps", c_int64),
        ("num_samples", c_int64),
        ("num_micro_batches", c_int64),
        ("letter", c_int64),  # of the task; 0 between tasks
        ("micro_batch", c_int64),
        ("since_ns", c_int64),  # when the task began
        ("layer", c_int64),  # -1 for none
        ("wait_since_ns", c_int64),
        ("busy_ns", c_int64),
        ("step_ns", c_int64),
        ("device_bytes", c_int64),
        ("reported_ns", c_int64),
        ("has_failed", c_int64),
        ("facts_bytes", c_int64),  # the length of the facts, which follow as JSON
        ("call", c_char * _MAX_CALL),
        ("wait", c_char * _MAX_WAIT),
    )


#: Where the facts begin.
_FACTS_AT = sizeof(_Page)


@dataclass(frozen=True)
class Wait:
    """What a process waits for, or waited for when it ended, and for how many seconds so far."""

    what: str
    seconds: float


@dataclass(frozen=True)
class BoardReading:
    """What a board shows."""

    pid: int
    rank: int  # in the job
    num_ranks: int  # of the pipeline and its replicas
    facts: dict[str, Any]  # "device", "layers" (name and class of each), "shards" (ranks), …
    heard_s: float  # since it last wrote
    call: str  # "step"; "" between calls
    task: str  # "F3"; "" between tasks
    task_s: float  # since that task began
    layer: str  # "layer 'conv2' (Conv2d)"; "" outside of layers
    wait: Wait | None  # if it has lasted for more than a moment
    num_steps: int  # mini-batches done
    num_samples: int  # in them, of all replicas
    micro_batch: int  # of the newest task
    num_micro_batches: int  # of the newest mini-batch
    busy_s: float  # in tasks, over all mini-batches done
    step_s: float  # in mini-batches
    device_bytes: int  # memory of the device in use by tensors; 0 on a CPU
    reported_s: float | None  # since it reported a stall; None if it never did
    has_failed: bool  # whether a call has failed
    num_replicas: int = 1
    place: int = 0  # the rank among those

    def where(self) -> str:
        """Describe where the process is: "in F3, layer 'conv2' (Conv2d), for 2.1 s"."""
        place = self.task or (f"{self.call}()" if self.call else "the user's code")
        if self.wait is not None:
            return f"in {place}, waiting {self.wait.seconds:.1f} s for {self.wait.what}"
        if self.task:
            place = f"{self.task}, {self.layer}" if self.layer else self.task
            return f"in {place}, for {self.task_s:.1f} s"
        if self.call:
            return f"in {self.call}(), last active {self.heard_s:.1f} s ago"
        return f"between calls, in the user's code, for {self.heard_s:.1f} s"


class Board:
    """One process's board: the end that writes, or one that reads."""

    _page: _Page  # only at the end that writes
    descriptor: int  # of its file there, to pass on

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def create(cls, rank: int, num_ranks: int, place: int | None = None) -> Board:
        """Create this process's board; it lasts as long as the object or its process.

        ``place`` is the rank within the pipeline, if that has not all ranks of the job.
        """
        descriptor = os.memfd_create(_NAME)
        os.ftruncate(descriptor, _SIZE_BYTES)
        board = cls(mmap.mmap(descriptor, _SIZE_BYTES))  # has a descriptor of its own
        board.descriptor = descriptor
        page = board._page = _Page.from_buffer(board._memory)
        page.rank, page.num_ranks, page.num_replicas = rank, num_ranks, 1
        page.place = rank if place is None else place
        page.layer, page.written_ns = -1, time.monotonic_ns()
        page.pid = os.getpid()
        return board

    @classmethod
    def opened(cls, descriptor: int) -> Board:
        """Map the board of another process, which has passed its descriptor."""
        return cls(mmap.mmap(descriptor, _SIZE_BYTES, access=mmap.ACCESS_READ))

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
                            memory = mmap.mmap(file.fileno(), _SIZE_BYTES, access=mmap.ACCESS_READ)
                        page = _Page.from_buffer_copy(memory)
                        if page.pid == pid:  # a forked child has its parent's board open, too
                            found.append((page.written_ns, cls(memory)))
        return max(found, key=lambda each: each[0], default=(0, None))[1]

    def close(self) -> None:
        """Hide the board from other processes, and keep its content for this one.

        Frees its descriptor, and the one that ``mmap`` keeps for as long as the memory.
        """
        os.close(self.descriptor)
        shared = self._memory
        content = shared[: _FACTS_AT + self._page.facts_bytes]
        self.give_up_in_child()
        self._memory[: len(content)] = content
        shared.close()

    # -- writing --------------------------------------------------------------------------------

    def write_facts(self, facts: dict[str, Any]) -> None:
        """Write facts about this process as JSON; without "layers", if it takes more than 1 MiB."""
        data = json.dumps(facts).encode()
        if len(data) > _SIZE_BYTES - _FACTS_AT:
            data = json.dumps({**facts, "layers": []}).encode()
        self._memory[_FACTS_AT : _FACTS_AT + len(data)] = data
        self._page.facts_bytes = len(data)

    def divide(self, num_replicas: int) -> None:
        """Note that the ranks make so many replicas."""
        self._page.num_replicas = num_replicas

    def start_call(self, name: str) -> None:
        """Note that a call begins."""
        page = self._page
        page.letter, page.layer, page.wait_since_ns = 0, -1, 0
        page.call = name.encode()[:_MAX_CALL]
        page.written_ns = time.monotonic_ns()

    def end_call(self) -> None:
        """Note that the call is over."""
        self._page.call = b""
        self._page.written_ns = time.monotonic_ns()

    def fail(self) -> None:
        """Note that the call failed; what was being done stays readable."""
        self._page.has_failed = 1
        self._page.written_ns = time.monotonic_ns()

    def start_task(self, letter: str, micro_batch: int) -> None:
        """Note that a task begins."""
        page = self._page
        page.letter, page.micro_batch, page.layer = ord(letter), micro_batch, -1
        page.since_ns = page.written_ns = time.monotonic_ns()

    def end_task(self) -> None:
        """Note that the task is over."""
        self._page.letter = 0

    def enter_layer(self, index: int) -> None:
        """Note which of this process's layers runs next; -1 for none."""
        self._page.layer = index

    def start_wait(self, what: str, since_ns: int) -> None:
        """Note what this process waits for, and since when on the monotonic clock."""
        self._page.wait = what.encode()[:_MAX_WAIT]
        self._page.wait_since_ns = since_ns

    def end_wait(self) -> None:
        """Note that the wait is over."""
        self._page.wait_since_ns = 0
        self._page.written_ns = time.monotonic_ns()

    def start_mini_batch(self, num_micro_batches: int) -> None:
        """Note that the tasks of a mini-batch begin."""
        self._page.num_micro_batches = num_micro_batches

    def end_program(self, num_samples: int, *, busy_ns: int, step_ns: int) -> None:
        """Note the end of a program, and the time in tasks and in programs so far.

        ``num_samples`` is 0 if the mini-batch's backward pass is to follow.
        """
        page = self._page
        page.num_steps += num_samples > 0
        page.num_samples += num_samples
        page.busy_ns, page.step_ns = busy_ns, step_ns

    def write_device_bytes(self, num_bytes: int) -> None:
        """Note how much memory of the device tensors take."""
        self._page.device_bytes = num_bytes

    def note_report(self) -> None:
        """Note that this process has just reported a stall."""
        self._page.reported_ns = time.monotonic_ns()

    def give_up_in_child(self) -> None:
        """Write to a private page in a forked child."""
        self._memory = mmap.mmap(-1, _SIZE_BYTES)
        self._page = _Page.from_buffer(self._memory)

    # -- reading --------------------------------------------------------------------------------

    def read(self) -> BoardReading:
        """Read the board as it is now, or as it was when its process ended."""
        page, now_ns = _Page.from_buffer_copy(self._memory), time.monotonic_ns()
        facts: dict[str, Any] = {}
        if page.facts_bytes:
            facts = json.loads(self._memory[_FACTS_AT : _FACTS_AT + page.facts_bytes])
        layers, wait = facts.get("layers", ()), None
        if page.wait_since_ns:
            wait = Wait(page.wait.decode(errors="ignore"), (now_ns - page.wait_since_ns) / 1e9)
        return BoardReading(
            pid=page.pid,
            rank=page.rank,
            num_ranks=page.num_ranks,
            facts=facts,
            heard_s=(now_ns - page.written_ns) / 1e9,
            call=page.call.decode(errors="ignore"),  # its last character may be cut
            task=f"{chr(page.letter)}{page.micro_batch}" if page.letter else "",
            task_s=(now_ns - page.since_ns) / 1e9,
            layer=layers[page.layer] if 0 <= page.layer < len(layers) else "",
            wait=wait,
            num_steps=page.num_steps,
            num_samples=page.num_samples,
            micro_batch=page.micro_batch,
            num_micro_batches=page.num_micro_batches,
            busy_s=page.busy_ns / 1e9,
            step_s=page.step_ns / 1e9,
            device_bytes=page.device_bytes,
            reported_s=(now_ns - page.reported_ns) / 1e9 if page.reported_ns else None,
            has_failed=bool(page.has_failed),
            num_replicas=page.num_replicas,
            place=page.place,
        )
