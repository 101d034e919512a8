"""``procpipe timeline run.json``: a page that shows where a run's time went.

Reads what ``Stage(trace="run.json")`` wrote, writes the page (page.py), and prints a summary.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from procpipe.balance.blocks import blocks
from procpipe.launch.timeline.page import page
from procpipe.run.statistics import split_table
from procpipe.timeline.advice import advise, basis
from procpipe.timeline.chrome import from_chrome
from procpipe.timeline.idle import split
from procpipe.timeline.recording import Recording

_EPILOG = """\
The page needs no network. The file itself opens in https://ui.perfetto.dev and chrome://tracing.

exit code: 0; 1 if the file cannot be read or the page cannot be written; 2 for a mistake in
the command line.
"""


def main(argv: Sequence[str]) -> int:
    """Write the page of the file that the words name; return the exit code."""
    options = _parser().parse_args(argv)
    path = Path(options.file)
    try:
        recording = read(path)
        target = Path(options.output) if options.output else path.with_suffix(".html")
        if target.absolute() == path.absolute():
            raise ValueError("the page would take its place; give another -o")
        step = recording.step(options.step)
        splits, advice = split(step), advise(recording, step, blocks)
        target.write_text(page(path.name, recording, step, splits, advice), encoding="utf-8")
    except (OSError, ValueError, KeyError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error.args[0]
        where = error.filename if isinstance(error, OSError) and error.filename else path
        print(f"procpipe timeline: {where}: {reason}", file=sys.stderr)
        return 1
    print(f"step {step.number} of {path} ({recording.kept_text()} of {recording.num_steps}):\n")
    print(split_table(splits))
    for sentence in advice:
        print(f"\n- {sentence}")
    if advice:
        print(f"\nWorked out from {basis(recording, step)}.")
    print(f"\n{target}")
    return 0


def read(path: Path) -> Recording:
    """Read a recording from its file; raises ``OSError``, or ``ValueError`` if it is not one."""
    data = path.read_bytes()
    if not data.strip():
        raise ValueError("it is empty")
    try:
        content = json.loads(data)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    return from_chrome(content)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="procpipe timeline",
        description="Show where the time of a run went: the plan above, what was measured below.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="run.json", help="what Stage(trace=…) wrote")
    parser.add_argument("-o", "--output", metavar="page.html", help="by default beside run.json")
    parser.add_argument("--step", type=int, metavar="N",
                        help="step to show; by default the last one that trained")  # fmt: skip
    return parser
