"""Run a command on emulated GPUs: ``python -m tests.emulated_gpu --gpus 4 -- COMMAND…``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile

from tests.emulated_gpu import environment


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.emulated_gpu", description=__doc__)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--delay-us", type=int, default=0, help="longest delay of an operation")
    parser.add_argument("--starve-ms", type=int, default=0, help="how long some streams do nothing")
    parser.add_argument("--memory-mib", default="8192", help="of each GPU: 8192, or 8192,4096,…")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = vars(parser.parse_args())
    command = options.pop("command")
    command = command[command[:1] == ["--"] :]
    if not command:
        parser.error("give a command to run")
    with tempfile.TemporaryDirectory(prefix="emulated_gpu-") as folder:
        variables = environment(**options, folder=folder)
        try:
            return subprocess.run(command, env=os.environ | variables, check=False).returncode
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())
