"""Breaks the code that only GPUs run, one line at a time, and shows which test notices.

    python -m tests.gpu_breaks              # all breaks; some minutes
    python -m tests.gpu_breaks ipc-wait …   # some of them

Run it in the environment of ``make test-gpu``. Each break is made in a copy of the working tree;
the tests named with it are run there on emulated GPUs, then all GPU tests, until one fails. A break
that nothing notices is a test that is missing, or something that the emulator does not emulate.
``tests/test_gpu_breaks.py`` checks that each break still fits the code.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("procpipe", "launch", "tests", "examples", "benchmarks", "pyproject.toml")
TIME_LIMIT_S = 600


class Break(NamedTuple):
    """One fault.

    Attributes:
        name: a short name.
        what: what is wrong then.
        file: the file that is changed, from the root.
        old: the text that is replaced; it occurs there once.
        new: what it is replaced by.
        tests: pytest's arguments for the tests that should notice, which run first.
    """

    name: str
    what: str
    file: str
    old: str
    new: str
    tests: str

    def apply(self, root: Path) -> None:
        """Make the change in a tree."""
        path = root / self.file
        path.write_text(self.broken(path.read_text()))

    def broken(self, text: str) -> str:
        """Return the file's text with the change.

        Raises:
            ValueError: the text to be replaced is not there exactly once.
        """
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: {self.file} has {text.count(self.old)} places with {self.old!r}: "
                "write the break anew for the code as it is"
            )
        return text.replace(self.old, self.new)


def main(arguments: list[str] | None = None) -> int:
    """Run breaks; return 1 if nothing noticed one of them."""
    parser = argparse.ArgumentParser(description="break the code, and see which test notices")
    parser.add_argument("names", nargs="*", help="breaks to make (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="the emulator's seed")
    parser.add_argument("--all", action="store_true", help="go on to all GPU tests where needed")
    options = parser.parse_args(arguments)
    from tests.gpu_breaks_list import BREAKS

    unknown = set(options.names) - {each.name for each in BREAKS}
    if unknown:
        parser.error(f"no such break: {', '.join(sorted(unknown))}")
    chosen = [each for each in BREAKS if each.name in options.names or not options.names]
    print("| break | what is wrong | noticed by | s |\n|---|---|---|---|", flush=True)
    missed = 0
    for each in chosen:
        start_s = time.monotonic()
        found = noticed_by(each, options.seed, options.all)
        missed += not found
        took_s = time.monotonic() - start_s
        print(
            f"| {each.name} | {each.what} | {found or '**nothing**'} | {took_s:.0f} |", flush=True
        )
    print(f"\n{len(chosen) - missed} of {len(chosen)} breaks were noticed (seed {options.seed}).")
    return min(missed, 1)


def noticed_by(each: Break, seed: int, goes_on: bool) -> str:
    """Return the first test that fails with a break; "" if none does."""
    with tempfile.TemporaryDirectory(prefix="procpipe-break-") as name:
        root = Path(name)
        for part in COPIED:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, root / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, root / part)
        each.apply(root)
        return _failure(root, each.tests.split(), seed) or (
            _failure(root, ["tests"], seed) if goes_on else ""
        )


def _failure(root: Path, tests: list[str], seed: int) -> str:
    """Run GPU tests in a tree until one fails; return its name, or ""."""
    command = [sys.executable, "-m", "tests.emulated_gpu", "--gpus", "4", "--seed", str(seed), "--"]
    command += [sys.executable, "-m", "pytest", "--gpus", "-x", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"none in {TIME_LIMIT_S} s: the tests hang"
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE)
    if done.returncode not in (0, 1) or (done.returncode == 1 and not failures):
        raise RuntimeError(f"the tests could not be run:\n{done.stdout}\n{done.stderr}")
    return f"`{failures[0]}`" if failures else ""


if __name__ == "__main__":
    sys.exit(main())
