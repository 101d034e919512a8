"""Breaks the code that only GPUs run, one place at a time, and shows which test fails.

    python -m tests.gpu_breaks              # all breaks; about half an hour
    python -m tests.gpu_breaks ipc-wait …   # some of them
    python -m tests.gpu_breaks --write …    # and their rows into the table of docs/gpu_breaks.md

Run it in the environment of ``make test-gpu``. Each break is made in a copy of the working tree,
and the tests named with it are run there on emulated GPUs, with the delays of ``make test-gpu``,
until one fails. The same tests are run without a break first: what fails then proves nothing. A
break that nothing notices is a test that is missing, or something that the emulator lacks.
``tests/test_gpu_breaks.py`` checks that each break still fits the code.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.on_gpus import TIMING

ROOT = Path(__file__).parents[1]
COPIED = ("procpipe", "launch", "tests", "examples", "benchmarks", "pyproject.toml")
PAGE = ROOT / "docs/gpu_breaks.md"
HEAD = "| fault | what is wrong | noticed by | GPUs |\n|---|---|---|---|\n"
ROW = re.compile(r"^\| ([a-z-]+) \| .*\n", re.MULTILINE)
TABLE = re.compile(r"(?<=<!-- table -->\n).*(?=<!-- end -->)", re.DOTALL)

FAILURE = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?(?:\[.*?\])?)(?: |$)", re.MULTILINE)
PASSED = re.compile(r"^\d+ passed", re.MULTILINE)

#: For the tests of one break, which have time limits of their own.
TIME_LIMIT_S = 300


class Tests(NamedTuple):
    """Tests that should notice a break.

    Attributes:
        arguments: of pytest.
        gpus: how many GPUs are emulated for them; 0 for tests on CPUs.
    """

    arguments: str
    gpus: int


class Break(NamedTuple):
    """One fault.

    Attributes:
        name: a short name.
        what: what is wrong then.
        file: the file that is changed, from the root.
        old: the text that is replaced; it occurs there once.
        new: what it is replaced by.
        tests: those that should notice.
    """

    name: str
    what: str
    file: str
    old: str
    new: str
    tests: Tests

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
    parser.add_argument("--jobs", type=int, default=1, help="how many to run at a time")
    parser.add_argument("--write", action="store_true", help=f"write the rows to {PAGE.name}")
    options = parser.parse_args(arguments)
    from tests.gpu_breaks_list import BREAKS

    unknown = set(options.names) - {each.name for each in BREAKS}
    if unknown:
        parser.error(f"no such break: {', '.join(sorted(unknown))}")
    chosen = [each for each in BREAKS if each.name in options.names or not options.names]
    rows: dict[str, str] = {}
    missed = 0
    print(HEAD, end="", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        selections = dict.fromkeys(each.tests for each in chosen)
        unbroken = {
            tests: pool.submit(first_failure, tests, options.seed, None) for tests in selections
        }
        broken = [pool.submit(first_failure, each.tests, options.seed, each) for each in chosen]
        for each, future in zip(chosen, broken, strict=True):
            found = future.result()
            if always := unbroken[each.tests].result():
                found = f"**{always} fails without a break, too**"
            missed += not found.startswith("`")
            found = found or "**nothing**"
            rows[each.name] = f"| {each.name} | {each.what} | {found} | {each.tests.gpus} |\n"
            print(rows[each.name], end="", flush=True)
    print(f"\n{len(rows) - missed} of {len(rows)} were noticed: {setting(options.seed)}.")
    if options.write:
        write([each.name for each in BREAKS], rows, setting(options.seed))
    return min(missed, 1)


def write(names: list[str], rows: dict[str, str], how: str) -> None:
    """Put rows into the page's table, in the place of older ones."""
    text = PAGE.read_text()
    rows = {match[1]: match[0] for match in ROW.finditer(text)} | rows
    table = HEAD + "".join(rows[name] for name in names if name in rows)
    PAGE.write_text(TABLE.sub(lambda _: f"{table}\nThe newest rows: {how}.\n", text))


def setting(seed: int) -> str:
    """Say when and with what the tests were run."""
    torch = importlib.metadata.version("torch")
    return (
        f"emulated GPUs, seed {seed}, {' '.join(TIMING)}, torch {torch}, "
        f"Python {platform.python_version()}, {dt.datetime.now(dt.UTC):%Y-%m-%d}"
    )


def first_failure(tests: Tests, seed: int, fault: Break | None) -> str:
    """Return the first of some tests that fails with a break, or ""."""
    with tempfile.TemporaryDirectory(prefix="procpipe-break-") as name:
        root = Path(name)
        for part in COPIED:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, root / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, root / part)
        (root / "procpipe/launch").symlink_to("../launch")  # as it is where procpipe is installed
        if fault is not None:
            fault.apply(root)
        output = run(root, tests, seed)
    if found := FAILURE.search(output):
        return f"`{found[1]}`"
    if not PASSED.search(output):
        print(output, file=sys.stderr)
        return f"**no end in {TIME_LIMIT_S} s, or tests that cannot be run**"
    return ""


def run(root: Path, tests: Tests, seed: int) -> str:
    """Run tests on emulated GPUs in a tree until one fails; return what pytest printed."""
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider"]
    if tests.gpus:
        emulated = [sys.executable, "-m", "tests.emulated_gpu", f"--gpus={tests.gpus}"]
        command = [*emulated, f"--seed={seed}", *TIMING, "--", *command, "--gpus=all"]
    environment = {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    with (root / "output").open("w+", errors="replace") as output:
        process = subprocess.Popen(
            [*command, *shlex.split(tests.arguments)],
            cwd=root,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return output.read()


if __name__ == "__main__":
    sys.exit(main())
