"""This rank's part in a call of all ranks; a plain module is the only rank of its job."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from procpipe.run.calls import Calls
from procpipe.stage import Stage
from procpipe.state import sharded

#: ``agree(ours, combine)`` brings every rank's value, plain JSON, to rank 0, calls ``combine`` with
#: the list of them there, and returns its result, again plain JSON, on every rank.
Agree = Callable[[Any, Callable[[list[Any]], Any]], Any]


@dataclass(frozen=True)
class Member:
    """A stage, or a plain module, among those that save or load together."""

    module: nn.Module
    device: torch.device
    rank: int = 0
    num_ranks: int = 1
    stage: int = 0  # the rank of replica 0 with the same layers
    cut: dict[str, list[int]] | None = None  # a stage's balance and placement, as plain JSON
    calls: Calls | None = None  # of a stage's pipeline
    timeout_s: float = math.inf  # how long to wait for another rank
    replica: int = 0  # which of the processes with the same layers this is
    num_replicas: int = 1  # how many of them there are
    shares: bool = False  # whether its layers may be sharded over other pipelines
    pipeline: int = 0  # which of those this is in; see ``among``
    num_pipelines: int = 1  # how many of them there are

    @classmethod
    def of(cls, module: nn.Module) -> Member:
        """Return the member that a module is."""
        if isinstance(getattr(module, "_orig_mod", None), Stage):
            raise TypeError(
                "torch.compile(stage) hides that this is a stage: pass the stage itself here, and "
                "compile its layers by stage.compile()"
            )
        if not isinstance(module, Stage):
            on = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
            return cls(module, on, shares=any(map(sharded.is_sharded, module.parameters())))
        cut = {"balance": module.balance, "placement": module.placement}
        place = module.device, module.rank, len(module.devices), module._grid.stage
        timeout_s = module._world.mesh.timeout_s
        replicas = module.replica, module.replicas
        shares = module._grid.is_part
        return cls(module, *place, cut, module._calls, timeout_s, *replicas, shares=shares)

    def among(self, agree: Agree) -> Member:
        """Return this member with its number among the ranks of all pipelines that share layers.

        Every rank calls it.
        """
        if not self.shares:
            return self
        places = agree(sharded.place_of(self.module), lambda of_all: max(of_all, key=itemgetter(1)))
        pipeline, num_pipelines = places
        return replace(
            self,
            rank=pipeline * self.num_ranks + self.rank,
            num_ranks=num_pipelines * self.num_ranks,
            pipeline=pipeline,
            num_pipelines=num_pipelines,
        )

    def from_first(self, text: str, agree: Agree) -> str:
        """Return the text of the first of the pipelines that share layers, on every rank."""
        if self.num_pipelines == 1:
            return text
        own = sharded.from_first(self.module, text)
        return str(agree(own, lambda of_all: next(filter(None, of_all))))

    def own_share(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return what this one writes of values that all replicas have: each is written once."""
        if self.shares:
            values = sharded.whole(values, keeps=self.pipeline == 0)
        if self.pipeline > 0:
            return {}
        return dict(islice(values.items(), self.replica, None, self.num_replicas))

    @contextmanager
    def call(self, name: str) -> Iterator[Agree]:
        """Make a call on every rank; an exception in it on one rank ends it on all."""
        if not isinstance(self.module, Stage):
            yield lambda ours, combine: combine([ours])
            return
        with self.module._agreement(name) as agree:
            yield agree


def raise_faults(headline: str, faults: list[str]) -> None:
    """Raise the faults of all ranks, if any, as one error on every rank.

    All ranks raise at the same place, so the stage can still be used.
    """
    if faults:
        raise ValueError(headline + ":\n" + "\n".join(f"  - {fault}" for fault in faults))
