"""In-place changes of a stage's input: correct, or an error that names who made them.

Those of a layer that has no ``inplace``: tests/compute/test_segment.py.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from torch import nn

from tests.dist.stages import (
    MODES,
    assert_same_gradients,
    named,
    plain_step,
    rows,
    stage_of,
)


def loss_of(output):
    return output.square().mean()


class InPlaceInside(nn.Module):
    """A user's layer that contains a module with ``inplace``, after a view."""

    def __init__(self):
        super().__init__()
        self.act = nn.Hardtanh(inplace=True)

    def forward(self, x):
        return self.act(x[:, :])


def check_modules(bare):
    """Modules with ``inplace=True`` at the start of each stage change copies where necessary."""
    modules = (
        lambda: nn.Sequential(nn.Flatten(), nn.LeakyReLU(0.1, inplace=True)),
        InPlaceInside,
    )
    for first, mode in product(modules, MODES):
        layers = [layer for _ in range(3) for layer in (first(), nn.Linear(4, 4))]
        model = nn.Sequential(*layers).double()
        options: Any = {"chunks": 3, "checkpoint": mode, "loss_fn": loss_of}
        name = f"{type(layers[0]).__name__} {mode}"
        with stage_of(bare, name, model, [2, 2, 2], **options) as stage:
            plain_step(model, (rows(),), None, 3, loss_of)
            stage.step(rows(), target=None)
            assert_same_gradients(stage, model, name, 1e-12)


def test_modules_with_inplace_may_begin_any_stage(ranks):
    ranks(3).run(check_modules, world=False).values()


def change_in_the_loss(bare, mode):
    """The last stage returns a view of its input, which the loss function changes."""
    model = named(linear=nn.Linear(4, 4), flat=nn.Flatten())
    options: Any = {"chunks": 2, "checkpoint": mode, "loss_fn": lambda x: x.mul_(2).square().mean()}
    plain_step(model, (rows(),), None, 2, lambda x: (x * 2).square().mean())
    with stage_of(bare, mode, model, [1, 1], **options) as stage:
        stage.step(rows(), target=None)
        assert_same_gradients(stage, model, mode, 1e-12)


def test_an_error_names_a_loss_function_that_changes_its_input(ranks):
    ranks(2).run(change_in_the_loss, "never", world=False).values()
    for mode in ("always", "except_last"):
        errors = ranks(2).run(change_in_the_loss, mode, world=False).errors()
        assert [error.type for error in errors] == ["RemoteStageError", "RecomputeError"]
        assert all("loss_fn changed its partition's input in place" in e.text for e in errors)
