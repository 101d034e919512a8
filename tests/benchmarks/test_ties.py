"""The benchmark of shared parameters: its two models are one, and its table has the ratios."""

from __future__ import annotations

import torch

from benchmarks.ties import _SHARED, _SKIP, _loss, _model, tabulate
from procpipe import Stage


def test_both_models_are_the_same():
    tokens = torch.randint(10, (4, 3))
    stages = [
        Stage(_model(10, is_shared=shared), [6], loss_fn=_loss, chunks=2)
        for shared in (True, False)
    ]
    losses = [stage.step(tokens, tokens) for stage in stages]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(stage.get_parameter("0.weight").grad for stage in stages))


def test_bytes_are_in_mib_and_times_beside_those_of_the_skip_tensor():
    figures = {
        "bytes": {_SHARED: [1 << 20, 2 << 20], _SKIP: [4 << 20, 5 << 20]},
        "times": {_SHARED: [0.1, 0.2, 0.4], _SKIP: [0.2, 0.4, 0.4]},
    }
    assert tabulate({4: figures}, 8192).rows == [
        [f"m = 4, {_SHARED}", 1, 2, 200, 0.5],
        [f"m = 4, {_SKIP}", 4, 5, 400, 1],
    ]
