"""The tracker of plain forwards: each has its own tensors, and holds none at its end."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from procpipe.skip.tracker import Tracker, tracking
from tests.skip.layers import popper, stasher


def test_a_tensor_is_released_when_it_is_popped_last() -> None:
    """Not at the end of the forward: a later layer finds it gone."""
    found: list[object] = []
    stashed: list[weakref.ref[Tensor]] = []
    popping = popper("a"), popper("a")
    model = nn.Sequential(nn.Linear(1, 1), stasher("a", times=2), *popping, nn.Identity())
    model[1].register_forward_pre_hook(lambda _, inputs: stashed.append(weakref.ref(inputs[0])))
    model[4].register_forward_pre_hook(lambda _, __: found.append(stashed[0]()))
    with torch.no_grad():
        model(torch.ones(1))
    assert found == [None]


def test_threads_do_not_see_each_others_tensors() -> None:
    model = nn.Sequential(stasher("a"), popper("a"))

    def pop_alone() -> Tensor:
        output: Tensor = popper("a")(torch.ones(1))
        return output

    with tracking(tracker := Tracker()), ThreadPoolExecutor(1) as pool:
        stasher("a")(torch.tensor([100.0]))
        assert pool.submit(model, torch.ones(1)).result().tolist() == [3]
        with pytest.raises(RuntimeError, match="was not stashed"):
            pool.submit(pop_alone).result()
    assert len(tracker._tensors) == 1
