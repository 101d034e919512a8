"""The command line: ``procpipe run``, ``doctor``, ``timeline`` and ``plan``.

Each command is a folder here whose module ``command`` has ``main(words) -> exit code``, which
raises ``SystemExit`` if the words are wrong (code 2) or ask for help. Only the one that is asked
for is imported, and one whose folder is missing is not offered.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

#: Each command, and what it is for.
COMMANDS = {
    "run": "run a training script on several processes",
    "doctor": "check what a run needs on this host",
    "timeline": "show where the time of a run went",
    "plan": "propose how to run a model on devices",
}


def positive(text: str) -> int:
    """Read a whole number of at least 1 from a command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a number of at least 1")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of ``argv``, by default this process's; return its code, 130 after Ctrl-C."""
    for stream in ("stdin", "stdout", "stderr"):  # one that was closed (2>&-), in this order
        if getattr(sys, stream) is None:  # else a log file would get its descriptor
            setattr(sys, stream, open(os.devnull, "r+"))  # noqa: SIM115
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="procpipe", description="Pipeline-parallel training with one process per stage."
    )
    offered = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name, purpose in COMMANDS.items():
        if Path(__file__).with_name(name).joinpath("command.py").is_file():
            offered.add_parser(name, help=purpose, add_help=False)
    name = parser.parse_args(words[:1]).command
    try:
        command = importlib.import_module(f"procpipe.launch.{name}.command")
        return int(command.main(words[1:]))
    except KeyboardInterrupt:
        print(f"procpipe {name}: interrupted", file=sys.stderr)
        return 130
