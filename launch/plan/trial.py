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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from procpipe import Stage
from procpipe.launch.plan.subject import MistakeError, Subject, load
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
    trials: Sequence[Trial], num_ranks: int, named: Sequence[Any], device_type: str, folder: Path
) -> list[tuple[Sequence[int], Sequence[Path]]]:
    """Run trials in one job of processes on this host; blocks until it has ended.

    Args:
        trials: what to run, one after the other.
        num_ranks: the number of processes.
        named: the arguments of ``subject.load``.
        device_type: "cpu" or "cuda".
        folder: where the recorded runs are written.

    Returns:
        Of each trial, by rank, the bytes that steps added to the process and its recording.

    Raises:
        RuntimeError: they could not be run.
    """
    folders = [folder / f"{k}" for k in range(len(trials))]
    for of_trial in folders:
        of_trial.mkdir()
    settings = {
        "named": named,
        "devices": ["cpu"] * num_ranks if device_type == "cpu" else None,
        "trials": [
            asdict(trial) | {"num_steps": trial.num_steps, "trace": str(of_trial / "run.json")}
            for trial, of_trial in zip(trials, folders, strict=True)
        ],
    }
    run_s = sum(trial.num_steps * trial.predicted_s for trial in trials)
    program = ("-m", "procpipe.launch.plan.trial", "--settings", json.dumps(settings))
    result = start_ranks(num_ranks, program, _START_TIMEOUT_S + _TIMES_PREDICTED * run_s)
    if result.value is None:
        raise RuntimeError(result.reason)
    return [
        (added_bytes, sorted(of_trial.iterdir()))
        for added_bytes, of_trial in zip(zip(*result.value, strict=True), folders, strict=True)
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
