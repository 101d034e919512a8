"""Lays out what a run has found: tables for the terminal, and text for the documentation. Pure.

Every title of a run on an emulated GPU says so, and no time in it is a GPU's.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.gpu.results import Record
from benchmarks.report import Table
from benchmarks.rounds import spread

__all__ = ["markdown", "tables_of"]

_EMULATED = "EMULATED, no GPU: "
_EMULATED_NOTE = "emulated on CPUs: times and sizes here are the emulator's, not those of any GPU"

_MIB = 1 << 20

Rows = list[list[Any]]

#: What a message's time is computed from, see ``measures.messages``.
_TURNS = ("both ways", "alone", "many", "one")

#: What the contenders of a step are compared with.
_AGAINST = {"gpt": "one process", "gpt-peers": "torch Schedule1F1B"}


def tables_of(records: Sequence[Record]) -> list[Table]:
    """Return a table for each kind of finding that there is, an overview first."""
    makers = (_steps, _machine, _tests, _parity, _times, _host, _messages, _gpt, _trace)
    tables = [table for make in makers for table in make(records)]
    return [_as_emulated(table) for table in tables] if _is_emulated(records) else tables


def markdown(records: Sequence[Record]) -> str:
    """Write all tables as text for ``docs/benchmarks.md``."""
    lines = ["## On a GPU that was not looked at", ""]
    for found in _of(records, "versions"):
        gpus = f"{found['num_gpus']} x {found['gpus'][0]}"
        lines = [
            f"## On {gpus}",
            "",
            f"`python -m benchmarks gpu` with {found['cores']} cores, Python {found['python']}, "
            f"torch {found['torch']}, driver {found['driver']}, NCCL {_version(found['nccl'])}.",
            "",
        ]
    if _is_emulated(records):
        lines[0] = "## On emulated GPUs: no time here is a GPU's"
    for table in tables_of(records):
        lines += ["```text", table.to_text(), "```", ""]
    return "\n".join(lines)


def _is_emulated(records: Sequence[Record]) -> bool:
    return any(record["emulated"] for record in _of(records, "run"))


def _as_emulated(table: Table) -> Table:
    notes = [*table.notes, _EMULATED_NOTE]
    return replace(table, title=_EMULATED + table.title, notes=notes)


def _of(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record.get("kind") == kind]


def _table(
    title: str, headings: Sequence[str], rows: Rows, formats: Sequence[str], *notes: str
) -> list[Table]:
    """Make a table, or none where there are no rows."""
    return [Table(title, ["", *headings], rows, formats, notes)] if rows else []


def _steps(records: Sequence[Record]) -> list[Table]:
    limits_s = {record["name"]: record["limit_s"] for record in _of(records, "begin")}
    ended = {record["name"]: record for record in _of(records, "end")}
    rows: Rows = []
    notes = []
    for name in dict.fromkeys([*limits_s, *ended]):
        end = ended.get(name, {"outcome": "cut off with the whole run", "seconds": None})
        outcome, _, why = end["outcome"].partition(": ")
        rows.append([name, outcome, end["seconds"], limits_s.get(name)])
        notes += [f"{name} {outcome}: {why}"] if why else []
    return _table("what was run", ["outcome", "s", "of at most"], rows, ["s", ".0f", ".0f"], *notes)


def _machine(records: Sequence[Record]) -> list[Table]:
    rows: Rows = []
    topology = ""
    for found in _of(records, "versions"):
        rows += [[f"GPU {k}: {gpu}"] for k, gpu in enumerate(found["gpus"])]
        reach = all(all(row) for row in found["peer_access"])
        rows.append([f"peer access: {'between all' if reach else found['peer_access']}"])
        names = ("driver", "torch", "cuda", "python", "kernel", "cores", "memory")
        rows += [[f"{name}: {found[name]}"] for name in names]
        rows.append([f"NCCL: {_version(found['nccl'])}"])
        topology = found["topology"]
    shared = {_version(record["version"]) for record in _of(records, "nccl")}
    rows += [[f"NCCL between ranks on one GPU: {version}"] for version in shared]
    notes = topology.splitlines()
    return [Table("machine", ["as torch and nvidia-smi see it"], rows, [], notes)] if rows else []


def _tests(records: Sequence[Record]) -> list[Table]:
    tests = {record["name"]: record for record in _of(records, "test")}
    if not tests:
        return []
    counts = Counter(test["outcome"] for test in tests.values())
    skipped = Counter(test["why"] for test in tests.values() if test["outcome"] == "skipped")
    rows: Rows = [
        [test["name"].removeprefix("tests/"), test["seconds"], test["why"][:100]]
        for test in tests.values()
        if test["outcome"] == "failed"
    ]
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    notes = [f"{count} skipped: {why}" for why, count in skipped.most_common()]
    headings = ["failed", "s", "error"] if rows else ["none failed", "", ""]
    return [Table(f"tests for GPUs: {outcomes}", headings, rows, [".1f", "s"], notes)]


def _parity(records: Sequence[Record]) -> list[Table]:
    names = ["loss", "output", "gradients", "buffers"]
    return _table(
        "parity: largest difference to the plain model on the same GPU, float64",
        names,
        [
            [f"{record['where']}: {', '.join(record['pair'])}", *(record[name] for name in names)]
            for record in _of(records, "parity")
        ],
        [".1e"] * len(names),
        "in three steps, of batches that cannot be split evenly",
    )


def _times(records: Sequence[Record]) -> list[Table]:
    found = _of(records, "steps")
    rows: Rows = []
    for record in found:
        ours, alone = record["times"]["procpipe"], record["times"]["one process"]
        rows.append([record["where"], _ms(ours), _ms(alone), spread(ours, alone)])
    return _table(
        f"time of a step: {found[0]['what'] if found else ''}, no recomputation",
        ["ms a step", "one process", "of one process"],
        rows,
        [".2f", ".2f", "s"],
        "medians of rounds; in brackets the least and the largest ratio of a round",
    )


def _host(records: Sequence[Record]) -> list[Table]:
    rows: Rows = []
    for record in _of(records, "host"):
        task_us = statistics.median(record["task_s"]) * 1e6
        for rank, found in enumerate(record["ranks"]):
            times_s = found["returned_s"], found["ended_s"]
            row = [f"{record['where']}: rank {rank}", task_us, *(s * 1e3 for s in times_s)]
            rows.append([*row, 1 - times_s[0] / times_s[1], found["warnings"], found["counted"]])
    return _table(
        "host: cost of a task, how far the host is ahead of the device, how often it waits for it",
        ["us a task", "step() ends, ms", "device ends, ms", "ahead", "waits", "(emulator)"],
        rows,
        [".0f", ".2f", ".2f", ".0%", "d", "d"],
        "us a task: step time / 2m of 16 layers of 16 x 16, where all is overhead",
        "ahead: the part of the step for which the host was free again",
        "waits: in a steady step, those that torch counts, and those that the emulator counts",
    )


def _messages(records: Sequence[Record]) -> list[Table]:
    rows: Rows = []
    for record in _of(records, "message"):
        times, many, size = record["times"], record["many"], record["bytes"]
        rounds = list(zip(*(times[name] for name in _TURNS), strict=True))
        way_s = statistics.median((both - alone) / 2 for both, alone, _, _ in rounds)
        each_s = statistics.median((all_s - one_s) / many for _, _, all_s, one_s in rounds)
        rate = size / 1e9 / each_s if each_s > 0 else None
        copy_rate = size / 1e9 / statistics.median(times["copy"])
        name = f"{record['where'].rpartition(', ')[2]}, {_size(size)}"
        rows.append([name, way_s * 1e6, each_s * 1e6, rate, copy_rate])
    return _table(
        "messages from one stage to the next, by size",
        ["one way, us", "in a row, us", "GB/s", "a copy, GB/s"],
        rows,
        [".0f", ".0f", ".2f", ".2f"],
        "one way: half of (a training step of one micro-batch, less the same in one process)",
        "in a row: each of 8 more messages in a forward pass, with its tasks; GB/s is of these",
        "a copy: from memory of a GPU to memory of the same GPU, each byte counted once",
    )


def _gpt(records: Sequence[Record]) -> list[Table]:
    """Lay out times and peaks of all contenders, and below them what was predicted."""
    times = {record["step"]: record["times"] for record in _of(records, "gpt steps")}
    rows: Rows = []
    for record in _of(records, "gpt memory"):
        step, name = record["step"], record["name"]
        of_step = times.get(step, {})
        seconds, against = of_step.get(name), of_step.get(_AGAINST[step])
        ratio = f"{spread(seconds, against)} of {_AGAINST[step]}" if seconds else None
        loss = next((loss for loss in record["losses"] if loss is not None), None)
        peaks = [peak / _MIB for peak in record["peak_bytes"]]
        rows.append([f"{step}: {name}", seconds and _ms(seconds), ratio, loss, *peaks])
    n = max((len(row) - 4 for row in rows), default=0)
    notes = []
    for plan in _of(records, "gpt plan"):
        held = zip(plan["static_bytes"], plan["held_bytes"], strict=True)
        peaks = [sum(both) / _MIB for both in held]
        name = f"predicted {plan['schedule']}, a GPU a stage"
        rows.append([name, plan["step_s"] * 1e3, None, None, *peaks])
        name = "predicted, all tasks in turn on one GPU"
        rows.append([name, plan["all_tasks_s"] * 1e3, None, None, *([None] * n)])
        notes.append(f"balance {plan['balance']}")
    return _table(
        _gpt_title(records),
        ["ms a step", "ratio", "loss", *(f"MiB, rank {rank}" for rank in range(n))],
        rows,
        [".1f", "s", ".4f", *([".1f"] * n)],
        "MiB: peak of torch's allocator: parameters, gradients, activations; without the slots of "
        "CUDA IPC",
        "predicted MiB: autocast's copies of weights count for each micro-batch that is held, "
        "though a step makes them once; what lives only within a task does not count",
        *notes,
    )


def _gpt_title(records: Sequence[Record]) -> str:
    for model in _of(records, "gpt model"):
        words, blocks, width, heads, context = model["sizes"]
        return (
            f"GPT of {model['num_parameters'] / 1e6:,.2f} M parameters ({blocks} blocks, width "
            f"{width}, {heads} heads, {words} words), bf16 autocast, {model['m']} micro-batches of "
            f"{model['micro_batch']} x {context} tokens, {model['n']} stages"
        )
    return "GPT"


def _trace(records: Sequence[Record]) -> list[Table]:
    found = _of(records, "trace")
    names = ["busy_s", "bubble_s", "imbalance_s", "communication_s"]
    rows: Rows = []
    for record in found:
        for split in filter(None, record["splits"]):
            shares = [split[name] / split["step_s"] for name in names]
            name = f"{record['where']}: stage {split['stage']}"
            rows.append([name, split["step_s"] * 1e3, *shares])
    headings = ["step, ms", *(name.removesuffix("_s") for name in names)]
    notes = [f"the whole timeline is in {record['file']}" for record in found]
    title = "trace: where the time of a step went"
    return _table(title, headings, rows, [".2f", *[".0%"] * 4], *notes)


def _ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


def _size(num_bytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:g} {unit}"
    return f"{num_bytes} B"


def _version(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))
