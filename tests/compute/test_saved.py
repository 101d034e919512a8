"""What autograd keeps inside layers, counted by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from procpipe.compute.layers import PartitionLayers
from procpipe.compute.partition import Partition
from procpipe.compute.saved import SavedTensors
from procpipe.tree import TENSOR, Flat

ROW = 8 * 4  # bytes of 8 floats


def saved_bytes(*layers: nn.Module, recompute: bool = False, is_first: bool = True) -> int:
    named = {str(k): layer for k, layer in enumerate(layers)}
    partition = Partition(PartitionLayers(named, torch.device("cpu"), is_first=is_first))
    partition.begin()
    x = torch.randn(12, 8)[4:7]  # a micro-batch of 3 rows of a mini-batch of 12
    inputs = Flat.of((x,)) if is_first else Flat([x], TENSOR, (True,))
    saved = SavedTensors()
    with saved.hooks():
        if recompute:
            partition.forward(0, inputs, keep=True, recompute=True)
            saved.num_bytes(())
            partition.recompute(0)
        else:
            partition.forward(0, inputs, keep=True, recompute=False)
    return saved.num_bytes(partition.tensors_of(0))


def test_inputs_outputs_and_parameters_are_counted_elsewhere() -> None:
    assert saved_bytes(nn.Linear(8, 8)) == 0
    assert saved_bytes(nn.Linear(8, 8), is_first=False) == 0
    assert saved_bytes(nn.Tanh(), is_first=False) == 0, "its output is the stage's"


def test_a_tensor_kept_by_several_nodes_counts_once() -> None:
    """The first Tanh keeps its output, and so does the linear layer after it."""
    layers = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()
    assert saved_bytes(*layers) == 3 * ROW
    assert saved_bytes(*layers, is_first=False) == 3 * ROW


def test_a_recomputation_keeps_the_same_bytes() -> None:
    layers = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)
    assert saved_bytes(*layers, recompute=True) == saved_bytes(*layers) == 3 * ROW


def test_gradients_are_right_while_saved_tensors_are_counted() -> None:
    layer, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.0)), torch.randn(3, 8)

    def gradient(saved: SavedTensors | None) -> Tensor:
        layer.zero_grad()
        if saved is None:
            output = layer(x)
        else:
            with saved.hooks():
                output = layer(x)
        output.sum().backward()
        of_weight = next(layer.parameters()).grad
        assert of_weight is not None
        return of_weight.clone()

    assert torch.equal(gradient(SavedTensors()), gradient(None))
