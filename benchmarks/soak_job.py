"""The job of one round of the soak test: trains a small model, with a fault on one rank.

    torchrun … -m benchmarks.soak_job '<round>' <folder>    one round, as each of its ranks
    python -m benchmarks.soak_job --serve [--frugal]        many: one start of Python, forked ranks

A round comes as JSON (``benchmarks.soak_rounds.Round``). The script catches no error: a rank ends
as a user's would. Ranks that get to the end compare all losses with the plain model's.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
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

#: Seconds between two checks whether another rank waits or has ended.
_CHECK_EVERY_S = 0.01

#: How long a thread or child that outlives its rank waits for the other ranks to end.
_LINGER_S = 15.0

#: How long a layer takes: so long that a stall would be reported.
_MUTE_S = 1.2

#: How long another rank may take to begin to wait.
_WAIT_TIMEOUT_S = 30.0


class FaultError(Exception):
    """Raised by faulty user code."""


class Fault:
    """The fault of a round on one rank.

    Args:
        round_: the round.
        rank: this rank.
        folder: where every rank has written its process id.
    """

    def __init__(self, round_: Round, rank: int, folder: Path) -> None:
        self._round = round_
        self._rank = rank
        self._folder = folder
        self.step = -1
        self._num_times = 0

    def strike(self, where: str) -> None:
        """Make the fault happen, if this is its place, step and rank."""
        round_ = self._round
        rank = round_.actor if round_.act == "kill the waiting" else round_.origin
        if where == round_.where and self.step == round_.step and self._rank == rank:
            self._num_times += 1
            if self._num_times == round_.micro_batch + 1:
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
        acts.get(self._round.act, lambda: None)()

    def _raise(self) -> None:
        raise FaultError(f"fault in {self._round.where}")

    def _kill_the_waiting(self) -> None:
        """Kill another rank once it sleeps, which it does when it waits for this one."""
        pid = int((self._folder / f"pid.{self._round.origin}").read_text())
        deadline_s = time.monotonic() + _WAIT_TIMEOUT_S
        num_asleep = 0
        while num_asleep < 5 and time.monotonic() < deadline_s:
            is_asleep = psutil.Process(pid).status() == psutil.STATUS_SLEEPING
            num_asleep = num_asleep + 1 if is_asleep else 0
            time.sleep(_CHECK_EVERY_S)
        note(self._folder / "struck")
        os.kill(pid, signal.SIGKILL)

    def _fork(self) -> None:
        """Fork a child, which ends as a script does."""
        pid = os.fork()
        if pid == 0:
            sys.exit(0)
        os.waitpid(pid, 0)

    def _kill_beside_a_child(self) -> None:
        """Kill this process while a forked child, which inherits its open files, stays alive."""
        if os.fork() == 0:
            self._outlive_others()
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    def _beside_a_thread(self, act: Callable[[], None]) -> None:
        """Act while a thread keeps this process from ending."""
        threading.Thread(target=self._outlive_others).start()
        act()

    def _outlive_others(self) -> None:
        """Wait until the scripts of the other ranks have ended, for some time at most."""
        deadline_s = time.monotonic() + _LINGER_S
        other_ranks = [rank for rank in range(self._round.num_ranks) if rank != self._rank]
        while time.monotonic() < deadline_s and not all(map(self._has_ended, other_ranks)):
            time.sleep(_CHECK_EVERY_S)

    def _has_ended(self, rank: int) -> bool:
        with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
            pid = int((self._folder / f"pid.{rank}").read_text())
            is_zombie = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
            return is_zombie or (self._folder / f"ended.{rank}").exists()
        return True

    def kill_soon(self) -> None:
        """Kill this process while its main thread is busy with its start."""

        def kill() -> None:
            time.sleep(self._round.moment / 10)
            note(self._folder / "struck")
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()


class FaultyLayer(nn.Linear):
    """A layer that may fail in its forward, its recomputation or its backward."""

    def __init__(self, fault: Fault, act: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self._fault = fault
        self._act = act

    def forward(self, input: Tensor) -> Tensor:
        """Run the layer, or fail."""
        self._fault.strike("recompute" if is_recomputing() else "forward")
        output: Tensor = FaultyBackward.apply(super().forward(input), self._fault)  # type: ignore[no-untyped-call]
        if self._act == "other dtype":
            return output.float()
        if self._act == "other shape":
            return output[:, 1:]
        return output * torch.nan if self._act == "nan" else output


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


def model_of(round_: Round, fault: Fault, rank: int = -1) -> nn.Sequential:
    """Build two layers a stage, for a rank; either layer of the faulty stage may be faulty."""
    torch.manual_seed(round_.seed)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for k in range(2 * round_.num_stages):
        kills = round_.act == "kill the waiting"
        is_actors = k == 2 * round_.stage(round_.actor) + round_.layer and kills
        is_faulty = k == 2 * round_.stage(round_.origin) + round_.layer or is_actors
        act = round_.act if is_faulty and rank == round_.origin else ""
        layers[f"l{k}"] = FaultyLayer(fault, act) if is_faulty else nn.Linear(WIDTH, WIDTH)
    if has_ties(round_):
        layers[f"l{len(layers) - 1}"].weight = layers["l0"].weight
    return nn.Sequential(layers)


def has_ties(round_: Round) -> bool:
    """Return whether the first and the last layer share a weight: in every second round."""
    return round_.seed % 2 == 1


def run_rank(round_: Round, folder: Path) -> None:
    """Train on this rank until the fault, or to the end."""
    rank = int(os.environ["RANK"])
    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    atexit.register(note, folder / f"ended.{rank}")  # the first to be registered runs last
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    fault = Fault(round_, rank, folder)

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        fault.strike("loss")
        return F.mse_loss(output, target)

    prepare(round_)
    if round_.act in ("several stages", "kill while building"):
        run_stages_before(round_, rank, fault)
    stage = Stage(
        model_of(round_, fault, rank),
        [2] * round_.num_stages,
        chunks=round_.chunks,
        checkpoint=round_.checkpoint,
        loss_fn=loss_of,
        check_loss=True,
        check_tied=has_ties(round_),
        stall_timeout_s=round_.stall_timeout_s,
        transport=round_.transport,
        replicas=round_.replicas,
    )
    losses = []
    for step, (input, target) in enumerate(stage.batches(batches_of(round_, fault))):
        fault.step = step
        fault.strike("between")
        if rank == round_.origin and step == round_.step and round_.act == "leave":
            break
        losses.append(call(stage, round_, rank, step, input, target))
        fault.strike("optimizer")
        descend(stage)
    if round_.act != "leave":
        copy = hashlib.sha256()
        for parameter in stage.parameters():
            copy.update(parameter.detach().numpy().tobytes())
        (folder / f"copy.{rank}").write_text(copy.hexdigest())
        check_losses(round_, losses)


def prepare(round_: Round) -> None:
    """Set this process up as a round needs it."""
    if round_.act == "few files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, FEW_FILES))
    if round_.act == "mute" and round_.layer == 0:
        sys.stderr = None
    elif round_.act == "mute":
        read_end, write_end = os.pipe()
        os.dup2(write_end, 2)
        os.close(write_end)
        os.close(read_end)


def run_stages_before(round_: Round, rank: int, fault: Fault) -> None:
    """Run some stages in turn before the one that is trained; a rank may be killed before that."""
    for number in range(3):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(round_.num_ranks)))
        stage = Stage(
            model, [1] * round_.num_ranks, chunks=round_.chunks, transport=round_.transport
        )
        is_killed_now = number == 1 + round_.step % 2  # all ranks are connected by then
        if round_.act == "kill while building" and is_killed_now and rank == round_.origin:
            fault.kill_soon()
        with torch.no_grad():
            stage(torch.ones(round_.chunks, WIDTH))
        stage.close()


def note(path: Path) -> None:
    """Write the time into a file."""
    path.write_text(str(time.monotonic_ns()))


def call(stage: Stage, round_: Round, rank: int, step: int, input: Any, target: Any) -> float:
    """Make one step by the round's method; return its loss."""
    is_faulty = rank == round_.origin and step == round_.step
    if is_faulty and round_.act == "another call":
        stage.clip_grad_norm_(1.0)
    elif is_faulty and round_.act == "catch":
        with contextlib.suppress(FaultError):
            stage.step(input, target)
    if round_.method == "step" or round_.act == "catch":
        return stage.step(input, target).item()
    loss = F.mse_loss(stage(input), target)
    loss.backward()
    return float(stage.fetch(loss))


def descend(module: nn.Module) -> None:
    """Make a step of SGD, without the second that the import of an optimizer takes."""
    with torch.no_grad():
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None


def batches_of(round_: Round, fault: Fault) -> Iterator[tuple[Tensor, Tensor]]:
    """Make the mini-batches; rank 0 reads them."""
    generator = torch.Generator().manual_seed(round_.seed)
    for step in range(round_.num_steps):
        fault.step = step
        fault.strike("loader")
        # Also uneven ones.
        num_samples = round_.replicas * round_.samples * round_.chunks - step % round_.chunks
        pair = torch.randn(2, num_samples, WIDTH, generator=generator)
        yield pair[0], pair[1]


def check_losses(round_: Round, losses: list[float]) -> None:
    """Compare with the plain model, trained here over the same micro-batches."""
    no_fault = Fault(round_, -1, Path())
    model = model_of(round_, no_fault)
    truth = []
    for input, target in batches_of(round_, no_fault):
        total = 0.0
        num_parts = round_.replicas * round_.chunks
        for x, y in zip(input.chunk(num_parts), target.chunk(num_parts), strict=True):
            part = F.mse_loss(model(x), y) * (len(x) / len(input))
            part.backward()
            total += part.item()
        truth.append(total)
        descend(model)
    if not torch.allclose(torch.tensor(losses), torch.tensor(truth), rtol=1e-9, atol=0.0):
        raise AssertionError(f"the losses are {losses}, the plain model's {truth}")


# -- many rounds by one start of Python -----------------------------------------------------------


def serve(orders: TextIO, *, is_frugal: bool) -> None:
    """Run a round for each line; answer with the ranks' exit codes.

    A line is ``[round, folder, port, tears_down]``, see ``benchmarks.soak``.

    Args:
        orders: where the lines come from.
        is_frugal: whether to skip some of the forked processes' work of ending.
    """
    if is_frugal:
        gc.collect()
        gc.freeze()  # otherwise each forked process visits, and so copies, all objects at its end
    for line in orders:
        fields, folder, port, tears_down = json.loads(line)
        round_ = Round(**fields)
        pids = []
        for rank in range(round_.num_ranks):
            pid = os.fork()
            if pid == 0:
                become_rank(rank, round_.num_ranks, port, Path(folder))
                run = run_rank if tears_down else run_rank_and_end
                return run(round_, Path(folder))  # ends as a script does
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)
    return None


def run_rank_and_end(round_: Round, folder: Path) -> None:
    """Run a rank, whose process ends after its last exit function, before modules are freed."""
    code = 1

    def end_now() -> None:
        sys.stdout.flush()
        if sys.stderr is not None:
            sys.stderr.flush()
        os._exit(code)

    atexit.register(end_now)  # exit functions run in reverse order
    try:
        run_rank(round_, folder)
        code = 0
    except SystemExit:
        code = 0  # the only one that a fault raises is sys.exit(0)
        raise


def become_rank(rank: int, num_ranks: int, port: int, folder: Path) -> None:
    """Set up a forked process as a launcher does."""
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
