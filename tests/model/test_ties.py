"""Which parameters and buffers layers of several partitions use."""

from __future__ import annotations

from torch import nn

from procpipe.model.cut import cut
from procpipe.model.ties import find_ties


def test_a_tie_has_its_first_name_in_each_partition_and_all_its_names() -> None:
    layers = [nn.Linear(2, 2) for _ in range(4)]
    for layer in layers:
        layer.weight = layers[0].weight
    model = nn.Sequential(*layers)

    (apart,), (within,) = find_ties(cut(model, (2, 1, 1))), find_ties(cut(model, (4,)))

    assert apart.names == {0: "0.weight", 1: "2.weight", 2: "3.weight"}
    assert (apart.all_names[0], apart.partitions) == ("0.weight", (0, 1, 2))
    assert within.names == {0: "0.weight"}
    assert within.all_names == ("0.weight", "1.weight", "2.weight", "3.weight")
