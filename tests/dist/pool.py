"""Runs a function on several real processes, which are kept for the next test: see test_pool.py.

    parent                                   worker of rank r (tests/dist/worker.py)
      hosts a TCPStore  <---------------------- one client each
      pipe, pickle      --- Task ------------->   builds a World, calls function(world, *args)
                        <-- Outcome -----------   closes the World
      no outcome in time: stop all, SIGABRT all, continue all: faulthandler writes every stack

Processes start when first needed and are used again; they are one ``Job`` (tests/dist/jobs.py). If
one dies, all are replaced: a stage that an earlier test left open in another process would blame
its end on the rank of that number. So they are if a run hangs, is interrupted, or leaves transfers
on a GPU that never end.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple

from tests.dist.devices import devices_of_ranks
from tests.dist.jobs import Job, Process
from tests.dist.report import Failure, Outcome, Outcomes, RanksHungError
from tests.dist.worker import Task

WORKER = "from tests.dist.worker import main; main()"


class Worker(NamedTuple):
    """The parent's view of one process of the pool."""

    process: Process
    pipe: Connection


class Pool:
    """Worker processes, at most 4, and their common store."""

    def __init__(self) -> None:
        self._job: Job | None = None
        self._workers: list[Worker] = []  # by rank
        self._num_runs = 0

    def run(self, num_ranks: int, call: bytes, timeout_s: float, *, world: bool) -> Outcomes:
        """See :meth:`Ranks.run`; ``call`` is the pickled function with its arguments."""
        self._num_runs += 1
        task = Task(self._num_runs, devices_of_ranks(num_ranks), call, timeout_s, world)
        try:
            self._grow(num_ranks)
            outcomes = self._run(task, self._workers[:num_ranks])
        except BaseException:
            # Also after an interrupt or a test's own time limit: the workers may still run this
            # task, so the next test needs new ones.
            self.close()
            raise
        if any(outcome.is_spoilt for outcome in outcomes):
            self.close()
        return outcomes

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.pipe.close()
        if self._job is not None:
            self._job.close()
        self._job, self._workers = None, []

    def _grow(self, num_ranks: int) -> None:
        if any(worker.process.popen.poll() is not None for worker in self._workers):
            self.close()
        if self._job is None:
            import torch.distributed as dist

            self._job = Job()
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(len(self._workers), num_ranks):
            ours, theirs = Pipe()
            with theirs:
                argv = ["-c", WORKER, rank, self._store.port]
                process = self._job.start(argv, stdin=theirs.fileno(), PYTHONUNBUFFERED="1")
            self._workers.append(Worker(process, ours))

    def _run(self, task: Task, workers: list[Worker]) -> Outcomes:
        deadline_s = time.monotonic() + task.timeout_s
        message = pickle.dumps(task)
        for worker in workers:
            # A worker that has died is found below, by the EOF of its pipe.
            with contextlib.suppress(BrokenPipeError):
                worker.pipe.send_bytes(message)
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(workers):
            waiting = {rank: each for rank, each in enumerate(workers) if rank not in outcomes}
            # Wait for processes too: a worker's forked children may keep its pipe open.
            ends = {rank: (w.pipe, w.process.popen.sentinel) for rank, w in waiting.items()}
            everything = [end for both in ends.values() for end in both]
            ready = wait(everything, max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise RanksHungError(self._hung_report(task, [*waiting], outcomes))
            for rank, worker in waiting.items():
                if not {*ends[rank]}.isdisjoint(ready):
                    outcomes[rank] = _outcome_of(rank, worker)
        return Outcomes(outcome for _, outcome in sorted(outcomes.items()))

    def _hung_report(self, task: Task, hung: list[int], ended: dict[int, Outcome]) -> str:
        assert self._job is not None
        function = pickle.loads(task.call)[0]
        lines = [
            f"{function.__module__}.{function.__qualname__}: rank(s) {hung} of "
            f"{len(task.devices)} did not end in {task.timeout_s} s",
            *map(str, ended.values()),
            self._job.output_and_stacks(),
        ]
        return "\n".join(lines)


class Ranks(NamedTuple):
    """The first ``n`` ranks of a pool, of 1 to 4; the ``ranks`` fixture returns it."""

    pool: Pool
    num_ranks: int

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        world: bool = True,
        **kwargs: Any,
    ) -> Outcomes:
        """Call ``function(world, *args, **kwargs)`` on every rank, and wait for all of them.

        Args:
            function: a function at a module's top level; it, its arguments and its result must be
                picklable. Warnings in it are errors; torch's and Python's random numbers start
                from seed 0.
            timeout_s: hard limit for the whole run.
            world: pass a ``World``; if false, a stand-in with ``rank``, ``num_ranks``, ``store``,
                ``device`` and ``timeout_s``.

        Raises:
            RanksHungError: a rank did not end in ``timeout_s``.
        """
        call = pickle.dumps((function, args, kwargs))
        return self.pool.run(self.num_ranks, call, timeout_s, world=world)


def _outcome_of(rank: int, worker: Worker) -> Outcome:
    """Return the outcome that is in a worker's pipe, or one that reports the process's end."""
    try:
        if not worker.pipe.poll():
            raise EOFError
        outcome: Outcome = pickle.loads(worker.pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        end = f"the process of rank {rank} {_end_of(worker.process)}"
        outcome = Outcome(rank, None, Failure("ProcessDied", end, end), is_spoilt=True)
    return replace(outcome, output=worker.process.output)


def _end_of(process: Process) -> str:
    """Wait for the end of a process that has closed its pipe; return how it ended."""
    try:
        code = process.popen.wait(10.0)
    except subprocess.TimeoutExpired:
        return "closed its pipe and still runs"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
