"""The script of every rank of a step: calls one function, which records its findings.

When the step's time is over, it writes the stacks of all its threads and ends, even if it is
blocked and even if the process that started it is gone.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.gpu.results import RESULTS, append
from procpipe import RemoteStageError

#: Adds a finding: its kind, its name and cells in a table, a note below that, and raw figures by
#: name. On rank 0; the other ranks' calls do nothing.
Recorder = Callable[..., None]


def main() -> None:
    where, step, encoded, end, rank, num_ranks, port = sys.argv[1:]  # end: seconds since 1970
    faulthandler.dump_traceback_later(max(1.0, float(end) - time.time()), exit=True)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks}
    ranks |= {"LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update(ranks, GLOO_SOCKET_IFNAME="lo")
    results = Path(os.environ[RESULTS])

    def record(
        kind: str,
        name: str = "",
        cells: Mapping[str, Any] | None = None,
        note: str = "",
        **raw: Any,
    ) -> None:
        if rank == "0":
            found = {"step": step, "kind": kind, "name": name, "cells": cells or {}, "note": note}
            append(results, found | raw)

    try:
        module, function = where.split(":")
        call = getattr(importlib.import_module(module), function)
        options = json.loads(encoded)
        # Between turns all wait on CPUs; torch.distributed.pipelining sends by NCCL.
        dist.init_process_group("cpu:gloo,cuda:nccl" if options.get("with_peers") else "gloo")
        call(record, **options)
        dist.barrier()
    except Exception as error:
        if not isinstance(error, RemoteStageError):  # this rank failed first
            line = f"rank {rank}: {type(error).__name__}: {error}".partition("\n")[0]
            append(results, {"step": step, "kind": "error", "error": line[:300]})
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
