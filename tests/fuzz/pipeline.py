"""A case as procpipe has it: the same layers and batches, with skip tensors and a Stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from procpipe import NoChunk, Stage, is_recomputing
from procpipe.skip import Namespace, pop, skippable, stash
from tests.dist.stages import USERS_PLANS, stage_of
from tests.dist.worker import BareWorld
from tests.fuzz.case import Case, Run
from tests.fuzz.data import Batch, loss_fn_of, loss_weight_of, with_whole
from tests.fuzz.layers import Drawing, Pop, Stash, build, fold


def stage_for(
    bare: BareWorld, case: Case, run: Run, *, is_new: bool
) -> AbstractContextManager[Stage]:
    """Return the stage of a run, to be entered; unless it is new, it has other values."""
    model = _model(case if is_new else dataclasses.replace(case, seed=case.seed + 1))
    loss_fn: Any = loss_fn_of(case)
    loss_weight = loss_weight_of(case)
    if loss_weight is not None and case.seed % 2:
        loss_fn.num_counted, loss_weight = loss_weight, None
    return stage_of(
        bare,
        "the only one",
        model,
        run.balance(len(case.layers) + 1),
        replicas=run.replicas,
        chunks=run.chunks,
        checkpoint=run.checkpoint,
        schedule=USERS_PLANS.get(run.schedule, run.schedule),
        transport=run.transport,
        loss_fn=loss_fn,
        loss_weight=loss_weight,
        deferred_batch_norm=case.is_deferred,
        check_tied=True,
        check_loss=True,
    )


def as_passed(batch: Batch, whole: Callable[[Tensor], Any] = NoChunk) -> Batch:
    """Return a mini-batch as a stage takes it; ``whole`` makes a target that is not split."""
    inputs, named = with_whole(NoChunk, (batch.inputs, batch.named))
    return Batch(inputs, named, with_whole(whole, batch.target), batch.num_samples)


def _model(case: Case) -> nn.Sequential:
    namespaces: dict[int, Namespace] = {}

    def make_skip(plain: Stash | Pop, num_pops: int) -> nn.Module:
        is_stash = isinstance(plain, Stash)
        declare: Any = skippable(stash={"skip": num_pops}) if is_stash else skippable(pop=["skip"])
        base: Any = _Stashing if is_stash else _Popping
        layer = declare(type(base.__name__, (base,), {}))(plain)
        isolated: nn.Module = layer.isolate(namespaces.setdefault(plain.number, Namespace()))
        return isolated

    model = build(case, make_skip)
    for module in model.modules():
        if isinstance(module, Drawing):
            module.is_repeating = is_recomputing
    return model


class _Stashing(Stash):
    def __init__(self, plain: Stash) -> None:
        nn.Module.__init__(self)
        self.f, self.number = plain.f, plain.number

    def forward(self, value: Any) -> Generator[Any, Any, Any]:
        x = fold(value)
        yield stash("skip", self.made(x))
        return x


class _Popping(Pop):
    def __init__(self, plain: Pop) -> None:
        nn.Module.__init__(self)

    def forward(self, value: Any) -> Generator[Any, Any, Any]:
        skip = yield pop("skip")
        return self.joined(value, skip)
