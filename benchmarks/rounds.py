"""Interleaved rounds: A B C A B C …, so that a machine whose speed drifts treats all alike.

Every benchmark starts itself again under torchrun, measures all contenders in the same processes,
and prints medians and ratios. Timings of one run are comparable; those of two runs are not.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

__all__ = ["is_worker", "launch", "machine", "measure", "table"]


def is_worker() -> bool:
    """Tell whether this process was started by ``launch``."""
    return "RANK" in os.environ


def launch(module: str, num_processes: int, arguments: list[str]) -> int:
    """Start a benchmark again under torchrun, one thread a process; return its exit code."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
        f"--nproc_per_node={num_processes}", "-m", module, *arguments,
    ]  # fmt: skip
    return subprocess.call(command, env=os.environ | {"OMP_NUM_THREADS": "1"})


def machine() -> str:
    """Name the machine and the versions, for the head of a table."""
    return (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def measure(
    contenders: Mapping[str, Callable[[], object]], *, num_rounds: int, num_steps: int
) -> dict[str, list[float]]:
    """Time each contender's step, all ranks together.

    Args:
        contenders: by name, a step; every rank calls it.
        num_rounds: how often each contender gets its turn, after one turn that is not counted.
        num_steps: steps a turn.

    Returns:
        By name, the seconds a step of each turn, from the first rank's start to the last's end.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(num_rounds + 1):
        for name, step in contenders.items():
            dist.barrier()
            start_s = time.perf_counter()
            for _ in range(num_steps):
                step()
            dist.barrier()
            if round_ > 0:
                times[name].append((time.perf_counter() - start_s) / num_steps)
    return times


def table(times: Mapping[str, list[float]], *, unit: str, scale: float, baseline: str) -> str:
    """Lay out medians, ranges, and the median of the round-by-round ratios to a baseline."""
    lines = [f"{'':<44} {'median':>9} {'min':>9} {'max':>9}   ratio to {baseline}"]
    for name, of_rounds in times.items():
        values = [seconds * scale for seconds in of_rounds]
        ratios = [a / b for a, b in zip(of_rounds, times[baseline], strict=True)]
        lines.append(
            f"{name:<44} {statistics.median(values):>9.1f} {min(values):>9.1f} "
            f"{max(values):>9.1f}   {statistics.median(ratios):.2f}"
        )
    return "\n".join([*lines, f"({unit})"])
