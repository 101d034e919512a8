"""Measures the best proposals in real pipelines, and predicts them again, from a calibration."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from procpipe.launch.plan import replay, trial
from procpipe.launch.plan.subject import Named
from procpipe.planner.divide import divide
from procpipe.planner.layers import Profile
from procpipe.planner.propose import Proposal


@dataclass(frozen=True)
class Measured:
    """What was measured of a proposal."""

    step_s: float  # seconds of a mini-batch
    idle: float  # the share of it that stages are idle, the mean over all
    needed_bytes: int  # of the stage that needs most
    task_s: Mapping[tuple[str, int], float]  # seconds of a task, by its kind and partition


def try_out(
    best: Sequence[Proposal],
    profile: Profile,
    named: Named,
    device_type: str,
    show: Callable[[int, int], object],
) -> dict[Proposal, Measured]:
    """Run proposals, and predict them from what other plans took: so what is measured is a check.

    Blocks, for about two seconds each and the start of the processes.

    Args:
        best: proposals on the same number of processes.
        profile: what they were proposed from.
        named: the model and what it is trained with.
        device_type: "cpu" or "cuda".
        show: called a few times a second with the number of steps that have ended, and of all.

    Returns:
        What was measured of each, by the proposal with its new prediction.

    Raises:
        RuntimeError: they could not be run.
    """
    calibrations = _calibrations(best, profile)
    batch = named.batch or profile.batch
    trials = [*calibrations.values()]
    trials += [trial.Trial(arguments_of(p), batch, p.total_s) for p in best]
    num_ranks = best[0].plan.num_stages * best[0].num_replicas
    with tempfile.TemporaryDirectory(prefix="procpipe-plan-") as folder:
        outcomes = trial.run(trials, num_ranks, named, device_type, Path(folder), show)
        runs = [replay.usual_of(outcome.traces) for outcome in outcomes]
    costs = {}
    for key, run in zip(calibrations, runs, strict=False):
        table = profile.at(key[1]).timed(run.facts["balance"], run.task_s)
        costs[key] = table, replay.machine_of(run, table)
    found = {}
    for proposal, outcome, run in zip(
        best, outcomes[len(costs) :], runs[len(costs) :], strict=True
    ):
        again = proposal.on(*costs[proposal.num_replicas, proposal.micro_batch])
        busy_s = sum(run.task_s[task.kind, task.j] for task in run.plan.tasks())
        found[again] = Measured(
            run.step_s,
            max(0.0, 1 - busy_s / (run.plan.num_stages * run.step_s)),
            _needed_bytes(again, outcome.added_bytes, profile),
            run.task_s,
        )
    return found


def arguments_of(proposal: Proposal) -> dict[str, Any]:
    """Return the arguments of ``Stage`` for a proposal, but for model and loss."""
    return {
        "balance": list(proposal.balance),
        **({"replicas": proposal.num_replicas} if proposal.num_replicas > 1 else {}),
        "chunks": proposal.chunks,
        "checkpoint": proposal.checkpoint,
        "schedule": proposal.schedule,
    }


def _calibrations(best: Sequence[Proposal], profile: Profile) -> dict[tuple[int, int], trial.Trial]:
    """Return a trial for each number of replicas and size of a micro-batch."""
    found: dict[tuple[int, int], trial.Trial] = {}
    for proposal in best:
        n, key = proposal.plan.num_stages, (proposal.num_replicas, proposal.micro_batch)
        if key in found:
            continue
        like = [p for p in best if (p.num_replicas, p.micro_batch) == key]
        kinds = "".join(sorted({task.kind for p in like for task in p.plan.tasks()}))
        seconds = profile.at(proposal.micro_batch).layer_seconds()
        balances = [p.balance for p in like if len(p.balance) == n]
        balance = balances[0] if balances else divide(seconds, n)
        found[key] = trial.calibration(
            balance, proposal.num_replicas, proposal.micro_batch, kinds, sum(seconds) / n
        )
    return found


def _needed_bytes(proposal: Proposal, added_bytes: Sequence[int], profile: Profile) -> int:
    """Return what the stage needs that needs most: what was measured, and what does not change.

    Gradients are part of what steps add to a process.
    """
    table, placement = profile.at(proposal.micro_batch), proposal.plan.placement
    with_gradients, without = (
        table.static_bytes(proposal.balance, placement, states) for states in (0.0, -1.0)
    )
    return max(
        proposal.static_bytes[stage] - (with_gradients[stage] - without[stage]) + added
        for rank, added in enumerate(added_bytes)
        for stage in [rank % proposal.plan.num_stages]
    )
