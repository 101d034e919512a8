"""Measures the best proposals in a real pipeline, and predicts them again, from a calibration.

``try_out`` starts this module on every rank, in one job. For each trial, the ranks build a stage,
run some steps, and note the memory that they need; the stage records what ran when:

    python -m procpipe.launch.plan.trial --settings JSON --output FILE

What tasks, the host and messages take in such a pipeline is found by trials whose plan has every
kind of task (``calibration``). Beside a neighbour these take longer than alone.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from procpipe import Stage
from procpipe.launch.plan import replay
from procpipe.launch.plan.subject import MistakeError, Subject, load
from procpipe.launch.start_ranks import start_ranks
from procpipe.plan.schedules.one_f_one_b import one_f_one_b
from procpipe.plan.schedules.rows import plan_of_rows
from procpipe.plan.task import Plan, Task
from procpipe.planner.costs import Table
from procpipe.planner.divide import divide
from procpipe.planner.propose import Proposal, Question
from procpipe.planner.simulation import simulate
from procpipe.timeline.chrome import read
from procpipe.timeline.steps import merged

#: How long processes may take to start, and how many times the predicted time to run their steps.
_START_TIMEOUT_S = 120.0
_TIMES_PREDICTED = 20.0

#: As many steps as are predicted to fit into some seconds. Medians of all count, so that the first,
#: which takes longer, does not.
_MIN_STEPS, _MAX_STEPS = 3, 52
_BUDGET_S = 2.0

#: Micro-batches a stage of a calibration.
_CHUNKS_A_STAGE = 6


@dataclass(frozen=True)
class Trial:
    """What is to be run."""

    stage: Mapping[str, Any]  # the arguments of ``Stage``, but for the model, the loss and devices
    batch: int  # samples of a mini-batch
    predicted_s: float  # seconds of a step
    kinds: str = ""  # of a calibration, the kinds of tasks; it has a schedule of its own

    @property
    def num_steps(self) -> int:
        """How many steps are run."""
        return max(_MIN_STEPS, min(_MAX_STEPS, int(_BUDGET_S / self.predicted_s)))


def calibration(
    balance: Sequence[int], replicas: int, micro_batch: int, kinds: str, task_s: float
) -> Trial:
    """Return a trial that measures each kind of task, on one partition a stage.

    Args:
        balance: the number of layers of each stage.
        replicas: the number of pipelines.
        micro_batch: samples of a micro-batch.
        kinds: those that the tried proposals have.
        task_s: the predicted seconds of a forward and a backward on one stage.
    """
    chunks = _CHUNKS_A_STAGE * len(balance)
    stage = {"balance": list(balance), "replicas": replicas, "chunks": chunks}
    stage["checkpoint"] = "never"
    return Trial(stage, micro_batch * chunks * replicas, task_s * chunks, kinds)


def mixed_plan(m: int, n: int, kinds: str) -> Plan:
    """Plan 1F1B, whose micro-batches take turns in going back whole, split, and recomputed."""
    turns = [kind for kind in "BIR" if kind in kinds] or ["B"]
    again = {i for i in range(m) if turns[i % len(turns)] == "R"}
    rows: list[list[Task]] = []
    for j in range(n):
        rows.append([])
        for task in one_f_one_b(m, n, recompute=again).tasks_of(j):
            is_split = task.kind == "B" and turns[task.i % len(turns)] == "I"
            rows[-1] += [task._replace(kind=kind) for kind in "IW"] if is_split else [task]
    return plan_of_rows(m, rows)


# -- in the command -------------------------------------------------------------------------------


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
    trials += [Trial(arguments_of(p), question.batch, p.timeline.total_s) for p in best]
    num_ranks = best[0].timeline.plan.num_stages * best[0].num_replicas
    outcomes = _run(trials, num_ranks, named, device_type)
    costs = {}
    for key, (_, run) in zip(calibrations, outcomes, strict=False):
        table = tables[key[1]].timed(run.facts["balance"], run.task_s)
        costs[key] = table, replay.machine_of(run, table)
    found = {}
    for proposal, (added_bytes, run) in zip(best, outcomes[len(costs) :], strict=True):
        table, machine = costs[proposal.num_replicas, proposal.micro_batch]
        plan, routes = proposal.timeline.plan, proposal.timeline.routes
        # Sums over replicas were in the calibration's steps, and so are in ``machine.step_s``.
        timeline = simulate(plan, table.costs(proposal.balance, machine), routes)
        # What steps added to a process has its gradients.
        static_bytes = table.static_bytes(proposal.balance, plan.placement, question.states - 1)
        needed_bytes = [n + static_bytes[k % plan.num_stages] for k, n in enumerate(added_bytes)]
        found[replace(proposal, timeline=timeline)] = replace(run, needed_bytes=max(needed_bytes))
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
) -> dict[tuple[int, int], Trial]:
    """Return a trial for each number of replicas and size of a micro-batch."""
    groups: defaultdict[tuple[int, int], list[Proposal]] = defaultdict(list)
    for proposal in best:
        groups[proposal.num_replicas, proposal.micro_batch].append(proposal)
    found = {}
    for key, like in groups.items():
        n, seconds = like[0].timeline.plan.num_stages, tables[key[1]].layer_seconds()
        kinds = "".join(sorted({kind for p in like for kind in p.timeline.plan.kinds}))
        balances = [p.balance for p in like if len(p.balance) == n] or [(*divide(seconds, n),)]
        found[key] = calibration(balances[0], *key, kinds, sum(seconds) / n)
    return found


def _run(
    trials: Sequence[Trial], num_ranks: int, named: Sequence[Any], device_type: str
) -> list[tuple[Sequence[int], replay.Usual]]:
    """Run trials in one job of processes on this host; blocks until it has ended.

    Returns:
        Of each trial, by rank, the bytes that steps added to the process; and the usual step.

    Raises:
        RuntimeError: they could not be run.
    """
    run_s = sum(trial.num_steps * trial.predicted_s for trial in trials)
    with tempfile.TemporaryDirectory(prefix="procpipe-plan-") as folder:
        settings = {
            "named": named,
            "devices": ["cpu"] * num_ranks if device_type == "cpu" else None,
            "trials": [
                asdict(trial) | {"num_steps": trial.num_steps, "trace": f"{folder}/{k}.json"}
                for k, trial in enumerate(trials)
            ],
        }
        program = ("-m", "procpipe.launch.plan.trial", "--settings", json.dumps(settings))
        result = start_ranks(num_ranks, program, _START_TIMEOUT_S + _TIMES_PREDICTED * run_s)
        if result.value is None:
            raise RuntimeError(result.reason)
        return [
            (added_bytes, replay.usual(merged(map(read, Path(folder).glob(f"{k}.*.json")))))
            for k, added_bytes in enumerate(zip(*result.value, strict=True))
        ]


# -- on each rank ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Run the trials on this rank, and write what it measured."""
    parser = argparse.ArgumentParser(prog="procpipe.launch.plan.trial")
    parser.add_argument("--settings", type=json.loads, required=True)
    parser.add_argument("--output", required=True)
    options = parser.parse_args(argv)
    subject = load(*options.settings["named"])
    found = [
        _added_bytes(subject, trial, options.settings["devices"])
        for trial in options.settings["trials"]
    ]
    Path(f"{options.output}.{os.environ['RANK']}").write_text(json.dumps(found))


def _added_bytes(subject: Subject, trial: Mapping[str, Any], devices: Any) -> int:
    """Run one trial; return the bytes that it adds to this process; every rank calls it."""
    arguments = dict(trial["stage"])
    if trial["kinds"]:
        arguments["schedule"] = partial(mixed_plan, kinds=trial["kinds"])
    model = copy.deepcopy(subject.model)
    stage = Stage(
        model, loss_fn=subject.loss_fn, devices=devices, trace=trial["trace"], **arguments
    )
    del model
    before = _memory_bytes(stage.device, is_peak=False)
    share, num_larger = divmod(trial["batch"], stage.replicas)
    inputs, target = subject.of_size(share + (stage.replica < num_larger), is_for_stage=True)
    for _ in range(trial["num_steps"]):
        stage.zero_grad()
        stage.step(*inputs.values, target=target, **inputs.named)
    added = _memory_bytes(stage.device, is_peak=True) - before
    stage.close()
    return max(0, added)


def _memory_bytes(device: torch.device, *, is_peak: bool) -> int:
    """Return the memory in use, or its peak since the last call that asked for the former."""
    if device.type == "cuda":
        if is_peak:
            return torch.cuda.max_memory_allocated(device)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if not is_peak:
        gc.collect()
        with suppress(AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)  # what earlier trials have freed
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    name = "VmHWM:" if is_peak else "VmRSS:"
    return int(status.partition(name)[2].split()[0]) << 10


if __name__ == "__main__":
    try:
        main()
    except MistakeError as mistake:
        sys.exit(f"procpipe plan: {mistake}")
