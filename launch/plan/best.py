"""Measures the best proposals in real pipelines, and predicts them again, from a calibration."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from procpipe.launch.plan import replay, trial
from procpipe.launch.plan.subject import Named
from procpipe.planner.divide import divide
from procpipe.planner.layers import Table
from procpipe.planner.propose import Proposal, Question
from procpipe.timeline.chrome import read
from procpipe.timeline.steps import merged


@dataclass(frozen=True)
class Measured:
    """What was measured of a proposal."""

    step_s: float  # seconds of a mini-batch
    idle: float  # the share of it that stages are idle, the mean over all
    needed_bytes: int  # of the stage that needs most
    task_s: Mapping[tuple[str, int], float]  # seconds of a task, by its kind and partition


def try_out(
    best: Sequence[Proposal],
    tables: Mapping[int, Table],
    question: Question,
    named: Named,
    device_type: str,
) -> dict[Proposal, Measured]:
    """Run proposals, and predict them from what other plans took: so what is measured is a check.

    Blocks, for about two seconds each and the start of the processes.

    Args:
        best: proposals on the same number of processes.
        tables: what they were proposed from, by the samples of a micro-batch.
        question: what was asked for.
        named: the model and what it is trained with.
        device_type: "cpu" or "cuda".

    Returns:
        What was measured of each, by the proposal with its new prediction.

    Raises:
        RuntimeError: they could not be run.
    """
    calibrations = _calibrations(best, tables)
    trials = [*calibrations.values()]
    trials += [trial.Trial(arguments_of(p), question.batch, p.timeline.total_s) for p in best]
    num_ranks = best[0].timeline.plan.num_stages * best[0].num_replicas
    with tempfile.TemporaryDirectory(prefix="procpipe-plan-") as folder:
        outcomes = trial.run(trials, num_ranks, named, device_type, Path(folder))
        runs = [replay.usual(merged(map(read, files))) for _, files in outcomes]
    costs = {}
    for key, run in zip(calibrations, runs, strict=False):
        table = tables[key[1]].timed(run.facts["balance"], run.task_s)
        costs[key] = table, replay.machine_of(run, table)
    found = {}
    for proposal, (added_bytes, _), run in zip(
        best, outcomes[len(costs) :], runs[len(costs) :], strict=True
    ):
        again = proposal.on(*costs[proposal.num_replicas, proposal.micro_batch])
        busy_s = sum(run.task_s[task.kind, task.j] for task in run.plan.tasks())
        num_stages = run.plan.num_stages
        # What steps added to a process has its gradients.
        static_bytes = tables[proposal.micro_batch].static_bytes(
            proposal.balance, run.plan.placement, question.states - 1
        )
        found[again] = Measured(
            run.step_s,
            max(0.0, 1 - busy_s / (num_stages * run.step_s)),
            max(n + static_bytes[k % num_stages] for k, n in enumerate(added_bytes)),
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


def _calibrations(
    best: Sequence[Proposal], tables: Mapping[int, Table]
) -> dict[tuple[int, int], trial.Trial]:
    """Return a trial for each number of replicas and size of a micro-batch."""
    found: dict[tuple[int, int], trial.Trial] = {}
    for proposal in best:
        n, key = proposal.timeline.plan.num_stages, (proposal.num_replicas, proposal.micro_batch)
        if key in found:
            continue
        like = [p for p in best if (p.num_replicas, p.micro_batch) == key]
        kinds = "".join(sorted({task.kind for p in like for task in p.timeline.plan.tasks()}))
        seconds = tables[proposal.micro_batch].layer_seconds()
        balances = [p.balance for p in like if len(p.balance) == n]
        balance = balances[0] if balances else divide(seconds, n)
        found[key] = trial.calibration(
            balance, proposal.num_replicas, proposal.micro_batch, kinds, sum(seconds) / n
        )
    return found
