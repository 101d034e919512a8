"""Kill random processes of a training run, and check that its result is the same.

    python -m benchmarks.restarts --kills 20 --nproc 2

    undisturbed    torchrun examples/train_digits.py --save A
    disturbed      torchrun --max-restarts=20 examples/train_digits.py --save B
                   ^ a random rank is killed at a random time, 20 times; each time torchrun starts
                     all again, and they resume from the last saved state
    fewer          the same, killed once and resumed on one stage less

Weights and optimizer state at the end are compared bit by bit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import psutil
import torch

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples/train_digits.py"

#: How long a wait may last before it counts as a hang.
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Outcome:
    """How a disturbed run ended.

    Attributes:
        num_kills: processes killed.
        resumed_at: the number of steps after which each restart resumed; 0 from the beginning.
        differences: keys of weights and optimizer state that differ from the undisturbed run.
        largest: the largest difference of a weight.
        output: what it printed.
        duration_s: from start to end.
        num_left: processes that had to be ended after it.
    """

    num_kills: int
    resumed_at: tuple[int, ...]
    differences: tuple[str, ...]
    largest: float
    output: str
    duration_s: float
    num_left: int


class Launcher(Protocol):
    """A running process: the part of ``subprocess.Popen`` that is needed here."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, or ``None`` while the process runs."""

    def wait(self, timeout: float | None = None, /) -> int:
        """Wait for the end, and return the exit code."""


#: Starts Python with arguments and an environment; both outputs go to a file.
StartPython = Callable[[list[str], dict[str, str], BinaryIO], Launcher]


def start_python(argv: list[str], env: dict[str, str], log: BinaryIO) -> Launcher:
    """Start Python as a new process."""
    return subprocess.Popen(
        [sys.executable, *argv], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )


class Run:
    """A run of the example under torchrun; ends with all its processes on leaving ``with``."""

    def __init__(
        self,
        folder: Path,
        nproc: int,
        args: list[str],
        *,
        max_restarts: int = 0,
        start: StartPython = start_python,
    ) -> None:
        self.folder = folder
        self._log = folder.with_suffix(f".{nproc}.{time.monotonic_ns()}.log")
        argv = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        argv += [f"--nproc-per-node={nproc}", f"--max-restarts={max_restarts}"]
        argv += [str(SCRIPT), "--save", str(folder), *args]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "TORCHE"))}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._started_s = time.monotonic()
        with self._log.open("wb") as log:
            self._launcher = start(argv, env, log)
        self.num_left = 0

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._launcher.poll() is None:
            os.kill(self._launcher.pid, signal.SIGKILL)
            self._launcher.wait()

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        tree = self._tree()
        code = int(self._launcher.wait(TIMEOUT_S))
        self.duration_s = time.monotonic() - self._started_s
        self.num_left = len(psutil.wait_procs(tree, timeout=5.0)[1])
        return code

    def output(self) -> str:
        """Return all that was printed so far."""
        return self._log.read_text(errors="replace")

    def wait_ranks(self, nproc: int, attempt: int) -> list[psutil.Process]:
        """Wait until all processes of one start are there; return none if the run has ended."""
        for _ in _until_hang(f"{nproc} processes of start {attempt}"):
            found: dict[int, psutil.Process] = {}
            for process in self._tree():
                with contextlib.suppress(psutil.Error):
                    env = process.environ()
                    if env.get("TORCHELASTIC_RESTART_COUNT") == str(attempt) and "RANK" in env:
                        found.setdefault(int(env["RANK"]), process)
            if len(found) == nproc:
                return [found[rank] for rank in range(nproc)]
            if self._launcher.poll() is not None:
                return []
        return []

    def wait_saved(self, number: int) -> None:
        """Wait until a saved state of this number or a later one is there, or the run has ended."""
        for _ in _until_hang(f"saved state {number}"):
            if self.newest() >= number or self._launcher.poll() is not None:
                return

    def newest(self) -> int:
        """Return the number of the newest saved state that is whole, or 0."""
        files = [*self.folder.glob("[0-9]*/stage-*.pt")] if self.folder.is_dir() else []
        num_files = Counter(file.parent.name for file in files)
        whole = [f for f in files if num_files[f.parent.name] == int(f.stem.rpartition("-")[2])]
        return max((int(file.parent.name.partition("-")[0]) for file in whole), default=0)

    def _tree(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return list(psutil.Process(self._launcher.pid).children(recursive=True))
        return []


def undisturbed(folder: Path, nproc: int, args: list[str]) -> Path:
    """Run the example to its end, and return where it saved."""
    with Run(folder, nproc, args) as run:
        if run.wait() != 0:
            raise RuntimeError(f"the undisturbed run failed\n{run.output()}")
    return folder


def disturbed(
    folder: Path,
    nproc: int,
    args: list[str],
    *,
    num_kills: int,
    seed: int,
    expected: Path,
    start: StartPython = start_python,
) -> Outcome:
    """Kill random ranks at random times; see :class:`Outcome`."""
    choose = random.Random(seed)
    killed = 0
    with Run(folder, nproc, args, max_restarts=num_kills, start=start) as run:
        while killed < num_kills:
            ranks = run.wait_ranks(nproc, attempt=killed)
            if not ranks:
                break
            # While the run starts, or after it has saved again; a fraction of a step later.
            run.wait_saved(run.newest() + choose.choice([0, 1, 1, 2]))
            time.sleep(choose.uniform(0.0, 0.2))
            with contextlib.suppress(psutil.NoSuchProcess):
                choose.choice(ranks).kill()
                killed += 1
        code = run.wait()
        if code != 0:
            raise RuntimeError(f"exit code {code} after {killed} kills\n{run.output()}")
    return _outcome(run, killed, expected)


def fewer(folder: Path, nproc: int, args: list[str], *, seed: int, expected: Path) -> Outcome:
    """Kill a rank once some steps are saved, and resume with one process less."""
    choose = random.Random(seed)
    with Run(folder, nproc, args) as run:
        ranks = run.wait_ranks(nproc, attempt=0)
        run.wait_saved(2)
        choose.choice(ranks).kill()
        if run.wait() == 0:
            raise RuntimeError(f"the run ended before the kill\n{run.output()}")
    with Run(folder, nproc - 1, args) as run:
        if run.wait() != 0:
            raise RuntimeError(f"the run on {nproc - 1} stages failed\n{run.output()}")
    return _outcome(run, 1, expected)


def _outcome(run: Run, num_kills: int, expected: Path) -> Outcome:
    ours, theirs = _contents(run.folder), _contents(expected)
    gaps = [
        float((ours[key].double() - value.double()).abs().max())
        for key, value in theirs.items()
        if key.startswith("model.")
    ]
    output = run.output()
    resumed_at = tuple(int(step) for step in re.findall(r"resumed after (\d+) steps", output))
    return Outcome(
        num_kills,
        resumed_at,
        differences(run.folder, expected),
        max(gaps),
        output,
        run.duration_s,
        run.num_left,
    )


def differences(folder: Path, expected: Path) -> tuple[str, ...]:
    """Return the keys of weights and optimizer state that differ between two runs' ends."""
    ours, theirs = _contents(folder), _contents(expected)
    return tuple(key for key in theirs if not _is_same(ours.get(key), theirs[key]))


def _contents(folder: Path) -> dict[str, Any]:
    """Return weights and optimizer state of the newest saved state, read by plain PyTorch."""
    values: dict[str, Any] = {}
    for file in max(folder.glob("[0-9]*")).glob("*.pt"):
        saved = torch.load(file, weights_only=True)
        values |= {f"model.{name}": value for name, value in saved["model"].items()}
        for name, parts in saved["optimizer"]["state"].items():
            values |= {f"optimizer.state.{name}.{part}": value for part, value in parts.items()}
        for group in (group for groups in saved["optimizer"]["groups"] for group in groups):
            values |= {f"optimizer.options.{name}": group["options"] for name in group["params"]}
    return values


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _until_hang(what: str) -> Iterator[None]:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        yield
        time.sleep(0.02)
    raise TimeoutError(f"no {what} in {TIMEOUT_S:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    options = ["--epochs", str(args.epochs), "--save-every", str(args.save_every)]
    with tempfile.TemporaryDirectory(prefix="procpipe-restarts-") as place:
        expected = undisturbed(Path(place, "undisturbed"), args.nproc, options)
        outcomes = {
            f"{args.nproc} processes, restarted": disturbed(
                Path(place, "disturbed"),
                args.nproc,
                options,
                num_kills=args.kills,
                seed=args.seed,
                expected=expected,
            ),
        }
        if args.nproc > 1:
            outcomes[f"resumed on {args.nproc - 1}"] = fewer(
                Path(place, "fewer"), args.nproc, options, seed=args.seed, expected=expected
            )
    print(f"{'':28}  kills  differences  largest      s  left  resumed after steps")
    for name, end in outcomes.items():
        steps = " ".join(map(str, end.resumed_at))
        print(
            f"{name:28}  {end.num_kills:5}  {len(end.differences):11}  {end.largest:7.1g}"
            f"  {end.duration_s:5.0f}  {end.num_left:4}  {steps}"
        )
    sys.exit(any(end.differences or end.num_left for end in outcomes.values()))


if __name__ == "__main__":
    main()
