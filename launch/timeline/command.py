"""``procpipe timeline run.*.json``: where a run's time went, as a table and a figure.

Reads the files that the ranks of a run wrote (``Stage(trace="run.json")``) and merges them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from procpipe.notes import progress
from procpipe.timeline.chrome import joined, read
from procpipe.timeline.split import split
from procpipe.timeline.steps import Recording, Step, early_hops_s, merged
from procpipe.timeline.text import split_table
from procpipe.words import seconds_text

_EPILOG = """\
The files also open in https://ui.perfetto.dev. The figure needs matplotlib:
pip install 'procpipe[plots]'.

exit code: 0; 1 if a file cannot be read or written; 2 for a mistake in the command line.
"""


def main(argv: Sequence[str]) -> int:
    """Print and draw a step of the run that the words name; return the exit code."""
    options = _parser().parse_args(argv)
    try:
        with progress("merging the files"):
            recording = merged(read(Path(name)) for name in options.files)
        step = recording.step(options.step)
        print("\n".join(_described(recording, step)))
        for name in options.output or [Path(options.files[0]).with_suffix("").with_suffix(".png")]:
            with progress("writing"):
                _write(Path(name), options.files, recording, step)
            print(name)
    except (OSError, ValueError) as error:
        print(f"procpipe timeline: {error}", file=sys.stderr)
        return 1
    return 0


def _described(recording: Recording, step: Step) -> Iterator[str]:
    yield f"step {step.number} (recorded: {recording.kept_text()}):\n"
    yield f"{split_table(split(step))}\n"
    if not recording.is_closed:
        last = recording.steps[-1].number
        yield f"The run has not closed its stages: it failed, or goes on, after step {last}.\n"
    for (source, destination), early_s in early_hops_s(recording.steps).items():
        yield (
            f"The clocks of the hosts of rank {source} and rank {destination} differ: messages "
            f"arrive up to {seconds_text(early_s)} before they are sent. What is said of idle time "
            "may be wrong by as much.\n"
        )


def _write(path: Path, files: Sequence[str], recording: Recording, step: Step) -> None:
    if path.suffix == ".json":
        path.write_text(joined([Path(name) for name in files]), encoding="utf-8")
        return
    try:
        from procpipe.launch.timeline.figure import draw, panels_of
    except ModuleNotFoundError as error:
        raise ValueError(f"a figure needs {error.name}: pip install 'procpipe[plots]'") from error
    draw(panels_of(recording, step)).savefig(path, format=path.suffix[1:] or "png", dpi=200)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="procpipe timeline",
        description="Show where the time of a run went: the plan above, what was measured below.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files",
        metavar="run.0.json",
        nargs="+",
        help='the files of all ranks: Stage(trace="run.json") writes run.*.json',
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        action="append",
        help="a figure (.png, .svg, .pdf; by default run.png), or the events of all "
        "ranks for ui.perfetto.dev (.json); may be repeated",
    )
    parser.add_argument("--step", type=int, metavar="N",
                        help="step to show; by default the last one that trained")  # fmt: skip
    return parser
