"""Every schedule's results equal those of the plain model on GPUs, bit for bit, as on CPUs.

So do plans of a user's own. These are cases of tests/fuzz, which draws many more, on CPUs only: its
oracle runs the plain model in float64 on the CPU, over the same micro-batches.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.dist.worker import WORLD_TIMEOUT_S, BareWorld
from tests.fuzz.case import Case, Run
from tests.fuzz.compare import run_one

pytestmark = pytest.mark.on_gpus

#: Layers with buffers, random numbers, in-place changes and two crossing skips; the last is a head.
LAYERS = (
    *("linear", "stash.0", "counting", "stash.6", "relu_"),
    *("pop.0", "dropout", "pop.6", "drawing"),
)

#: What is recomputed, how many micro-batches there are, and a size that leaves a smaller last one.
SIZES = (("always", 1, 5), ("except_last", 3, 11), ("never", 8, 23))


#: Two steps, a loss of a user's own, and an evaluation.
ACTS = ("step", "step", "loss", "evaluate in a loop")


def cases(schedule: str, num_partitions: int) -> list[Case]:
    """Return a case for each mode; the last partitions have more layers than the first."""
    num_layers = len(LAYERS) + 1
    cuts = tuple(num_layers * k // num_partitions for k in range(1, num_partitions))
    return [
        Case(seed=k, layers=LAYERS, loss="classes", runs=(
            Run(cuts, chunks=chunks, schedule=schedule, checkpoint=mode, transport="",
                calls=tuple((act, ((size,),)) for act in ACTS)),
        ))
        for k, (mode, chunks, size) in enumerate(SIZES)
    ]  # fmt: skip


def compare_in_a_script(names: list[str] | None) -> None:
    """Compare on each rank of a script, with these devices, or with one GPU each."""
    rank, num_ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    devices = [torch.device(name) for name in names or map("cuda:{}".format, range(num_ranks))]
    torch.cuda.set_device(devices[rank])
    for k, case in enumerate(cases("gpipe", num_ranks)):
        name = f"{os.environ['MASTER_PORT']} {k}"
        bare = BareWorld(rank, num_ranks, None, name, devices[rank], devices, WORLD_TIMEOUT_S)
        run_one(bare, case, 0, "")


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_partitions"),
    [
        *(
            pytest.param(*each, marks=pytest.mark.gpu)
            for each in [
                *(("gpipe", 3, 3), ("gpipe", 4, 4), ("1f1b", 2, 2), ("zb-h1", 3, 3)),
                *(("interleaved", 2, 4), ("interleaved", 2, 8), ("zb-v", 3, 6), ("zb-v", 4, 8)),
            ]
        ),
        ("in a loop", 2, 4),
        ("in a fold", 1, 1),
        ("in a fold", 2, 4),
        ("without the turn", 2, 3),
    ],
)
def test_a_plan_gives_the_plain_models_results(
    ranks, tmp_path, schedule, num_ranks, num_partitions
):
    for case in cases(schedule, num_partitions):
        assert case.is_exact
        ranks(num_ranks).run(run_one, case, 0, str(tmp_path), world=False).values()
