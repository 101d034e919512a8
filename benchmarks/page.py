"""Writes the first tables of docs/benchmarks.md from the results of a run.

    python -m benchmarks page [FOLDER …]

They come between two comments of the page. With folders of several runs, under several versions of
torch, the ratios to torch's pipelining of each stand side by side.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.quiet import drift_text
from benchmarks.report import OF_BARE, OF_ONE, OF_TORCH, SHARE, TORCHS_SHARE

PAGE = Path(__file__).parents[1] / "docs/benchmarks.md"

BEGIN = "<!-- by python -m benchmarks page: begin -->"
END = "<!-- by python -m benchmarks page: end -->"

#: Of a run, the results of each part.
Run = dict[str, dict[str, Any]]


def write(page: Path, folders: Sequence[Path]) -> None:
    """Replace what is between the comments of a page.

    Raises:
        FileNotFoundError: a folder has no results.
        ValueError: the page has not both comments.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has to have two comments, {BEGIN} and {END}")
    text = tables([read(folder) for folder in folders])
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def read(folder: Path) -> Run:
    """Return the results of a run, by part, those of whole steps first."""
    paths = sorted(folder.glob("*.json"), key=lambda path: (path.stem != "throughput", path.stem))
    parts = {path.stem: json.loads(path.read_text()) for path in paths}
    if not parts:
        raise FileNotFoundError(f"{folder} has no results: python -m benchmarks all --out {folder}")
    return parts


def tables(runs: Sequence[Run]) -> str:
    """Lay out the machine, all ratios, and how quiet each part was."""
    return "\n\n".join([_machine(runs), _ratios(runs), _quiet(runs)])


def _machine(runs: Sequence[Run]) -> str:
    here = [next(iter(run.values()))["machine"] for run in runs]
    versions = " and ".join(dict.fromkeys(machine["torch"] for machine in here))
    first = here[0]
    gpus = "no GPU" if first["GPUs"] == "none" else first["GPUs"]
    return (
        f"{first['processor']}, {first['cores']} cores, {gpus}, Python {first['Python']}, "
        f"torch {versions}."
    )


def _ratios(runs: Sequence[Run]) -> str:
    """Lay out the first run's ratios, and those to torch of each run."""
    of_runs = [
        {what: of for part in run.values() for what, of in part["ratios"].items()} for run in runs
    ]
    is_one = len(runs) == 1
    columns = [(0, OF_TORCH)] if is_one else [(k, OF_TORCH) for k in range(len(runs))]
    columns += [(0, of) for of in (OF_BARE, OF_ONE, SHARE, TORCHS_SHARE)]
    heads = [of if is_one or of != OF_TORCH else f"{of} {_version(runs[k])}" for k, of in columns]
    rows = [
        [what, *(_written(of_runs[k].get(what, {}).get(of)) for k, of in columns)]
        for what in of_runs[0]
    ]
    return _table(["procpipe", *heads], rows)


def _version(run: Run) -> str:
    release: str = next(iter(run.values()))["machine"]["torch"]
    return release.partition("+")[0]


def _quiet(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        of_run = "" if run is runs[0] else f", {_version(run)}"
        for name, part in run.items():
            quiet = part["quiet"]
            shares = [f"{quiet[each]:.1%}" for each in ("stolen", "others")]
            rows.append([name + of_run, *shares, drift_text(quiet)])
    return _table(["part", "stolen", "other programs", "drift of one process"], rows)


def _written(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
