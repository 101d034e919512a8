"""Runs a function on several real processes, which are kept for the next test.

    def double(world, x):
        return 2 * x + world.rank

    def test_double(ranks):
        assert ranks(2).run(double, 21).values() == [42, 43]

    parent                                   worker of rank r (tests/dist/worker.py)
      hosts a TCPStore  <---------------------- one client each
      pipe, pickle      --- Job -------------->   builds a World, calls function(world, *args)
                        <-- Outcome -----------   closes the World
      no outcome in time: stop all, SIGABRT all, continue all: faulthandler writes every stack

Processes start when first needed and are used again. If one dies, all are replaced: a stage that an
earlier test left open in another process would blame its end on the rank of that number. So they
are if a run hangs, is interrupted, or leaves transfers on a GPU that never end. They are forks of
one process that has imported torch (tests/dist/forks.py): the import would take each of them a
second or two.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.dist.devices import devices_of_ranks
from tests.dist.forks import fork_server
from tests.dist.report import Failure, Outcome, Outcomes, RanksHungError
from tests.dist.worker import Job

if TYPE_CHECKING:
    import torch.distributed as dist

ROOT = Path(__file__).parents[2]
MAX_NUM_RANKS = 4
START_TIMEOUT_S = 100.0
WORKER = "from tests.dist.worker import main; main()"

#: A job must not inherit these from whatever launched the tests. (The last two are of readline,
#: which pytest imports: pytest-xdist's processes have them.)
LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "GROUP_", "LOCAL_", "ROLE_", "MASTER_", "TORCHELASTIC_"),
    *("COLUMNS", "LINES"),
)


class Ranks:
    """The first ``n`` ranks of a pool; the ``ranks`` fixture returns it."""

    def __init__(self, pool: Pool, num_ranks: int) -> None:
        if not 1 <= num_ranks <= MAX_NUM_RANKS:
            raise ValueError(f"ranks({num_ranks}): the pool has 1 to {MAX_NUM_RANKS} ranks")
        self._pool = pool
        self._num_ranks = num_ranks

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        world_timeout_s: float = 20.0,
        world: bool = True,
        **kwargs: Any,
    ) -> Outcomes:
        """Call ``function(world, *args, **kwargs)`` on every rank, and wait for all of them.

        Args:
            function: a function at a module's top level; it, its arguments and its result must be
                picklable. Warnings in it are errors; torch's and Python's random numbers start
                from seed 0.
            timeout_s: hard limit for the whole run.
            world_timeout_s: passed to the ``World``; smaller, so that its errors come first.
            world: pass a ``World``; if false, a stand-in with ``rank``, ``num_ranks``, ``store``,
                ``device`` and ``timeout_s``.

        Raises:
            RanksHungError: a rank did not end in ``timeout_s``.
        """
        call = pickle.dumps((function, args, kwargs))
        return self._pool.run(self._num_ranks, call, timeout_s, world_timeout_s, world)


class Pool:
    """At most :data:`MAX_NUM_RANKS` worker processes and their common store."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="procpipe-pool-")
        self._store: dist.TCPStore | None = None
        self._workers: dict[int, Worker] = {}  # by rank
        self._num_started = 0
        self._num_runs = 0

    def run(
        self, num_ranks: int, call: bytes, timeout_s: float, world_timeout_s: float, world: bool
    ) -> Outcomes:
        """See :meth:`Ranks.run`; ``call`` is the pickled function with its arguments."""
        try:
            self._grow(num_ranks)
            self._num_runs += 1
            devices = devices_of_ranks(num_ranks)
            job = Job(self._num_runs, devices, call, timeout_s, world_timeout_s, world)
            outcomes = self._run(job, [self._workers[rank] for rank in range(num_ranks)])
        except BaseException:
            # Also after an interrupt or a test's own time limit: the workers may still run this
            # job, so the next test needs new ones.
            self._discard()
            raise
        died = any(outcome.error and outcome.error.type == "ProcessDied" for outcome in outcomes)
        if died or any(outcome.is_spoilt for outcome in outcomes):
            self._discard()
        return outcomes

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers.values():
            worker.pipe.close()
        self._discard(grace_s=5.0)
        self._folder.cleanup()

    def _grow(self, num_ranks: int) -> None:
        if any(worker.process.poll() is not None for worker in self._workers.values()):
            self._discard()
        if self._store is None:
            import torch.distributed as dist

            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        new = [rank for rank in range(num_ranks) if rank not in self._workers]
        for rank in new:
            path = Path(self._folder.name, f"worker{self._num_started}")
            self._num_started += 1
            self._workers[rank] = Worker(rank, self._store.port, path)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        for rank in new:
            worker = self._workers[rank]
            if not wait([worker.pipe], max(0.0, deadline_s - time.monotonic())):
                raise RanksHungError(f"no start in {START_TIMEOUT_S} s\n{_stacks([worker])}")
            try:
                worker.pipe.recv_bytes()
            except EOFError:
                end = worker.wait_death()
                raise RuntimeError(f"{end}\n{worker.log.read_text()}") from None

    def _run(self, job: Job, workers: list[Worker]) -> Outcomes:
        deadline_s = time.monotonic() + job.timeout_s
        for worker in workers:
            worker.log_start = worker.log.stat().st_size
        message = pickle.dumps(job)
        for worker in workers:
            # A worker that has died is found below, by the EOF of its pipe.
            with contextlib.suppress(BrokenPipeError):
                worker.pipe.send_bytes(message)
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(workers):
            waiting = [worker for worker in workers if worker.rank not in outcomes]
            # Wait for processes too: a worker's forked children may keep its pipe open.
            ends = [end for worker in waiting for end in (worker.pipe, worker.process.sentinel)]
            ready = wait(ends, max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise RanksHungError(_hung_report(job, workers, waiting, outcomes.values()))
            for worker in waiting:
                if worker.pipe in ready or worker.process.sentinel in ready:
                    outcomes[worker.rank] = worker.read_outcome()
        return Outcomes(outcomes[worker.rank] for worker in workers)

    def _discard(self, grace_s: float = 0.0) -> None:
        workers, self._workers = self._workers, {}
        self._store = None
        for worker in workers.values():
            worker.end(grace_s)


class Worker:
    """The parent's view of one process of the pool. Starts it without waiting until it runs."""

    def __init__(self, rank: int, port: int, path: Path) -> None:
        self.rank = rank
        self.stacks = path.with_suffix(".stacks")
        self.log = path.with_suffix(".log")
        self.log_start = 0
        self.pipe, child_end = Pipe()
        argv = ["-c", WORKER, *map(str, (rank, port, self.stacks))]
        with child_end, self.log.open("wb") as log:
            files = (child_end.fileno(), log.fileno(), log.fileno())
            self.process = fork_server().start(argv, env=job_environment(), cwd=ROOT, files=files)

    def read_outcome(self) -> Outcome:
        """Return the outcome that is in the pipe, or one that reports the process's end."""
        try:
            if not self.pipe.poll():
                raise EOFError
            outcome: Outcome = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            outcome = Outcome(self.rank, None, self._failure_of_death())
        return replace(outcome, output=self._output())

    def wait_death(self) -> str:
        """Wait for the end of a process that has closed its pipe; return how it ended."""
        try:
            code = self.process.wait(10.0)
        except subprocess.TimeoutExpired:
            return f"the process of rank {self.rank} closed its pipe and still runs"
        if code < 0:
            return f"the process of rank {self.rank} was ended by {signal.Signals(-code).name}"
        return f"the process of rank {self.rank} ended with exit code {code}"

    def end(self, grace_s: float) -> None:
        """Wait for the process to end, then kill it and its children."""
        self.pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _failure_of_death(self) -> Failure:
        end = self.wait_death()
        stacks = self.stacks.read_text() if self.stacks.exists() else ""
        return Failure("ProcessDied", end, f"{end}\n{stacks}")

    def _output(self) -> str:
        with self.log.open("rb") as log:
            log.seek(self.log_start)
            return log.read().decode(errors="replace")


def job_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a process under test: this one's without launcher variables."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)
    }
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment["OMP_NUM_THREADS"] = "1"
    return environment | (extra or {})


def abort_all(pids: Iterable[int]) -> None:
    """Make processes write their stacks, all of the same moment, and end.

    All are stopped before the first is aborted, because the end of one would wake the others.
    """
    pids = list(pids)
    for number in (signal.SIGSTOP, signal.SIGABRT, signal.SIGCONT):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _hung_report(
    job: Job, workers: list[Worker], hung: list[Worker], ended: Iterable[Outcome]
) -> str:
    stacks = _stacks(hung)
    function = pickle.loads(job.call)[0]
    lines = [
        f"{function.__module__}.{function.__qualname__}: rank(s) {[w.rank for w in hung]} of "
        f"{len(workers)} did not end in {job.timeout_s} s",
        *map(str, ended),
        stacks,
    ]
    return "\n".join(lines)


def _stacks(workers: list[Worker]) -> str:
    abort_all(worker.process.pid for worker in workers if worker.process.poll() is None)
    reports = []
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(10.0)
        text = worker.stacks.read_text() if worker.stacks.exists() else "(no stacks)"
        reports.append(f"--- rank {worker.rank} is still at\n{text}{worker._output()}")
    return "\n".join(reports)
