"""Which commands a run has on a machine, in which order, and how long each may take. Pure.

The most important steps come first. Each has a weight: its part of the time that is left when it
begins, compared with the steps still to come. So all later steps share the time that a step saves,
and a step that hangs costs them only its own part. If there is too little time for all, the last
steps are not run.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

#: A step gets at least this while there is time: its processes start in some seconds.
LEAST_S = 20.0

#: A step is not begun with less time than this.
SHORTEST_S = 5.0

_NO_NCCL = "NCCL takes two ranks on one GPU from 2.30 on: give one with --nccl PATH"

_BLOCKS = "throughput --workloads blocks --micro-batches 8 --contenders procpipe"
_GPT = "throughput --workloads gpt --micro-batches 8"


@dataclass(frozen=True)
class Step:
    """One step of a run.

    Attributes:
        name: as in the results.
        weight: its part of the time, compared with other steps.
        words: of ``python -m benchmarks``; none for pytest.
        num_gpus: how many the command may see; all if None.
        with_nccl: whether the processes get the NCCL of ``--nccl``, and may share GPUs by it.
        why_not: why it is not run; "" if it is.
    """

    name: str
    weight: float
    words: tuple[str, ...] = ()
    num_gpus: int | None = None
    with_nccl: bool = False
    why_not: str = ""


def steps_for(num_gpus: int, *, shares_by_nccl: bool = False, why_no_tests: str = "") -> list[Step]:
    """Return the steps in their order; those that the machine cannot run have a reason.

    Args:
        num_gpus: GPUs that torch can use.
        shares_by_nccl: whether an NCCL is there that takes several ranks on a GPU.
        why_no_tests: why pytest cannot be run; "" if it can.
    """

    def step(name: str, weight: float, words: str, number: int | None = None) -> Step:
        return Step(name, weight, tuple(shlex.split(words)), number)

    def by_nccl(name: str, weight: float, words: str) -> Step:
        """Make a step over NCCL between two ranks, which share a GPU where there is one only."""
        made = step(name, weight, words, 2 if num_gpus > 1 else 1)
        if num_gpus > 1:
            return made
        return replace(made, with_nccl=True, why_not="" if shares_by_nccl else _NO_NCCL)

    return [
        step("versions", 10, "gpu_checks --only versions"),
        Step("tests", 130, why_not=why_no_tests),
        step("parity", 40, "gpu_checks --only parity --stages 2 4 8", 1),
        *(step(f"shared-{n}", 20 + 2 * n, f"{_BLOCKS} --stages {n}", 1) for n in (2, 4, 8)),
        *(
            step(f"nccl-{n}", 20 + 2 * n, f"{_BLOCKS} --stages {n}", n)
            for n in (2, 4, 8)
            if n <= num_gpus
        ),
        by_nccl("nccl-parity", 20, "gpu_checks --only parity --stages 2 --transport nccl"),
        by_nccl("nccl-pair", 25, f"{_BLOCKS} --stages 2 --transport nccl"),
        step("host", 20, "gpu_checks --only host"),
        step("tasks", 15, "throughput --workloads tiny --micro-batches 16 --contenders procpipe"),
        step("ipc-messages", 25, "boundary --tensors", 1),
        by_nccl("nccl-messages", 25, "boundary --tensors --transport nccl"),
        *([step("nccl-blocks", 30, "gpu_checks --only blocks", 2)] if num_gpus > 1 else []),
        step("gpt", 45, f"{_GPT} --contenders 'procpipe 1F1B'"),
        step("gpt-memory", 30, "memory --workload gpt --contenders 'procpipe 1F1B'"),
        by_nccl("gpt-peers", 50, f"{_GPT} --contenders 'procpipe 1F1B' 'torch 1F1B'"),
        step("trace", 20, "gpu_checks --only trace"),
    ]


def allowance_s(left_s: float, weights: Sequence[float]) -> float:
    """Return how long the first of the steps that are still to come may take."""
    return min(left_s, max(LEAST_S, left_s * weights[0] / sum(weights)))
