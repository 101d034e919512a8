"""``procpipe run``: what to run, on how many processes, with how many threads."""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed.launcher.api import LaunchConfig
from torch.numa.binding import AffinityMode, NumaOptions

from procpipe.job.devices import pci_of
from procpipe.job.pin import SWITCH, cores_of_host, shares
from procpipe.launch.console import natural, positive
from procpipe.launch.run.launcher import Job, Launcher
from procpipe.words import counted, cpus_text, text_table

#: Torch's own variable for how long processes may take to end after a signal.
_GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_GRACE_S = 5

_EPILOG = """\
Rank 0's output is shown; the output of each rank is in its log files. After a failure, one report
is the last output on the screen.

exit code: 0; that of the rank that failed first; 128 + n if signal n ended that rank or the
launcher (130 after Ctrl-C); 2 for a mistake in the command line.
"""


def main(argv: Sequence[str]) -> int:
    """Run a script by the words after ``procpipe run``; return the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    _check(options, parser.error)
    num_threads, reason = _num_threads(options.nproc, options.threads)
    if options.no_pin or options.numa_binding:
        os.environ[SWITCH] = "0"
    if options.dry_run:
        _print_dry_run(options, f"{num_threads} ({reason})")
        return 0
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    try:
        folder = _make_folder(options)
    except OSError as error:
        parser.error(f"the logs cannot be written: {error}; choose another --log-dir")
    job = Job(_config(options, folder), _command(options), folder, _grace_s(), options.view)
    code: int = Launcher(job).run()
    return code


def _check(options: argparse.Namespace, refuse: Callable[[str], NoReturn]) -> None:
    """Check what goes together; fill in the number of processes."""
    if not options.module and not Path(options.script).is_file():
        refuse(f"there is no file {options.script} (seen from {Path.cwd()})")
    least, most = options.nnodes
    if most > 1 and not options.rdzv_endpoint:
        refuse(
            f"--nnodes {least if least == most else f'{least}:{most}'} needs --rdzv-endpoint "
            "HOST:PORT: a host that all others reach, and a free port there"
        )
    if options.node_rank is not None and not options.rdzv_endpoint:
        refuse("--node-rank is for several hosts: give --nnodes and --rdzv-endpoint too")
    if options.nproc is None:
        if not torch.cuda.is_available():
            refuse(
                "there is no GPU that torch can use here: give the number of processes by -n, "
                "for example -n 2"
            )
        options.nproc = torch.cuda.device_count()


def _num_threads(num_processes: int, wanted: int | None) -> tuple[int, str]:
    """Return the number of OMP threads of a process, and why that many."""
    if wanted:
        return wanted, "--threads"
    variable = os.environ.get("OMP_NUM_THREADS", "")
    if variable.isdigit() and int(variable) > 0:
        return int(variable), "OMP_NUM_THREADS is set"
    if num_least := min(map(len, shares(num_processes))):
        return num_least, "the physical cores of a process"
    num_cores = len(cores_of_host())
    return max(1, num_cores // num_processes), f"{num_cores} cores, {num_processes} processes"


def _print_dry_run(options: argparse.Namespace, threads: str) -> None:
    least, most = options.nnodes
    processes = f"{counted(options.nproc, 'process')} on this host"
    if options.numa_binding:
        print(f"{processes}, torch's own NUMA binding, {options.numa_binding}")
    elif os.environ.get(SWITCH) == "0":
        print(f"{processes}, not pinned to cores")
    else:
        print(f"{processes}:\n")
        print("\n".join(_table_of_cores(options.nproc)))
    hosts = "this one; a free port of it as meeting point"
    if options.rdzv_endpoint:
        numbers = str(least) if least == most else f"{least} to {most}"
        hosts = f"{numbers}, which meet at {options.rdzv_endpoint}"
    print()
    print(f"starts    {shlex.join([sys.executable, '-u', *_command(options)])}")
    print(f"threads   OMP_NUM_THREADS={threads}")
    print(f"hosts     {hosts}")
    print(f"restarts  {options.max_restarts}")
    print(f"logs      {Path(options.log_dir) / '…'}")


def _table_of_cores(num_processes: int) -> list[str]:
    """Return a table of where each process would run, as lines."""
    gpus = [pci_of(index) for index in range(min(num_processes, torch.cuda.device_count()))]
    devices = [*(f"GPU {pci}" for pci in gpus), *["CPU"] * (num_processes - len(gpus))]
    rows = [("process", "device", "cores", "CPUs")]
    for rank, cores in enumerate(shares(num_processes, gpus)):
        cpus = cpus_text(cpu for core in cores for cpu in core)
        rows.append((str(rank), devices[rank], str(len(cores) or "-"), cpus or "any"))
    return text_table(rows, num_left=len(rows[0]))


def _config(options: argparse.Namespace, folder: Path) -> LaunchConfig:
    """Return what torch's agent needs to know."""
    least, most = options.nnodes
    config = LaunchConfig(
        min_nodes=least,
        max_nodes=most,
        nproc_per_node=options.nproc,
        run_id=options.rdzv_id or (folder.name if not options.rdzv_endpoint else "procpipe"),
        rdzv_backend="c10d",
        rdzv_endpoint=options.rdzv_endpoint or "localhost:0",  # a free port
        # By default the agent finds out from its name whether the endpoint is on this host.
        rdzv_configs={} if options.node_rank is None else {"is_host": options.node_rank == 0},
        max_restarts=options.max_restarts,
        monitor_interval=0.1,
        # Without it the agent looks up this host's name, which may take seconds.
        local_addr=options.local_addr if options.rdzv_endpoint else "127.0.0.1",
        signals_to_handle="SIGQUIT",  # the launcher handles the others itself
    )
    if options.numa_binding:
        config.numa_options = NumaOptions(AffinityMode(options.numa_binding))
    config.shutdown_timeout = _grace_s()  # torch 2.11 has no such setting
    return config


def _grace_s() -> int:
    grace = os.environ.get(_GRACE_VARIABLE, "")
    return int(grace) if grace.isdigit() else _GRACE_S


def _command(options: argparse.Namespace) -> tuple[str, ...]:
    return (*(["-m"] if options.module else []), options.script, *options.script_args)


def _make_folder(options: argparse.Namespace) -> Path:
    """Make a folder for the logs of this run: "20250131-120000-train"."""
    name = options.script.rpartition(".")[2] if options.module else Path(options.script).stem
    host = f"-{socket.gethostname()}" if options.nnodes[1] > 1 else ""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}{host}"
    parent = Path(options.log_dir).absolute()
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="procpipe run",
        description="Run a training script, one process per stage.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-n", "--nproc-per-node", dest="nproc", type=positive, metavar="N",
        help="processes on this host; by default one for each of its GPUs")  # fmt: skip
    add("--max-restarts", type=natural, default=0, metavar="K",
        help="start all ranks again up to K times after a failure")  # fmt: skip
    add("--log-dir", default="procpipe-logs", metavar="DIR", help="default: %(default)s")
    add("--threads", type=positive, metavar="T",
        help="OMP_NUM_THREADS; by default as set, else its physical cores")  # fmt: skip
    add("--no-pin", action="store_true", help="do not pin processes to cores")
    add("--numa-binding", default="", metavar="MODE",
        choices=("node", "socket", "exclusive", "core-complex"),
        help="let torch bind processes to NUMA nodes instead (GPUs and numactl needed): "
        "%(choices)s")  # fmt: skip
    add("--dry-run", action="store_true",
        help="print what would be started, and on which cores")  # fmt: skip
    add("--view", default="auto", choices=("auto", "live", "plain", "off"),
        help="live table, plain lines, or rank 0's output only; by default the table on a terminal "
        "and lines elsewhere")  # fmt: skip
    hosts = parser.add_argument_group("several hosts (start this on each)")
    add = hosts.add_argument
    add("--nnodes", type=_hosts, default="1", metavar="MIN:MAX",
        help="number of hosts, or a range")  # fmt: skip
    add("--rdzv-endpoint", default="", metavar="HOST:PORT", help="where the hosts meet")
    add("--rdzv-id", default="", metavar="ID", help="name of the run; the same on all hosts")
    add("--node-rank", type=natural, metavar="R",
        help="0 on the host of the endpoint, another number elsewhere; by default found out from "
        "the host's name")  # fmt: skip
    add("--local-addr", metavar="ADDRESS", help="this host's address for the others")
    parser.add_argument("-m", "--module", action="store_true", help="train.py is a module's name")
    parser.add_argument("script", metavar="train.py")
    parser.add_argument("script_args", metavar="...", nargs=argparse.REMAINDER,
                        help="its arguments")  # fmt: skip
    return parser


def _hosts(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    try:
        least, most = int(first), int(last or first)
    except ValueError:
        least = most = 0
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(
            f"{text}: give a number of hosts, or MIN:MAX with 1 <= MIN <= MAX"
        )
    return least, most
