"""The output of a part: tables on standard output, and the same with all raw figures in a folder.

build/benchmarks/<part>.txt     the tables
build/benchmarks/<part>.json    machine, versions, options, tables, ratios and raw figures
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.quiet import drift_text

#: A number is laid out by its column's format; None shows as a dash.
Cell = str | float | int | None

#: What procpipe's time, or memory, is divided by; and the shares of a limit that are reached.
OF_TORCH, OF_BARE, OF_ONE = "of torch", "of bare gloo", "of one process"
SHARE, TORCHS_SHARE = "share of the limit", "torch's share"


@dataclass(frozen=True)
class Table:
    """Rows under headings.

    Attributes:
        title: what was measured, with sizes.
        headings: a name and a unit for each column; the first column is text.
        rows: a cell for each column.
        formats: how to write the numbers of each column but the first, as ``format`` takes it.
        notes: lines under the table: the meaning of figures, and why contenders were not run.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    formats: Sequence[str]
    notes: Sequence[str] = ()

    def to_text(self) -> str:
        """Lay the table out."""
        cells = [list(self.headings), *(self._written(row) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0])]
                + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            ).rstrip()
            for row in cells
        ]
        rule = "-" * max(map(len, lines))
        return "\n".join([self.title, "", lines[0], rule, *lines[1:], *self._note_lines()])

    def _written(self, row: Sequence[Cell]) -> list[str]:
        return [str(row[0])] + [
            "-" if cell is None else cell if isinstance(cell, str) else format(cell, form)
            for cell, form in zip(row[1:], self.formats, strict=True)
        ]

    def _note_lines(self) -> list[str]:
        return ["", *self.notes] if self.notes else []


@dataclass(frozen=True)
class Report:
    """The results of one part.

    Attributes:
        part: its name, also of its files.
        tables: what is printed.
        figures: raw figures, plain JSON.
        options: its options, plain JSON.
        ratios: for the first table of the documentation: by what was measured, procpipe's ratios
            by ``OF_TORCH``, ``SHARE`` and so on.
        one_process: of each workload, the seconds of one process in each round, to see drift.
    """

    part: str
    tables: Sequence[Table]
    figures: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    ratios: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    one_process: Mapping[str, Sequence[float]] = field(default_factory=dict)


def machine() -> dict[str, str]:
    """Name the machine and the versions."""
    import torch

    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "GPUs": ", ".join(torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count()))
        or "none",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "torchgpipe": _version("torchgpipe"),
        "procpipe": _version("procpipe"),
    }


def publish(report: Report, folder: Path, quiet: Mapping[str, Any] | None = None) -> None:
    """Print a report and write its files.

    Args:
        report: the results.
        folder: where the files are written.
        quiet: how quiet the machine was, as ``quiet.py`` says.
    """
    here = machine()
    head = ", ".join(f"{name} {value}" for name, value in here.items())
    if "Emulated" in here["GPUs"]:
        head += "\nEMULATED: no time or size here is a GPU's"
    if quiet:
        head += f"\nstolen {quiet['stolen']:.1%}, other programs {quiet['others']:.1%}"
        head += f", drift of one process: {drift_text(quiet)}" if quiet["drift"] else ""
    text = "\n\n\n".join([head, *(table.to_text() for table in report.tables)]) + "\n"
    print(f"\n{text}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath(f"{report.part}.txt").write_text(text)
    content = {
        "part": report.part,
        "machine": here,
        "quiet": quiet,
        "options": report.options,
        "ratios": report.ratios,
        "tables": [asdict(table) for table in report.tables],
        "figures": report.figures,
    }
    folder.joinpath(f"{report.part}.json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"(also in {folder}/{report.part}.*)", flush=True)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
