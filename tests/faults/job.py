"""The job of one round of the fault test: trains a small model and saves it, with a fault.

    python -m tests.faults.job '<round>' <folder>      by each rank

The script catches no error: a rank ends as a user's would. Into the folder each rank writes what
the judge reads: ``pid.r``, ``losses.r``, ``saved.r``, ``ended.r``; ``struck`` is the moment of the
fault, ``held.r`` lists the sockets and memory that the rank has open, ``named.r`` the files of
shared memory that it has opened.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe import Stage, is_recomputing, state
from procpipe.job.world import World
from tests.faults.rounds import ANY_MOMENT, SAVING, START, WIDTH, Round

#: Seconds between two looks at another rank; and how long a child waits for the other ranks to end.
_LOOK_EVERY_S, _LINGER_S = 0.005, 15.0

#: How long a rank waits for another one's note.
_NOTE_TIMEOUT_S = 30.0

#: What a rank saves beside its layers where it is disturbed, so that writing takes longer.
_BALLAST = 1 << 18


class FaultError(Exception):
    """Raised by faulty user code."""


class Fault:
    """The fault of a round, on this rank: -1 for a process that has none."""

    def __init__(self, round_: Round, rank: int = -1, folder: Path = Path()) -> None:
        self.round = round_
        self.rank = rank
        self.folder = folder
        self.step = -1
        self.inherited: set[str] = set()
        self._calls: dict[tuple[str, int], int] = {}

    def strike(self, where: str) -> None:
        """Make the fault happen, if this is its place, step, call and rank."""
        round_ = self.round
        number = self._calls[where, self.step] = self._calls.get((where, self.step), -1) + 1
        if self.step != round_.step:
            return
        if where == "forward" and 0 <= self.rank == round_.origin - 1 and number == 1:
            note(self.folder / "sent")  # what the micro-batch before this one has given
        if self.rank != round_.origin or where != round_.where or number != round_.micro_batch:
            return
        if where in ANY_MOMENT:
            threading.Timer(round_.moment_s, self._strike).start()
        else:
            self._strike()

    def _strike(self) -> None:
        if self.round.what == "nothing":
            return
        self.note_held("last")
        note(self.folder / "struck")
        signals = {
            "kill": signal.SIGKILL,
            "stop": signal.SIGSTOP,
            "stop for good": signal.SIGSTOP,
            "SIGTERM": signal.SIGTERM,
        }
        what = self.round.what
        if what in signals:
            os.kill(os.getpid(), signals[what])
        elif what == "kill the launcher":
            os.kill(os.getppid(), signal.SIGKILL)
        elif what == "exit":
            sys.exit(0)
        elif what in ("fork", "kill beside a child"):
            self._fork(kills=what != "fork")
        elif what.startswith("raise") or what == "catch":
            raise FaultError(f"fault in {self.round.where}")

    def _fork(self, *, kills: bool) -> None:
        """Fork a child, which ends as a script does, or lives longer than the ranks."""
        lives = kills or self.round.lives
        pid = os.fork()
        if pid == 0:
            of_host = Path("/proc/net/unix").read_text().splitlines()[1:]
            sockets = {f"socket:[{line.split()[6]}]" for line in of_host}
            kept = held_by("self") & sockets - self.inherited
            if kept:
                (self.folder / f"kept.{os.getpid()}").write_text(", ".join(sorted(kept)))
            if lives:
                self._outlive_others()
                os._exit(0)
            sys.exit(0)
        if kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if not lives:
            os.waitpid(pid, 0)

    def _outlive_others(self) -> None:
        """Wait until the scripts of the other ranks have ended, for some time at most."""
        others = [rank for rank in range(self.round.num_ranks) if rank != self.rank]
        _wait_until(lambda: all(map(self._has_ended, others)), _LINGER_S)

    def _has_ended(self, rank: int) -> bool:
        with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
            pid = int((self.folder / f"pid.{rank}").read_text())
            is_zombie = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
            return is_zombie or (self.folder / f"ended.{rank}").exists()
        return True

    def note_held(self, moment: str) -> None:
        """Write down which sockets and memory this process has made or opened."""
        names = sorted(held_by("self") - self.inherited)
        (self.folder / f"held.{self.rank}.{moment}").write_text(json.dumps(names))

    def wait(self) -> None:
        """Wait before the step of the fault, if a message is to be under way then."""
        name = self.round.waits_for(self.rank)
        if name and self.step == self.round.step:
            _wait_until((self.folder / name).exists, _NOTE_TIMEOUT_S)


class FaultyLayer(nn.Module):
    """A layer that may fail in each of its methods; its values depend on its number only."""

    def __init__(self, fault: Fault, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=torch.float64))
        if fault.round.when == SAVING:
            self.register_buffer("ballast", torch.zeros(_BALLAST, dtype=torch.float64))
        self._fault = fault if number % 2 == fault.round.layer else Fault(fault.round)
        self._number = number
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the weight; on the meta device that is done in ``Stage()``."""
        if self.weight.is_meta:
            return
        self._fault.strike("Stage()")
        generator = torch.Generator().manual_seed(self._fault.round.seed + self._number)
        with torch.no_grad():
            self.weight.normal_(std=0.5, generator=generator)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply by the weight, or fail."""
        self._fault.strike("recompute" if is_recomputing() else "forward")
        output = (input @ self.weight).tanh()
        return FaultyBackward.apply(output, self._fault)  # type: ignore[no-any-return]


class FaultyBackward(torch.autograd.Function):
    """Returns its input; the fault may happen in its backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, fault: Fault) -> Tensor:
        """Pass on."""
        ctx.fault = fault
        return input.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Pass on, or fail."""
        ctx.fault.strike("backward")
        return gradient, None


class Progress:
    """Something that a user saves beside the model; the fault may happen while it is saved."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self.step = -1

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps, or fail."""
        self._fault.strike("state_dict")
        self.step = self._fault.step + 1
        return {"step": self.step}

    def load_state_dict(self, values: dict[str, int]) -> None:
        """Take over the number of steps."""
        self.step = values["step"]


def model_of(fault: Fault) -> nn.Sequential:
    """Build two layers a stage."""
    numbers = range(2 * fault.round.num_stages)
    layers = [FaultyLayer(fault, k) for k in numbers]
    if fault.round.has_ties:
        layers[-1].weight = layers[0].weight
    return nn.Sequential(OrderedDict((f"l{k}", layers[k]) for k in numbers))


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with a state of its own."""
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def shares_of(round_: Round) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Make the mini-batches: for each step, each replica's own; uneven ones, too."""
    generator = torch.Generator().manual_seed(round_.seed)
    num_rows = round_.rows * round_.chunks
    for step in range(round_.num_steps):
        size = (2, num_rows - step % round_.chunks, WIDTH)
        pairs = [
            torch.randn(size, generator=generator, dtype=torch.float64)
            for _ in range(round_.replicas)
        ]
        yield [(pair[0], pair[1]) for pair in pairs]


def loader_of(fault: Fault) -> Iterator[tuple[Tensor, Tensor]]:
    """Make the mini-batches of this rank's replica, or fail."""
    for step, shares in enumerate(shares_of(fault.round)):
        fault.step = step
        fault.strike("loader")
        yield shares[fault.rank // fault.round.num_stages]


def stage_of(fault: Fault) -> Stage:
    """Build the stage; the only place that knows how a transport is chosen."""
    round_ = fault.round

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        fault.strike("loss")
        return F.mse_loss(output, target)

    World.transport = round_.transport
    with torch.device("meta" if round_.when == START else "cpu"):
        model = model_of(fault)
    return Stage(
        model,
        [2] * round_.num_stages,
        chunks=round_.chunks,
        checkpoint=round_.checkpoint,
        loss_fn=loss_of,
        timeout_s=round_.timeout_s,
        stall_timeout_s=round_.stall_timeout_s,
        replicas=round_.replicas,
    )


def run_rank(round_: Round, folder: Path) -> None:
    """Train on this rank until the fault, or to the end."""
    rank = int(os.environ["RANK"])
    inherited = held_by("self")
    sys.addaudithook(functools.partial(note_named_memory, folder / f"named.{rank}"))
    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    atexit.register(note, folder / f"ended.{rank}")  # the first to be registered runs last
    torch.set_num_threads(1)
    fault = Fault(round_, rank, folder)
    fault.inherited = inherited
    stage = stage_of(fault)
    fault.strike("built")
    optimizer, progress = optimizer_of(stage), Progress(fault)
    saving: state.Saving | None = None
    stop_on = (signal.SIGTERM,) if round_.what == "SIGTERM" else ()
    for step, batch in enumerate(stage.batches(loader_of(fault), stop_on=stop_on)):
        fault.step = step
        fault.wait()
        fault.strike("between")
        fault.strike("any moment")
        is_faulty = rank == round_.origin and step == round_.step
        if is_faulty and round_.what == "leave the loop":
            note(folder / "struck")
            return
        if is_faulty and round_.what == "call another method":
            note(folder / "struck")
            stage.clip_grad_norm_(1.0)
        optimizer.zero_grad()
        with catching(round_, "forward"):
            append(folder / f"losses.{rank}", call(stage, round_, *batch))
        fault.strike("optimizer")
        optimizer.step()
        fault.strike("any moment of save")
        with catching(round_, "state_dict"):
            saving = save(stage, optimizer, progress, folder, fault)
        fault.strike("saved")
        if step == 0:
            fault.note_held("first")
    fault.strike("close")
    if saving is not None:
        saving.wait()
        (folder / f"saved.{rank}").write_text(str(progress.step))
    stage.close()
    fault.strike("closed")


def save(
    stage: Stage, optimizer: torch.optim.Optimizer, progress: Progress, folder: Path, fault: Fault
) -> state.Saving:
    """Save; note which save is over: this one, or in the background the one before."""
    is_background = fault.round.asynchronous and fault.step > 0
    saving = state.save(
        folder / "state",
        stage,
        optimizer,
        extra={"progress": progress},
        step=fault.step + 1,
        keep=2,
        asynchronous=is_background,
    )
    saved = fault.step if is_background else fault.step + 1
    (folder / f"saved.{fault.rank}").write_text(str(saved))
    return saving


def call(stage: Stage, round_: Round, input: Any, target: Any) -> float:
    """Run a mini-batch by the round's method; return its loss."""
    if round_.method == "step":
        return stage.step(input, target).item()
    loss = F.mse_loss(stage(input), target)
    loss.backward()
    return float(stage.fetch(loss))


def catching(round_: Round, where: str) -> contextlib.AbstractContextManager[object]:
    """Catch the fault there, if that is what this round's user does."""
    is_here = round_.what == "catch" and round_.where == where
    return contextlib.suppress(FaultError) if is_here else contextlib.nullcontext()


def train_plainly(round_: Round) -> Iterator[tuple[float, nn.Module, torch.optim.Optimizer]]:
    """Train the plain model, in one process; yield its loss and itself after each step."""
    model = model_of(Fault(round_))
    optimizer = optimizer_of(model)
    for shares in shares_of(round_):
        num_rows = sum(len(input) for input, _ in shares)
        optimizer.zero_grad()
        total = 0.0
        for input, target in shares:
            for x, y in zip(input.chunk(round_.chunks), target.chunk(round_.chunks), strict=True):
                part = F.mse_loss(model(x), y) * (len(x) / num_rows)
                part.backward()
                total += part.item()
        optimizer.step()
        yield total, model, optimizer


# -- notes for the judge -------------------------------------------------------------------------


def note(path: Path) -> None:
    """Write the time into a file, as one that is there as a whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(str(time.monotonic_ns()))
    draft.rename(path)


def append(path: Path, value: float) -> None:
    """Add a line to a file."""
    with path.open("a") as file:
        file.write(f"{value!r}\n")


def note_named_memory(path: Path, event: str, arguments: tuple[Any, ...]) -> None:
    """Write down, as an audit hook, which files of shared memory this process opens by name."""
    if event == "open" and str(arguments[0]).startswith("/dev/shm/"):
        with path.open("a") as file:
            file.write(f"{arguments[0]}\n")


def held_by(pid: int | str) -> set[str]:
    """Name the sockets and anonymous files that a process has open or mapped, by their inodes."""
    names = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith("socket:"):
                    names.add(target)
                elif target.startswith(("/memfd:", "/dev/shm")):
                    names.add(f"memory:{os.stat(entry.path).st_ino}")
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/memfd:" in line or "/dev/shm" in line:
                names.add(f"memory:{line.split()[4]}")
    return names


def _wait_until(ready: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not ready() and time.monotonic() < deadline_s:
        time.sleep(_LOOK_EVERY_S)


if __name__ == "__main__":
    run_rank(Round(**json.loads(sys.argv[1])), Path(sys.argv[2]))
