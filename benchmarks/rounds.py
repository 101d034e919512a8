"""Interleaved rounds: A B C A B C …, so that a drift in the machine's speed affects all alike.

All contenders run in the same processes, in turns. Timings of one run are comparable, those of two
runs are not. So contenders are compared by their ratio in the same round, and the result is the
median of the rounds' ratios.

    command ── launch("benchmarks.throughput:measure_workload", 2, …) ──> torchrun
                                                                            └ worker.py, rank 0, 1
            <────────────────── what the function returned on rank 0 ──────────┘
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import call
from typing import Any

#: One mini-batch of a contender; every rank calls it, whether or not it takes part.
Step = Callable[[], object]

#: Seconds a step, of each contender in each round.
Times = dict[str, list[float]]

#: When a rank writes the stacks of its threads and ends, so that a hang ends too.
LIMIT_S = 600.0


def launch(
    function: str,
    num_processes: int,
    environment: Mapping[str, str] | None = None,
    *,
    device: str = "cpu",
    **options: Any,
) -> Any:
    """Run a function in processes that torchrun starts, with one thread each.

    Args:
        function: ``"module:function"``; every rank calls it with ``options``, in a group of gloo,
            and of NCCL if each has a GPU of its own.
        num_processes: how many.
        environment: variables to add.
        device: ``"cpu"`` hides all GPUs from them.
        options: plain JSON.

    Returns:
        What the function returned on rank 0, plain JSON.

    Raises:
        RuntimeError: a process failed, or was still running after ``LIMIT_S``; its error is on
            standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--local-addr=127.0.0.1", f"--nproc_per_node={num_processes}",
            "-m", "benchmarks.worker", function, json.dumps(options), str(LIMIT_S), str(result),
        ]  # fmt: skip
        variables = os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {})
        if device == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        code = call(command, env=variables, cwd=Path(__file__).parents[1])
        if code != 0:
            raise RuntimeError(
                f"{function} on {num_processes} processes ended with exit code {code}"
            )
        return json.loads(result.read_text())


def measure(contenders: Mapping[str, Step], *, num_rounds: int, num_steps: int) -> Times:
    """Time each contender's step, all ranks and devices together; every rank calls it.

    Args:
        contenders: by name, a step.
        num_rounds: how often each contender gets its turn, after one turn that is not counted.
        num_steps: steps a turn.

    Returns:
        By name, the seconds a step of each turn, from the first rank's start to the last's end.
    """
    times: Times = {name: [] for name in contenders}
    for round_ in range(num_rounds + 1):
        for name, step in contenders.items():
            _wait_all()
            start_s = time.perf_counter()
            for _ in range(num_steps):
                step()
            _wait_all()
            if round_ > 0:
                times[name].append((time.perf_counter() - start_s) / num_steps)
    return times


def _wait_all() -> None:
    """Wait until this rank's device has nothing to do, and then for the other ranks."""
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def spread(seconds: list[float], others: list[float]) -> str:
    """Write the median of the round-by-round ratios of two contenders, and the ratios' range."""
    ratios = sorted(a / b for a, b in zip(seconds, others, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"


def ratio(seconds: list[float], others: list[float]) -> float:
    """Return the median of the round-by-round ratios of two contenders."""
    return statistics.median(a / b for a, b in zip(seconds, others, strict=True))
