"""The process behind one rank of the pool: runs one function after another until it is stopped.

tests/dist/pool.py starts it with the arguments <rank> <store's port>, and exchanges pickles with it
over a pipe that is its standard input (this is test code on one machine).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import pickle
import random
import resource
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from tests.dist.devices import seed_only_cpu
from tests.dist.report import Failure, Outcome

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

#: How much longer than its time limit a run may last before the process ends itself. Only used
#: if the parent has ended.
GRACE_S = 20.0

#: The time limit that a world is built with; smaller than a run's, so that its errors come first.
WORLD_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Task:
    """The message that starts a run on each rank.

    Attributes:
        number: counts the runs of a pool; names the run's part of the store.
        devices: of all ranks that take part.
        call: pickled ``(function, args, kwargs)``; pickled separately, so that a failure to load
            it is an outcome.
        timeout_s: the run's time limit.
        world: pass a ``procpipe.job.world.World``, or a :class:`BareWorld` if false.
    """

    number: int
    devices: list[str]
    call: bytes
    timeout_s: float
    world: bool


@dataclass(frozen=True)
class BareWorld:
    """Has the attributes of a ``World`` and does nothing; for tests that need only those."""

    rank: int
    num_ranks: int
    store: dist.Store | None
    name: str  # of this run, among all of the host
    device: torch.device
    devices: list[torch.device]
    timeout_s: float

    def close(self) -> None:
        """Do nothing."""


def main() -> None:
    """Serve tasks until the pipe ends."""
    import torch
    import torch.distributed as dist

    rank, port = map(int, sys.argv[1:])
    seed_only_cpu()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe = Connection(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    while True:
        try:
            task = pickle.loads(pipe.recv_bytes())
        except EOFError:
            # At once: objects left over from tests must not delay or fail the end.
            os._exit(0)
        for descriptor in (1, 2):
            os.ftruncate(descriptor, 0)  # what an earlier run has written
        faulthandler.dump_traceback_later(task.timeout_s + GRACE_S, exit=True)
        outcome = _run(task, rank, store, f"pool/{port}/{task.number}")
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(_dumps(outcome))


def _run(task: Task, rank: int, store: dist.Store, name: str) -> Outcome:
    import torch

    torch.manual_seed(0)
    random.seed(0)
    torch.set_default_dtype(torch.float32)
    value: Any = None
    failure: Failure | None = None
    world: Any = None
    start = time.monotonic()
    try:
        function, args, kwargs = pickle.loads(task.call)
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            world = _make_world(task, rank, store, name)
            start = time.monotonic()
            value = function(world, *args, **kwargs)
    except BaseException as error:
        failure = _failure_of(error)
    duration_s = time.monotonic() - start
    if world is not None:
        try:
            world.close()
        except BaseException as error:
            closing = _failure_of(error)
            story = f"{failure.traceback}\nand then closing the world failed:\n" if failure else ""
            first = failure or closing
            failure = Failure(first.type, first.text, story + closing.traceback)
    if failure is not None:
        gc.collect()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Whether a stage that failed has left transfers on this process's GPU.
    transports = sys.modules.get("procpipe.job.transports")
    is_spoilt = transports is not None and bool(transports._left_behind)
    return Outcome(rank, None if failure else value, failure, "", duration_s, is_spoilt)


def _make_world(task: Task, rank: int, store: dist.Store, name: str) -> Any:
    import torch
    import torch.distributed as dist

    devices = [torch.device(device) for device in task.devices]
    if devices[rank].type == "cuda":
        torch.cuda.set_device(devices[rank])
    store = dist.PrefixStore(f"run{task.number}", store)
    if not task.world:
        own = devices[rank]
        return BareWorld(rank, len(devices), store, name, own, devices, WORLD_TIMEOUT_S)
    from procpipe.job.grid import Grid
    from procpipe.job.start import Meeting
    from procpipe.job.world import World

    grid = Grid(rank, len(devices))
    made: Any = World(grid, devices, Meeting(name), timeout_s=WORLD_TIMEOUT_S)
    made.store = store  # for the test
    return made


def _failure_of(error: BaseException) -> Failure:
    failure = Failure.of(error)
    # Frames would keep groups and pending transfers alive into the next test.
    traceback.clear_frames(error.__traceback__)
    return failure


class ToCpu(pickle.Pickler):
    """Pickles tensors of GPUs as tensors of the CPU, where they are compared."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor) and value.is_cuda:
            copy = value.detach().cpu().requires_grad_(value.requires_grad)
            return copy.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def _dumps(outcome: Outcome) -> bytes:
    # Plain pickle: ``Connection.send`` would share the memory of tensors with this process.
    try:
        buffer = io.BytesIO()
        ToCpu(buffer).dump(outcome)
        return buffer.getvalue()
    except Exception as error:
        error.add_note(f"(raised while pickling the value that rank {outcome.rank} returned)")
        failure = Failure.of(error)
        return pickle.dumps(Outcome(outcome.rank, None, failure, duration_s=outcome.duration_s))
