"""``procpipe run``: what to run, on how many processes, on which hosts."""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.launcher.api import LaunchConfig

from procpipe.job.pin import cores_of_host, shares
from procpipe.launch.main import positive
from procpipe.launch.run.launcher import Launcher

#: How long ranks may take to end after a signal, in seconds; torch's own variable.
_GRACE = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5")

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
    if not options.module and not Path(options.script).is_file():
        parser.error(f"there is no file {options.script} (seen from {Path.cwd()})")
    if options.nnodes[1] > 1 and not options.rdzv_endpoint:
        parser.error("several hosts need --rdzv-endpoint HOST:PORT, which all of them reach")
    if options.max_restarts < 0:
        parser.error(f"--max-restarts {options.max_restarts}: give 0 or more")
    options.nproc = options.nproc or torch.cuda.device_count()
    if options.nproc == 0:
        parser.error("torch can use no GPU here: give the number of processes by -n, as in -n 2")
    os.environ.setdefault("OMP_NUM_THREADS", str(_num_threads(options.nproc)))
    os.environ.setdefault(*_GRACE)
    try:
        folder = _make_folder(options)
    except OSError as error:
        parser.error(f"the logs cannot be written: {error}; choose another --log-dir")
    words = (*(["-m"] if options.module else []), options.script, *options.script_args)
    return int(Launcher(_config(options, folder), words, folder, is_quiet=options.quiet).run())


def _num_threads(num_processes: int) -> int:
    """Return the physical cores of a process."""
    return min(map(len, shares(num_processes))) or max(1, len(cores_of_host()) // num_processes)


def _make_folder(options: argparse.Namespace) -> Path:
    """Make a folder for the logs of this run: "20250131-120000-train-4711"."""
    name = options.script.rpartition(".")[2] if options.module else Path(options.script).stem
    host = f"-{socket.gethostname()}" if options.nnodes[1] > 1 else ""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}{host}-{os.getpid()}"
    folder = Path(options.log_dir).absolute() / stem
    folder.mkdir(parents=True)
    return folder


def _config(options: argparse.Namespace, folder: Path) -> LaunchConfig:
    """Return what torch's agent needs to know."""
    least, most = options.nnodes
    return LaunchConfig(
        min_nodes=least,
        max_nodes=most,
        nproc_per_node=options.nproc,
        run_id=options.rdzv_id or (folder.name if not options.rdzv_endpoint else "procpipe"),
        rdzv_backend="c10d",
        rdzv_endpoint=options.rdzv_endpoint or "localhost:0",  # a free port
        rdzv_configs=options.rdzv_conf,
        max_restarts=options.max_restarts,
        # Without it the agent looks up this host's name, which may take seconds.
        local_addr=options.local_addr if options.rdzv_endpoint else "127.0.0.1",
        signals_to_handle="SIGQUIT",  # the launcher handles the others itself
    )


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
    add("--max-restarts", type=int, default=0, metavar="K",
        help="start all ranks again up to K times after a failure")  # fmt: skip
    add("--log-dir", default="procpipe-logs", metavar="DIR", help="default: %(default)s")
    add("-q", "--quiet", action="store_true",
        help="show rank 0's output and failures only, not the table")  # fmt: skip
    hosts = parser.add_argument_group("several hosts (start this on each), as torchrun's")
    add = hosts.add_argument
    add("--nnodes", type=_hosts, default="1", metavar="MIN:MAX",
        help="number of hosts, or a range")  # fmt: skip
    add("--rdzv-endpoint", default="", metavar="HOST:PORT", help="where the hosts meet")
    add("--rdzv-id", default="", metavar="ID", help="name of the run; the same on all hosts")
    add("--rdzv-conf", type=_settings, default="", metavar="NAME=VALUE,…",
        help="more for torch's rendezvous: is_host=1 on the host of the endpoint and is_host=0 on "
        "the others, where its name does not say so")  # fmt: skip
    add("--local-addr", metavar="ADDRESS", help="this host's address for the others")
    parser.add_argument("-m", "--module", action="store_true", help="train.py is a module's name")
    parser.add_argument("script", metavar="train.py")
    parser.add_argument("script_args", metavar="...", nargs=argparse.REMAINDER,
                        help="its arguments")  # fmt: skip
    return parser


def _hosts(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    return positive(least), positive(most or least)


def _settings(text: str) -> dict[str, str]:
    return dict(part.split("=") for part in text.split(",") if part)
