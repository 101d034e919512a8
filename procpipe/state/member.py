"""This rank's part in a call of all ranks; a plain module is the only rank of its job.

Pipelines that share layers, by FSDP say, do not know one another: each has agreements of its own.
Processes with the same layers then exchange what each pipeline has agreed on (sharded.py), so that
all ranks of all of them agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from procpipe.compute.wrappers import is_sharded
from procpipe.errors import RemoteStageError
from procpipe.run.calls import Calls
from procpipe.run.coordinator import Agree
from procpipe.run.faults import in_a_line
from procpipe.stage import Stage
from procpipe.state import sharded


@dataclass(frozen=True)
class Member:
    """A stage, or a plain module, among those that save or load together."""

    module: nn.Module
    device: torch.device
    rank: int = 0
    num_ranks: int = 1
    cut: dict[str, list[int]] | None = None  # a stage's balance and placement, as plain JSON
    calls: Calls | None = None  # of a stage
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
            return cls(module, on, shares=is_sharded(module))
        cut = {"balance": module.balance, "placement": module.placement}
        place = module.device, module.rank, len(module.devices), cut, module._calls
        replicas = module.replica, module.replicas
        return cls(module, *place, *replicas, shares=module._grid.is_part)

    @contextmanager
    def call(self, name: str) -> Iterator[Agree]:
        """Make a call on every rank; an exception in it on one rank ends it on all."""
        if not isinstance(self.module, Stage):
            yield partial(self._agree, lambda ours, combine: combine([ours]))
            return
        with self.module._agreement(name) as agree:
            yield partial(self._agree, agree)

    def among(self, agree: Agree) -> tuple[Member, Agree]:
        """Return this member among the ranks of pipelines that share layers, and how they agree.

        Every rank calls it.
        """
        if not self.shares:
            return self, agree
        places = agree(sharded.place_of(self.module), lambda of_all: max(of_all, key=itemgetter(1)))
        pipeline, number = places
        rank, num_ranks = pipeline * self.num_ranks + self.rank, number * self.num_ranks
        member = replace(
            self, rank=rank, num_ranks=num_ranks, pipeline=pipeline, num_pipelines=number
        )
        return member, partial(member._agree, agree)

    def _agree(self, agree: Agree, ours: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Agree with all ranks of all pipelines; the first of each pipeline combines.

        ``ours`` may be a function that returns it. If it raises, so does this rank, and all other
        ranks a RemoteStageError.
        """
        if self.num_pipelines == 1:  # whose call an exception ends
            return agree(ours() if callable(ours) else ours, combine)
        failed = None
        try:
            ours = ours() if callable(ours) else ours
        except BaseException as error:
            ours, failed = None, error
        own = agree([ours, in_a_line(failed) if failed else ""], list)
        found = sharded.gathered(self.module, own)
        of_pipelines = agree(found, lambda of_ranks: next(filter(None, of_ranks)))
        facts = [fact for of_one in of_pipelines for fact in of_one]
        if failed is not None:
            raise failed
        for rank, (_, fault) in enumerate(facts):
            if fault:
                raise RemoteStageError(rank, fault)
        return agree(None, lambda _: combine([value for value, _ in facts]))

    def own_share(self, values: dict[str, Any], *, in_shards: bool = False) -> dict[str, Any]:
        """Return what this one writes of values that all replicas have, so that each is once."""
        if self.shares:
            values = sharded.share_of(values, keeps=self.pipeline == 0, in_shards=in_shards)
        return dict(islice(values.items(), self.replica, None, self.num_replicas))


def of_all_ranks(facts: list[dict[str, Any]]) -> list[str]:
    """Return the faults of all ranks, from the ``faults`` of each."""
    return [
        (f"rank {rank}: " if len(facts) > 1 else "") + fault
        for rank, of_rank in enumerate(facts)
        for fault in of_rank["faults"]
    ]


def raise_faults(headline: str, faults: list[str]) -> None:
    """Raise the faults of all ranks, if any, as one error on every rank.

    All ranks raise at the same place, so the stage can still be used.
    """
    if faults:
        raise ValueError(headline + ":\n" + "\n".join(f"  - {fault}" for fault in faults))
