"""Measures the best proposals in real pipelines, and predicts them again, from a calibration."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from procpipe.launch.plan import replay, trial
from procpipe.planner.costs import Table
from procpipe.planner.divide import divide
from procpipe.planner.propose import Proposal, Question
from procpipe.timeline.chrome import read
from procpipe.timeline.steps import merged


def try_out(
    best: Sequence[Proposal],
    tables: Mapping[int, Table],
    question: Question,
    named: Sequence[Any],
    device_type: str,
) -> dict[Proposal, replay.Usual]:
    """Run proposals, and predict them from what other plans took: so what is measured is a check.

    Blocks, for about two seconds each and the start of the processes.

    Args:
        best: proposals on the same number of processes.
        tables: what they were proposed from, by the samples of a micro-batch.
        question: what was asked for.
        named: the arguments of ``subject.load``.
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
        num_stages = run.plan.num_stages
        # What steps added to a process has its gradients.
        static_bytes = tables[proposal.micro_batch].static_bytes(
            proposal.balance, run.plan.placement, question.states - 1
        )
        needed_bytes = [n + static_bytes[k % num_stages] for k, n in enumerate(added_bytes)]
        found[again] = replace(run, needed_bytes=max(needed_bytes))
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
    groups: defaultdict[tuple[int, int], list[Proposal]] = defaultdict(list)
    for proposal in best:
        groups[proposal.num_replicas, proposal.micro_batch].append(proposal)
    found = {}
    for key, like in groups.items():
        n, seconds = like[0].timeline.plan.num_stages, tables[key[1]].layer_seconds()
        kinds = "".join(sorted({kind for p in like for kind in p.timeline.plan.kinds}))
        balances = [p.balance for p in like if len(p.balance) == n] or [(*divide(seconds, n),)]
        found[key] = trial.calibration(balances[0], *key, kinds, sum(seconds) / n)
    return found
