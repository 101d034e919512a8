"""What every rank of a step runs: calls one function, which records what it finds.

Writes the stacks of all its threads and ends when the step's time is over, whatever it is blocked
in, and also if the process that started it is gone.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.gpu.results import RESULTS, append

__all__ = ["Recorder"]

#: Adds a record of a kind, on rank 0; the other ranks' calls do nothing.
Recorder = Callable[..., None]


def main() -> None:
    where, step, encoded, end = sys.argv[1:]  # the end in seconds since 1970
    faulthandler.dump_traceback_later(max(1.0, float(end) - time.time()), exit=True)
    module, function = where.split(":")
    call = getattr(importlib.import_module(module), function)
    options = json.loads(encoded)
    rank, results = int(os.environ["RANK"]), Path(os.environ[RESULTS])

    def record(kind: str, **values: Any) -> None:
        if rank == 0:
            append(results, {"step": step, "kind": kind, **values})

    # Between turns all wait on CPUs; torch.distributed.pipelining sends by NCCL.
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.get("with_peers") else "gloo")
    call(record, **options)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
