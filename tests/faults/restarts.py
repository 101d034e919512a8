"""Kill random processes of a training run, and check that its result is the same.

    python -m tests.faults.restarts --kills 20 --nproc 2

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
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/train_digits.py"

#: How long a wait may last before it counts as a hang.
TIMEOUT_S = 300.0


class Run:
    """A run of the example under torchrun; ends with all its processes on leaving ``with``."""

    def __init__(self, folder: Path, nproc: int, args: list[str], max_restarts: int = 0) -> None:
        self.folder, self._nproc = folder, nproc
        self.num_kills = self.num_left = 0
        self._log = folder.with_suffix(f".{nproc}.{time.monotonic_ns()}.log")
        argv = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        argv += [f"--nproc-per-node={nproc}", f"--max-restarts={max_restarts}"]
        argv += [str(SCRIPT), "--save", str(folder), *args]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "TORCHE"))}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._started_s = time.monotonic()
        with self._log.open("wb") as log:
            self._launcher = psutil.Popen([sys.executable, *argv], env=env, stdout=log, stderr=log)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._tree(), self._launcher):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._launcher.wait()

    def wait(self, *, must_succeed: bool = True) -> int:
        """Wait for the end; return how many processes had to be ended after it."""
        tree = self._tree()
        code = self._launcher.wait(TIMEOUT_S)
        self.duration_s = time.monotonic() - self._started_s
        if must_succeed != (code == 0):
            raise RuntimeError(f"the run ended with exit code {code}\n{self.output()}")
        return len(psutil.wait_procs(tree, timeout=5.0)[1])

    def output(self) -> str:
        """Return all that was printed so far."""
        return self._log.read_text(errors="replace")

    def kill_one(self, choose: random.Random, attempt: int, num_saved: int) -> bool:
        """Kill a rank of one start, once so many more states are saved; False if the run ended."""
        ranks: dict[str, psutil.Process] = {}
        for _ in _until_hang(f"{self._nproc} processes of start {attempt}"):
            for process in self._tree():
                with contextlib.suppress(psutil.Error):
                    env = process.environ()
                    if env.get("TORCHELASTIC_RESTART_COUNT") == str(attempt) and "RANK" in env:
                        ranks.setdefault(env["RANK"], process)
            if len(ranks) == self._nproc:
                break
            if self._launcher.poll() is not None:
                return False
        number = self._newest() + num_saved
        for _ in _until_hang(f"saved state {number}"):
            if self._newest() >= number or self._launcher.poll() is not None:
                break
        time.sleep(choose.uniform(0.0, 0.2))  # a fraction of a step later
        with contextlib.suppress(psutil.NoSuchProcess):
            choose.choice([*ranks.values()]).kill()
            return True
        return False

    def _newest(self) -> int:
        """Return the number of the newest saved state that is whole, or 0."""
        files = [*self.folder.glob("[0-9]*/stage-*.pt")] if self.folder.is_dir() else []
        num_files = Counter(file.parent.name for file in files)
        whole = [f for f in files if num_files[f.parent.name] == int(f.stem.rpartition("-")[2])]
        return max((int(file.parent.name.partition("-")[0]) for file in whole), default=0)

    def _tree(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found: list[psutil.Process] = self._launcher.children(recursive=True)
            return found
        return []


def disturbed(folder: Path, nproc: int, args: list[str], choose: random.Random, kills: int) -> Run:
    """Kill random ranks at random times, while the run starts or after it has saved again."""
    with Run(folder, nproc, args, max_restarts=kills) as run:
        while run.num_kills < kills and run.kill_one(choose, run.num_kills, choose.randrange(3)):
            run.num_kills += 1
        run.num_left = run.wait()
    return run


def fewer(folder: Path, nproc: int, args: list[str], choose: random.Random) -> Run:
    """Kill a rank once some steps are saved, and resume with one process less."""
    with Run(folder, nproc, args) as run:
        run.kill_one(choose, 0, 2)
        run.wait(must_succeed=False)
    with Run(folder, nproc - 1, args) as run:
        run.num_kills, run.num_left = 1, run.wait()
    return run


def differences(folder: Path, expected: Path) -> list[str]:
    """Return the keys of weights and optimizer state that differ between two runs' ends."""
    ours, theirs = _contents(folder), _contents(expected)
    return [key for key in theirs if not _is_same(ours.get(key), theirs[key])]


def _contents(folder: Path) -> dict[str, Any]:
    """Return weights and optimizer state of the newest saved state, read by plain PyTorch."""
    values: dict[str, Any] = {}
    for file in max(folder.glob("[0-9]*")).glob("*.pt"):
        saved = torch.load(file, weights_only=True)
        values |= {f"model.{name}": value for name, value in saved["model"].items()}
        for name, parts in saved["optimizer"]["state"].items():
            values |= {f"optimizer.state.{name}.{part}": value for part, value in parts.items()}
        for group in saved["optimizer"]["groups"].values():
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
    options = parser.parse_args()
    args = ["--epochs", str(options.epochs), "--save-every", str(options.save_every)]
    choose, n = random.Random(options.seed), options.nproc
    is_wrong = False
    print(f"{'':28}  kills  differences      s  left  resumed after steps")
    with tempfile.TemporaryDirectory(prefix="procpipe-restarts-") as place:
        expected = Path(place, "undisturbed")
        with Run(expected, n, args) as run:
            run.wait()
        runs = {
            f"{n} processes, restarted": disturbed(
                Path(place, "disturbed"), n, args, choose, options.kills
            )
        }
        if n > 1:
            runs[f"resumed on {n - 1}"] = fewer(Path(place, "fewer"), n, args, choose)
        for name, run in runs.items():
            found = differences(run.folder, expected)
            steps = " ".join(re.findall(r"resumed after (\d+) steps", run.output()))
            print(
                f"{name:28}  {run.num_kills:5}  {len(found):11}  {run.duration_s:5.0f}"
                f"  {run.num_left:4}  {steps}"
            )
            is_wrong |= bool(found or run.num_left)
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
