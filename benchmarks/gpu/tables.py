"""Lays out what a run has found: tables for the terminal, and text for the documentation. Pure.

A finding belongs to the table of its kind: its name is the row, its cells are the columns. Later
findings of the same step and name add cells. Every title of a run on an emulated GPU is marked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.gpu.results import Record
from benchmarks.report import Table

_EMULATED = "EMULATED, no GPU: "
_EMULATED_NOTE = "emulated on CPUs: times and sizes here are the emulator's, not those of any GPU"

#: For each kind of finding a title, and what its figures mean.
_TABLES = {
    "machine": ["machine, as torch and nvidia-smi see it"],
    "parity": [
        "parity: largest difference to the plain model on the same GPU, float64",
        "in three steps, of batches that cannot be split evenly",
    ],
    "steps": [
        "time of a step, no recomputation",
        "medians of rounds; in brackets the least and the largest ratio of a round",
    ],
    "host": [
        "host: cost of a task, how far the host is ahead of the device, how often it waits for it",
        "us a task: step time / 2m of 16 layers of 16 x 16, where all is overhead",
        "ahead: the part of the step for which the host was free again",
        "waits: in a steady step, those that torch counts",
    ],
    "messages": [
        "messages from one stage to the next, by size",
        "one way: half of (a training step of one micro-batch, less the same in one process)",
        "in a row: each of 8 more messages in a forward pass, with its tasks; GB/s is of these",
        "a copy: from memory of a GPU to memory of the same GPU, each byte counted once",
    ],
    "gpt": [
        "GPT in bf16 autocast",
        "MiB: peak of torch's allocator: parameters, gradients, activations; without the slots of "
        "CUDA IPC",
        "predicted MiB: autocast's copies of weights count for each micro-batch that is held, "
        "though a step makes them once; what lives only within a task does not count",
    ],
    "trace": ["trace: where the time of a step went"],
}


def tables_of(records: Sequence[Record]) -> list[Table]:
    """Return a table for each kind of finding, an overview first."""
    tables = [*_steps(records), *_tests(records)]
    for kind, (title, *notes) in _TABLES.items():
        tables += _findings(_of(records, kind), title, notes)
    if not _is_emulated(records):
        return tables
    return [
        replace(table, title=_EMULATED + table.title, notes=[*table.notes, _EMULATED_NOTE])
        for table in tables
    ]


def markdown(records: Sequence[Record]) -> str:
    """Write all tables as text for ``docs/benchmarks.md``."""
    title = "a GPU, by `python -m benchmarks gpu`"
    if _is_emulated(records):
        title = "emulated GPUs: no time here is a GPU's"
    texts = [f"```text\n{table.to_text()}\n```\n" for table in tables_of(records)]
    return "\n".join([f"## On {title}\n", *texts])


def _is_emulated(records: Sequence[Record]) -> bool:
    return any(record["emulated"] for record in _of(records, "run"))


def _of(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _findings(records: Sequence[Record], title: str, notes: list[str]) -> list[Table]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for record in records:
        rows.setdefault((record["step"], record["name"]), {}).update(record["cells"])
    headings = list(dict.fromkeys(heading for cells in rows.values() for heading in cells))
    written = [
        [name, *(_written(cells.get(heading)) for heading in headings)]
        for (_, name), cells in rows.items()
    ]
    notes = [*dict.fromkeys(filter(None, (record["note"] for record in records))), *notes]
    return [Table(title, ["", *headings], written, ["s"] * len(headings), notes)] if rows else []


def _written(value: str | float | None) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _steps(records: Sequence[Record]) -> list[Table]:
    steps: dict[str, Record] = {}
    for record in [*_of(records, "begin"), *_of(records, "end")]:
        steps[record["name"]] = steps.get(record["name"], {}) | record
    rows: list[list[Any]] = []
    notes = []
    for name, step in steps.items():
        outcome, _, why = step.get("outcome", "cut off with the whole run").partition(": ")
        rows.append([name, outcome, step.get("seconds"), step.get("limit_s")])
        notes += [f"{name} {outcome}: {why}"] if why else []
    headings = ["", "outcome", "s", "of at most"]
    return [Table("what was run", headings, rows, ["s", ".0f", ".0f"], notes)] if rows else []


def _tests(records: Sequence[Record]) -> list[Table]:
    tests = list({record["name"]: record for record in _of(records, "test")}.values())
    counts = Counter(test["outcome"] for test in tests)
    skipped = Counter(test["why"] for test in tests if test["outcome"] == "skipped")
    rows = [
        [test["name"].removeprefix("tests/"), test["seconds"], test["why"][:100]]
        for test in tests
        if test["outcome"] == "failed"
    ]
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    notes = [f"{count} skipped: {why}" for why, count in skipped.most_common()]
    headings = ["failed", "s", "error"] if rows else ["none failed", "", ""]
    table = Table(f"tests for GPUs: {outcomes}", headings, rows, [".1f", "s"], notes)
    return [table] if tests else []
