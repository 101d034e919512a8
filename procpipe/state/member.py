"""This rank's part in a call of all ranks; a plain module is the only rank of its job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from procpipe.run import coordinator
from procpipe.stage import Stage
from procpipe.state import sharded

#: ``agree(ours, combine)``: see there.
Agree = coordinator.Agree


@dataclass(frozen=True)
class Member:
    """A stage, or a plain module, among those that save or load together."""

    module: nn.Module
    device: torch.device
    rank: int = 0
    num_ranks: int = 1
    cut: dict[str, list[int]] | None = None  # a stage's balance and placement, as plain JSON
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
        record, num_ranks = module._record(), len(module.devices)
        replicas = module.replica, module.replicas
        place = module.device, module.rank, num_ranks, record.cut
        return cls(module, *place, *replicas, shares=record.is_part)

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

    def any_of(self, flag: bool, agree: Agree) -> bool:
        """Return whether a flag is set on any rank of these pipelines; of one, the own flag."""
        if self.num_pipelines == 1:
            return flag
        flag = bool(agree(flag, any))
        return bool(agree(sharded.any_of(self.module, flag), any))

    def own_share(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return what this one writes of whole values that all replicas have: each once."""
        if self.shares:
            values = sharded.whole(values, keeps=self.pipeline == 0)
        if self.pipeline > 0:
            return {}
        return dict(islice(values.items(), self.replica, None, self.num_replicas))

    def own_shards(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return what this one saves of values that all replicas have: each shard once."""
        if self.shares:
            values = sharded.share_of(values, keeps=self.pipeline == 0)
        return dict(islice(values.items(), self.replica, None, self.num_replicas))

    @contextmanager
    def call(self, name: str) -> Iterator[Agree]:
        """Make a call on every rank; an exception in it on one rank ends it on all."""
        if not isinstance(self.module, Stage):
            yield lambda ours, combine: combine([ours])
            return
        with self.module._record().call(name) as agree:
            yield agree


def raise_faults(headline: str, faults: list[str]) -> None:
    """Raise the faults of all ranks, if any, as one error on every rank.

    All ranks raise at the same place, so the stage can still be used.
    """
    if faults:
        raise ValueError(headline + ":\n" + "\n".join(f"  - {fault}" for fault in faults))
