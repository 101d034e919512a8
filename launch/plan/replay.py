"""Fills the table of layers, and the machine's numbers, from a recorded run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from procpipe.plan.routes import ACTIVATION, SKIP
from procpipe.planner.layers import Layer, Machine, Profile, Skip, Table
from procpipe.planner.simulation import simulate
from procpipe.timeline.chrome import read
from procpipe.timeline.steps import merged
from procpipe.timeline.usual import Usual, usual
from procpipe.words import counted


def is_recording(text: str) -> bool:
    """Return whether a file is of a recorded run."""
    whole = json.loads(text)
    return isinstance(whole, dict) and "traceEvents" in whole


def usual_of(paths: Sequence[Path]) -> Usual:
    """Return the usual training step of a recorded run, from the files of all its ranks.

    Raises:
        ValueError: they are none, or not those of one run, or no step trained.
    """
    traces = []
    for path in paths:
        try:
            traces.append(read(path))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    try:
        return usual(merged(traces))
    except KeyError as error:
        raise ValueError(error.args[0]) from error


def basis(run: Usual) -> str:
    """Say what is known of a run, and what is not."""
    facts = run.facts
    layers = "by each layer's forward" if run.layer_s else "equally: they were not timed"
    return (
        f"a recorded run: {facts['schedule']}, balance {facts['balance']}, "
        f"{counted(len(run.samples), 'micro-batch')} of {max(run.samples)} samples, medians of "
        f"{counted(run.num_steps, 'step')}\na partition's seconds are divided among its layers "
        f"{layers}; other sizes of micro-batches are in proportion\nnot recorded, so not counted: "
        "parameters, and what autograd keeps"
    )


def profile_of(run: Usual) -> Profile:
    """Return the costs of a run's layers: of their bytes, only those of messages are known.

    A partition's seconds are divided among its layers as their forwards', if these were timed,
    else equally. Outputs within a partition are taken to be as large as the messages.
    """
    balance = list(run.facts["balance"])
    samples = max(run.samples)
    names = [str(line).partition(":")[0] for line in run.facts["layers"]]
    shares = run.layer_s or (1.0,) * sum(balance)
    cuts = [sum(balance[: j + 1]) - 1 for j in range(len(balance))]
    sizes = run.message_bytes
    known = {cut: sizes.get((ACTIVATION, j, j + 1), 0) for j, cut in enumerate(cuts[:-1])}
    usual = statistics.fmean(known.values()) if known else 0.0
    layers = tuple(
        Layer(name, share, 2 * share, output_bytes=known.get(k, usual))
        for k, (name, share) in enumerate(zip(names, shares, strict=True))
    )
    skips = tuple(
        Skip(cuts[a], (cuts[b],), num_bytes)
        for (payload, a, b), num_bytes in sizes.items()
        if payload == SKIP
    )
    table = Table(samples, layers, skips=skips).timed(balance, run.task_s)
    batch = sum(run.samples) * run.facts["replicas"]
    return Profile(batch, (table,), machine_of(run, table), "a recorded run")


def machine_of(run: Usual, table: Table) -> Machine:
    """Return what a run says of its machine."""
    num_bytes = sum(run.message_bytes[channel] for channel in run.send_s)
    send_s = sum(run.send_s.values()) / num_bytes if num_bytes else 0.0
    waits_s = [hop_s - run.send_s[channel] for channel, hop_s in run.hop_s.items()]
    hop_s = max(0.0, statistics.median(waits_s)) if waits_s else 0.0
    machine = Machine(run.host_s, send_s, hop_s)
    costs = table.costs(run.facts["balance"], machine, run.facts["replicas"])
    return replace(machine, step_s=max(0.0, run.step_s - simulate(run.plan, costs).total_s))
