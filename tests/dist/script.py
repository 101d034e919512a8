"""Runs a whole script, without a launcher or under torchrun, as a user would.

done = run_forked(ROOT / "examples/train_digits.py", num_ranks=2, args=["--epochs", "1"])
done.check()

done = run_by_torchrun(ROOT / "examples/train_digits.py", num_ranks=2)
"""

from __future__ import annotations

import socket
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.dist.jobs import TIMEOUT_S, Job
from tests.dist.report import RanksFailedError

#: Each job gets its own port; the host's name is not looked up.
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")


@dataclass(frozen=True)
class Completed:
    """How a script ended.

    Attributes:
        stdout: all that its processes wrote there; stderr likewise.
        returncode: of the first process; negative if a signal ended it.
        duration_s: from the start of the first process to its end.
    """

    stdout: str
    stderr: str
    returncode: int
    duration_s: float

    def check(self) -> Completed:
        """Return itself; raise if the script failed."""
        if self.returncode != 0:
            raise RanksFailedError(f"the script did not end well\n{self}")
        return self

    def __str__(self) -> str:
        return (
            f"exit code {self.returncode} after {self.duration_s:.1f} s\n"
            f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )


def run_forked(
    path_or_code: Path | str,
    *,
    num_ranks: int | None = None,
    args: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
    tears_down: bool = False,
) -> Completed:
    """Run a script to its end, in a folder of its own that is removed afterwards.

    Args:
        path_or_code: a ``Path`` to a script, or a script's code as a ``str``.
        num_ranks: how many processes, with the environment variables that a launcher would set;
            ``None`` for one process without a launcher.
        args: the script's arguments.
        timeout_s: hard limit.
        tears_down: see ``Job.start``.

    Raises:
        RanksHungError: the time limit has passed; see ``Process.wait_end``. All are killed.
    """
    start_s = time.monotonic()
    with Job() as job:
        words = [_script_in(job, path_or_code), *args]
        environments: Any = environments_of(num_ranks)
        processes = [job.start(words, tears_down=tears_down, **env) for env in environments]
        codes = [each.wait_end(start_s + timeout_s - time.monotonic()) for each in processes]
        duration_s = time.monotonic() - start_s
        out, err = ("".join(each.raw(name) for each in processes) for name in ("out", "err"))
    return Completed(out, err, next((code for code in codes if code != 0), 0), duration_s)


def run_by_torchrun(path_or_code: Path | str, *, num_ranks: int) -> Completed:
    """Run a script under torchrun; else as :func:`run_forked` does."""
    start_s = time.monotonic()
    with Job() as job:
        words = [*TORCHRUN, f"--nproc-per-node={num_ranks}", _script_in(job, path_or_code)]
        process = job.start(words, num_ranks=num_ranks, tears_down=True)
        code, duration_s = process.wait_end(), time.monotonic() - start_s
        return Completed(process.raw("out"), process.raw("err"), code, duration_s)


def environments_of(num_ranks: int | None) -> list[dict[str, str]]:
    """Return what a launcher would add to the environment of each process."""
    if num_ranks is None:
        return [{}]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    ranks = map(str, range(num_ranks))
    return [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in ranks]


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _script_in(job: Job, path_or_code: Path | str) -> str:
    """Return a script's path; code is written into the job's folder."""
    if isinstance(path_or_code, Path):
        return str(path_or_code.resolve())
    job.write("script.py", textwrap.dedent(path_or_code))
    return str(job.path / "script.py")
