"""Lays out what a run has found: tables for the terminal, and text for the documentation. Pure.

Every title of a run on an emulated GPU says so, and no time in it is a GPU's.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.results import Record
from benchmarks.report import Table
from benchmarks.rounds import spread

__all__ = ["markdown", "tables_of"]

_EMULATED = "EMULATED, no GPU: "
_EMULATED_NOTE = "emulated on CPUs: times and sizes here are the emulator's, not those of any GPU"

_MIB = 1 << 20


def tables_of(records: Sequence[Record]) -> list[Table]:
    """Return a table for each kind of finding that there is, an overview first."""
    is_emulated = any(record.get("emulated") for record in records)
    made = [
        make(records)
        for make in (
            *(_steps, _machine, _tests, _parity, _step_times, _host, _synchronisations),
            *(_messages, _gpt_steps, _gpt_memory, _trace),
        )
    ]
    tables = [table for table in made if table is not None and (table.rows or table.notes)]
    return [_as_emulated(table) for table in tables] if is_emulated else tables


def markdown(records: Sequence[Record]) -> str:
    """Write all tables as text for ``docs/benchmarks.md``."""
    is_emulated = any(record.get("emulated") for record in records)
    versions = next(iter(_of(records, "versions")), None)
    gpus = versions["gpus"] if versions else ["a GPU that was not looked at"]
    where = "emulated GPUs: no time here is a GPU's" if is_emulated else _counted(gpus)
    lines = [f"## On {where}", ""]
    if versions:
        lines += [
            f"`python -m benchmarks gpu` on {versions['cores']} cores, Python "
            f"{versions['python']}, torch {versions['torch']}, driver {versions['driver']}, NCCL "
            f"{_version(versions['nccl'])}.",
            "",
        ]
    for table in tables_of(records):
        lines += ["```text", table.to_text(), "```", ""]
    return "\n".join(lines)


def _as_emulated(table: Table) -> Table:
    return Table(
        _EMULATED + table.title,
        table.headings,
        table.rows,
        table.formats,
        [*table.notes, _EMULATED_NOTE],
    )


def _of(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record.get("kind") == kind]


def _steps(records: Sequence[Record]) -> Table:
    limits_s = {record["name"]: record["limit_s"] for record in _of(records, "begin")}
    ended = {record["name"]: record for record in _of(records, "end")}
    rows: list[list[Any]] = []
    notes = []
    for name in dict.fromkeys([*limits_s, *ended]):
        end = ended.get(name, {"outcome": "cut off with the whole run", "seconds": None})
        outcome, _, why = end["outcome"].partition(": ")
        rows.append([name, outcome, end["seconds"], limits_s.get(name)])
        notes += [f"{name} {outcome}: {why}"] if why else []
    return Table("steps", ["", "outcome", "s", "of at most"], rows, ["s", ".0f", ".0f"], notes)


def _machine(records: Sequence[Record]) -> Table | None:
    found = next(iter(_of(records, "versions")), None)
    if found is None:
        return None
    peers = found["peer_access"]
    lines = [f"GPU {k}: {gpu}" for k, gpu in enumerate(found["gpus"])]
    if len(peers) > 1:
        reach = all(all(row) for row in peers)
        lines.append(f"peer access: {'between all' if reach else peers}")
    names = ("driver", "torch", "cuda", "python", "kernel", "cores", "memory")
    lines += [f"{name}: {found[name]}" for name in names]
    lines.append(f"NCCL: {_version(found['nccl'])}")
    given = {_version(record["version"]) for record in _of(records, "nccl")}
    lines += [f"NCCL between ranks on one GPU: {version}" for version in given]
    return Table("machine", [""], [[line] for line in lines], [], found["topology"].splitlines())


def _tests(records: Sequence[Record]) -> Table | None:
    tests = {record["name"]: record for record in _of(records, "test")}
    if not tests:
        return None
    counts = Counter(test["outcome"] for test in tests.values())
    rows: list[list[Any]] = [
        [test["name"].rpartition("/")[2], test["seconds"], test["why"][:100]]
        for test in tests.values()
        if test["outcome"] == "failed"
    ]
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    skipped = Counter(test["why"] for test in tests.values() if test["outcome"] == "skipped")
    notes = [f"{count} skipped: {why}" for why, count in skipped.most_common()]
    title = f"tests marked gpu: {told}; those that failed:"
    return Table(title, ["", "s", "error"], rows, [".1f", "s"], notes or ["none was skipped"])


def _parity(records: Sequence[Record]) -> Table:
    names = ["loss", "output", "gradients", "buffers"]
    rows = [
        [f"{record['where']}: {', '.join(record['pair'])}", *(record[name] for name in names)]
        for record in _of(records, "parity")
    ]
    return Table(
        "parity: largest difference to the plain model on the same GPU, float64",
        ["", *names],
        rows,
        [".1e"] * len(names),
        ["in three steps, of batches that cannot be split evenly"] if rows else [],
    )


def _step_times(records: Sequence[Record]) -> Table | None:
    rows: list[list[Any]] = []
    found = _of(records, "steps")
    for record in found:
        ours, alone = record["times"]["procpipe"], record["times"]["one process"]
        rows.append([record["where"], _ms(ours), _ms(alone), spread(ours, alone)])
    if not found:
        return None
    return Table(
        f"steps: {found[0]['what']}, no recomputation",
        ["", "ms a step", "one process", "of one process"],
        rows,
        [".2f", ".2f", "s"],
        ["medians of rounds; in brackets the least and the largest ratio of a round"],
    )


def _host(records: Sequence[Record]) -> Table | None:
    rows: list[list[Any]] = []
    for record in _of(records, "host"):
        for rank, found in enumerate(record["ranks"]):
            returned_s, ended_s = found["returned_s"], found["ended_s"]
            rows.append(
                [
                    f"{record['where']}: rank {rank}",
                    statistics.median(record["task_s"]) * 1e6,
                    returned_s * 1e3,
                    ended_s * 1e3,
                    1 - returned_s / ended_s,
                ]
            )
    return Table(
        "host: cost of a task, and how far the host is ahead of the device",
        ["", "us a task", "step() returns, ms", "device ends, ms", "ahead"],
        rows,
        [".0f", ".2f", ".2f", ".0%"],
        [
            "us a task: step time / 2m of 16 layers of 16 x 16, where all is overhead",
            "ahead: the part of the step for which the host was free again",
        ]
        if rows
        else [],
    )


def _synchronisations(records: Sequence[Record]) -> Table | None:
    rows = [
        [f"{record['where']}: rank {rank}", found["warnings"], found["counted"]]
        for record in _of(records, "host")
        for rank, found in enumerate(record["ranks"])
    ]
    headings = ["", "by torch", "by the emulator"]
    return Table("host: waits for the device in a steady step", headings, rows, ["d", "d"])


def _messages(records: Sequence[Record]) -> Table | None:
    rows: list[list[Any]] = []
    for record in _of(records, "message"):
        times, many, size = record["times"], record["many"], record["bytes"]
        latency_s = [
            (both - alone) / 2
            for both, alone in zip(times["both ways"], times["alone"], strict=True)
        ]
        each_s = [
            (all_s - one_s) / many for all_s, one_s in zip(times["many"], times["one"], strict=True)
        ]
        median_s, copy_s = statistics.median(each_s), statistics.median(times["copy"])
        rows.append(
            [
                f"{record['where'].rpartition(', ')[2]}, {_size(size)}",
                statistics.median(latency_s) * 1e6,
                median_s * 1e6,
                size / 1e9 / median_s if median_s > 0 else None,
                size / 1e9 / copy_s,
            ]
        )
    return Table(
        "messages from one stage to the next, by size",
        ["", "one way, us", "in a row, us", "GB/s", "a copy, GB/s"],
        rows,
        [".0f", ".0f", ".2f", ".2f"],
        [
            "one way: half of (a training step of one micro-batch, less the same in one process)",
            "in a row: each of 8 more messages in a forward pass, with its tasks; GB/s is of these",
            "a copy: from memory of a GPU to memory of the same GPU, each byte counted once",
        ]
        if rows
        else [],
    )


def _gpt_steps(records: Sequence[Record]) -> Table | None:
    found, plans = _of(records, "gpt steps"), _of(records, "gpt plan")
    rows: list[list[Any]] = []
    for record in found:
        times = record["times"]
        against = "one process" if "one process" in times else "torch Schedule1F1B"
        for name, seconds in times.items():
            told = f"{spread(seconds, times[against])} of {against}"
            rows.append([f"{record['step']}: {name}", _ms(seconds), told])
    for plan in plans:
        rows.append([f"predicted {plan['schedule']}, a GPU a stage", plan["step_s"] * 1e3, ""])
        rows.append(["predicted, all tasks in turn on one GPU", plan["all_tasks_s"] * 1e3, ""])
    if not rows:
        return None
    notes = [f"balance {plan['balance']}" for plan in plans]
    return Table(_gpt_title(records), ["", "ms a step", "ratio"], rows, [".1f", "s"], notes)


def _gpt_memory(records: Sequence[Record]) -> Table | None:
    rows: list[list[Any]] = [
        [f"{record['step']}: {record['name']}", *(peak / _MIB for peak in record["peak_bytes"])]
        for record in _of(records, "gpt memory")
    ]
    if not rows:
        return None
    n = max(len(row) for row in rows) - 1
    for plan in _of(records, "gpt plan"):
        whole = [a + b for a, b in zip(plan["static_bytes"], plan["held_bytes"], strict=True)]
        rows.append([f"predicted {plan['schedule']}", *(count / _MIB for count in whole)])
    return Table(
        "GPT: peak memory of each rank, MiB",
        ["", *(f"rank {rank}" for rank in range(n))],
        rows,
        [".1f"] * n,
        [
            "of torch's allocator in the second step: parameters, gradients, activations; without "
            "the slots of CUDA IPC, which the driver allocates",
            "predicted: without what lives within a task, such as autocast's copies of weights",
        ],
    )


def _trace(records: Sequence[Record]) -> Table | None:
    names = ["busy_s", "bubble_s", "imbalance_s", "communication_s"]
    rows = [
        [f"{record['where']}: stage {split['stage']}", split["step_s"] * 1e3]
        + [split[name] / split["step_s"] for name in names]
        for record in _of(records, "trace")
        for split in record["splits"]
        if split
    ]
    files = [f"the whole timeline is in {record['file']}" for record in _of(records, "trace")]
    headings = ["", "step, ms", *(name.removesuffix("_s") for name in names)]
    return Table("trace: where a step's time went", headings, rows, [".2f", *[".0%"] * 4], files)


def _gpt_title(records: Sequence[Record]) -> str:
    model = _of(records, "gpt model")[0]
    words, blocks, width, heads, context = model["sizes"]
    number = model["num_parameters"]
    size = f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number:,}"
    return (
        f"GPT of {size} parameters ({blocks} blocks, width {width}, "
        f"{heads} heads, {words} words), bf16 autocast, {model['m']} micro-batches of "
        f"{model['micro_batch']} x {context} tokens, {model['n']} stages"
    )


def _ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


def _size(num_bytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:g} {unit}"
    return f"{num_bytes} B"


def _counted(gpus: Sequence[str]) -> str:
    name = gpus[0].partition(",")[0]
    return f"one {name}" if len(gpus) == 1 else f"{len(gpus)} GPUs, {name}"


def _version(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))
