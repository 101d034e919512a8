"""The faults of a round of the soak test, and the report that must follow; starts nothing.

    draw(seed, number) ──> Round ──> a real job (soak.py, soak_job.py) ──> Ending ──> faults_of

A round depends on seed and number only, so a round that went wrong can be repeated.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

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

#: Faults with which a run must succeed.
HARMLESS = ("none", "stop", "strangers", "fork", "several stages", "mute", "few files")

#: Faults that must be noticed although something keeps the faulty process, or its sockets, alive;
#: and how long after the fault the other ranks' scripts may end.
HIDDEN = (
    *("kill beside a child", "raise beside a thread", "exit beside a thread"),
    "kill while building",
)
HIDDEN_LIMIT_S = 5.0

#: Micro-batches, and open files, of a job with few files.
FEW_FILES_CHUNKS, FEW_FILES = 60, 60

#: Faults that come from outside, unless the job is over before.
FROM_OUTSIDE = (*NEED_LAUNCHER, "strangers")

TORCHRUN = "torchrun"
PROCPIPE_RUN = "procpipe run"
FORK = "fork"
LAUNCHERS = (TORCHRUN, PROCPIPE_RUN, FORK)


@dataclass(frozen=True)
class Round:
    """One job and its fault; plain values, sent as JSON.

    Attributes:
        seed: of the parameters and data.
        launcher: what starts the processes.
        num_ranks: how many.
        act: what happens.
        where: in which piece of code.
        origin: on which rank.
        actor: the rank that kills another one, if one does.
        step: in which step, counted from 0.
        micro_batch: at which of the step's calls of that code, counted from 0.
        layer: which of the rank's two layers is the faulty one.
        moment: seconds from the start of training to a fault that comes from outside.
        num_steps: steps of the job.
        chunks: micro-batches a step.
        samples: samples a micro-batch, most of them.
        checkpoint: what is recomputed.
        method: "step", or "forward" and backward.
        stall_timeout_s: when a stall is reported.
        transport: what carries large tensors.
        replicas: pipelines of the model, each of an equal share of the ranks.
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
    replicas: int = 1

    @property
    def num_stages(self) -> int:
        """The stages of a pipeline."""
        return self.num_ranks // self.replicas

    def stage(self, rank: int) -> int:
        """Return the stage of a rank."""
        return rank % self.num_stages

    def place_of(self, rank: int) -> str:
        """Return what reports call a rank's place."""
        of = f" of replica {rank // self.num_stages}" if self.replicas > 1 else ""
        return f"stage {self.stage(rank)}{of}"

    def __str__(self) -> str:
        where = f" in {self.where}" if self.where else ""
        size = f"large ({self.transport})" if self.samples > 100 else "small"
        place = f" on rank {self.origin}, step {self.step}" if self.act != "none" else ""
        return (
            f"{self.act}{where}{place}; {self.num_ranks} ranks by {self.launcher}, "
            f"{self.replicas} replicas, {self.method}, {self.chunks} {size} micro-batches, "
            f"recompute {self.checkpoint}"
        )


def draw(
    seed: int,
    number: int,
    *,
    max_ranks: int,
    launchers: tuple[str, ...] = LAUNCHERS,
    faults: tuple[tuple[str, str], ...] = FAULTS,
    replicas: int | None = None,
) -> Round:
    """Draw a round.

    Args:
        seed: of the whole test.
        number: of the round.
        max_ranks: at most so many processes.
        launchers: what may start them.
        faults: what may happen, and where.
        replicas: how many; None for one or, in half of the jobs whose ranks can be divided, two.
    """
    chance = random.Random(f"{seed}/{number}")
    act, where = chance.choice(faults)
    num_ranks = chance.randint(2, max_ranks)
    num_ranks -= num_ranks % (replicas or 1)
    num_steps = chance.randint(2, 4)
    if replicas is None:  # drawn apart, so that all else is as it was without replicas
        may_divide = num_ranks % 2 == 0 and act != "few files"
        replicas = random.Random(f"{seed}/{number}/replicas").choice([1, 2]) if may_divide else 1
    num_stages = num_ranks // replicas
    origin = chance.randrange(num_ranks)
    if where == "loader":
        origin = 0
    elif where == "loss":
        origin = num_ranks - 1
    layer = chance.randrange(2)
    if act.startswith("other") and origin % num_stages == num_stages - 1:
        layer = 0  # so that another layer gets its output
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
        replicas=replicas,
    )


@dataclass(frozen=True)
class Expected:
    """How a round must end.

    Attributes:
        is_well: whether with exit code 0 and the right losses.
        reporter: the rank that prints the report; None if other ranks do.
        named: the rank that every report must name.
        words: what must be printed.
        num_tracebacks: how many tracebacks all ranks together print.
        is_root_cause: whether torchrun can find that rank, by its exit code or its error.
    """

    is_well: bool
    reporter: int | None = None
    named: int | None = None
    words: tuple[str, ...] = ()
    num_tracebacks: int = 0
    is_root_cause: bool = True


def expected_of(round_: Round) -> Expected:
    """Return how a round must end."""
    origin = round_.origin
    last = origin - round_.stage(origin) + round_.num_stages - 1  # of the same pipeline
    act = round_.act.removesuffix(" beside a thread")
    words: tuple[str, ...]
    if round_.act in HARMLESS:
        return Expected(True, words=("is stopped",) if round_.act == "stop" else ())
    if round_.act == "kill while building":
        return Expected(False, None, origin, (f"because rank {origin}",))
    if round_.act.startswith("kill"):
        return Expected(False, None, origin, (f"rank {origin} ended without a message",))
    if act == "leave" or (act == "exit" and round_.where == "between"):
        words = (f"rank {origin} has left the pipeline",)
        return Expected(False, None, origin, words, is_root_cause=False)
    if act == "exit":
        words = (f"rank {origin} failed", "SystemExit")
        return Expected(False, None, origin, words, is_root_cause=False)
    if round_.act == "another call":
        if origin == 0:
            return Expected(False, None, None, ("while rank 0 is in clip_grad_norm_()",), -1)
        words = (f"rank {origin} is in clip_grad_norm_() while rank 0 is in ",)
        return Expected(False, origin, origin, words, 1)
    if round_.act.startswith("other"):
        receiver = origin if round_.layer == 0 else origin + 1
        layer = f"l{2 * round_.stage(origin) + round_.layer + 1}"
        given = "float32 (" if round_.act == "other dtype" else ", 7)"
        words = (
            f"layer '{layer}'",
            "was given ",
            given,
            f"{round_.place_of(receiver)} (rank {receiver})",
        )
        return Expected(False, receiver, receiver, words, 1)
    if round_.act == "nan":
        return Expected(False, last, last, ("NonFiniteLossError", "the loss is nan"), 1)
    words = {
        "allocate": ("out of memory on cpu", f"{round_.place_of(origin)} held "),
        "catch": ("StageClosedError", f"FaultError: fault in {round_.where}"),
    }.get(round_.act, (f"FaultError: fault in {round_.where}",))
    if act == "raise" and round_.where in ("forward", "recompute", "backward", "loss"):
        words += (f"in {round_.place_of(origin)} (rank {origin}), task ",)
    return Expected(False, origin, origin, words, 1)


@dataclass(frozen=True)
class Ending:
    """How a round ended.

    Attributes:
        codes: the launcher's exit code, or each forked rank's; () if it hung.
        outputs: what each rank wrote.
        launcher_output: what the launcher wrote.
        duration_s: from its start to its end.
        fault_s: from the fault to the end of the last rank's script, before its interpreter is
            torn down; None where it could not be noted.
        left: command lines of processes left.
        shared_bytes: bytes in /dev/shm left.
        files: temporary files left.
        num_acts: how often something came from outside: signals sent, strangers that sent garbage.
        copies: what each rank that got to the end had then, by rank: a digest of its parameters.
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
    copies: dict[int, str] = field(default_factory=dict)


#: What follows a rank's name where there are replicas.
_PLACE = re.compile(r" \(stage \d+ of replica \d+\)")


def faults_of(round_: Round, ending: Ending) -> list[str]:
    """Return the faults in the report of a round that has ended."""
    expected = expected_of(round_)
    if round_.act == "kill the launcher":
        return []  # no process is left to report; that none is left is checked elsewhere
    if round_.act == "kill at any time" and ending.codes == (0,):
        return []  # it was over before
    output = "\n".join(ending.outputs)
    faults = _faults_of_codes(round_, expected, ending.codes)
    num_tracebacks = output.count("Traceback (most recent call last)")
    if num_tracebacks != expected.num_tracebacks and expected.num_tracebacks >= 0:
        faults.append(f"{num_tracebacks} tracebacks, not {expected.num_tracebacks}")
    on_screen = ending.launcher_output.count("Traceback (most recent call last)")
    if round_.launcher == PROCPIPE_RUN and 0 <= expected.num_tracebacks < on_screen:
        faults.append(f"{on_screen} tracebacks on the screen, not {expected.num_tracebacks}")
    if round_.act.startswith("kill") and round_.launcher != FORK:
        # The launcher reports the kill, and may end the other ranks before they notice it.
        expected = Expected(False, None, round_.origin)
    source = output if expected.reporter is None else ending.outputs[expected.reporter]
    source = _PLACE.sub("", source)
    faults += [f"{word!r} is not printed" for word in expected.words if word not in source]
    if expected.named is not None:
        named_ranks = {int(rank) for rank in re.findall(r"because rank (\d+)", output)}
        faults += [f"rank {rank} is named" for rank in named_ranks - {expected.named}]
        if round_.launcher == PROCPIPE_RUN or (
            round_.launcher == TORCHRUN and expected.is_root_cause
        ):
            faults += _faults_of_report(round_.launcher, expected.named, ending.launcher_output)
    if round_.act in HIDDEN and (ending.fault_s or 0.0) > HIDDEN_LIMIT_S:
        faults.append(f"the last script ended {ending.fault_s:.1f} s after the fault")
    if round_.act == "strangers" and not ending.num_acts:
        faults.append("no stranger came")
    of_stage: dict[int, set[str]] = {}
    for rank, copy in ending.copies.items():
        of_stage.setdefault(round_.stage(rank), set()).add(copy)
    faults += [f"replicas of stage {s} differ" for s, of in of_stage.items() if len(of) > 1]
    if expected.is_well and "procpipe: rank" in output:
        faults.append("a rank of a job that ended well reports a failure")
    return faults


def _faults_of_codes(round_: Round, expected: Expected, codes: tuple[int, ...]) -> list[str]:
    """Check exit codes: of the launcher, or of all forked ranks."""
    if expected.is_well:
        return [] if not any(codes) else [f"exit codes {codes} of a job that must end well"]
    if round_.launcher != FORK:
        return [] if codes[0] not in (0, -9) else [f"exit code {codes[0]} of a job that must fail"]
    may_be_0 = {round_.origin} if round_.act.startswith(("exit", "leave")) else set()
    return [
        f"exit code 0 of rank {rank}"
        for rank, code in enumerate(codes)
        if code == 0 and rank not in may_be_0
    ]


def _faults_of_report(launcher: str, named: int, text: str) -> list[str]:
    """Check which rank a launcher's report names as the first to fail."""
    if launcher == TORCHRUN:
        _, _, text = text.partition("Root Cause (first observed failure):")
        found = re.findall(r"rank      : (\d+)", text)[:1]
    else:
        found = re.findall(
            r"^procpipe: (?:stage \d+ (?:of replica \d+ )?\()?rank (\d+)"
            r"(?!(?: \([^)]*\))? ends, because)",
            text,
            re.M,
        )
    if not found:
        return [f"{launcher} names no rank"]
    return [f"{launcher} names rank {rank}" for rank in found if int(rank) != named]
