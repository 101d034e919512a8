"""Which steps a run has on a machine, in which order, and how long each may take. Pure.

The most important steps come first. Each has a weight: its part of the time that is left when it
begins, compared with the steps still to come. So all later steps share the time that a step saves,
and a step that hangs costs them only its own part. If there is too little time for all, the last
steps are not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

#: A step gets at least this while there is time: its processes start in some seconds.
LEAST_S = 15.0

#: A step is not begun with less time than this.
SHORTEST_S = 5.0

_PAIRS = (
    *(("gpipe", "never"), ("1f1b", "except_last"), ("zb-h1", "always"), ("zb-v", "except_last")),
    *(("interleaved", "always"), ("gpipe", "always"), ("zb-h1", "never")),
)
_BLOCKS = {"width": (4096, 16), "rows": (1024, 4), "num_micro_batches": (8, 4)}

#: Options of each function: on a real GPU, and on an emulated one.
_OPTIONS: dict[str, dict[str, tuple[Any, Any]]] = {
    "versions": {},
    "parity": {"width": (64, 8), "pairs": (_PAIRS, _PAIRS[:4])},
    "against_one_process": _BLOCKS | {"num_rounds": (5, 1), "pairs": (_PAIRS[:2], _PAIRS[:2])},
    "host": _BLOCKS,
    "trace": _BLOCKS,
    "messages": {
        "sizes": ([8 << (3 * k) for k in range(9)] + [256 << 20], [8, 64 << 10, 1 << 20]),
        "num_rounds": (10, 2),
    },
    "blocks": {
        "sizes": ([1 << 20, 64 << 20], [8, 1 << 20]),
        "num_rounds": (5, 1),
        "most": ((1, 2, 4, 8, 16), (1, 4)),
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
class Step:
    """One step of a run.

    Attributes:
        name: as in the results.
        weight: its part of the time, compared with other steps.
        function: ``"module:function"``, called on every rank; "" for pytest.
        options: what the function is called with, plain JSON; ``devices`` are one a rank.
        with_nccl: whether the processes get the NCCL of ``--nccl``, and share GPUs by it.
        why_not: why it is not run; "" if it is.
    """

    name: str
    weight: float
    function: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    with_nccl: bool = False
    why_not: str = ""


def steps_for(
    num_gpus: int, *, is_tiny: bool = False, shares_by_nccl: bool = False, why_no_tests: str = ""
) -> list[Step]:
    """Return the steps in their order; those that the machine cannot run have a reason.

    Args:
        num_gpus: GPUs that torch can use.
        is_tiny: whether sizes are those for an emulated GPU.
        shares_by_nccl: whether an NCCL is there that takes several ranks on a GPU.
        why_no_tests: why pytest cannot be run; "" if it can.
    """
    steps: list[Step] = []
    gpus = [f"cuda:{k}" for k in range(num_gpus)]
    pair = (gpus * 2)[:2]

    def add(name: str, weight: float, function: str, devices: Sequence[str], **more: Any) -> None:
        shares = bool(more) and len({*devices}) < len(devices)  # by NCCL, as both options say
        options = {name: sizes[is_tiny] for name, sizes in _OPTIONS[function].items()}
        options |= {"devices": devices, "transport": None, **more}
        where = f"benchmarks.gpu.{'gpt' if function == 'gpt' else 'measures'}:{function}"
        why_not = _NO_NCCL if shares and not shares_by_nccl else ""
        steps.append(Step(name, weight, where, options, shares, why_not))

    add("versions", 15, "versions", gpus[:1])
    steps.append(Step("tests", 130, why_not=why_no_tests))
    add("parity", 40, "parity", pair)
    for n in (2, 4, 8):
        add(f"shared-{n}", 20 + 2 * n, "against_one_process", gpus[:1] * n)
    for n in (2, 4, 8):
        if n <= num_gpus:
            add(f"nccl-{n}", 20 + 2 * n, "against_one_process", gpus[:n])
    if num_gpus == 1:
        add("nccl-shared", 30, "against_one_process", pair, transport="nccl")
    add("host", 25, "host", pair)
    add("ipc-messages", 25, "messages", gpus[:1] * 2)
    add("nccl-messages", 25, "messages", pair, transport="nccl")
    if num_gpus > 1:
        add("nccl-blocks", 30, "blocks", pair, transport="nccl")
    add("gpt", 70, "gpt", pair)
    add("gpt-peers", 50, "gpt", pair, with_peers=True)
    add("trace", 20, "trace", pair)
    return steps


def allowance_s(left_s: float, weights: Sequence[float]) -> float:
    """Return how long the first of the steps that are still to come may take."""
    return min(left_s, max(LEAST_S, left_s * weights[0] / sum(weights)))
