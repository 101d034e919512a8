"""Random faults in real jobs, round after round: each must end in time with the right report.

    python -m benchmarks.soak --rounds 60 [--seed 0] [--max-ranks 4] [--verbose]
    python -m benchmarks.soak --repeat-correct 100

A round is one job with one fault: which, on which rank, when, with how many ranks, steps and
micro-batches is drawn from the seed and the round's number. After each round:

    it has ended within its time                                    else: a hang
    exit codes, the rank named and the report are right             else: a wrong report
    none of its processes is alive                                  else: processes left
    /dev/shm and the job's temporary folder are as before           else: bytes, files left

Prints the sums, and for each round that went wrong its faults and the command that repeats
it. The exit code is 1 if any round did.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import select
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

import psutil

from benchmarks.soak_outside import Outsider
from benchmarks.soak_rounds import (
    FAULTS,
    FORK,
    FROM_OUTSIDE,
    HARMLESS,
    LAUNCHERS,
    TORCHRUN,
    Ending,
    Round,
    draw,
    faults_of,
)

#: A round that takes longer is a hang. A quiet one takes 1 to 6 s.
TIME_LIMIT_S = 90.0

#: How long processes may take to vanish after the launcher has ended.
VANISH_TIMEOUT_S = 5.0

#: Seconds between two checks of the job of a round.
_CHECK_EVERY_S = 0.05

_TOKEN = "PROCPIPE_SOAK"


class Job:
    """The processes of one round, started by a launcher.

    Args:
        round_: the round.
        folder: an empty folder for what the job writes.
    """

    def __init__(self, round_: Round, folder: Path) -> None:
        self._token = uuid.uuid4().hex
        self._log = folder / "launcher.log"
        if round_.launcher == TORCHRUN:
            start = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
            start += [f"--nproc-per-node={round_.num_ranks}", "-r", "3"]
        else:
            start = ["-m", "procpipe.launch", "run", f"--nproc-per-node={round_.num_ranks}"]
        start += ["--log-dir", str(folder / "logs"), "-m", "benchmarks.soak_job"]
        words = [*start, json.dumps(dataclasses.asdict(round_)), str(folder)]
        with self._log.open("wb") as log:
            self._process = _start(words, _environment(folder) | {_TOKEN: self._token}, log)
        self.launcher_pid = self._process.pid

    def wait_codes(self, timeout_s: float) -> tuple[int, ...] | None:
        """Wait a while for the end; return the exit codes, or None if the job has not ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return (self._process.wait(timeout_s),)
        return None

    def processes(self) -> list[psutil.Process]:
        """Return the job's processes that are alive."""
        return [p for p in psutil.process_iter() if self._is_ours(p) and _is_alive(p)]

    def output(self) -> str:
        """Return what the launcher wrote."""
        return self._log.read_text(errors="replace")

    def _is_ours(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return bool(process.environ().get(_TOKEN) == self._token)
        return False


class ForkServer:
    """One Python process that forks the ranks of many rounds; started when first needed.

    Args:
        is_frugal: whether to skip some of the ranks' work of ending, which few faults concern.
    """

    def __init__(self, is_frugal: bool) -> None:
        self._arguments = ["--serve", *(["--frugal"] if is_frugal else [])]
        self._process: subprocess.Popen[str] | None = None

    def start(self, round_: Round, folder: Path, *, tears_down: bool) -> None:
        """Start the ranks of a round."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.soak_job", *self._arguments],
                env=_environment(folder),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        order = json.dumps([dataclasses.asdict(round_), str(folder), _free_port(), tears_down])
        self._process.stdin.write(order + "\n")

    @property
    def launcher_pid(self) -> int:
        """The server's process."""
        assert self._process is not None
        return self._process.pid

    def wait_codes(self, timeout_s: float) -> tuple[int, ...] | None:
        """Wait a while for the end; return the exit codes, or None if the job has not ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            return None
        return tuple(json.loads(self._process.stdout.readline()))

    def processes(self) -> list[psutil.Process]:
        """Return the forked processes that are alive."""
        children = psutil.Process(self.launcher_pid).children(recursive=True)
        return [process for process in children if _is_alive(process)]

    def output(self) -> str:
        """Return nothing: there is no launcher."""
        return ""

    def close(self) -> None:
        """End the server, and all that it forked."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


class Soak:
    """Runs rounds and counts.

    Args:
        time_limit_s: of a round.
        is_verbose: whether to print a line a round.
        command: the command that repeats a round, without its number.
        is_frugal: as for ``ForkServer``.
    """

    def __init__(
        self, time_limit_s: float, is_verbose: bool, command: str, is_frugal: bool = True
    ) -> None:
        self._time_limit_s = time_limit_s
        self._is_verbose = is_verbose
        self._command = command
        self._server = ForkServer(is_frugal)
        self.sums: Counter[str] = Counter()
        self.longest_s = 0.0
        self.ends_s: dict[str, list[float]] = {}

    def run(self, number: int, round_: Round, *, tears_down: bool = True) -> None:
        """Run a round, judge it and count.

        Args:
            number: of the round, for the command that repeats it.
            round_: the round.
            tears_down: whether forked ranks free all modules at their end, as Python does; it
                takes most of a round's time.
        """
        folder = Path(tempfile.mkdtemp(prefix="procpipe-soak-"))
        (folder / "tmp").mkdir()
        try:
            ending = self._ending(round_, folder, tears_down=tears_down)
            wrong = self._judge(round_, ending)
            if self._is_verbose:
                verdict = "WRONG" if wrong else "ok"
                print(f"{number:4d} {verdict:5} {ending.duration_s:5.1f} s  {round_}", flush=True)
            if wrong:
                self._print_wrong(number, round_, wrong, ending)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """End the fork server."""
        self._server.close()

    def _ending(self, round_: Round, folder: Path, *, tears_down: bool) -> Ending:
        names_before = _shared_memory().keys()
        start_s = time.monotonic()
        job: Job | ForkServer = self._server
        if round_.launcher == FORK:
            self._server.start(round_, folder, tears_down=tears_down)
        else:
            job = Job(round_, folder)
        codes = None
        with Outsider(round_, folder, job.launcher_pid) as outsider:
            while codes is None and time.monotonic() < start_s + self._time_limit_s:
                codes = job.wait_codes(_CHECK_EVERY_S)
                outsider.poll()
        end_s = time.monotonic()
        left = _wait_vanished(job)
        if codes is None:
            self._server.close()
        return Ending(
            codes=codes or (),
            outputs=tuple(_outputs(folder, round_.num_ranks)),
            launcher_output=job.output(),
            duration_s=end_s - start_s,
            fault_s=_fault_s(folder),
            left=left,
            shared_bytes=_wait_freed(names_before),
            files=tuple(_files_left(folder / "tmp")),
            num_acts=outsider.num_acts,
            copies={int(file.suffix[1:]): file.read_text() for file in folder.glob("copy.*")},
        )

    def _judge(self, round_: Round, ending: Ending) -> list[str]:
        """Count the outcome of a round; return what was wrong."""
        sums, wrong = self.sums, []
        sums["rounds"] += 1
        self.longest_s = max(self.longest_s, ending.duration_s)
        if ending.fault_s is not None and round_.act not in HARMLESS:
            self.ends_s.setdefault(round_.launcher, []).append(ending.fault_s)
        if not ending.codes:
            sums["hangs"] += 1
            wrong.append(f"a hang: it has not ended in {self._time_limit_s:.0f} s")
        elif faults := faults_of(round_, ending):
            sums["wrong reports"] += 1
            wrong += faults
        if ending.codes and ending.left:
            sums["processes left"] += len(ending.left)
            wrong += [f"process left: {command}" for command in ending.left]
        if ending.shared_bytes:
            sums["bytes of shared memory left"] += ending.shared_bytes
            wrong.append(f"{ending.shared_bytes} bytes left in /dev/shm")
        if ending.files:
            sums["temporary files left"] += len(ending.files)
            wrong.append(f"temporary files left: {', '.join(ending.files)}")
        has_struck = ending.num_acts > 0 if round_.act in FROM_OUTSIDE else round_.act != "none"
        if not wrong and has_struck:
            sums["faults survived"] += 1
        return wrong

    def _print_wrong(self, number: int, round_: Round, wrong: list[str], ending: Ending) -> None:
        print(f"\nround {number} went wrong: {round_}\n  " + "\n  ".join(wrong))
        print(f"  repeat it with: {self._command} --first {number} --rounds 1")
        print(f"  exit codes {ending.codes} after {ending.duration_s:.1f} s")
        for rank, text in enumerate(ending.outputs):
            print(f"--- rank {rank} wrote\n{text.rstrip()}")
        print(f"--- the launcher wrote\n{ending.launcher_output.rstrip()}\n", flush=True)


#: All that is counted, in the order in which it is printed.
COUNTED = (
    "rounds",
    "faults survived",
    "hangs",
    "wrong reports",
    "processes left",
    "bytes of shared memory left",
    "temporary files left",
)


def main() -> int:
    """Run the test from the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=60, help="0 for none")
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-ranks", type=int, default=4)
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=LAUNCHERS)
    parser.add_argument("--acts", nargs="+", choices=sorted({act for act, _ in FAULTS}), default=[])
    parser.add_argument("--steps", type=int, help="of each job (default: 2 to 4)")
    parser.add_argument("--replicas", type=int, help="in each job (default: 1 or 2)")
    parser.add_argument("--repeat-correct", type=int, default=0, help="one job without a fault")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds a round")
    parser.add_argument("--verbose", action="store_true", help="print a line a round")
    options = parser.parse_args()
    faults = tuple(fault for fault in FAULTS if not options.acts or fault[0] in options.acts)
    common = options.time_limit, options.verbose, _command(options)
    soak, repeated = Soak(*common), Soak(*common, is_frugal=False)
    start_s = time.monotonic()
    try:
        for number in range(options.first, options.first + options.rounds):
            round_ = draw(
                options.seed,
                number,
                max_ranks=options.max_ranks,
                launchers=tuple(options.launchers),
                faults=faults,
                replicas=options.replicas,
            )
            if options.steps is not None:
                round_ = dataclasses.replace(round_, num_steps=options.steps)
            soak.run(number, round_)
        correct = draw(options.seed, 0, max_ranks=3, launchers=(FORK,), faults=(FAULTS[0],))
        correct = dataclasses.replace(
            correct, num_ranks=2, samples=2048, transport="gloo", replicas=1
        )
        for number in range(options.repeat_correct):
            repeated.run(number, correct)
    finally:
        soak.close()
        repeated.close()
    sums = soak.sums + repeated.sums
    for name in COUNTED:
        print(f"{name:28} {sums[name]:4d}")
    for launcher, ends_s in sorted(soak.ends_s.items()):
        print(
            f"from the fault to the last script's end ({launcher}): median "
            f"{statistics.median(ends_s):.2f} s, longest {max(ends_s):.2f} s"
        )
    took_s = time.monotonic() - start_s
    print(f"{took_s:.0f} s, the longest round {max(soak.longest_s, repeated.longest_s):.1f} s")
    return int(any(sums[name] for name in COUNTED[2:]))


def _command(options: argparse.Namespace) -> str:
    """Return the command that repeats a round, without its number."""
    words = ["--seed", options.seed, "--max-ranks", options.max_ranks]
    words += ["--launchers", *options.launchers]
    words += ["--acts", *options.acts] if options.acts else []
    words += ["--steps", options.steps] if options.steps else []
    words += ["--replicas", options.replicas] if options.replicas else []
    return shlex.join(["python", "-m", "benchmarks.soak", *map(str, words)])


def _start(words: list[str], environment: dict[str, str], log: BinaryIO) -> subprocess.Popen[bytes]:
    """Start a launcher in a session of its own: Python with these arguments."""
    return subprocess.Popen(
        [sys.executable, *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def _wait_vanished(job: Job | ForkServer) -> tuple[str, ...]:
    """Wait for the rest of a job, kill what does not end, and return its command lines."""
    deadline_s = time.monotonic() + VANISH_TIMEOUT_S
    while (left := job.processes()) and time.monotonic() < deadline_s:
        time.sleep(_CHECK_EVERY_S)
    commands = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            commands.append(" ".join(process.cmdline()))
            process.kill()
    return tuple(commands)


def _wait_freed(names_before: Collection[str]) -> int:
    """Wait until no file in shared memory is new; return the bytes of those that stay.

    Other programs on this machine also make some there, for a moment: Python for each semaphore.
    """
    deadline_s = time.monotonic() + VANISH_TIMEOUT_S
    while True:
        new = [size for name, size in _shared_memory().items() if name not in names_before]
        if not new or time.monotonic() > deadline_s:
            return sum(new)
        time.sleep(_CHECK_EVERY_S)


def _fault_s(folder: Path) -> float | None:
    """Return the seconds from the fault to the end of the last script that noted its own."""
    with contextlib.suppress(OSError, ValueError):
        ended_ns = [int(path.read_text()) for path in folder.glob("ended.*")]
        return (max(ended_ns) - int((folder / "struck").read_text())) / 1e9
    return None


def _outputs(folder: Path, num_ranks: int) -> Iterator[str]:
    """Read what each rank wrote, from any launcher's logs."""
    for rank in range(num_ranks):
        names = (str(rank), f"rank_{rank}")
        logs = sorted(path for path in folder.glob("logs/**/*.log") if path.parent.name in names)
        yield "".join(log.read_text(errors="replace") for log in logs)


def _files_left(folder: Path) -> Iterator[str]:
    """List files in the job's temporary folder; torchrun's own are not ours."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "torchelastic" not in str(path.relative_to(folder)):
            yield str(path.relative_to(folder))


def _shared_memory() -> dict[str, int]:
    """Return the sizes of all files in shared memory, by name."""
    sizes = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir("/dev/shm"):
            with contextlib.suppress(OSError):
                sizes[entry.name] = entry.stat().st_size
    return sizes


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _environment(folder: Path) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")}


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
