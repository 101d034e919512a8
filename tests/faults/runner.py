"""Runs rounds of the fault test: starts the job, watches it, and looks at what it has left.

Ranks without a launcher are forks of a process that has imported torch (tests/dist/forks.py), and
so are launchers and their ranks unless ``fresh`` starts new interpreters, as a user does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from procpipe import state
from tests.dist.forks import ROOT, Forked, fork_server
from tests.dist.jobs import TOKEN, job_of, kill_job
from tests.dist.pool import abort_all, job_environment
from tests.dist.script import TORCHRUN, environments_of
from tests.faults.job import Fault, Progress, held_by, model_of, optimizer_of, train_plainly
from tests.faults.rounds import CLOSE, NONE, PROCPIPE_RUN, START, Ending, Round, faults_of

#: A round that takes longer is a hang. A quiet one takes 0.5 to 12 s, and 40 s where torchrun
#: waits half a minute before it kills a stopped rank.
TIME_LIMIT_S = 300.0

#: How long processes may take to vanish after the launcher, or all ranks, have ended.
VANISH_TIMEOUT_S = 10.0

#: How long a rank that no stall report names stays stopped.
_STOPPED_S = 1.0

_LOOK_EVERY_S = 0.02


class Job:
    """The processes of one round.

    Args:
        round_: the round.
        folder: an empty folder for what the job writes.
        fresh: whether a launcher is a new interpreter, and its ranks are.
    """

    def __init__(self, round_: Round, folder: Path, *, fresh: bool) -> None:
        self._round = round_
        self._folder = folder
        self._token = uuid.uuid4().hex
        self._log = folder / "launcher.log"
        (folder / "tmp").mkdir()
        self._start_s = time.time()
        self._stopped_s: float | None = None
        self._env = job_environment({TOKEN: self._token, "TMPDIR": str(folder / "tmp")})
        self._env["PYTHONFAULTHANDLER"] = "1"
        words = ["-m", "tests.faults.job", json.dumps(dataclasses.asdict(round_)), str(folder)]
        self._processes: list[Forked | subprocess.Popen[bytes]]
        if round_.launcher == NONE:
            self._processes = self._start_ranks(words)
        else:
            number = f"--nproc-per-node={round_.num_ranks}"
            start = [*TORCHRUN, number, "-r", "3"]
            if round_.launcher == PROCPIPE_RUN:
                start = ["-m", "procpipe.launch", "run", number]
            words = [*start, "--log-dir", str(folder / "logs"), *words]
            self._processes = [self._start(words, self._log, {}, fresh=fresh)]

    def _start_ranks(self, words: list[str]) -> list[Forked | subprocess.Popen[bytes]]:
        processes = []
        for env in environments_of(self._round.num_ranks):
            log = self._folder / "logs" / env["RANK"] / "output.log"
            log.parent.mkdir(parents=True)
            processes.append(self._start(words, log, env, fresh=False))
        return processes

    def _start(
        self, words: list[str], path: Path, env: dict[str, str], *, fresh: bool
    ) -> Forked | subprocess.Popen[bytes]:
        env = self._env | env
        with open(os.devnull) as stdin, path.open("ab") as log:
            files = (stdin.fileno(), log.fileno(), log.fileno())
            if not fresh:
                num_ranks = 0 if self._round.launcher == NONE else self._round.num_ranks
                return fork_server().start(
                    words,
                    env=env,
                    cwd=ROOT,
                    files=files,
                    tears_down=self._round.tears_down,
                    num_ranks=num_ranks,
                )
            return subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env=env,
                stdin=stdin,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self, timeout_s: float) -> tuple[int, ...]:
        """Wait for the end; continue what is stopped. Return the exit codes; () for a hang."""
        deadline_s = time.monotonic() + timeout_s
        codes = [process.poll() for process in self._processes]
        while None in codes and time.monotonic() < deadline_s:
            if self._round.what.startswith("stop"):
                self._continue_stopped(codes)
            time.sleep(_LOOK_EVERY_S)
            codes = [process.poll() for process in self._processes]
        return () if None in codes else tuple(code for code in codes if code is not None)

    def _continue_stopped(self, codes: list[int | None]) -> None:
        round_, origin = self._round, self._round.origin
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            pid = int((self._folder / f"pid.{origin}").read_text())
            if psutil.Process(pid).status() != psutil.STATUS_STOPPED:
                return
            self._stopped_s = self._stopped_s or time.monotonic()
            is_unseen = round_.when in (START, CLOSE) or round_.where.startswith("any")
            if round_.what == "stop for good":
                is_over = round_.launcher == NONE and codes.count(None) == 1
            elif is_unseen:
                is_over = time.monotonic() > self._stopped_s + _STOPPED_S
            else:
                is_over = any(f"process {pid} is stopped" in text for text in self.outputs())
            if is_over:
                os.kill(pid, signal.SIGCONT)

    def abort(self) -> None:
        """Make every process write the stacks of its threads, and end; kill the rest."""
        ours = [*job_of(self._token)]
        ranks = [process for process in ours if process.pid != self._processes[0].pid]
        abort_all(process.pid for process in (ranks if self._round.launcher != NONE else ours))
        psutil.wait_procs(ours, 5.0)
        self.kill()

    def kill(self) -> None:
        """Kill what is alive."""
        kill_job(self._token)
        for process in self._processes:
            process.wait(VANISH_TIMEOUT_S)

    def outputs(self) -> Iterator[str]:
        """Read what each rank wrote."""
        logs = sorted(self._folder.glob("logs/**/*.log"))
        for rank in range(self._round.num_ranks):
            ours = [log for log in logs if log.parent.name in (str(rank), f"rank_{rank}")]
            yield "".join(log.read_text(errors="replace") for log in ours)

    def launcher_output(self) -> str:
        """Read what the launcher wrote."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def left(self) -> list[str]:
        """Wait until nothing of the job is there; name what stays."""
        deadline_s = time.monotonic() + VANISH_TIMEOUT_S
        # A process that ends under load may still have its sockets, but no environment.
        while (left := [*self._left()]) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_EVERY_S)
        return left

    def _left(self) -> Iterator[str]:
        processes = [*job_of(self._token)]
        for process in processes:
            with contextlib.suppress(psutil.Error):
                yield f"process {process.pid}: {' '.join(process.cmdline())[:200]}"
        if not processes:
            yield from self._held_by_others()
        for path in self._folder.glob("kept.*"):
            yield f"in a forked child, sockets to other ranks: {path.read_text()}"
        notes = [path.read_text() for path in self._folder.glob("named.*")]
        yield from (f"file {name}" for name in {*"".join(notes).split()} if Path(name).exists())
        for path in sorted((self._folder / "tmp").rglob("*")):
            name = str(path.relative_to(self._folder / "tmp"))
            if path.is_file() and "torchelastic" not in name:  # torchrun's own are not ours
                yield f"temporary file {name}"

    def _held_by_others(self) -> Iterator[str]:
        """Name sockets and memory of the job that are there when its processes are not."""
        held = {
            name for path in self._folder.glob("held.*") for name in json.loads(path.read_text())
        }
        names = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.create_time() > self._start_s - 1.0:
                    names[process.pid] = held_by(process.pid)
        for pid, theirs in names.items():
            yield from (f"{name} in process {pid}" for name in theirs & held)
        for entry in os.scandir("/dev/shm"):
            if f"memory:{entry.inode()}" in held:
                yield entry.path
        in_use = set().union(*names.values())
        for name in held - in_use:
            if name.startswith("socket:") and name[8:-1] in _listening():
                yield f"{name} listens"


def _listening() -> set[str]:
    """Return the inodes of all sockets on which a process listens."""
    inodes = set()
    for name, state_of, inode in (("unix", 5, 6), ("tcp", 3, 9), ("tcp6", 3, 9)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[state_of] in ("01", "0A") and (name != "unix" or fields[3] == "00010000"):
                inodes.add(fields[inode])
    return inodes


def ending_of(round_: Round, folder: Path, *, fresh: bool, time_limit_s: float) -> Ending:
    """Run a round in an empty folder; return how it ended."""
    start_s = time.monotonic()
    job = Job(round_, folder, fresh=fresh)
    try:
        codes = job.wait(time_limit_s)
        duration_s = time.monotonic() - start_s
        if not codes:
            job.abort()
        left = job.left()
    finally:
        job.kill()
    fault_s, job_s = _times(folder, start_s + duration_s)
    saved = [int(path.read_text() or 0) for path in folder.glob("saved.*")]
    loaded_step, wrong_values = _compare(round_, folder)
    return Ending(
        codes=codes,
        outputs=tuple(job.outputs()),
        launcher_output=job.launcher_output(),
        duration_s=duration_s,
        has_struck=(folder / "struck").exists(),
        fault_s=fault_s,
        job_s=job_s,
        left=tuple(left),
        saved_step=max(saved, default=0),
        loaded_step=loaded_step,
        steps=tuple(len(path.read_text().split()) for path in folder.glob("losses.*")),
        wrong_values=tuple(wrong_values),
    )


def _times(folder: Path, end_s: float) -> tuple[float | None, float]:
    """Return the seconds from the fault to the end of the last script, and to that of the job."""
    try:
        struck_s = int((folder / "struck").read_text()) / 1e9
    except OSError:
        return None, 0.0
    ended_s = [int(path.read_text()) / 1e9 for path in folder.glob("ended.*")]
    return (max(ended_s) - struck_s if ended_s else None), end_s - struck_s


def _compare(round_: Round, folder: Path) -> tuple[int, list[str]]:
    """Compare losses and the newest saved state with the plain model's.

    Returns the steps after which that state was saved, and what differs.
    """
    wrong, loaded_step = [], 0
    fault = Fault(round_)
    model, progress = model_of(fault), Progress(fault)
    optimizer = optimizer_of(model)
    generators = random.getstate(), torch.random.get_rng_state()
    try:
        found = state.load(
            folder / "state", model, optimizer, extra={"progress": progress}, missing_ok=True
        )
        loaded_step = 0 if found is None else found.step or 0
    except Exception as error:  # a saved state that does not load is what is looked for
        wrong.append(f"the newest saved state does not load: {type(error).__name__}: {error}")
    finally:
        random.setstate(generators[0])
        torch.random.set_rng_state(generators[1])
    if loaded_step and progress.step != loaded_step:
        wrong.append(f"progress of step {progress.step} in the state of step {loaded_step}")
    losses = {path.name: path.read_text().split() for path in folder.glob("losses.*")}
    num_steps = max([loaded_step, *map(len, losses.values())])
    for step, (loss, truth, its_optimizer) in enumerate(train_plainly(round_)):
        if step == num_steps:
            break
        for name, theirs in losses.items():
            if len(theirs) > step and not _are_close(float(theirs[step]), loss):
                wrong.append(f"{name}: {theirs[step]} in step {step}, the plain model's {loss}")
        if step + 1 == loaded_step:
            wrong += _differences(model, truth, optimizer, its_optimizer)
    return loaded_step, wrong


def _differences(
    model: torch.nn.Module,
    truth: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    its_optimizer: torch.optim.Optimizer,
) -> Iterator[str]:
    """Name the parameters, and the state of the optimizer, that differ."""
    named = dict(model.named_parameters())
    for name, expected in truth.named_parameters():
        if not _are_close(named[name], expected):
            yield f"saved parameter {name}"
        momentum = optimizer.state[named[name]].get("momentum_buffer")
        if momentum is None or not _are_close(
            momentum, its_optimizer.state[expected]["momentum_buffer"]
        ):
            yield f"saved momentum of {name}"


def _are_close(value: torch.Tensor | float, expected: torch.Tensor | float) -> bool:
    pair = torch.as_tensor(value), torch.as_tensor(expected)
    return torch.allclose(*pair, rtol=1e-9, atol=1e-12)


class Rounds:
    """Runs rounds, prints what went wrong and counts.

    Args:
        fresh: whether launchers are new interpreters.
        is_verbose: whether to print a line a round.
        command: the command that repeats a round, without its number.
        time_limit_s: of a round.
    """

    def __init__(
        self, *, fresh: bool, is_verbose: bool, command: str, time_limit_s: float = TIME_LIMIT_S
    ) -> None:
        self._fresh = fresh
        self._is_verbose = is_verbose
        self._command = command
        self._time_limit_s = time_limit_s
        self.sums: Counter[str] = Counter()

    def run(self, number: int, round_: Round) -> list[str]:
        """Run a round; return what was wrong with its end."""
        folder = Path(tempfile.mkdtemp(prefix="procpipe-faults-"))
        try:
            ending = ending_of(round_, folder, fresh=self._fresh, time_limit_s=self._time_limit_s)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        faults = faults_of(round_, ending)
        self.sums["rounds"] += 1
        self.sums["wrong"] += bool(faults)
        self.sums["hangs"] += not ending.codes
        self.sums["struck"] += ending.has_struck
        if self._is_verbose:
            verdict = "WRONG" if faults else "ok"
            print(f"{number:4d} {verdict:5} {ending.duration_s:5.1f} s  {round_}", flush=True)
        if faults:
            self._print_wrong(number, round_, faults, ending)
        return faults

    def print_sums(self) -> None:
        """Print the counts."""
        print(", ".join(f"{count} {name}" for name, count in self.sums.items()))

    def _print_wrong(self, number: int, round_: Round, faults: list[str], ending: Ending) -> None:
        print(f"\nround {number} went wrong: {round_}\n  " + "\n  ".join(faults))
        print(f"  repeat it with: {self._command} --first {number} --rounds 1")
        print(f"  exit codes {ending.codes} after {ending.duration_s:.1f} s")
        for rank, text in enumerate(ending.outputs):
            print(f"--- rank {rank} wrote\n{text.rstrip()}")
        print(f"--- the launcher wrote\n{ending.launcher_output.rstrip()}\n", flush=True)
