"""The rounds of the fault test: draws them, and judges how they ended; starts nothing.

    draw(seed, number) ──> Round ──> a real job (job.py, by runner.py) ──> Ending ──> faults_of

A round is one job with one fault: what happens, on which rank, when, under which launcher. It
depends on seed and number only. The first rounds have each pair of what and launcher once, and so
have the next ones, in another order.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace

START, BETWEEN, TASK = "start", "between steps", "in a task"
TRANSFER, SAVING, CLOSE = "in a transfer", "while saving", "at close"

#: Where in the job's code a fault strikes, by time; ``Fault.strike`` gets these words.
EVERYWHERE = {
    START: ("Stage()", "built"),
    BETWEEN: ("between",),
    TASK: ("forward", "backward", "loss"),
    TRANSFER: ("forward", "between"),
    SAVING: ("state_dict", "saved"),
    CLOSE: ("close", "closed"),
}

#: A signal comes at any moment, too, with a message or a save under way.
ANY_MOMENT = ("any moment", "any moment of save")
_BY_SIGNAL = EVERYWHERE | {
    TRANSFER: (*EVERYWHERE[TRANSFER], ANY_MOMENT[0]),
    SAVING: (*EVERYWHERE[SAVING], ANY_MOMENT[1]),
}

#: What happens, and where it may.
WHATS: dict[str, dict[str, tuple[str, ...]]] = {
    "nothing": {BETWEEN: ("between",)},
    "raise in forward": {TASK: ("forward",), TRANSFER: ("forward",)},
    "raise in recompute": {TASK: ("recompute",)},
    "raise in backward": {TASK: ("backward",)},
    "raise in loss": {TASK: ("loss",)},
    "raise in loader": {BETWEEN: ("loader",)},
    "raise in optimizer": {BETWEEN: ("optimizer",)},
    "raise in script": {**EVERYWHERE, TASK: (), TRANSFER: ("between",)},
    "exit": EVERYWHERE,
    "kill": _BY_SIGNAL,
    "stop": _BY_SIGNAL,
    "stop for good": {**_BY_SIGNAL, CLOSE: ()},
    "catch": {TASK: ("forward",), TRANSFER: ("forward",), SAVING: ("state_dict",)},
    "call another method": {BETWEEN: ("between",)},
    "leave the loop": {BETWEEN: ("between",)},
    "fork": {**EVERYWHERE, START: ("built",)},
    "kill beside a child": EVERYWHERE,
    "kill the launcher": {time: EVERYWHERE[time] for time in (BETWEEN, TASK, SAVING)},
    "SIGTERM": {time: EVERYWHERE[time] for time in (BETWEEN, TASK)},  # the loop ends everywhere
}

TORCHRUN, PROCPIPE_RUN, NONE = LAUNCHERS = "torchrun", "procpipe run", "none"

#: Each pair of what and launcher.
PAIRS = tuple(
    (what, launcher)
    for what in WHATS
    for launcher in LAUNCHERS
    if (what, launcher) != ("kill the launcher", NONE)
)

#: The launchers of short rounds, in turn; and what launchers need long to end.
_SHORT = (NONE, TORCHRUN, NONE, PROCPIPE_RUN)
_LONG = ("stop for good", TORCHRUN), ("stop for good", PROCPIPE_RUN)

#: How long after an exception, and after a kill, the last script may end. On a quiet machine it is
#: 2 s and 5 s at most; other work may make it several times as long.
EXCEPTION_LIMIT_S, KILL_LIMIT_S = 15.0, 20.0

#: Elements of a row, and the rows of a micro-batch: inside tokens, by the transport, for longer.
WIDTH = 8
SMALL, LARGE, HUGE = 4, 1 << 11, 1 << 15


@dataclass(frozen=True)
class Round:
    """One job and its fault; plain values, sent as JSON.

    Attributes:
        seed: of parameters and data.
        launcher: what starts the processes.
        num_stages: of each pipeline.
        replicas: pipelines of the model.
        what: what happens.
        when: a time of the job.
        where: the piece of the job's code that strikes.
        origin: the rank it happens on.
        step: in which step, counted from 0.
        micro_batch: at which of the step's calls of that code, counted from 0.
        layer: which of the rank's two layers is the faulty one.
        moment_s: how much later than ``where``, if that is any moment.
        lives: whether a forked child outlives the ranks.
        num_steps: steps of the job.
        chunks: micro-batches a step.
        rows: of a micro-batch, most of them.
        checkpoint: what is recomputed.
        method: "step", or "forward" and backward.
        asynchronous: whether all saves but the first are in the background.
        transport: what carries large tensors.
        tears_down: whether processes that are forks free all modules at their end, as Python does.
    """

    seed: int
    launcher: str
    num_stages: int
    replicas: int
    what: str
    when: str
    where: str
    origin: int
    step: int
    micro_batch: int
    layer: int
    moment_s: float
    lives: bool
    num_steps: int
    chunks: int
    rows: int
    checkpoint: str
    method: str
    asynchronous: bool
    transport: str
    tears_down: bool

    @property
    def num_ranks(self) -> int:
        """The processes of the job."""
        return self.num_stages * self.replicas

    @property
    def has_ties(self) -> bool:
        """Whether the first and the last layer share a weight."""
        # Before the second call stages compare their copies, which no rank may miss.
        return self.seed % 2 == 1 and self.when not in (START, TRANSFER)

    @property
    def timeout_s(self) -> float:
        """How long a rank waits for another: a lost failure is an error, and no hang."""
        return 6.0 if self.what == "stop for good" else 100.0

    @property
    def stall_timeout_s(self) -> float:
        """After what time a stall is reported."""
        return 0.5 if self.what.startswith("stop") else 60.0

    def waits_for(self, rank: int) -> str:
        """Return the note that a rank waits for before the step, so that a message is under way."""
        if self.when == TRANSFER and self.where == "forward" and rank == self.origin + 1:
            return "struck"  # origin has sent one, and this rank has not taken it
        if self.when == TRANSFER and self.where == "between" and rank == self.origin:
            return "sent"
        return ""

    def __str__(self) -> str:
        place = f", {self.when} ({self.where}) on rank {self.origin}, step {self.step}"
        return (
            f"{self.what}{place if self.what != 'nothing' else ''}; {self.num_stages} stages, "
            f"{self.replicas} replicas, launcher {self.launcher}, {self.method}, {self.chunks} "
            f"micro-batches of {self.rows} by {self.transport}, recompute {self.checkpoint}"
        )


def draw(seed: int, number: int, *, short: bool = False) -> Round:
    """Draw a round.

    Args:
        seed: of the whole test.
        number: of the round.
        short: only what ends soon, half of it without a launcher.
    """
    turn, k = divmod(number, len(PAIRS))
    order = list(PAIRS)
    random.Random(f"{seed}/{turn}").shuffle(order)
    if short:
        turn, k = divmod(number, len(_SHORT))
        order = [pair for pair in order if pair[1] == _SHORT[k] and pair not in _LONG]
        k = turn * _SHORT.count(_SHORT[k]) + _SHORT[:k].count(_SHORT[k])
        what, launcher = order[k % len(order)]
    else:
        what, launcher = order[k]
    return _draw(random.Random(f"{seed}/{number}"), what, launcher)


def correct(seed: int) -> Round:
    """Return a job without a fault, with large tensors by sockets, which ends as Python does."""
    round_ = _draw(random.Random(seed), "nothing", NONE)
    return replace(
        round_, origin=0, step=0, num_stages=2, replicas=1, rows=LARGE, transport="sockets",
        tears_down=True,
    )  # fmt: skip


def _draw(chance: random.Random, what: str, launcher: str) -> Round:
    when, where = chance.choice(_places(what, launcher))
    num_stages, replicas = chance.choice([(2, 1), (3, 1), (4, 1), (2, 2), (1, 2)])
    needs_peer = when == TRANSFER or what == "call another method"
    num_stages = max(num_stages, 2) if needs_peer else num_stages
    stages = range(num_stages)
    if when == TRANSFER and where != "any moment":
        stages = stages[:-1] if where == "forward" else stages[1:]
    elif where in ("loader", "loss"):
        stages = stages[:1] if where == "loader" else stages[-1:]
    origin = chance.choice(stages) + num_stages * chance.randrange(replicas)
    num_steps = chance.randint(3, 4)
    chunks = chance.randint(2 if when == TRANSFER else 1, 4)
    micro_batch = 0
    if where in ("forward", "recompute", "backward", "loss"):
        micro_batch = chance.randrange(1 if when == TRANSFER else 0, chunks)
    steps = {START: [-1], SAVING: range(1, num_steps - 1), CLOSE: [num_steps - 1]}
    # In its first calls stage(input) compares inputs, which no rank may miss.
    is_missed = when == TRANSFER and where != "any moment"
    needs_step = where == "loss" or what == "catch" or replicas > 1 or is_missed
    return Round(
        seed=chance.randrange(1 << 30),
        launcher=launcher,
        num_stages=num_stages,
        replicas=replicas,
        what=what,
        when=when,
        where=where,
        origin=origin,
        step=chance.choice(steps.get(when, range(num_steps - 1))),
        micro_batch=micro_batch,
        layer=chance.randrange(2),
        moment_s=chance.uniform(0.0, 0.05),
        lives=chance.random() < 0.5,
        num_steps=num_steps,
        chunks=chunks,
        rows=chance.choice([LARGE, HUGE] if when == TRANSFER else [SMALL, LARGE]),
        checkpoint="always"
        if where == "recompute"
        else chance.choice(["always", "except_last", "never"]),
        method="step" if needs_step else chance.choice(["step", "step", "forward"]),
        asynchronous=where == "saved" or chance.random() < 0.5,
        transport=chance.choice(["shm", "sockets"]),
        tears_down=chance.random() < 0.25,
    )


def _places(what: str, launcher: str) -> list[tuple[str, str]]:
    """List the times and places at which a fault may strike."""
    places = [(when, where) for when, of_time in WHATS[what].items() for where in of_time]
    if launcher == NONE and what != "raise in script":
        # Before the ranks are connected, only a launcher is sure to detect the end of a process;
        # before one has begun to connect, its end looks like a late start.
        is_kill = what.startswith("kill")
        places = [p for p in places if p != (START, "Stage()") and not (is_kill and p[0] == START)]
    return places


@dataclass(frozen=True)
class Expected:
    """How a round must end.

    Attributes:
        is_well: whether with exit code 0 everywhere.
        reporter: the rank that prints the report; None if other ranks do.
        named: the rank that every report must name; None where that may be any.
        words: what must be printed.
        told: what every other rank must print, where no launcher may end it before.
        num_tracebacks: how many all ranks together print; -1 for any number.
        is_root_cause: whether torchrun can find that rank, by its exit code or its error.
        may_end_well: ranks that may have exit code 0 in a job that fails.
    """

    is_well: bool
    reporter: int | None = None
    named: int | None = None
    words: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    num_tracebacks: int = 0
    is_root_cause: bool = True
    may_end_well: frozenset[int] = frozenset()


def expected_of(round_: Round) -> Expected:
    """Return how a round must end."""
    what, origin = round_.what, round_.origin
    nobody: frozenset[int] = frozenset()
    words: tuple[str, ...]
    told: tuple[str, ...]
    all_but_origin = frozenset(range(round_.num_ranks)) - {origin}
    cause = f"because rank {origin} "
    at_end = all_but_origin if round_.when == CLOSE else nobody  # they may have ended before
    waits_for_save = round_.asynchronous and round_.where == "close"  # of all ranks
    ends_well = what == "exit" and round_.when == CLOSE and not waits_for_save
    if what in ("nothing", "fork", "SIGTERM") or ends_well:
        return Expected(True)
    if what == "stop":
        is_reported = round_.when not in (START, CLOSE) and round_.where not in ANY_MOMENT
        return Expected(True, words=("is stopped",) if is_reported else ())
    if what == "stop for good":
        return Expected(False, words=("WaitTimeoutError",), num_tracebacks=-1)
    if what == "kill the launcher":
        return Expected(False, num_tracebacks=-1)
    if what.startswith("kill"):
        told = () if at_end else (cause, "ended without a message")
        return Expected(False, None, origin, (), told, may_end_well=at_end)
    if what == "exit" and round_.where in ("forward", "backward", "loss", "state_dict"):
        words = (f"rank {origin} failed", "SystemExit")
        told = (f"{cause}failed", "SystemExit")
        return Expected(False, None, origin, words, told, 0, False, frozenset({origin}))
    if what in ("exit", "leave the loop"):
        return Expected(False, None, origin, (), (cause,), 0, False, frozenset({origin}))
    if what == "call another method" and round_.replicas > 1:  # found there, or by another replica
        return Expected(False, None, None, ("is in clip_grad_norm_()",), (), -1)
    if what == "call another method":
        if origin == 0:
            return Expected(False, None, None, ("while rank 0 is in clip_grad_norm_()",), (), -1)
        words = (f"rank {origin} is in clip_grad_norm_() while rank 0 is in ",)
        return Expected(False, origin, origin, words, (f"{cause}failed",), 1)
    words = (f"FaultError: fault in {round_.where}",)
    if what == "catch":
        words += ("StageClosedError",)
    elif round_.where in ("forward", "recompute", "backward", "loss"):
        words += (f"(rank {origin}), task ", f"stage {origin % round_.num_stages}")
    told = () if at_end else (f"{cause}failed", "FaultError: fault in ")
    return Expected(False, origin, origin, words, told, 1, may_end_well=at_end)


@dataclass(frozen=True)
class Ending:
    """How a round ended.

    Attributes:
        codes: the launcher's exit code, or each rank's; () if it hung.
        outputs: what each rank wrote.
        launcher_output: what the launcher wrote.
        duration_s: from its start to its end.
        has_struck: whether the fault happened.
        fault_s: from the fault to the end of the last rank's script, before its interpreter is
            torn down; None where that could not be noted.
        left: the processes, memory, sockets and temporary files that are left.
        saved_step: after how many steps a rank has noted the end of a save; 0 for none.
        loaded_step: after how many steps the newest saved state that loads was made; 0 for none.
        steps: how many steps each rank has made.
        wrong_values: which values differ from those of the plain model.
    """

    codes: tuple[int, ...]
    outputs: tuple[str, ...]
    launcher_output: str = ""
    duration_s: float = 0.0
    has_struck: bool = True
    fault_s: float | None = None
    left: tuple[str, ...] = ()
    saved_step: int = 0
    loaded_step: int = 0
    steps: tuple[int, ...] = ()
    wrong_values: tuple[str, ...] = ()


#: What follows a rank's name where there are replicas.
_PLACE = re.compile(r" \(stage \d+ of replica \d+\)")


def faults_of(round_: Round, ending: Ending) -> list[str]:
    """Return what was wrong with the end of a round."""
    if not ending.codes:
        return [f"a hang: it has not ended in {ending.duration_s:.0f} s"]
    expected = expected_of(round_)
    if not ending.has_struck and round_.where in ANY_MOMENT:
        expected = Expected(True)  # it was over before
    elif not ending.has_struck and round_.what != "nothing":
        return ["the fault did not happen"]
    faults = [f"left: {each}" for each in ending.left]
    faults += [f"wrong values: {each}" for each in ending.wrong_values]
    if ending.loaded_step < ending.saved_step:
        faults.append(f"step {ending.saved_step} was saved, and {ending.loaded_step} is loaded")
    if expected.is_well and any(step != ending.loaded_step for step in ending.steps):
        faults.append(f"the ranks made {ending.steps} steps, and {ending.loaded_step} are saved")
    if expected.is_well and round_.what != "SIGTERM" and ending.loaded_step != round_.num_steps:
        faults.append(f"{ending.loaded_step} steps are saved, not {round_.num_steps}")
    limit_s = KILL_LIMIT_S if round_.what.startswith("kill") else EXCEPTION_LIMIT_S
    if not round_.what.startswith("stop") and (ending.fault_s or 0.0) > limit_s:
        faults.append(f"the last script ended {ending.fault_s:.1f} s after the fault")
    if round_.what == "kill the launcher":
        return faults  # no process is left to report
    return (
        faults
        + _faults_of_codes(round_, expected, ending.codes)
        + _faults_of_reports(round_, expected, ending)
    )


def _faults_of_codes(round_: Round, expected: Expected, codes: tuple[int, ...]) -> list[str]:
    if expected.is_well:
        return [] if not any(codes) else [f"exit codes {codes} of a job that must end well"]
    if round_.launcher != NONE:
        return [] if codes[0] not in (0, -9) else [f"exit code {codes[0]} of a job that must fail"]
    return [
        f"exit code 0 of rank {rank}"
        for rank, code in enumerate(codes)
        if code == 0 and rank not in expected.may_end_well
    ]


def _faults_of_reports(round_: Round, expected: Expected, ending: Ending) -> list[str]:
    output = "\n".join(ending.outputs)
    faults = []
    number = output.count("Traceback (most recent call last)")
    if number != expected.num_tracebacks >= 0:
        faults.append(f"{number} tracebacks, not {expected.num_tracebacks}")
    number = ending.launcher_output.count("Traceback (most recent call last)")
    if round_.launcher == PROCPIPE_RUN and number > expected.num_tracebacks >= 0:
        faults.append(f"{number} tracebacks on the screen, not {expected.num_tracebacks}")
    source = output if expected.reporter is None else ending.outputs[expected.reporter]
    source = _PLACE.sub("", source)
    faults += [f"{word!r} is not printed" for word in expected.words if word not in source]
    for rank, text in enumerate(ending.outputs if round_.launcher == NONE else ()):
        missing = [word for word in expected.told if word not in _PLACE.sub("", text)]
        if rank != round_.origin:
            faults += [f"rank {rank} does not print {word!r}" for word in missing]
    named = {int(rank) for rank in re.findall(r"because rank (\d+)", output)}
    if expected.named is not None:
        faults += [f"rank {rank} is named" for rank in sorted(named - {expected.named})]
        if round_.launcher == PROCPIPE_RUN or (
            round_.launcher == TORCHRUN and expected.is_root_cause
        ):
            faults += _faults_of_launcher(round_.launcher, expected.named, ending.launcher_output)
    if expected.is_well and "procpipe: rank" in output:
        faults.append("a rank of a job that ended well reports a failure")
    return faults


def _faults_of_launcher(launcher: str, named: int, text: str) -> list[str]:
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
