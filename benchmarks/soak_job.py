"""The job of one round of the soak test: trains a small model, with a fault on one rank.

    torchrun … -m benchmarks.soak_job '<round>' <folder>    one round, as each of its ranks
    python -m benchmarks.soak_job --serve [--frugal]        many: one start of Python, forked ranks

A round comes as JSON (``benchmarks.soak_rounds.Round``). Whatever happens, the script itself
catches nothing: a rank ends as a user's would. Ranks that get to the end compare all losses with
the plain model's.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import resource
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.soak_rounds import FEW_FILES, Round
from procpipe import Stage, is_recomputing

WIDTH = 8

#: How often a rank looks whether another one has begun to wait.
_LOOK_EVERY_S = 0.01

#: How long what outlives its rank waits for the others to end.
_LINGER_S = 15.0

#: How long a layer takes, of which a stall would be reported.
_MUTE_S = 1.2

#: How long it may take to begin.
_WAIT_TIMEOUT_S = 30.0


class IllError(Exception):
    """What a faulty piece of user code raises."""


class Illness:
    """The fault of a round, as one rank has it: what happens when the moment comes.

    Args:
        this: the round.
        rank: this rank.
        folder: where every rank has written its process id.
    """

    def __init__(self, this: Round, rank: int, folder: Path) -> None:
        self._this = this
        self._rank = rank
        self._folder = folder
        self.step = -1
        self._num_times = 0

    def strike(self, where: str) -> None:
        """Do the harm of the round, if this is the place, the step and the rank for it."""
        this = self._this
        who = this.actor if this.act == "kill the waiting" else this.origin
        if where == this.where and self.step == this.step and self._rank == who:
            self._num_times += 1
            if self._num_times == this.micro_batch + 1:
                self._strike()

    def _strike(self) -> None:
        note(self._folder / "struck")
        acts: dict[str, Callable[[], object]] = {
            "raise": self._raise,
            "catch": self._raise,
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "exit": lambda: sys.exit(0),
            "allocate": lambda: torch.empty(1 << 50),
            "kill the waiting": self._kill_the_waiting,
            "fork": self._fork,
            "kill beside a child": self._kill_beside_a_child,
            "raise beside a thread": lambda: self._beside_a_thread(self._raise),
            "exit beside a thread": lambda: self._beside_a_thread(lambda: sys.exit(0)),
            "mute": lambda: time.sleep(_MUTE_S),
        }
        acts.get(self._this.act, lambda: None)()

    def _raise(self) -> None:
        raise IllError(f"ill in {self._this.where}")

    def _kill_the_waiting(self) -> None:
        """Kill another rank once it sleeps, which it does when it waits for this one."""
        pid = int((self._folder / f"pid.{self._this.origin}").read_text())
        deadline_s = time.monotonic() + _WAIT_TIMEOUT_S
        num_asleep = 0
        while num_asleep < 5 and time.monotonic() < deadline_s:
            is_asleep = psutil.Process(pid).status() == psutil.STATUS_SLEEPING
            num_asleep = num_asleep + 1 if is_asleep else 0
            time.sleep(_LOOK_EVERY_S)
        note(self._folder / "struck")
        os.kill(pid, signal.SIGKILL)

    def _fork(self) -> None:
        """Let a forked child end as a script does."""
        pid = os.fork()
        if pid == 0:
            sys.exit(0)
        os.waitpid(pid, 0)

    def _kill_beside_a_child(self) -> None:
        """Be killed while a forked child, which has all that was open here, lives on."""
        if os.fork() == 0:
            self._outlive_others()
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    def _beside_a_thread(self, act: Callable[[], None]) -> None:
        """Act while a thread keeps this process from its end."""
        threading.Thread(target=self._outlive_others).start()
        act()

    def _outlive_others(self) -> None:
        """Wait until the scripts of the other ranks have ended, for some time at most."""
        deadline_s = time.monotonic() + _LINGER_S
        others = [rank for rank in range(self._this.num_ranks) if rank != self._rank]
        while time.monotonic() < deadline_s and not all(map(self._has_ended, others)):
            time.sleep(_LOOK_EVERY_S)

    def _has_ended(self, rank: int) -> bool:
        with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
            pid = int((self._folder / f"pid.{rank}").read_text())
            is_zombie = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
            return is_zombie or (self._folder / f"ended.{rank}").exists()
        return True

    def be_killed_soon(self) -> None:
        """Be killed while this process's main thread is busy with its start."""

        def kill() -> None:
            time.sleep(self._this.moment / 10)
            note(self._folder / "struck")
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()


class IllLayer(nn.Linear):
    """A layer that may fall ill in its forward, its recomputation or its backward."""

    def __init__(self, illness: Illness, act: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self._illness = illness
        self._act = act

    def forward(self, input: Tensor) -> Tensor:
        """Run the layer, or fall ill."""
        self._illness.strike("recompute" if is_recomputing() else "forward")
        output: Tensor = IllBackward.apply(super().forward(input), self._illness)  # type: ignore[no-untyped-call]
        if self._act == "other dtype":
            return output.float()
        if self._act == "other shape":
            return output[:, 1:]
        return output * torch.nan if self._act == "nan" else output


class IllBackward(torch.autograd.Function):
    """Passes all on, and strikes on the way back."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, illness: Illness) -> Tensor:
        """Pass on."""
        ctx.illness = illness
        return input.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Pass on, or fall ill."""
        ctx.illness.strike("backward")
        return gradient, None


def model_of(this: Round, illness: Illness) -> nn.Sequential:
    """Build two layers a stage; either of the ill stage's may be the ill one."""
    torch.manual_seed(this.seed)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for k in range(2 * this.num_ranks):
        is_actors = k == 2 * this.actor + this.layer and this.act == "kill the waiting"
        is_ill = k == 2 * this.origin + this.layer or is_actors
        act = this.act if k == 2 * this.origin + this.layer else ""
        layers[f"l{k}"] = IllLayer(illness, act) if is_ill else nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(layers)


def run_rank(this: Round, folder: Path) -> None:
    """Train on this rank until the fault, or to the end."""
    rank = int(os.environ["RANK"])
    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    atexit.register(note, folder / f"ended.{rank}")  # the first to be registered runs last
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    illness = Illness(this, rank, folder)

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        illness.strike("loss")
        return F.mse_loss(output, target)

    prepare(this)
    if this.act in ("several stages", "kill while building"):
        run_stages_before(this, rank, illness)
    stage = Stage(
        model_of(this, illness),
        [2] * this.num_ranks,
        chunks=this.chunks,
        checkpoint=this.checkpoint,
        loss_fn=loss_of,
        check_loss=True,
        stall_timeout_s=this.stall_timeout_s,
        transport=this.transport,
    )
    losses = []
    for step, (input, target) in enumerate(stage.batches(batches_of(this, illness))):
        illness.step = step
        illness.strike("between")
        if rank == this.origin and step == this.step and this.act == "leave":
            break
        losses.append(call(stage, this, rank, step, input, target))
        illness.strike("optimizer")
        descend(stage)
    if this.act != "leave":
        check_losses(this, losses)


def prepare(this: Round) -> None:
    """Set this process up as a round asks."""
    if this.act == "few files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, FEW_FILES))
    if this.act == "mute" and this.layer == 0:
        sys.stderr = None
    elif this.act == "mute":
        read_end, write_end = os.pipe()
        os.dup2(write_end, 2)
        os.close(write_end)
        os.close(read_end)


def run_stages_before(this: Round, rank: int, illness: Illness) -> None:
    """Run some stages in turn before the one that is trained; a rank may be killed before that."""
    for number in range(3):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(this.num_ranks)))
        stage = Stage(model, [1] * this.num_ranks, chunks=this.chunks, transport=this.transport)
        is_the_one = number == 1 + this.step % 2  # all have met before
        if this.act == "kill while building" and is_the_one and rank == this.origin:
            illness.be_killed_soon()
        with torch.no_grad():
            stage(torch.ones(this.chunks, WIDTH))
        stage.close()


def note(path: Path) -> None:
    """Write down that the moment is now."""
    path.write_text(str(time.monotonic_ns()))


def call(stage: Stage, this: Round, rank: int, step: int, input: Any, target: Any) -> float:
    """Make one step by the round's method; return its loss."""
    is_ill = rank == this.origin and step == this.step
    if is_ill and this.act == "another call":
        stage.clip_grad_norm_(1.0)
    elif is_ill and this.act == "catch":
        with contextlib.suppress(IllError):
            stage.step(input, target)
    if this.method == "step" or this.act == "catch":
        return stage.step(input, target).item()
    loss = F.mse_loss(stage(input), target)
    loss.backward()
    return float(stage.fetch(loss))


def descend(module: nn.Module) -> None:
    """Do what SGD does, but for the second that the import of an optimizer takes."""
    with torch.no_grad():
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None


def batches_of(this: Round, illness: Illness) -> Iterator[tuple[Tensor, Tensor]]:
    """Make the mini-batches; rank 0 reads them."""
    generator = torch.Generator().manual_seed(this.seed)
    for step in range(this.num_steps):
        illness.step = step
        illness.strike("loader")
        num_samples = this.samples * this.chunks - step % this.chunks  # also uneven ones
        pair = torch.randn(2, num_samples, WIDTH, generator=generator)
        yield pair[0], pair[1]


def check_losses(this: Round, losses: list[float]) -> None:
    """Compare with the plain model, trained here over the same micro-batches."""
    well = Illness(this, -1, Path())
    model = model_of(this, well)
    truth = []
    for input, target in batches_of(this, well):
        total = 0.0
        for x, y in zip(input.chunk(this.chunks), target.chunk(this.chunks), strict=True):
            part = F.mse_loss(model(x), y) * (len(x) / len(input))
            part.backward()
            total += part.item()
        truth.append(total)
        descend(model)
    if not torch.allclose(torch.tensor(losses), torch.tensor(truth), rtol=1e-9, atol=0.0):
        raise AssertionError(f"the losses are {losses}, the plain model's {truth}")


# -- many rounds by one start of Python -----------------------------------------------------------


def serve(orders: TextIO, *, is_frugal: bool) -> None:
    """Run a round for each line ``[round, folder, port]``; answer with the ranks' exit codes.

    Args:
        orders: where the lines come from.
        is_frugal: whether to spare forked processes some of the work of ending.
    """
    if is_frugal:
        gc.collect()
        gc.freeze()  # else each forked process walks, and so copies, all that is loaded as it ends
    for line in orders:
        fields, folder, port = json.loads(line)
        this = Round(**fields)
        pids = []
        for rank in range(this.num_ranks):
            pid = os.fork()
            if pid == 0:
                become_rank(rank, this.num_ranks, port, Path(folder))
                return run_rank(this, Path(folder))  # ends as a script does
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)
    return None


def become_rank(rank: int, num_ranks: int, port: int, folder: Path) -> None:
    """Make a forked process look like one that a launcher has started."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TMPDIR=str(folder / "tmp"),
    )
    os.close(0)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        path = folder / "logs" / str(rank) / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, descriptor)
        os.close(log)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.stdin, is_frugal="--frugal" in sys.argv)
    else:
        run_rank(Round(**json.loads(sys.argv[1])), Path(sys.argv[2]))
