"""What is sent between stages, and how often: nothing that is not needed, and nothing twice.

Values of all kinds, sizes and layouts: tests/fuzz, and tests/channel for every transport.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from procpipe import StageStatistics
from tests.compute.segments import Do
from tests.dist.stages import stage_of
from tests.skip.layers import popper, stasher

pytestmark = pytest.mark.on_gpus


def rows(num_rows=7, num_columns=4):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64)


def frozen(layer):
    return layer.requires_grad_(False)


def linear(num_out=4):
    return nn.Linear(4, num_out)


def traffic(bare, mode, style) -> list[StageStatistics]:
    """Return this stage's statistics for several models, after one mini-batch each."""
    options: Any = {"chunks": 2, "checkpoint": mode, "loss_fn": torch.mean}
    statistics: list[StageStatistics] = []
    for layers in (
        (linear(3), nn.Linear(3, 5), nn.Linear(5, 1)),
        (frozen(linear(3)), nn.Linear(3, 5), nn.Linear(5, 1)),
        (frozen(linear(3)), frozen(nn.Linear(3, 5)), nn.Linear(5, 1)),
        (Do(lambda ids: ids > 2), Do(lambda f, m: (f(m.float()), m), linear()), Do(lambda t: t[0])),
        (nn.ReLU(), nn.ReLU(), linear(1)),
        (Do(lambda f, x: (f(x), f(x)), linear()), Do(lambda f, t: f(t[1]), linear()), linear(1)),
        (nn.Sequential(linear(), stasher("skip")), linear(), popper("skip")),
    ):
        model, name = nn.Sequential(*layers), f"{len(statistics)}"
        with stage_of(bare, name, model, [1, 1, 1], **options) as stage:
            if style == "step":
                stage.step(rows(8).float(), target=None)
            else:
                stage(rows(8).float()).sum().backward()
            statistics.append(stage.statistics())
    return statistics


#: For each model of ``traffic``, the bytes that each stage sends forward and backward: 2
#: micro-batches of 4 samples; 32 bytes a float32 column, 8 a bool one. No unneeded gradients, and
#: a skip tensor is sent past a stage that does not use it.
EXPECTED_TRAFFIC = [
    ({"activation": 96}, {"activation": 160, "gradient": 96}, {"gradient": 160}),
    ({"activation": 96}, {"activation": 160, "gradient": 0}, {"gradient": 160}),
    ({"activation": 96}, {"activation": 160, "gradient": 0}, {"gradient": 0}),
    ({"activation": 32}, {"activation": 160, "gradient": 0}, {"gradient": 128}),
    ({"activation": 128}, {"activation": 128, "gradient": 0}, {"gradient": 0}),
    ({"activation": 256}, {"activation": 128, "gradient": 128}, {"gradient": 128}),
    (
        {"activation": 128, "skip": 128},
        {"activation": 128, "gradient": 128, "skip": 0, "skip gradient": 0},
        {"gradient": 128, "skip": 0, "skip gradient": 128},
    ),
]


@pytest.mark.parametrize(("style", "mode"), [("step", "always"), ("backward", "never")])
def test_a_stage_is_sent_only_what_it_needs(ranks, style, mode):
    by_rank = ranks(3).run(traffic, mode, style, world=False).values()

    for model, expected in enumerate(EXPECTED_TRAFFIC):
        for rank, sent in enumerate(expected):
            statistics = by_rank[rank][model]
            found = {kind: statistics.sent_bytes.get(kind, 0) for kind in sent}
            num_messages = {kind: 2 if bytes else 0 for kind, bytes in sent.items()}
            assert found == sent, f"model {model}, stage {rank}"
            assert {k: statistics.num_messages.get(k, 0) for k in sent} == num_messages
