"""Which steps a run has on a machine, in which order, and how long each may take. Pure.

The steps that matter most come first. Each has a weight: its part of the time that is left when it
begins, compared with the steps still to come. So a step that ends early leaves its time to all that
follow, and a step that hangs takes nothing from them but its own part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["SHORTEST_S", "Facts", "Step", "allowance_s", "steps_for"]

#: A step is not begun with less time than this.
SHORTEST_S = 4.0

#: The step that runs pytest.
TESTS = "tests"

_COMBINATIONS = (
    ("gpipe", "never"),
    ("1f1b", "except_last"),
    ("zb-h1", "always"),
    ("zb-v", "except_last"),
    ("interleaved", "always"),
    ("gpipe", "always"),
    ("zb-h1", "never"),
    ("auto", "except_last"),
)

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
    sizes = _TINY if facts.is_tiny else _FULL
    several = facts.num_gpus > 1
    pair = ["cuda:0", "cuda:1"] if several else ["cuda:0", "cuda:0"]
    no_nccl = "" if several or facts.shares_by_nccl else _NO_NCCL
    by_nccl = {"transport": None if several else "nccl"}
    combinations = _COMBINATIONS[:4] if facts.is_tiny else _COMBINATIONS

    def measuring(
        name: str, title: str, weight: float, function: str, devices: list[str], **more: Any
    ) -> Step:
        shared = {"transport": None, "devices": devices}
        options = shared | sizes.get(function, {}) | more.pop("options", {})
        where = f"benchmarks.gpu.{'gpt' if function == 'gpt' else 'measures'}:{function}"
        return Step(name, title, weight, where, len(devices), options, **more)

    def alike(name: str, title: str, devices: list[str], weight: float, **more: Any) -> Step:
        step = measuring(name, title, weight, "against_one_process", devices, **more)
        step.options["combinations"] = _COMBINATIONS[:2]
        return step

    return [
        Step("versions", "versions and topology", 15, "benchmarks.gpu.measures:versions"),
        Step(TESTS, "tests marked gpu", 130, why_not=facts.why_no_tests),
        measuring(
            *("parity", "parity with the plain model on CUDA", 40, "parity", pair),
            options={"combinations": combinations},
        ),
        *(
            alike(f"shared-{n}", f"{n} stages on one GPU, CUDA IPC", ["cuda:0"] * n, 20 + 2 * n)
            for n in (2, 4, 8)
        ),
        *(
            alike(f"nccl-{n}", f"{n} GPUs, NCCL", [f"cuda:{k}" for k in range(n)], 20 + 2 * n)
            for n in (2, 4, 8)
            if n <= facts.num_gpus
        ),
        *(
            alike(
                *("nccl-shared", "2 stages on one GPU, NCCL", pair, 30),
                options=by_nccl,
                with_nccl=True,
                why_not=no_nccl,
            )
            for _ in range(not several)
        ),
        measuring("host", "host cost, and how far the host runs ahead", 25, "host", pair),
        measuring("ipc-messages", "messages over CUDA IPC", 25, "messages", ["cuda:0"] * 2),
        measuring(
            *("nccl-messages", "messages over NCCL", 25, "messages", pair),
            options=by_nccl,
            with_nccl=not several,
            why_not=no_nccl,
        ),
        measuring("gpt", "GPT in bf16 beside one process and its plan", 70, "gpt", pair),
        measuring(
            *("gpt-peers", "the same beside torch.distributed.pipelining", 50, "gpt", pair),
            options={"with_peers": True},
            with_nccl=not several,
            why_not=no_nccl and f"torch.distributed.pipelining sends by NCCL; {no_nccl}",
        ),
        measuring("trace", "a trace", 20, "trace", pair),
    ]


def allowance_s(left_s: float, weights: Sequence[float]) -> float:
    """Return how long the first of the steps that are still to come may take."""
    return left_s * weights[0] / sum(weights)


_BLOCKS = {"width": 4096, "rows": 1024, "num_micro_batches": 8, "num_rounds": 5}
_FULL: dict[str, dict[str, Any]] = {
    "parity": {"width": 64},
    "against_one_process": _BLOCKS,
    "host": {key: value for key, value in _BLOCKS.items() if key != "num_rounds"},
    "trace": {key: value for key, value in _BLOCKS.items() if key != "num_rounds"},
    "messages": {"sizes": [8 << (3 * k) for k in range(9)] + [256 << 20], "num_rounds": 10},
    "gpt": {
        "sizes": [32768, 24, 1792, 14, 1024],  # vocabulary, blocks, width, heads, context
        "micro_batch": 4,
        "num_micro_batches": 8,
        "num_rounds": 4,
    },
}

_TINY_BLOCKS = {"width": 16, "rows": 4, "num_micro_batches": 4, "num_rounds": 1}
_TINY: dict[str, dict[str, Any]] = {
    "parity": {"width": 8},
    "against_one_process": _TINY_BLOCKS,
    "host": {key: value for key, value in _TINY_BLOCKS.items() if key != "num_rounds"},
    "trace": {key: value for key, value in _TINY_BLOCKS.items() if key != "num_rounds"},
    "messages": {"sizes": [8, 64 << 10, 1 << 20], "num_rounds": 2},
    "gpt": {
        "sizes": [64, 2, 16, 2, 8],
        "micro_batch": 1,
        "num_micro_batches": 4,
        "num_rounds": 1,
    },
}
