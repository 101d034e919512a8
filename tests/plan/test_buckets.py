"""Gradients that are added up over replicas together."""

from __future__ import annotations

import torch
from torch import nn

from procpipe.plan.buckets import BUCKET_BYTES, bucketed
from procpipe.replicas.bucket import buckets_of


def test_gradients_fill_buckets_in_their_order() -> None:
    half = BUCKET_BYTES // 2
    sizes = [("a", half), ("b", 1), ("a", half), ("a", 1), ("b", 2), ("a", 2 * BUCKET_BYTES)]

    assert bucketed(sizes) == [[0, 2], [3], [5], [1, 4]]
    assert bucketed([("a", 2 * BUCKET_BYTES)] * 2) == [[0], [1]]
    assert bucketed([]) == []


def test_the_last_layers_come_first_and_those_of_a_loss_last() -> None:
    a, b, c = (nn.Parameter(torch.tensor(float(k))) for k in range(3))
    found = [bucket._parameters for bucket in buckets_of([a, b, c], {c})]
    assert found == [[b, a], [c]]
