"""Buffers that a forward changes: changed once, and repeated on copies in recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from procpipe.compute.buffers import Buffers, put


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
        elif self.how == "past autograd":
            count.data.add_(1)
        elif self.how == "assigned":
            self.count = torch.tensor(1) if count is None else count + 1
        return None if self.count is None else self.count.item()


WAYS = pytest.mark.parametrize(
    ("how", "start"), [("in place", 0), ("past autograd", 0), ("assigned", 0), ("assigned", None)]
)


def buffers_of(**layers: nn.Module) -> Buffers:
    buffers = Buffers(layers)
    buffers.read()
    return buffers


def forward(buffers, layer):
    """Run a first forward; return its output and the copies that its recomputation needs."""
    buffers.note()
    copies = buffers.before_forward()
    output = layer()
    buffers.after_forward(copies)
    return output, copies


@WAYS
def test_recomputation_repeats_and_leaves_buffers_unchanged(how, start):
    layer, constant = Counter(how, start), Counter(how="never")
    buffers = buffers_of(counter=layer, other=nn.Sequential(constant))
    firsts = [forward(buffers, layer) for _ in range(3)]
    assert [output for output, _ in firsts] == [1, 2, 3]
    assert [len(copies) for _, copies in firsts] == [4, 1, 1]
    owned = layer.count
    for expected, copies in reversed(firsts):
        before = put(copies)
        assert layer() == expected
        put(before)
        assert layer.count is owned
    assert layer.count == 3
    assert forward(buffers, layer)[0] == 4


@pytest.mark.parametrize(("how", "start"), [("in place", 0), ("assigned", 0), ("assigned", None)])
def test_a_buffer_that_changes_only_now_is_found(how, start):
    layer = Counter("never", start)
    buffers = buffers_of(layer=nn.Sequential(layer))
    forward(buffers, layer)
    forward(buffers, layer)
    assert buffers.changed(by_forward=True) == ""
    layer.how = how
    forward(buffers, layer)
    assert buffers.changed(by_forward=True) == "the buffer 'layer.0.count'"


def test_a_buffer_in_two_places_has_one_copy():
    a, b = Counter(), Counter()
    b.count = a.count
    buffers = buffers_of(a=a, b=b)
    model = nn.ModuleList([a, b])
    _, copies = forward(buffers, lambda: [layer() for layer in model])
    before = put(copies)
    assert [layer() for layer in model] == [1, 2]
    put(before)
    assert a.count is b.count
    assert a.count == 2
