"""Runs rounds of the fault test: starts the job, watches it, and looks at what it has left."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from procpipe import state
from tests.dist import script
from tests.dist.jobs import Job, Process
from tests.faults.job import Fault, Progress, held_by, model_of, optimizer_of, train_plainly
from tests.faults.rounds import CLOSE, NONE, START, TORCHRUN, Ending, Round, faults_of

#: A round that takes longer is a hang. A quiet one takes 0.5 to 12 s, and 40 s where torchrun
#: waits half a minute before it kills a stopped rank.
TIME_LIMIT_S = 300.0

#: How long processes may take to vanish after the launcher, or all ranks, have ended.
VANISH_TIMEOUT_S = 10.0

#: How long a rank that no stall report names stays stopped.
_STOPPED_S = 1.0

_LOOK_EVERY_S = 0.02


def run(
    number: int,
    round_: Round,
    *,
    command: str = "",
    is_new: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
) -> list[str]:
    """Run a round, print it if its end was wrong, and return what was wrong.

    Args:
        number: of the round.
        round_: what happens.
        command: the command that repeats a round, without its number.
        is_new: whether a launcher and its ranks are new interpreters.
        time_limit_s: a round that takes longer is a hang.
    """
    with Job() as job:
        ending = ending_of(round_, job, is_new=is_new, time_limit_s=time_limit_s)
    if faults := faults_of(round_, ending):
        print(f"\nround {number} went wrong: {round_}\n  " + "\n  ".join(faults))
        print(f"  repeat it with: {command} --first {number} --rounds 1")
        print(f"  exit codes {ending.codes} after {ending.duration_s:.1f} s")
        for rank, text in enumerate(ending.outputs):
            print(f"--- rank {rank} wrote\n{text.rstrip()}")
        print(f"--- the launcher wrote\n{ending.launcher_output.rstrip()}\n", flush=True)
    return faults


def ending_of(round_: Round, job: Job, *, is_new: bool, time_limit_s: float) -> Ending:
    """Run a round in a job; return how it ended."""
    start_s, folder = time.monotonic(), job.path
    processes = start(round_, job, is_new=is_new)
    codes = wait(round_, processes, start_s + time_limit_s)
    duration_s = time.monotonic() - start_s
    if not codes:
        job.output_and_stacks()
    left = what_is_left(job, time.time() - duration_s)
    ended_s = [int(path.read_text()) / 1e9 for path in folder.glob("ended.*")]
    struck_s = [int(path.read_text()) / 1e9 for path in folder.glob("struck")]
    saved = [int(path.read_text() or 0) for path in folder.glob("saved.*")]
    loaded_step, wrong_values = compare(round_, folder)
    return Ending(
        codes=codes,
        outputs=tuple(outputs(round_, processes)),
        launcher_output="" if round_.launcher == NONE else processes[0].output,
        duration_s=duration_s,
        has_struck=bool(struck_s),
        fault_s=max(ended_s) - struck_s[0] if ended_s and struck_s else None,
        left=tuple(left),
        saved_step=max(saved, default=0),
        loaded_step=loaded_step,
        steps=tuple(len(path.read_text().split()) for path in folder.glob("losses.*")),
        wrong_values=tuple(wrong_values),
    )


# -- the processes -------------------------------------------------------------------------------


def start(round_: Round, job: Job, *, is_new: bool) -> list[Process]:
    """Start the launcher, or without one all ranks, which write into the job's folder."""
    tmp, number = job.path / "tmp", round_.num_ranks
    tmp.mkdir()
    words = ["-m", "tests.faults.job", json.dumps(dataclasses.asdict(round_)), job.path]
    if round_.launcher == NONE:
        environments: Any = script.environments_of(number)
        return [
            job.start(words, tears_down=round_.tears_down, TMPDIR=str(tmp), **env)
            for env in environments
        ]
    launcher = ["-m", "procpipe.launch", "run"]
    if round_.launcher == TORCHRUN:
        launcher = [*script.TORCHRUN, "--redirects=3"]
    options = [f"--nproc-per-node={number}", "--log-dir", job.path / "logs"]
    return [
        job.start(
            [*launcher, *options, *words],
            num_ranks=number,
            tears_down=round_.tears_down,
            is_new=is_new,
            TMPDIR=str(tmp),
        )
    ]


def wait(round_: Round, processes: list[Process], deadline_s: float) -> tuple[int, ...]:
    """Wait for the end; continue what is stopped. Return the exit codes; () for a hang."""
    stopped_s: float | None = None
    while None in (codes := [process.popen.poll() for process in processes]):
        if time.monotonic() > deadline_s:
            return ()
        pid = stopped_rank(round_, processes)
        if pid is not None:
            stopped_s = stopped_s or time.monotonic()
            if round_.what == "stop for good":
                is_over = round_.launcher == NONE and codes.count(None) == 1
            elif round_.when in (START, CLOSE) or round_.where.startswith("any"):
                is_over = time.monotonic() > stopped_s + _STOPPED_S
            else:
                is_over = any(f"process {pid} is stopped" in t for t in outputs(round_, processes))
            if is_over:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        time.sleep(_LOOK_EVERY_S)
    return tuple(code for code in codes if code is not None)


def stopped_rank(round_: Round, processes: list[Process]) -> int | None:
    """Return the process of the rank of the fault, if that has been stopped."""
    if round_.what.startswith("stop"):
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            pid = int((processes[0].job.path / f"pid.{round_.origin}").read_text())
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                return pid
    return None


def outputs(round_: Round, processes: list[Process]) -> Iterator[str]:
    """Read what each rank wrote."""
    if round_.launcher == NONE:
        yield from (process.output for process in processes)
        return
    logs = sorted(processes[0].job.path.glob("logs/**/*.log"))
    for rank in range(round_.num_ranks):
        ours = [log for log in logs if log.parent.name in (str(rank), f"rank_{rank}")]
        yield "".join(log.read_text(errors="replace") for log in ours)


# -- what is left --------------------------------------------------------------------------------


def what_is_left(job: Job, start_s: float) -> list[str]:
    """Wait until nothing of a job is there that began at a time; name what stays."""
    deadline_s = time.monotonic() + VANISH_TIMEOUT_S
    # A process that ends under load may still have its sockets, but no folder.
    while (left := [*_left(job, start_s)]) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_EVERY_S)
    return left


def _left(job: Job, start_s: float) -> Iterator[str]:
    processes = job.survivors()
    yield from (f"process: {words[:200]}" for words in processes)
    if not processes:
        yield from _held_by_others(job.path, start_s)
    for path in job.path.glob("kept.*"):
        yield f"in a forked child, sockets to other ranks: {path.read_text()}"
    notes = [path.read_text() for path in job.path.glob("named.*")]
    yield from (f"file {name}" for name in {*"".join(notes).split()} if Path(name).exists())
    for path in sorted((job.path / "tmp").rglob("*")):
        name = str(path.relative_to(job.path / "tmp"))
        if path.is_file() and "torchelastic" not in name:  # torchrun's own are not ours
            yield f"temporary file {name}"


def _held_by_others(folder: Path, start_s: float) -> Iterator[str]:
    """Name sockets and memory of the job that are there when its processes are not."""
    held = {name for path in folder.glob("held.*") for name in json.loads(path.read_text())}
    names = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.create_time() > start_s - 1.0:
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


# -- what was computed and saved -----------------------------------------------------------------


def compare(round_: Round, folder: Path) -> tuple[int, list[str]]:
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
