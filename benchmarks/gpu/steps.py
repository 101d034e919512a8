"""Which steps a run has on a machine, in which order, and how long each may take. Pure.

The steps that matter most come first. Each has a weight: its part of the time that is left when it
begins, compared with the steps still to come. So a step that ends early leaves its time to all that
follow, and a step that hangs takes nothing from them but its own part. Where there is too little
time for all, the last steps are not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["LEAST_S", "SHORTEST_S", "Facts", "Step", "allowance_s", "steps_for"]

#: A step gets as much as this while there is any time: its processes start in some seconds.
LEAST_S = 15.0

#: A step is not begun with less time than this.
SHORTEST_S = 5.0

#: The step that runs pytest.
TESTS = "tests"

_COMBINATIONS = (
    *(("gpipe", "never"), ("1f1b", "except_last"), ("zb-h1", "always"), ("zb-v", "except_last")),
    *(("interleaved", "always"), ("gpipe", "always"), ("zb-h1", "never"), ("auto", "except_last")),
)
_BLOCKS = {"width": (4096, 16), "rows": (1024, 4), "num_micro_batches": (8, 4)}

#: Options of each function: on a real GPU, and on an emulated one.
_OPTIONS: dict[str, dict[str, tuple[Any, Any]]] = {
    "versions": {},
    "parity": {"width": (64, 8), "combinations": (_COMBINATIONS, _COMBINATIONS[:4])},
    "against_one_process": _BLOCKS
    | {"num_rounds": (5, 1), "combinations": (_COMBINATIONS[:2], _COMBINATIONS[:2])},
    "host": _BLOCKS,
    "trace": _BLOCKS,
    "messages": {
        "sizes": ([8 << (3 * k) for k in range(9)] + [256 << 20], [8, 64 << 10, 1 << 20]),
        "num_rounds": (10, 2),
    },
    "gpt": {
        "sizes": ([32768, 24, 1792, 14, 1024], [64, 2, 16, 2, 8]),
        "micro_batch": (2, 1),
        "num_micro_batches": (8, 4),
        "num_rounds": (4, 1),
    },
}

_NO_NCCL = "NCCL takes two ranks on one GPU from 2.30 on: give one with --nccl PATH"


@dataclass(frozen=True)
class Facts:
    """What the choice of steps depends on.

    Attributes:
        num_gpus: GPUs that torch can use.
        is_tiny: whether sizes are those for an emulated GPU.
        why_no_tests: why pytest cannot be run; "" if it can.
        shares_by_nccl: whether an NCCL is there that takes several ranks on a GPU.
    """

    num_gpus: int
    is_tiny: bool = False
    why_no_tests: str = ""
    shares_by_nccl: bool = False


@dataclass(frozen=True)
class Step:
    """One step of a run.

    Attributes:
        name: as in the results.
        title: what it does, for people.
        weight: its part of the time, compared with other steps.
        function: ``"module:function"``, called on every rank; "" for pytest.
        num_ranks: how many processes there are.
        options: what the function is called with, plain JSON.
        with_nccl: whether the processes get the NCCL of ``--nccl``, and share GPUs by it.
        why_not: why it is not run; "" if it is.
    """

    name: str
    title: str
    weight: float
    function: str = ""
    num_ranks: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    with_nccl: bool = False
    why_not: str = ""


def steps_for(facts: Facts) -> list[Step]:
    """Return the steps in their order; those that the machine cannot do say why."""
    steps: list[Step] = []
    is_one = facts.num_gpus == 1
    pair = ["cuda:0", "cuda:0"] if is_one else ["cuda:0", "cuda:1"]
    nccl = "nccl" if is_one else None  # between different GPUs it is the default

    def add(
        name: str,
        title: str,
        weight: float,
        function: str,
        devices: Sequence[str],
        *,
        by_nccl: bool = False,
        **more: Any,
    ) -> None:
        shares = by_nccl and is_one
        options = {name: sizes[facts.is_tiny] for name, sizes in _OPTIONS[function].items()}
        options |= {"devices": devices, "transport": None, **more}
        where = f"benchmarks.gpu.{'gpt' if function == 'gpt' else 'measures'}:{function}"
        why_not = _NO_NCCL if shares and not facts.shares_by_nccl else ""
        steps.append(Step(name, title, weight, where, len(devices), options, shares, why_not))

    add("versions", "versions and topology", 15, "versions", ["cuda:0"])
    steps.append(Step(TESTS, "tests for GPUs", 130, why_not=facts.why_no_tests))
    add("parity", "parity with the plain model on CUDA", 40, "parity", pair)
    for n in (2, 4, 8):
        title = f"{n} stages on one GPU, CUDA IPC"
        add(f"shared-{n}", title, 20 + 2 * n, "against_one_process", ["cuda:0"] * n)
    for n in (2, 4, 8):
        if n <= facts.num_gpus:
            gpus = [f"cuda:{k}" for k in range(n)]
            add(f"nccl-{n}", f"{n} GPUs, NCCL", 20 + 2 * n, "against_one_process", gpus)
    if is_one:
        title = "2 stages on one GPU, NCCL"
        add("nccl-shared", title, 30, "against_one_process", pair, by_nccl=True, transport=nccl)
    add("host", "host cost, and how far the host runs ahead", 25, "host", pair)
    add("ipc-messages", "messages over CUDA IPC", 25, "messages", ["cuda:0"] * 2)
    title = "messages over NCCL"
    add("nccl-messages", title, 25, "messages", pair, by_nccl=True, transport=nccl)
    add("gpt", "GPT in bf16 beside one process and its plan", 70, "gpt", pair)
    title = "the same beside torch.distributed.pipelining, which sends by NCCL"
    add("gpt-peers", title, 50, "gpt", pair, by_nccl=True, with_peers=True)
    add("trace", "a trace", 20, "trace", pair)
    return steps


def allowance_s(left_s: float, weights: Sequence[float]) -> float:
    """Return how long the first of the steps that are still to come may take."""
    return min(left_s, max(LEAST_S, left_s * weights[0] / sum(weights)))
