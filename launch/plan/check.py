"""``procpipe plan --check``: runs what was proposed, and puts what was measured beside it.

    procpipe plan ── torchrun ── rank 0 … rank n - 1     each builds the stage of the proposal,
      └─ waits, then reads                               runs some steps and writes what it saw

This module is both: ``rehearse`` starts the processes, and is what they run.

    python -m procpipe.launch.plan.check --settings FILE --output FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from procpipe.launch.doctor.measuring import measure
from procpipe.launch.plan.subject import MistakeError, Named, load
from procpipe.tuning.propose import Proposal

PROGRAM = ("-m", "procpipe.launch.plan.check")

#: How long processes may take to start, and to run their steps, beside the predicted time.
_START_TIMEOUT_S = 120.0
_TIMES_PREDICTED = 20.0

#: Steps that are not counted: as many as schedule="auto" measures and tries plans in, or a few.
_NUM_WARM_UP_OF_AUTO, _NUM_WARM_UP = 16, 2

#: Those that are: as many as fit into some seconds.
_MIN_STEPS, _MAX_STEPS = 3, 50
_BUDGET_S = 2.0


@dataclass(frozen=True)
class Rehearsal:
    """What was measured.

    Attributes:
        step_s: seconds of a mini-batch, the median.
        idle: the share of it that a stage rests, as the mean over stages.
        task_s: seconds of a task, by kind and partition: "F0".
        held_bytes: the most that each stage held between tasks, in the steps that count.
        schedule: what the last step ran, as ``Stage.schedule`` tells it.
        tasks: the tasks of each stage in it, in order: "F0@0".
    """

    step_s: float
    idle: float
    task_s: Mapping[str, float]
    held_bytes: tuple[int, ...]
    schedule: str
    tasks: tuple[tuple[str, ...], ...]


def rehearse(
    proposal: Proposal, arguments: Mapping[str, Any], named: Named, device_type: str
) -> Rehearsal:
    """Run a proposal on as many processes as it has stages, on this host.

    Args:
        proposal: what to run.
        arguments: those of ``Stage`` beside the model, the loss and the devices.
        named: the model and what it is trained with.
        device_type: "cpu" or "cuda".

    Raises:
        RuntimeError: it could not be run; says what the processes told.
    """
    num_stages = proposal.plan.num_stages
    num_steps = max(_MIN_STEPS, min(_MAX_STEPS, int(_BUDGET_S / proposal.total_s)))
    num_warm_up = _NUM_WARM_UP_OF_AUTO if arguments["schedule"] == "auto" else _NUM_WARM_UP
    settings = {
        "named": asdict(named),
        "stage": {
            **arguments,
            "devices": ["cpu"] * num_stages if device_type == "cpu" else None,
        },
        "num_warm_up": num_warm_up,
        "num_steps": num_steps,
    }
    with tempfile.TemporaryDirectory(prefix="procpipe-plan-") as folder:
        file = Path(folder, "settings.json")
        file.write_text(json.dumps(settings))
        measured = measure(
            num_stages,
            timeout_s=_START_TIMEOUT_S
            + _TIMES_PREDICTED * (num_warm_up + num_steps) * proposal.total_s,
            program=(*PROGRAM, "--settings", str(file)),
        )
    if measured.report is None:
        raise RuntimeError(measured.story)
    return _rehearsal([measured.report[str(rank)] for rank in range(num_stages)])


def _rehearsal(of_ranks: Sequence[Mapping[str, Any]]) -> Rehearsal:
    """Put together what each rank has seen."""
    step_s = max(statistics.median(told["steps_s"]) for told in of_ranks)
    busy_s = [statistics.median(told["busy_s"]) for told in of_ranks]
    task_s = {name: seconds for told in of_ranks for name, seconds in told["task_s"].items()}
    idle = 1 - sum(busy_s) / (len(of_ranks) * step_s)
    held_bytes = tuple(told["held_bytes"] for told in of_ranks)
    tasks = tuple(tuple(told["tasks"]) for told in of_ranks)
    return Rehearsal(step_s, idle, task_s, held_bytes, of_ranks[0]["schedule"], tasks)


# -- on each rank ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Run the steps on this rank; rank 0 writes what all ranks have seen."""
    parser = argparse.ArgumentParser(prog="procpipe.launch.plan.check")
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(argv)
    settings = json.loads(options.settings.read_text())
    from procpipe import Stage

    subject = load(Named(**settings["named"]))
    stage = Stage(subject.model, loss_fn=subject.loss_fn, **settings["stage"])
    for _ in range(settings["num_warm_up"]):
        _step(stage, subject.inputs, subject.target)
    stage.reset_peak_held_bytes()  # auto has measured with plans that hold more, and tried others
    steps_s, busy_s = [], []
    tasks_s: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(settings["num_steps"]):
        steps_s.append(_step(stage, subject.inputs, subject.target))
        tasks = stage.last_step()
        busy_s.append(sum(timed.end_s - timed.start_s for timed in tasks))
        for timed in tasks:
            tasks_s[f"{timed.task.kind}{timed.task.j}"].append(timed.end_s - timed.start_s)
    ours = {
        "steps_s": steps_s,
        "busy_s": busy_s,
        "task_s": {name: statistics.median(found) for name, found in tasks_s.items()},
        "held_bytes": stage.statistics().peak_held_bytes,
        "schedule": stage.schedule,
        "tasks": [str(timed.task) for timed in tasks],
    }
    _file_of(options.output, stage.rank).write_text(json.dumps(ours))
    stage.report()  # which waits for all ranks, so that all files are there
    if stage.rank == 0:
        files = [_file_of(options.output, rank) for rank in range(len(stage.devices))]
        found = {rank: json.loads(file.read_text()) for rank, file in enumerate(files)}
        options.output.write_text(json.dumps(found))
    stage.close()


def _step(stage: Any, inputs: Sequence[Any], target: Any) -> float:
    stage.zero_grad()
    begun = time.perf_counter()
    stage.step(*inputs, target=target)
    if stage.device.type == "cuda":
        import torch

        torch.cuda.synchronize(stage.device)
    return time.perf_counter() - begun


def _file_of(output: Path, rank: int) -> Path:
    return output.with_name(f"{output.name}.{rank}")


if __name__ == "__main__":
    try:
        main()
    except MistakeError as mistake:
        sys.exit(f"procpipe plan --check: {mistake}")
