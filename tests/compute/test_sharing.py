"""A partition returns tensors that share memory, and one is changed in place after that.

The plain model changes all of them. Partitions give the plain model's result, or one error that
names the layer that made the change.
"""

from __future__ import annotations

import collections
import copy
import random
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from procpipe.channel.meta import decode, encode
from procpipe.compute.layers import PartitionLayers
from procpipe.compute.partition import Partition
from procpipe.compute.sharing import check_fresh, shared
from procpipe.compute.skips import SkipPorts
from procpipe.errors import RecomputeError
from procpipe.plan.routes import Routes, Transfer
from procpipe.plan.task import Task
from procpipe.skip import pop, skippable, stash
from procpipe.skip.layout import SkipLayout
from procpipe.tree import Flat, joined, parted
from tests.cases import case, for_each
from tests.compute.sizes import Sizes


class Do(nn.Module):
    """A layer from a function, after a linear map if ``num_features`` is given."""

    def __init__(self, function: Any, num_features: int = 0) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, num_features) if num_features else nn.Identity()

    def forward(self, *inputs: Any) -> Any:
        return self.function(*map(self.linear, inputs))


@skippable(stash=["t"])
class StashT(nn.Module):
    """Stashes its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        yield stash("t", h)
        return h


@skippable(stash=["u"])
class StashU(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("u", x)
        return x + 1


class Pop(nn.Module):
    """Adds the popped tensor, which it may change in place."""

    def __init__(self, name: str, change: bool = False) -> None:
        super().__init__()
        self.name, self.change = name, change

    def forward(self, x: Tensor) -> Any:
        skip = yield pop(self.name)
        return x + (skip.mul_(3) if self.change else skip)


@skippable(pop=["t"])
class PopT(Pop):
    pass


@skippable(pop=["u"])
class PopU(Pop):
    pass


def change(index: int) -> Do:
    """Return a layer that changes one entry of a tuple in place."""

    def run(entries: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        entries[index].mul_(2)
        return entries

    return Do(run)


def use(entries: tuple[Tensor, ...]) -> Tensor:
    """Return a sum of all entries' products with different factors."""
    rows = [(k + 1) * entry.flatten(1).sum(1, keepdim=True) for k, entry in enumerate(entries)]
    return sum(rows, torch.zeros(())).exp()


def plus_one(x: Tensor) -> Tensor:
    return x + 1


class Case(NamedTuple):
    """Four layers, and the one that the error names; None where stages equal the plain model."""

    layers: tuple[nn.Module, ...]
    named: int | None


def made(function: Any, num_features: int = 4) -> Do:
    return Do(function, num_features)


def same(value: Any) -> Any:
    return value


def cases() -> dict[str, Case]:
    torch.manual_seed(1)
    return {
        "base": Case((made(lambda h: (h, h[:, :2])), change(0), Do(use), Do(same)), 1),
        "view": Case((made(lambda h: (h, h[:, :2])), change(1), Do(use), Do(same)), 1),
        "twice": Case((made(lambda h: (h, h)), change(1), Do(use), Do(same)), 1),
        "part": Case((made(lambda h: (h[:, 1:], h[:, :2])), change(0), Do(use), Do(same)), 1),
        "later": Case((made(lambda h: (h, h.t().t())), Do(same), change(0), Do(use)), 2),
        "columns": Case(
            (made(lambda h: (h[:, :4], h[:, 4:]), 8), change(0), Do(use), Do(same)), None
        ),
        "every other": Case(
            (made(lambda h: (h[:, ::2], h[:, 1::2])), Do(same), change(1), Do(use)), None
        ),
        "unchanged": Case((made(lambda h: (h, h[:, :2], h)), Do(same), Do(use), Do(same)), None),
        "no view": Case(
            (made(lambda h: (h, h[:, :2].clone())), Do(same), change(0), Do(use)), None
        ),
        "skip": Case((StashT(), nn.ReLU(inplace=True), PopT("t"), Do(same)), 1),
        "skip, later": Case((StashT(), Do(same), nn.ReLU(inplace=True), PopT("t")), 2),
        "skip, used before": Case((StashT(), Do(plus_one), PopT("t", change=True), Do(same)), None),
        "two skips": Case((StashT(), StashU(), PopT("t", change=True), PopU("u")), 2),
    }


def sent(message: Flat) -> Flat:
    """Return a message as received by another process."""
    meta = decode(encode(message, message.tensors))
    tensors = [tensor.clone() for tensor in message.tensors]
    return Flat(tensors, meta.structure, meta.requires_grad).sharing(meta.memories, meta.changes)


def run_in_turn(
    layers: list[nn.Module], x: Tensor, *, keep: bool, recompute: bool, is_sent: bool
) -> Tensor:
    """Run a partition a layer forward, all in this process."""
    parts: list[dict[str, nn.Module]] = [{str(k): layer} for k, layer in enumerate(layers)]
    layout, last = SkipLayout.of(parts), len(parts) - 1
    routes = Routes(len(parts), tuple(layout.keys))
    made: dict[Transfer, Flat] = {}
    output = Flat.of((x,))
    for j, part in enumerate(parts):
        partition = Partition(
            PartitionLayers(
                part,
                torch.device("cpu"),
                is_first=j == 0,
                is_last=j == last,
                skips=SkipPorts(layout, j),
            )
        )
        task = Task("F", 0, j)
        inputs = [made[transfer] for transfer in routes.used_by(task)] or [output]
        check_fresh(inputs)
        output = partition.forward(0, joined(inputs), keep=keep, recompute=recompute)
        makes = routes.made_by(task)
        for transfer, flat in zip(makes, parted(output, len(makes)) if makes else [], strict=True):
            made[transfer] = sent(flat) if is_sent else flat
    return output.tensors[0]


@for_each("is_sent", [True, False], ids=["between processes", "within one"])
@for_each(("keep", "recompute"), [(False, False), (True, False), (True, True)])
def test_a_change_of_shared_memory_is_right_or_an_error(
    keep: bool, recompute: bool, is_sent: bool
) -> None:
    for name, (layers, named) in cases().items():
        x = torch.randn(5, 4)
        expected = nn.Sequential(*copy.deepcopy(layers))(x.clone())
        text = f"^layer '{named}' .* in place"
        error: type[Exception] = RuntimeError
        if named is None and recompute and name in CHANGES_ITS_INPUT:
            text, error = "so recomputing it would start from the wrong", RecomputeError
        elif named is None:
            text = ""
        with case(name), pytest.raises(error, match=text) if text else nullcontext():
            found = run_in_turn(list(layers), x, keep=keep, recompute=recompute, is_sent=is_sent)
            assert torch.equal(found, expected)


#: Cases in which a partition changes its input, which recomputation always refuses.
CHANGES_ITS_INPUT = ("columns", "every other", "no view", "skip, used before")


@for_each(
    ("views", "expected"),
    [
        (lambda x: [x, x[:, :2]], [{0}, {0}]),
        (lambda x: [x[:, :2], x[:, 2:]], [set(), set()]),
        (lambda x: [x[:2], x[2:], x[1:3]], [{0}, {1}, {0, 1}]),
        (lambda x: [x[::2], x[1::2], x.t()[1:]], [{0}, {1}, {0, 1}]),
        (lambda x: [x, x.clone(), x.view(-1)], [{0}, set(), {0}]),
        (lambda x: [x, x.view(torch.int64)[1:]], [{0}, {0}]),
        (lambda x: [x[:0], x], [set(), set()]),
        (lambda x: [x[0, 1:2].expand(3, 1), x[:, :1], x[:, 1:]], [{0}, set(), {0}]),
        (lambda x: [x[0, 0], x[0, 1], x[0]], [{0}, {1}, {0, 1}]),
    ],
)
def test_which_tensors_share_memory(views: Any, expected: list[set[int]]) -> None:
    found = shared(views(torch.zeros(4, 6, dtype=torch.float64)), "p")
    assert [set(names) for names in found] == [{f"p/{k}" for k in of} for of in expected] or (
        found == () and not any(expected)
    )


def places(tensor: Tensor) -> list[int]:
    """Return where a tensor's elements are in memory."""
    numbers = torch.arange(tensor.untyped_storage().nbytes() // tensor.element_size())
    of_tensor = numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return of_tensor.flatten().tolist()


def random_view(base: Tensor, rng: random.Random) -> Tensor:
    shape = [rng.choice([0, 1, 2, 2, 3, 3]) for _ in range(rng.randint(0, 3))]
    strides = [rng.choice([0, 1, 2, 3, 4, 6, 12]) for _ in shape]
    return base.as_strided(shape, strides, rng.randint(0, 12))


def test_views_share_memory_if_they_have_an_element_in_common() -> None:
    rng, base = random.Random(1), torch.zeros(100)
    seen = collections.Counter[bool]()
    for _ in range(3000):
        pair = [random_view(base, rng) for _ in range(2)]
        expected = bool(set(places(pair[0])) & set(places(pair[1])))
        found = bool(shared(pair, "p"))
        # Views that overlap themselves may be reported as shared without being so.
        if all(len(set(places(view))) == view.numel() for view in pair):
            seen[expected] += 1
            assert found == expected, pair
        else:
            assert found >= expected, pair
    assert min(seen.values()) > 200


def test_columns_of_a_large_tensor_are_compared_without_memory_of_its_size() -> None:
    columns = torch.empty(4, 1000, 3, 16, 64).permute(2, 0, 3, 1, 4)
    with Sizes() as sizes:
        assert shared(list(columns), "p") == ()
    assert sizes.most < 10_000
    assert shared([*columns[:2], columns[1, 1:]], "p") == ((), ("p/1",), ("p/1",))
