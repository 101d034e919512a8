"""The faults of a round of the soak test, and the report that must follow; starts nothing.

    draw(seed, number) ──> Round ──> a real job (soak.py, soak_job.py) ──> Ending ──> faults_of

A round follows from seed and number alone, so a round that went wrong can be repeated.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

#: What happens, and where: in a layer's task, or in the user's code around the step.
FAULTS = (
    ("none", ""),
    ("raise", "forward"),
    ("raise", "recompute"),
    ("raise", "backward"),
    ("raise", "loss"),
    ("raise", "loader"),
    ("raise", "between"),
    ("raise", "optimizer"),
    ("kill", "forward"),
    ("kill", "backward"),
    ("kill", "between"),
    ("kill the waiting", "forward"),
    ("kill at any time", ""),
    ("kill the launcher", ""),
    ("stop", "forward"),
    ("stop", "between"),
    ("exit", "forward"),
    ("exit", "between"),
    ("leave", ""),
    ("another call", ""),
    ("catch", "forward"),
    ("other dtype", ""),
    ("other shape", ""),
    ("nan", ""),
    ("allocate", "forward"),
    ("strangers", ""),
    ("fork", "forward"),
    ("fork", "between"),
    ("kill beside a child", "forward"),
    ("kill beside a child", "between"),
    ("raise beside a thread", "forward"),
    ("raise beside a thread", "between"),
    ("exit beside a thread", "between"),
    ("several stages", ""),
    ("kill while building", ""),
    ("mute", "forward"),
    ("few files", ""),
)

#: Only a launcher sees the end of a process that has not met the others yet.
NEED_LAUNCHER = ("kill at any time", "kill the launcher")

#: These are no reason for a run to fail.
HARMLESS = ("none", "stop", "strangers", "fork", "several stages", "mute", "few files")

#: What must be noticed although something keeps the ill process, or its sockets, alive; and how
#: long after it the other ranks' scripts may end.
HIDDEN = (
    *("kill beside a child", "raise beside a thread", "exit beside a thread"),
    "kill while building",
)
HIDDEN_LIMIT_S = 5.0

#: So many micro-batches, and open files, has a job with few of the latter.
FEW_FILES_CHUNKS, FEW_FILES = 60, 60

#: These come from outside, if the job is not over before.
FROM_OUTSIDE = (*NEED_LAUNCHER, "strangers")

TORCHRUN = "torchrun"
PROCPIPE_RUN = "procpipe run"
FORK = "fork"
LAUNCHERS = (TORCHRUN, PROCPIPE_RUN, FORK)


@dataclass(frozen=True)
class Round:
    """One job and its fault; plain values, to travel as JSON.

    Attributes:
        seed: of the parameters and data.
        launcher: what starts the processes.
        num_ranks: how many.
        act: what happens.
        where: in which piece of code.
        origin: to which rank.
        actor: where a rank kills another one: which.
        step: in which step, counted from 0.
        micro_batch: at which of the step's calls of that code, counted from 0.
        layer: which of the rank's two layers is the ill one.
        moment: seconds from the start of training to a fault that comes from outside.
        num_steps: steps of the job.
        chunks: micro-batches a step.
        samples: samples a micro-batch, most of them.
        checkpoint: what is recomputed.
        method: "step", or "forward" and backward.
        stall_timeout_s: when a stall is reported.
        transport: what carries large tensors.
    """

    seed: int
    launcher: str
    num_ranks: int
    act: str
    where: str
    origin: int
    actor: int
    step: int
    micro_batch: int
    layer: int
    moment: float
    num_steps: int
    chunks: int
    samples: int
    checkpoint: str
    method: str
    stall_timeout_s: float
    transport: str

    def __str__(self) -> str:
        where = f" in {self.where}" if self.where else ""
        size = f"large ({self.transport})" if self.samples > 100 else "small"
        who = f" on rank {self.origin}, step {self.step}" if self.act != "none" else ""
        return (
            f"{self.act}{where}{who}; {self.num_ranks} ranks by {self.launcher}, {self.method}, "
            f"{self.chunks} {size} micro-batches, recompute {self.checkpoint}"
        )


def draw(
    seed: int,
    number: int,
    *,
    max_ranks: int,
    launchers: tuple[str, ...] = LAUNCHERS,
    faults: tuple[tuple[str, str], ...] = FAULTS,
) -> Round:
    """Draw a round.

    Args:
        seed: of the whole test.
        number: of the round.
        max_ranks: at most so many processes.
        launchers: what may start them.
        faults: what may happen, and where.
    """
    chance = random.Random(f"{seed}/{number}")
    act, where = chance.choice(faults)
    num_ranks = chance.randint(2, max_ranks)
    num_steps = chance.randint(2, 4)
    origin = chance.randrange(num_ranks)
    if where == "loader":
        origin = 0
    elif where == "loss":
        origin = num_ranks - 1
    layer = chance.randrange(2)
    if act.startswith("other") and origin == num_ranks - 1:
        layer = 0  # so that another layer gets what it returns
    if act in NEED_LAUNCHER:
        launchers = tuple(launcher for launcher in launchers if launcher != FORK) or (TORCHRUN,)
    needs_step = where == "loss" or act == "nan"
    chunks = chance.randint(1, 4)
    samples = chance.choice([4, 2048])  # inside tokens, or 128 KiB by the transport
    transport = chance.choice(["shm", "gloo"])
    if act == "few files":
        chunks, samples, transport = FEW_FILES_CHUNKS, 2048, "shm"
    is_in_task = where in ("forward", "recompute", "backward", "loss")
    return Round(
        seed=chance.randrange(1 << 30),
        launcher=chance.choice(launchers),
        num_ranks=num_ranks,
        act=act,
        where=where,
        origin=origin,
        actor=chance.choice([rank for rank in range(num_ranks) if rank != origin]),
        step=chance.randrange(num_steps - 1),
        micro_batch=chance.randrange(chunks) if is_in_task else 0,
        layer=layer,
        moment=chance.uniform(0.0, 0.6),
        num_steps=num_steps,
        chunks=chunks,
        samples=samples,
        checkpoint=chance.choice(["always", "except_last", "never"])
        if where != "recompute"
        else "always",
        method="step" if needs_step else chance.choice(["step", "step", "forward"]),
        stall_timeout_s=0.5 if act in ("stop", "mute") else 60.0,
        transport=transport,
    )


@dataclass(frozen=True)
class Expected:
    """How a round must end.

    Attributes:
        is_well: with exit code 0 and the right losses.
        teller: the rank whose own output tells the story; None if it cannot, so others do.
        named: the rank that everybody must name.
        words: what must be told.
        num_tracebacks: how many tracebacks all ranks together print.
        is_root_cause: whether torchrun can know that rank, by its exit code or its error.
    """

    is_well: bool
    teller: int | None = None
    named: int | None = None
    words: tuple[str, ...] = ()
    num_tracebacks: int = 0
    is_root_cause: bool = True


def expected_of(this: Round) -> Expected:
    """Return how a round must end."""
    who, last = this.origin, this.num_ranks - 1
    act = this.act.removesuffix(" beside a thread")
    words: tuple[str, ...]
    if this.act in HARMLESS:
        return Expected(True, words=("is stopped",) if this.act == "stop" else ())
    if this.act == "kill while building":
        return Expected(False, None, who, (f"because rank {who}",))
    if this.act.startswith("kill"):
        return Expected(False, None, who, (f"rank {who} ended without a word",))
    if act == "leave" or (act == "exit" and this.where == "between"):
        words = (f"rank {who} has left the pipeline",)
        return Expected(False, None, who, words, is_root_cause=False)
    if act == "exit":
        words = (f"rank {who} failed", "SystemExit")
        return Expected(False, None, who, words, is_root_cause=False)
    if this.act == "another call":
        if who == 0:
            return Expected(False, None, None, ("while rank 0 is in clip_grad_norm_()",), -1)
        words = (f"rank {who} is in clip_grad_norm_() while rank 0 is in ",)
        return Expected(False, who, who, words, 1)
    if this.act.startswith("other"):
        getter = who if this.layer == 0 else who + 1
        layer = f"l{2 * who + this.layer + 1}"
        given = "float32 (" if this.act == "other dtype" else ", 7)"
        words = (f"layer '{layer}'", "was given ", given, f"stage {getter} (rank {getter})")
        return Expected(False, getter, getter, words, 1)
    if this.act == "nan":
        return Expected(False, last, last, ("NonFiniteLossError", "the loss is nan"), 1)
    words = {
        "allocate": ("out of memory on cpu", f"stage {who} held "),
        "catch": ("StageClosedError", f"IllError: ill in {this.where}"),
    }.get(this.act, (f"IllError: ill in {this.where}",))
    if act == "raise" and this.where in ("forward", "recompute", "backward", "loss"):
        words += (f"in stage {who} (rank {who}), task ",)
    return Expected(False, who, who, words, 1)


@dataclass(frozen=True)
class Ending:
    """How a round ended.

    Attributes:
        codes: the launcher's exit code, or each forked rank's; () if it hung.
        outputs: what each rank wrote.
        launcher_output: what the launcher wrote.
        duration_s: from its start to its end.
        fault_s: from the fault to the end of the last rank's script, before its interpreter is
            torn down; None where nobody could note it.
        left: command lines of processes left.
        shared_bytes: bytes in /dev/shm left.
        files: temporary files left.
        num_acts: how often something came from outside: signals sent, strangers that spoke.
    """

    codes: tuple[int, ...]
    outputs: tuple[str, ...]
    launcher_output: str
    duration_s: float
    fault_s: float | None
    left: tuple[str, ...]
    shared_bytes: int
    files: tuple[str, ...]
    num_acts: int


def faults_of(this: Round, ending: Ending) -> list[str]:
    """Return what was wrong with the story of a round that has ended; [] if nothing was."""
    expected = expected_of(this)
    if this.act == "kill the launcher":
        return []  # nobody is left to tell anything; that nobody is left is checked elsewhere
    if this.act == "kill at any time" and ending.codes == (0,):
        return []  # it was over before
    told = "\n".join(ending.outputs)
    faults = _faults_of_codes(this, expected, ending.codes)
    num_tracebacks = told.count("Traceback (most recent call last)")
    if num_tracebacks != expected.num_tracebacks and expected.num_tracebacks >= 0:
        faults.append(f"{num_tracebacks} tracebacks, not {expected.num_tracebacks}")
    on_screen = ending.launcher_output.count("Traceback (most recent call last)")
    if this.launcher == PROCPIPE_RUN and 0 <= expected.num_tracebacks < on_screen:
        faults.append(f"{on_screen} tracebacks on the screen, not {expected.num_tracebacks}")
    if this.act.startswith("kill") and this.launcher != FORK:
        # The launcher tells it, and may end the others before they notice.
        expected = Expected(False, None, this.origin)
    source = told if expected.teller is None else ending.outputs[expected.teller]
    faults += [f"{word!r} is not told" for word in expected.words if word not in source]
    if expected.named is not None:
        blamed = {int(rank) for rank in re.findall(r"because rank (\d+)", told)}
        faults += [f"rank {rank} is blamed" for rank in blamed - {expected.named}]
        if this.launcher == PROCPIPE_RUN or (this.launcher == TORCHRUN and expected.is_root_cause):
            faults += _faults_of_report(this.launcher, expected.named, ending.launcher_output)
    if this.act in HIDDEN and (ending.fault_s or 0.0) > HIDDEN_LIMIT_S:
        faults.append(f"the last script ended {ending.fault_s:.1f} s after the fault")
    if this.act == "strangers" and not ending.num_acts:
        faults.append("no stranger came")
    if expected.is_well and "procpipe: rank" in told:
        faults.append("a rank of a job that ended well complains")
    return faults


def _faults_of_codes(this: Round, expected: Expected, codes: tuple[int, ...]) -> list[str]:
    """Check exit codes: of the launcher, or of all forked ranks."""
    if expected.is_well:
        return [] if not any(codes) else [f"exit codes {codes} of a job that must end well"]
    if this.launcher != FORK:
        return [] if codes[0] not in (0, -9) else [f"exit code {codes[0]} of a job that must fail"]
    may_be_0 = {this.origin} if this.act.startswith(("exit", "leave")) else set()
    return [
        f"exit code 0 of rank {rank}"
        for rank, code in enumerate(codes)
        if code == 0 and rank not in may_be_0
    ]


def _faults_of_report(launcher: str, named: int, text: str) -> list[str]:
    """Check whom a launcher's own report names as the first to fail."""
    if launcher == TORCHRUN:
        _, _, text = text.partition("Root Cause (first observed failure):")
        found = re.findall(r"rank      : (\d+)", text)[:1]
    else:
        found = re.findall(r"^procpipe: (?:stage \d+ \()?rank (\d+)(?! ends, because)", text, re.M)
    if not found:
        return [f"{launcher} names no rank"]
    return [f"{launcher} blames rank {rank}" for rank in found if int(rank) != named]
