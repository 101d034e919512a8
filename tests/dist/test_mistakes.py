"""A mistake in a call is an error on every rank, with words that say how to mend it.

What one process finds alone: tests/test_stage_single.py.
"""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

import pytest

from procpipe import RemoteStageError
from procpipe.hf.loss import causal_lm_loss
from procpipe.losses import masked_cross_entropy
from tests.dist.stages import stage_of
from tests.dist.test_replicas import mean_loss
from tests.dist.test_tokens import ALL, make_batch, make_model

pytestmark = pytest.mark.on_gpus


def one_step(stage, batch, **more):
    stage.step(**batch, **more)


def step_of(**more):
    """Return a call of ``step`` with these arguments, too."""
    return lambda stage, batch: one_step(stage, batch, **more)


def step_by_position(stage, batch):
    """Give three values without a name on the first rank, and fewer on the last."""
    stage.step(*[*batch.values()][: 3 - stage.rank])


def loop_until(*stop_on):
    return lambda stage, batch: list(stage.batches([batch], stop_on=stop_on))


COUNTED: dict[str, Any] = {"loss_fn": masked_cross_entropy}

#: By the words of the error: options of the stage, and the call.
MISTAKES: dict[str, tuple[dict[str, Any], Any]] = {
    "missing 1 required positional argument: 'target'": (
        {"loss_fn": mean_loss},
        lambda stage, batch: one_step(stage, {**batch, "labels": None}),
    ),
    "give Stage\\(…, loss_weight=masked_cross_entropy.num_counted\\)": (
        {"loss_fn": lambda output, target: masked_cross_entropy(output, target)},
        one_step,
    ),
    "loss_weight=hf.causal_lm_loss.num_counted\\)": (
        {"loss_fn": partial(causal_lm_loss)},
        one_step,
    ),
    "total_weight is 0.0": (COUNTED, step_of(total_weight=0)),
    "unexpected keyword argument 'masks'": (
        COUNTED,
        lambda stage, batch: one_step(stage, batch, masks=batch["attention_mask"]),
    ),
    r"3 positional values.*step\(a, b, target=y\)": (COUNTED, step_by_position),
    "accumulate is True, but must be the number of mini-batches": (
        COUNTED,
        step_of(accumulate=True),
    ),
    "accumulate is 4.0, but must be": (COUNTED, step_of(accumulate=4.0)),
    "accumulate is 0, but must be": (COUNTED, step_of(accumulate=0)),
    "accumulate=4 and total_weight=8, of which each says what the loss is divided by": (
        COUNTED,
        step_of(accumulate=4, total_weight=8),
    ),
    "stop_on is 'SIGTERM', .*must be a tuple of signals": (
        {},
        lambda stage, batch: list(stage.batches([batch], stop_on="SIGTERM")),
    ),
    r"stop_on is \(True,\), .*must be a tuple of signals": ({}, loop_until(True)),
    r"stop_on is \(9999,\), .*must be a tuple of signals": ({}, loop_until(9999)),
    "stop_on has SIGKILL": ({}, loop_until(signal.SIGKILL)),
}


def check_message(bare, message):
    options, call = MISTAKES[message]
    with (
        stage_of(bare, message, make_model(), [4, 2], chunks=3, **options) as stage,
        pytest.raises((TypeError, ValueError, RemoteStageError), match=message),
    ):
        call(stage, make_batch(ALL))


def test_a_mistake_in_a_call_is_an_error_on_every_rank(ranks):
    for message in MISTAKES:
        ranks(2).run(check_message, message, world=False).values()
