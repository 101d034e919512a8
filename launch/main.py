"""The command line: ``procpipe run``, ``doctor``, ``plan`` and ``timeline``.

    procpipe run -n 2 train.py --epochs 3

It works out what to run, on how many processes, with how many threads. Imports what a command
needs once it is known which.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from procpipe.launch.run.engine import Job

#: Torch's own variable for how long processes may take to end when they are told to.
_GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_GRACE_S = 5

_EPILOG = """\
Rank 0's output is shown; every rank's is in its log files. When a rank fails, the last thing on the
screen is one report of it.

exit code: 0; that of the rank that failed first; 128 + n if signal n ended that rank or the
launcher (130 after Ctrl-C); 2 for a mistake in the command line.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code.

    Args:
        argv: its words; by default those of this process.

    Raises:
        SystemExit: the words are wrong (code 2), or ask for help.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["doctor"]:
        from procpipe.launch.doctor import command as doctor

        return int(doctor.main(words[1:]))
    if words[:1] == ["timeline"]:
        from procpipe.launch.timeline import command as timeline

        return int(timeline.main(words[1:]))
    if words[:1] == ["plan"]:
        from procpipe.launch.plan import command as plan

        return int(plan.main(words[1:]))
    try:
        return _Run(_parser().parse_args(words)).main()
    except KeyboardInterrupt:  # before anything was started
        return 130


class _Run:
    """``procpipe run``.

    Args:
        options: its command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._parser: argparse.ArgumentParser = options.parser
        self._min_hosts, self._max_hosts = self._num_hosts()
        self._check()

    def main(self) -> int:
        """Run what is asked for."""
        options = self._options
        num_processes = options.nproc or self._num_gpus()
        num_threads, threads_why = self._num_threads(num_processes)
        if options.no_pin or options.numa_binding:
            os.environ["PROCPIPE_PIN"] = "0"
        if options.dry_run:
            return self._tell(num_processes, num_threads, threads_why)
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        try:
            folder = _make_folder(options.log_dir, self._name(), self._max_hosts > 1)
        except OSError as error:
            self._wrong(f"the logs cannot be written: {error}; choose another --log-dir")
        from procpipe.launch.run import job

        code: int = job.run(self._job(num_processes, folder), secrets.token_hex(16), options.view)
        return code

    def _check(self) -> None:
        options = self._options
        if not options.module and not Path(options.script).is_file():
            self._wrong(f"there is no file {options.script} (seen from {Path.cwd()})")
        if self._max_hosts > 1 and not options.rdzv_endpoint:
            self._wrong(
                f"--nnodes {options.nnodes} needs --rdzv-endpoint HOST:PORT: a host that all "
                "others reach, and a free port there"
            )
        if options.node_rank is not None and not options.rdzv_endpoint:
            self._wrong("--node-rank is for several hosts: give --nnodes and --rdzv-endpoint too")
        if options.numa_binding:
            from procpipe.launch.run.engine import can_bind_numa

            if not can_bind_numa():
                self._wrong("this version of torch has no NUMA binding: leave --numa-binding out")

    def _num_hosts(self) -> tuple[int, int]:
        text = self._options.nnodes
        first, _, last = text.partition(":")
        try:
            least, most = int(first), int(last or first)
        except ValueError:
            least = most = 0
        if not 1 <= least <= most:
            self._wrong(f"--nnodes {text}: give a number of hosts, or MIN:MAX with 1 <= MIN <= MAX")
        return least, most

    def _num_gpus(self) -> int:
        import torch

        if not torch.cuda.is_available():
            self._wrong(
                "there is no GPU that torch can use here: say with -n how many processes to start, "
                "for example -n 2"
            )
        return torch.cuda.device_count()

    def _num_threads(self, num_processes: int) -> tuple[int, str]:
        """Return the number of OMP threads of a process, and why that many."""
        from procpipe.job.pinning import places_of_host
        from procpipe.job.topology import read_topology

        if self._options.threads:
            return self._options.threads, "--threads"
        told = os.environ.get("OMP_NUM_THREADS", "")
        if told.isdigit() and int(told) > 0:
            return int(told), "OMP_NUM_THREADS is set"
        places = places_of_host(num_processes)
        if all(place.cpus for place in places):
            return min(place.num_cores for place in places), "the physical cores of a process"
        num_cores = len(read_topology().cores)
        return max(1, num_cores // num_processes), f"{num_cores} cores, {num_processes} processes"

    def _tell(self, num_processes: int, num_threads: int, threads_why: str) -> int:
        """Print what would be started."""
        from procpipe.job.pinning import places_of_host, table
        from procpipe.job.topology import gpu_pcis

        options = self._options
        processes = "1 process" if num_processes == 1 else f"{num_processes} processes"
        binding = (
            f"torch's own NUMA binding, {options.numa_binding}" if options.numa_binding else ""
        )
        if options.no_pin or binding or os.environ.get("PROCPIPE_PIN") == "0":
            print(f"{processes} on this host, {binding or 'not pinned to cores'}")
        else:
            print(f"{processes} on this host:\n")
            print(table(places_of_host(num_processes, gpu_pcis()[:num_processes])))
        print()
        print(f"starts    {shlex.join([sys.executable, '-u', *self._command()])}")
        print(f"threads   OMP_NUM_THREADS={num_threads} ({threads_why})")
        print(f"hosts     {self._hosts_text()}")
        print(f"restarts  {options.max_restarts}")
        print(f"logs      {Path(options.log_dir) / '…'}")
        return 0

    def _hosts_text(self) -> str:
        if not self._options.rdzv_endpoint:
            return "this one; a free port of it as meeting point"
        least, most = self._min_hosts, self._max_hosts
        numbers = str(least) if least == most else f"{least} to {most}"
        return f"{numbers}, which meet at {self._options.rdzv_endpoint}"

    def _job(self, num_processes: int, folder: Path) -> Job:
        from procpipe.launch.run.engine import Job

        options = self._options
        grace = os.environ.get(_GRACE_VARIABLE, "")
        return Job(
            num_processes=num_processes,
            command=self._command(),
            run_id=options.rdzv_id or (folder.name if not options.rdzv_endpoint else "procpipe"),
            min_hosts=self._min_hosts,
            max_hosts=self._max_hosts,
            endpoint=options.rdzv_endpoint,
            is_endpoint_host=None if options.node_rank is None else options.node_rank == 0,
            local_address=options.local_addr,
            max_restarts=options.max_restarts,
            grace_s=int(grace) if grace.isdigit() else _GRACE_S,
            numa_binding=options.numa_binding,
            folder=folder,
        )

    def _command(self) -> tuple[str, ...]:
        options = self._options
        module = ("-m",) if options.module else ()
        return (*module, options.script, *options.script_args)

    def _name(self) -> str:
        script = self._options.script
        return str(script).rpartition(".")[2] if self._options.module else Path(script).stem

    def _wrong(self, told: str) -> NoReturn:
        self._parser.error(told)


def _make_folder(parent: str, name: str, has_peers: bool) -> Path:
    """Make a folder of its own for a run: "20250131-120000-train"."""
    host = f"-{socket.gethostname()}" if has_peers else ""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}{host}"
    folder = Path(parent).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        found = folder / (stem if number == 1 else f"{stem}-{number}")
        try:
            found.mkdir()
        except FileExistsError:
            number += 1
            continue
        return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="procpipe", description="Pipeline-parallel training with one process per stage."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    commands.add_parser("doctor", help="check what a run needs on this host", add_help=False)
    commands.add_parser("timeline", help="show where the time of a run went", add_help=False)
    commands.add_parser("plan", help="propose how to run a model on devices", add_help=False)
    run = commands.add_parser(
        "run",
        help="run a training script on several processes",
        description="Run a training script, one process per stage.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.set_defaults(parser=run)
    add = run.add_argument
    add("-n", "--nproc-per-node", dest="nproc", type=_positive, metavar="N",
        help="processes on this host; by default one for each of its GPUs")  # fmt: skip
    add("--max-restarts", type=_natural, default=0, metavar="K",
        help="start all ranks again up to K times after a failure")  # fmt: skip
    add("--log-dir", default="procpipe-logs", metavar="DIR", help="default: %(default)s")
    add("--threads", type=_positive, metavar="T",
        help="OMP threads of a process; by default the physical cores it gets")  # fmt: skip
    add("--no-pin", action="store_true", help="do not pin processes to cores")
    add("--numa-binding", default="", metavar="MODE",
        choices=("node", "socket", "exclusive", "core-complex"),
        help="let torch bind processes to NUMA nodes instead (GPUs and numactl needed): "
        "%(choices)s")  # fmt: skip
    add("--dry-run", action="store_true", help="say what would be started, and where it would run")
    add("--view", default="auto", choices=("auto", "live", "plain", "off"),
        help="live table, plain lines, or rank 0's output only; by default the table on a terminal "
        "and lines elsewhere")  # fmt: skip
    hosts = run.add_argument_group("several hosts (start this on each)")
    add = hosts.add_argument
    add("--nnodes", default="1", metavar="MIN:MAX", help="number of hosts, or a range")
    add("--rdzv-endpoint", default="", metavar="HOST:PORT", help="where the hosts meet")
    add("--rdzv-id", default="", metavar="ID", help="names the run; the same on all hosts")
    add("--node-rank", type=_natural, metavar="R",
        help="0 on the host of the endpoint, another number elsewhere; by default found out from "
        "the host's name")  # fmt: skip
    add("--local-addr", metavar="ADDRESS", help="this host's address for the others")
    run.add_argument("-m", "--module", action="store_true", help="train.py is a module's name")
    run.add_argument("script", metavar="train.py")
    run.add_argument("script_args", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a number of at least 1")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: give 0 or more")
    return int(text)
