"""``procpipe plan --check``: runs what was proposed, and measures it.

``rehearse`` starts this module on every rank. Each one builds the stage of the proposal, runs some
steps and writes what it measured:

    python -m procpipe.launch.plan.check --settings JSON --output FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from procpipe import Stage
from procpipe.launch.plan.subject import MistakeError, Named, load
from procpipe.launch.start_ranks import start_ranks
from procpipe.planner.propose import Proposal

#: How long processes may take to start, and how many times the predicted time to run their steps.
_START_TIMEOUT_S = 120.0
_TIMES_PREDICTED = 20.0

#: Steps before those that count.
_NUM_WARM_UP = 2

#: Steps that count: as many as are predicted to fit into some seconds.
_MIN_STEPS, _MAX_STEPS = 3, 50
_BUDGET_S = 2.0


@dataclass(frozen=True)
class Rehearsal:
    """What was measured."""

    step_s: float  # seconds of a mini-batch, the median
    idle: float  # the share of it that stages are idle, the mean over stages and replicas
    task_s: Mapping[str, float]  # seconds of a task, by kind and partition: "F0"


def rehearse(
    proposal: Proposal, arguments: Mapping[str, Any], named: Named, device_type: str
) -> Rehearsal:
    """Run a proposal on as many processes as it has stages and replicas of them, on this host.

    The ``arguments`` are those of ``Stage``, but for the model, the loss and the devices.

    Raises:
        RuntimeError: it could not be run.
    """
    num_stages = proposal.plan.num_stages
    num_ranks = num_stages * proposal.num_replicas
    num_steps = max(_MIN_STEPS, min(_MAX_STEPS, int(_BUDGET_S / proposal.total_s)))
    devices = ["cpu"] * num_ranks if device_type == "cpu" else None
    settings = {
        "named": asdict(named),
        "stage": {**arguments, "devices": devices},
        "num_steps": num_steps,
    }
    run_s = _TIMES_PREDICTED * (_NUM_WARM_UP + num_steps) * proposal.total_s
    program = ("-m", "procpipe.launch.plan.check", "--settings", json.dumps(settings))
    result = start_ranks(num_ranks, program, _START_TIMEOUT_S + run_s)
    if result.value is None:
        raise RuntimeError(result.reason)
    of_ranks = result.value
    step_s = max(statistics.median(one["steps_s"]) for one in of_ranks)
    busy_s = sum(statistics.median(one["busy_s"]) for one in of_ranks)
    return Rehearsal(
        step_s=step_s,
        idle=1 - busy_s / (num_ranks * step_s),
        task_s={
            name: statistics.median(one["task_s"][name] for one in of_ranks[stage::num_stages])
            for stage in range(num_stages)
            for name in of_ranks[stage]["task_s"]
        },
    )


# -- on each rank ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Run the steps on this rank, and write what it measured."""
    parser = argparse.ArgumentParser(prog="procpipe.launch.plan.check")
    parser.add_argument("--settings", type=json.loads, required=True)
    parser.add_argument("--output", required=True)
    options = parser.parse_args(argv)
    settings = options.settings
    subject = load(Named(**settings["named"]))
    stage = Stage(subject.model, loss_fn=subject.loss_fn, **settings["stage"])
    inputs = [_part_of(each, stage) for each in subject.inputs]
    target = _part_of(subject.target, stage)
    for _ in range(_NUM_WARM_UP):
        _step(stage, inputs, target)
    steps_s, busy_s = [], []
    tasks_s: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(settings["num_steps"]):
        steps_s.append(_step(stage, inputs, target))
        tasks = stage.last_step()
        busy_s.append(sum(timed.end_s - timed.start_s for timed in tasks))
        for timed in tasks:
            tasks_s[f"{timed.task.kind}{timed.task.j}"].append(timed.end_s - timed.start_s)
    ours = {
        "steps_s": steps_s,
        "busy_s": busy_s,
        "task_s": {name: statistics.median(found) for name, found in tasks_s.items()},
    }
    Path(f"{options.output}.{stage.rank}").write_text(json.dumps(ours))
    stage.close()


def _part_of(value: Any, stage: Any) -> Any:
    """Return this replica's part of a mini-batch's nested value."""
    if isinstance(value, torch.Tensor):
        return value.tensor_split(stage.replicas)[stage.replica]
    if isinstance(value, dict):
        return {key: _part_of(each, stage) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_part_of(each, stage) for each in value)
    return value


def _step(stage: Any, inputs: Sequence[Any], target: Any) -> float:
    stage.zero_grad()
    begun = time.perf_counter()
    stage.step(*inputs, target=target)
    if stage.device.type == "cuda":
        torch.cuda.synchronize(stage.device)
    return time.perf_counter() - begun


if __name__ == "__main__":
    try:
        main()
    except MistakeError as mistake:
        sys.exit(f"procpipe plan --check: {mistake}")
