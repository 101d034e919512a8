"""A process's board: what it is doing now, in memory that other processes of its host can read.

A rank that is stopped, deep in a layer, or dead cannot answer questions. So each writes its state
to a page of shared memory as it goes, a few stores per task, and other processes read it:

    rank 1:  board.start_task("F", 3); board.layer = 4; …          about 0.1 us a store
    rank 0, the launcher:  Board.of_process(pid).read()            at any time

The page is an anonymous file (memfd) of its process. Readers find it among the process's open
files, so no name can be left behind; a reader's mapping outlives the process. Only processes that
may look into one another's ``/proc`` entry, those of the same user, can read.

Each number is one aligned 8-byte word, so it is never read half written. A text has a word before
it with its length, which changes whenever the text is written, so that a reader notices and reads
again. A reading as a whole is not of a single moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import time
from dataclasses import dataclass
from typing import Any

_NAME = "procpipe-board"
_SIZE_BYTES = 1 << 20  # pages that are never touched take no memory
_MAGIC = 0x3165706970636F72

#: The words, in order.
(
    _MAGIC_AT,
    _PID,
    _RANK,
    _NUM_RANKS,
    _WRITTEN_NS,
    _NUM_STEPS,
    _NUM_SAMPLES,
    _NUM_MICRO_BATCHES,
    _LETTER,
    _MICRO_BATCH,
    _SINCE_NS,
    _LAYER,
    _WAIT_SINCE_NS,
    _BUSY_NS,
    _STEP_NS,
    _DEVICE_BYTES,
    _REPORTED_NS,
    _HAS_FAILED,
    _COMPILING_SINCE_NS,
    _NUM_REPLICAS,
    _PLACE,
) = range(21)

#: The texts: where each begins, and how many bytes it may take, its word included.
_CALL = (256, 128)
_WAIT = (384, 640)
_FACTS = (1024, _SIZE_BYTES - 1024)

#: A text's word: how often it was written, shifted by this, plus its length in bytes; or -1.
_LENGTH_BITS = 32
_IS_WRITTEN_NOW = -1

#: How often a reader tries to read a text that is being written; its writer may be stopped.
_NUM_LOOKS = 1000

#: The file cannot be made shorter, which would end a reader of the removed part (SIGBUS).
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


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
    compiling_s: float | None  # since torch began to compile code; None if it does not
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
        if self.compiling_s is not None:
            return f"in {place}, compiling {self.layer or 'code'}, for {self.compiling_s:.1f} s"
        if self.task:
            place = f"{self.task}, {self.layer}" if self.layer else self.task
            return f"in {place}, for {self.task_s:.1f} s"
        if self.call:
            return f"in {self.call}(), last active {self.heard_s:.1f} s ago"
        return f"between calls, in the user's code, for {self.heard_s:.1f} s"


class Board:
    """One process's board: the end that writes, or one that reads."""

    descriptor: int  # of its file, where this process writes it

    def __init__(self, page: mmap.mmap) -> None:
        self._page = page
        self._words = memoryview(page).cast("q")

    @classmethod
    def create(cls, rank: int, num_ranks: int, place: int | None = None) -> Board:
        """Create this process's board; it lasts as long as the object or its process.

        ``place`` is the rank within the pipeline, if that has not all ranks of the job.
        """
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, _SIZE_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            page = mmap.mmap(descriptor, _SIZE_BYTES)  # has a descriptor of its own
        except BaseException:
            os.close(descriptor)
            raise
        board = cls(page)
        board.descriptor = descriptor
        words = board._words
        words[_PID], words[_RANK], words[_NUM_RANKS] = os.getpid(), rank, num_ranks
        words[_LAYER], words[_NUM_REPLICAS] = -1, 1
        words[_PLACE] = rank if place is None else place
        words[_WRITTEN_NS] = time.monotonic_ns()
        words[_MAGIC_AT] = _MAGIC
        return board

    @classmethod
    def of_process(cls, pid: int) -> Board | None:
        """Find the board of another process of this host, the newest if there are several.

        Returns None if the process has none, has ended or may not be read.
        """
        found: list[Board] = []
        folder = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                with contextlib.suppress(OSError, ValueError):  # closed meanwhile, or no board
                    if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{_NAME}"):
                        found.append(cls._opened(f"{folder}/{name}"))
        # A forked child has its parent's board open, too.
        found = [b for b in found if b._words[_MAGIC_AT] == _MAGIC and b._words[_PID] == pid]
        return max(found, key=lambda board: board._words[_WRITTEN_NS], default=None)

    @classmethod
    def opened(cls, descriptor: int) -> Board:
        """Map the board of a process that has passed its descriptor."""
        return cls(mmap.mmap(descriptor, _SIZE_BYTES, access=mmap.ACCESS_READ))

    @classmethod
    def _opened(cls, path: str) -> Board:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ValueError("no board: it may become shorter")
            return cls(mmap.mmap(descriptor, _SIZE_BYTES, access=mmap.ACCESS_READ))
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Hide the board from other processes, and keep its content for this one.

        Frees its descriptor, which ``mmap`` keeps for as long as the page.
        """
        shared, words = self._page, self._words
        self._page = mmap.mmap(-1, _SIZE_BYTES)
        self._words = memoryview(self._page).cast("q")
        end = _FACTS[0] + 8 + (words[_FACTS[0] // 8] & 0xFFFFFFFF)
        self._page[:end] = shared[:end]
        words.release()
        shared.close()

    # -- writing --------------------------------------------------------------------------------

    def write_facts(self, facts: dict[str, Any]) -> None:
        """Write facts about this process, once, as JSON; beyond 1 MiB the longest are left out."""
        texts = {name: json.dumps(fact) for name, fact in facts.items()}
        while len(text := json.dumps({name: facts[name] for name in texts})) > _FACTS[1] - 8:
            del texts[max(texts, key=lambda name: len(texts[name]))]
        self._write(_FACTS, text)

    def divide(self, num_replicas: int) -> None:
        """Note that the ranks make so many replicas."""
        self._words[_NUM_REPLICAS] = num_replicas

    def start_call(self, name: str) -> None:
        """Note that a call begins."""
        words = self._words
        words[_LETTER], words[_LAYER] = 0, -1
        words[_WAIT_SINCE_NS] = 0
        self._write(_CALL, name)
        words[_WRITTEN_NS] = time.monotonic_ns()

    def end_call(self) -> None:
        """Note that the call is over."""
        self._write(_CALL, "")
        self._words[_WRITTEN_NS] = time.monotonic_ns()

    def fail(self) -> None:
        """Note that the call failed; what was being done stays readable."""
        self._words[_HAS_FAILED] = 1
        self._words[_WRITTEN_NS] = time.monotonic_ns()

    def start_task(self, letter: str, micro_batch: int) -> None:
        """Note that a task begins."""
        words = self._words
        words[_LETTER], words[_MICRO_BATCH], words[_LAYER] = ord(letter), micro_batch, -1
        words[_SINCE_NS] = words[_WRITTEN_NS] = time.monotonic_ns()

    def start_compiling(self) -> None:
        """Note that torch compiles code of this process."""
        self._words[_COMPILING_SINCE_NS] = self._words[_WRITTEN_NS] = time.monotonic_ns()

    def end_compiling(self) -> None:
        """Note that it is compiled."""
        self._words[_COMPILING_SINCE_NS] = 0

    def end_task(self) -> None:
        """Note that the task is over."""
        self._words[_LETTER] = 0

    def enter_layer(self, index: int) -> None:
        """Note which of this process's layers runs next; -1 for none."""
        self._words[_LAYER] = index

    def start_wait(self, what: str, since_ns: int) -> None:
        """Note what this process waits for, and since when on the monotonic clock."""
        self._write(_WAIT, what)
        self._words[_WAIT_SINCE_NS] = since_ns

    def end_wait(self) -> None:
        """Note that the wait is over."""
        self._words[_WAIT_SINCE_NS] = 0
        self._words[_WRITTEN_NS] = time.monotonic_ns()

    def start_mini_batch(self, num_micro_batches: int) -> None:
        """Note that the tasks of a mini-batch begin."""
        self._words[_NUM_MICRO_BATCHES] = num_micro_batches

    def end_program(self, num_samples: int, *, busy_ns: int, step_ns: int) -> None:
        """Note the end of a program, and the time in tasks and in programs so far.

        ``num_samples`` is 0 if the mini-batch's backward pass is to follow.
        """
        words = self._words
        words[_NUM_STEPS] += num_samples > 0
        words[_NUM_SAMPLES] += num_samples
        words[_BUSY_NS], words[_STEP_NS] = busy_ns, step_ns

    def write_device_bytes(self, num_bytes: int) -> None:
        """Note how much memory of the device tensors take."""
        self._words[_DEVICE_BYTES] = num_bytes

    def note_report(self) -> None:
        """Note that this process has just reported a stall."""
        self._words[_REPORTED_NS] = time.monotonic_ns()

    def give_up_in_child(self) -> None:
        """Write to a private page in a forked child."""
        self._page = mmap.mmap(-1, _SIZE_BYTES)
        self._words = memoryview(self._page).cast("q")

    def _write(self, area: tuple[int, int], text: str) -> None:
        start, size = area
        words, word = self._words, start // 8
        data = text.encode(errors="replace")[: size - 8]
        num_written = (words[word] >> _LENGTH_BITS) + 1
        words[word] = _IS_WRITTEN_NOW
        self._page[start + 8 : start + 8 + len(data)] = data
        words[word] = (num_written & 0x7FFFFFFF) << _LENGTH_BITS | len(data)

    # -- reading --------------------------------------------------------------------------------

    def read(self) -> BoardReading:
        """Read the board as it is now, or as it was when its process ended."""
        words, now_ns = self._words, time.monotonic_ns()
        facts = self._facts()
        letter = words[_LETTER]
        task = f"{chr(letter)}{words[_MICRO_BATCH]}" if 0 < letter < 128 else ""
        wait_since_ns, reported_ns = words[_WAIT_SINCE_NS], words[_REPORTED_NS]
        layers, layer = facts.get("layers", ()), words[_LAYER]
        compiling_ns = words[_COMPILING_SINCE_NS]
        return BoardReading(
            pid=words[_PID],
            rank=words[_RANK],
            num_ranks=words[_NUM_RANKS],
            facts=facts,
            heard_s=(now_ns - words[_WRITTEN_NS]) / 1e9,
            call=self._text(_CALL),
            task=task,
            task_s=(now_ns - words[_SINCE_NS]) / 1e9,
            layer=layers[layer] if 0 <= layer < len(layers) else "",
            compiling_s=(now_ns - compiling_ns) / 1e9 if compiling_ns else None,
            wait=(
                Wait(self._text(_WAIT) or "something", (now_ns - wait_since_ns) / 1e9)
                if wait_since_ns
                else None
            ),
            num_steps=words[_NUM_STEPS],
            num_samples=words[_NUM_SAMPLES],
            micro_batch=words[_MICRO_BATCH],
            num_micro_batches=words[_NUM_MICRO_BATCHES],
            busy_s=words[_BUSY_NS] / 1e9,
            step_s=words[_STEP_NS] / 1e9,
            device_bytes=words[_DEVICE_BYTES],
            reported_s=(now_ns - reported_ns) / 1e9 if reported_ns else None,
            has_failed=bool(words[_HAS_FAILED]),
            num_replicas=words[_NUM_REPLICAS],
            place=words[_PLACE],
        )

    def _facts(self) -> dict[str, Any]:
        try:
            facts: object = json.loads(self._text(_FACTS) or "{}")
        except ValueError:
            return {}
        return facts if isinstance(facts, dict) else {}

    def _text(self, area: tuple[int, int]) -> str:
        """Return a text; "" while it is being written, or if its writer ended halfway."""
        start, size = area
        words, word = self._words, start // 8
        for _ in range(_NUM_LOOKS):
            state = words[word]
            length = min(state & 0xFFFFFFFF, size - 8)
            if state != _IS_WRITTEN_NOW:
                data = self._page[start + 8 : start + 8 + length]
                if words[word] == state:
                    return data.decode(errors="ignore")  # its last character may be cut
        return ""
