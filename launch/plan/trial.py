"""Runs proposals in a real pipeline of this machine's processes, and measures them.

``run`` starts this module on every rank, in one job. For each trial, the ranks build a stage, run
some steps, and note the memory that they need; the stage records what ran when:

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch

from procpipe import Stage
from procpipe.launch.plan.subject import MistakeError, Named, Subject, load
from procpipe.launch.start_ranks import start_ranks
from procpipe.plan.schedules.one_f_one_b import one_f_one_b
from procpipe.plan.schedules.rows import plan_of_rows
from procpipe.plan.task import Plan, Task

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


@dataclass(frozen=True)
class Outcome:
    """What was measured of a trial."""

    added_bytes: tuple[int, ...]  # by rank, what it needed in addition to the model's parameters
    traces: tuple[Path, ...] = field(default=(), repr=False)  # the files of the recorded run


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


def run(
    trials: Sequence[Trial],
    num_ranks: int,
    named: Named,
    device_type: str,
    folder: Path,
    show: Callable[[int, int], object],
) -> list[Outcome]:
    """Run trials in one job of processes on this host; blocks until it has ended.

    Args:
        trials: what to run, one after the other.
        num_ranks: the number of processes.
        named: the model and what it is trained with.
        device_type: "cpu" or "cuda".
        folder: where the recorded runs are written.
        show: called a few times a second with the number of steps that have ended, and of all.

    Raises:
        RuntimeError: they could not be run.
    """
    done = folder / "done"
    done.touch()
    traces = [folder / f"{k}" for k in range(len(trials))]
    for trace in traces:
        trace.mkdir()
    settings = {
        "named": asdict(named),
        "devices": ["cpu"] * num_ranks if device_type == "cpu" else None,
        "trials": [
            {
                **asdict(trial),
                "num_steps": trial.num_steps,
                "trace": str(traces[k] / "run.json"),
            }
            for k, trial in enumerate(trials)
        ],
        "done": str(done),
    }
    num_steps = [trial.num_steps for trial in trials]
    run_s = sum(n * trial.predicted_s for n, trial in zip(num_steps, trials, strict=True))
    program = ("-m", "procpipe.launch.plan.trial", "--settings", json.dumps(settings))
    has_ended = Event()

    def watch() -> None:
        while not has_ended.wait(0.2):
            show(done.stat().st_size, sum(num_steps))

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        result = start_ranks(num_ranks, program, _START_TIMEOUT_S + _TIMES_PREDICTED * run_s)
    finally:
        has_ended.set()
        watcher.join()
    if result.value is None:
        raise RuntimeError(result.reason)
    return [
        Outcome(
            tuple(one["added_bytes"] for one in of_ranks),
            tuple(sorted(traces[k].iterdir())),
        )
        for k, of_ranks in enumerate(zip(*result.value, strict=True))
    ]


# -- on each rank ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Run the trials on this rank, and write what it measured."""
    parser = argparse.ArgumentParser(prog="procpipe.launch.plan.trial")
    parser.add_argument("--settings", type=json.loads, required=True)
    parser.add_argument("--output", required=True)
    options = parser.parse_args(argv)
    settings = options.settings
    rank = int(os.environ["RANK"])
    subject = load(Named(**settings["named"]))
    found = []
    with Path(settings["done"]).open("ab", buffering=0) as done:
        for trial in settings["trials"]:
            note = partial(done.write, b".") if rank == 0 else partial(len, "")
            found.append(_measured(subject, trial, settings["devices"], note))
    Path(f"{options.output}.{rank}").write_text(json.dumps(found))


def _measured(
    subject: Subject, trial: Mapping[str, Any], devices: Any, note: Callable[[], object]
) -> dict[str, Any]:
    """Run one trial; every rank calls it."""
    arguments = dict(trial["stage"])
    if trial["kinds"]:
        arguments["schedule"] = partial(mixed_plan, kinds=trial["kinds"])
    model, ours = copy.deepcopy(subject.model), subject.resized(trial["batch"])
    stage = Stage(model, loss_fn=ours.loss_fn, devices=devices, trace=trial["trace"], **arguments)
    del model
    before = _memory_bytes(stage.device, is_peak=False)
    inputs = [_part_of(each, stage) for each in ours.inputs]
    target = _part_of(ours.target, stage)
    for _ in range(trial["num_steps"]):
        stage.zero_grad()
        stage.step(*inputs, target=target)
        note()
    added = _memory_bytes(stage.device, is_peak=True) - before
    stage.close()
    return {"added_bytes": max(0, added)}


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


def _part_of(value: Any, stage: Stage) -> Any:
    """Return this replica's part of a mini-batch's nested value."""
    if isinstance(value, torch.Tensor):
        return value.tensor_split(stage.replicas)[stage.replica]
    if isinstance(value, dict):
        return {key: _part_of(each, stage) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_part_of(each, stage) for each in value)
    return value


if __name__ == "__main__":
    try:
        main()
    except MistakeError as mistake:
        sys.exit(f"procpipe plan: {mistake}")
