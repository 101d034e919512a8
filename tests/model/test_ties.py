"""Which parameters and buffers layers of several partitions use."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from procpipe.model.cut import cut
from procpipe.model.ties import find_ties


class Shares(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)


def make_model() -> nn.Sequential:
    embedding, head, table = nn.Embedding(5, 2), nn.Linear(2, 5, bias=False), torch.ones(1)
    head.weight = embedding.weight
    return nn.Sequential(embedding, Shares(table), nn.Sequential(head, head), Shares(table))


def test_ties_are_found_between_partitions_only() -> None:
    model = make_model()

    def ties(*balance: int) -> list[str]:
        found = [tie for tie in find_ties(cut(model, balance)) if len(tie.partitions) > 1]
        return [f"{tie}: {tie.is_parameter}" for tie in found]

    assert ties(2, 2) == [
        "0.weight in partition 0 and 2.0.weight in partition 1: True",
        "1.table in partition 0 and 3.table in partition 1: False",
    ]
    assert ties(3, 1) == ["1.table in partition 0 and 3.table in partition 1: False"]
    assert ties(1, 1, 2) == [
        "0.weight in partition 0 and 2.0.weight in partition 2: True",
        "1.table in partition 1 and 3.table in partition 2: False",
    ]


def test_a_tie_has_its_first_name_in_each_partition_and_all_its_names() -> None:
    layers = [nn.Linear(2, 2) for _ in range(4)]
    for layer in layers:
        layer.weight = layers[0].weight
    model = nn.Sequential(*layers)

    (apart,), (within,) = find_ties(cut(model, (2, 1, 1))), find_ties(cut(model, (4,)))

    assert apart.names == {0: "0.weight", 1: "2.weight", 2: "3.weight"}
    assert (apart.name, apart.partitions) == ("0.weight", (0, 1, 2))
    assert within.names == {0: "0.weight"}
    assert within.all_names == ("0.weight", "1.weight", "2.weight", "3.weight")
