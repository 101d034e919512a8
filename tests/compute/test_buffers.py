"""Buffers that a forward changes: changed once, and repeated on copies in recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from procpipe.compute.buffers import Buffers


class Counter(nn.Module):
    """Changes its buffer in a given way."""

    count: Any

    def __init__(self, how="in place", start: Any = 0):
        super().__init__()
        self.how = how
        self.register_buffer("count", None if start is None else torch.tensor(start))
        self.register_buffer("steady", torch.arange(3))

    def forward(self):
        count: Any = self.count
        if self.how == "in place":
            count.add_(1)
        elif self.how == "assigned":
            self.count = count + 1
        elif self.how == "created":
            self.count = torch.tensor(1) if count is None else count + 1
        return None if self.count is None else self.count.item()


def forward(buffers, layer):
    """Run a first forward; return its output and the copies that its recomputation needs."""
    buffers.note_steady()
    copies = buffers.before_forward()
    output = layer()
    buffers.after_forward(copies)
    return output, copies


@pytest.mark.parametrize(
    ("how", "start"), [("in place", 0), ("assigned", 0), ("created", None)], ids=str
)
def test_recomputation_repeats_and_leaves_buffers_unchanged(how, start):
    layer = Counter(how, start)
    buffers = Buffers({"counter": layer})
    firsts = [forward(buffers, layer) for _ in range(3)]
    assert [output for output, _ in firsts] == [1, 2, 3]
    owned = layer.count
    for expected, copies in reversed(firsts):
        with buffers.lent(copies):
            assert layer() == expected
        assert layer.count is owned
    assert layer.count == 3
    assert forward(buffers, layer)[0] == 4


def test_only_buffers_that_change_are_copied_after_the_first_forward():
    layer, constant = Counter(), Counter(how="never")
    buffers = Buffers({"a": layer, "b": nn.Sequential(constant)})
    _, first = forward(buffers, layer)
    _, second = forward(buffers, layer)
    assert set(first) == {
        (layer, "count"),
        (layer, "steady"),
        (constant, "count"),
        (constant, "steady"),
    }
    assert set(second) == {(layer, "count")}


def test_running_statistics_always_count_as_changing():
    norm = nn.BatchNorm1d(3)
    buffers = Buffers({"norm": norm})
    norm.eval()
    for _ in range(2):  # nothing changes in evaluation
        copies = buffers.before_forward()
        norm(torch.randn(4, 3))
        buffers.after_forward(copies)
    norm.train()
    copies = buffers.before_forward()
    output = norm(input := torch.randn(4, 3))
    buffers.after_forward(copies)
    mean = norm.running_mean
    assert mean is not None
    expected = mean.clone()
    with buffers.lent(copies):
        assert norm.running_mean is not mean
        assert torch.equal(norm(input), output)
        assert norm.running_mean is not None
        assert torch.equal(norm.running_mean, expected)
    assert norm.running_mean is mean
    assert torch.equal(mean, expected)
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize(
    ("how", "start"), [("in place", 0), ("assigned", 0), ("created", None)], ids=str
)
def test_a_buffer_that_changes_only_now_is_found(how, start):
    layer = Counter("never", start)
    buffers = Buffers({"layer": nn.Sequential(layer)})
    forward(buffers, layer)
    forward(buffers, layer)
    assert buffers.changed() == []
    layer.how = how
    forward(buffers, layer)
    assert buffers.changed() == ["layer.0.count"]


def test_a_buffer_in_two_places_has_one_copy():
    a, b = Counter(), Counter()
    b.count = a.count
    buffers = Buffers({"a": a, "b": b})
    model = nn.ModuleList([a, b])
    copies = buffers.before_forward()
    assert [layer() for layer in model] == [1, 2]
    buffers.after_forward(copies)
    with buffers.lent(copies):
        assert [layer() for layer in model] == [1, 2]
    assert a.count is b.count
    assert a.count == 2


def test_a_buffer_of_not_a_number_counts_as_changing():
    layer = Counter(start=float("nan"))
    buffers = Buffers({"counter": layer})
    forward(buffers, layer)
    assert (layer, "count") in buffers.before_forward()
