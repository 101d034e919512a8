"""In-place changes of a stage's input: correct, or an error that names the layer."""

from __future__ import annotations

from collections.abc import Generator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from procpipe import RecomputeError, RemoteStageError
from procpipe.skip import pop, skippable, stash
from tests.cases import pairs
from tests.dist.stages import (
    MODES,
    Do,
    assert_same_gradients,
    named,
    plain_step,
    rows,
    stage_of,
)


def change_whole(x):
    return x.add_(1)


def change_view(x):
    x[:, :2].mul_(2)
    return x


def change_detached(x):
    x.detach().add_(1)
    return x * 1.0


def change_without_grad(x):
    with torch.no_grad():
        x.add_(1)
    return x


CHANGES = (
    change_whole,
    change_view,
    change_detached,
    change_without_grad,
)

STYLES = ("step", "backward")

#: Layers before the one that changes the input: none, a view, a view of a view.
BEFORE = {"first": [], "after a view": ["view"], "after two": ["view", "rows"]}


def model_that_changes(change, num_before, at_stage, num_stages):
    """Return a model whose layer 'change' changes the input of one of its stages, and a balance.

    Each stage ends with a linear layer and an operation that does not need its result, so that the
    plain model allows the change.
    """
    layers: dict[str, nn.Module] = {}
    balance = []
    for j in range(num_stages):
        own: dict[str, nn.Module] = {}
        if j == at_stage:
            views = {"view": Do(lambda x: x[:]), "rows": Do(lambda x: x.reshape(-1, 2, 2))}
            own |= {name: views[name] for name in BEFORE[num_before]}
            own["change"] = Do(change)
            own["flat"] = nn.Flatten()
        own[f"linear{j}"] = nn.Linear(4, 4)
        layers |= own
        balance.append(len(own))
    return named(**layers), balance


def loss_of(output):
    return output.square().mean()


def outcome(bare, name, model, balance, mode, style):
    """Train a mini-batch; return "same" if the gradients equal the plain model's, or the error."""
    plain_parts = [part.clone() for part in rows().chunk(3)]
    model.zero_grad()
    if style == "step":
        for part in reversed(plain_parts):
            (loss_of(model(part)) / 3).backward()
    else:
        loss_of(torch.cat([model(part) for part in plain_parts])).backward()
    options: Any = {"chunks": 3, "checkpoint": mode, "loss_fn": loss_of}
    try:
        with stage_of(bare, name, model, balance, **options) as stage:
            if style == "step":
                stage.step(rows(), target=None)
            else:
                output = stage(rows())
                (loss_of(output) if isinstance(output, Tensor) else output).backward()
            assert_same_gradients(stage, model, name, 1e-12)
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "same", ""


def outcomes_of_changes(bare, modes):
    found: dict[str, Any] = {}
    changes = product(range(bare.num_ranks), CHANGES)
    for (at_stage, change), before, mode, style in pairs(changes, BEFORE, modes, STYLES):
        if before == "after two" and change is change_view:
            continue  # the view has another first dimension; otherwise the same case
        name = f"{change.__name__} {before}, {mode} {style}, stage {at_stage}"
        model, balance = model_that_changes(change, before, at_stage, bare.num_ranks)
        found[name] = outcome(bare, name, model, balance, mode, style)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_error_names_the_layer_that_changes_a_recomputed_input(ranks, num_ranks):
    modes = ("always", "except_last")
    by_rank = ranks(num_ranks).run(outcomes_of_changes, modes, world=False).values()
    assert len(by_rank[0]) == num_ranks * 11
    for name in by_rank[0]:
        at_stage = int(name[-1])
        for rank, found in enumerate(by_rank):
            result, text = found[name]
            error = RecomputeError if rank == at_stage else RemoteStageError
            assert result == error.__name__, (name, rank, result, text)
            assert "layer 'change' (Do) changed its partition's input in place" in text, name


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_changes_without_recomputation_equal_the_plain_model(ranks, num_ranks):
    by_rank = ranks(num_ranks).run(outcomes_of_changes, ("never",), world=False).values()
    assert len(by_rank[0]) == num_ranks * 11
    for name in by_rank[0]:
        for found in by_rank:
            result, text = found[name]
            # The first stage's micro-batches are views of one tensor, made by x.chunk(3): autograd
            # counts a change of one as a change of all, and raises.
            is_refused = int(name[-1]) == 0 and "modified by an inplace operation" in text
            assert result == "same" or is_refused, (name, result, text)


class InPlaceInside(nn.Module):
    """A user's layer that contains a module with ``inplace``, after a view."""

    def __init__(self):
        super().__init__()
        self.act = nn.Hardtanh(inplace=True)

    def forward(self, x):
        return self.act(x[:, :])


def outcomes_of_modules(bare):
    """Modules with ``inplace=True`` at the start of a stage change copies where necessary."""
    found: dict[str, Any] = {}
    modules = (
        lambda: nn.Sequential(nn.Flatten(), nn.LeakyReLU(0.1, inplace=True)),
        InPlaceInside,
    )
    starts = product(range(bare.num_ranks), modules)
    for (at_stage, first), mode, style in pairs(starts, MODES, STYLES):
        layers: list[nn.Module] = []
        balance = []
        for j in range(bare.num_ranks):
            own = [*([first()] if j == at_stage else []), nn.Linear(4, 4)]
            layers += own
            balance.append(len(own))
        name = f"{len(found)}, {mode} {style}, stage {at_stage}"
        model = nn.Sequential(*layers).double()
        found[name] = outcome(bare, name, model, balance, mode, style)
    return found


def test_modules_with_inplace_may_begin_any_stage(ranks):
    for found in ranks(3).run(outcomes_of_modules, world=False).values():
        assert len(found) == 3 * 2 * len(MODES)
        assert set(found.values()) == {("same", "")}


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


@skippable(stash=["skip"])
class StashDouble(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        yield stash("skip", x * 2)
        return x


@skippable(pop=["skip"])
class PopInPlace(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        skip = yield pop("skip")
        return skip.add_(x)


def outcome_of_popping_in_place(bare, mode):
    model = named(
        linear=nn.Linear(4, 4), give=StashDouble(), middle=nn.Linear(4, 4),
        take=PopInPlace(), end=nn.Linear(4, 4),
    )  # fmt: skip
    return outcome(bare, mode, model, [2, 1, 2], mode, "step")


def test_an_error_names_the_layer_that_changes_a_popped_skip_tensor(ranks):
    for result, _ in ranks(3).run(outcome_of_popping_in_place, "never", world=False).values():
        assert result == "same"
    for mode in ("always", "except_last"):
        by_rank = ranks(3).run(outcome_of_popping_in_place, mode, world=False).values()
        assert [result for result, _ in by_rank] == ["RemoteStageError"] * 2 + ["RecomputeError"]
        assert all("layer 'take' (PopInPlace) changed" in text for _, text in by_rank)


def overwrite_before_backward(bare):
    model = named(linear=nn.Linear(4, 4), end=nn.Linear(4, 4))
    options: Any = {"chunks": 2, "checkpoint": "always", "loss_fn": loss_of}
    with stage_of(bare, "between", model, [1, 1], **options) as stage:
        input = rows()
        output = stage(input)
        input.zero_()
        output.sum().backward()


def test_a_mini_batch_may_not_be_overwritten_before_its_backward(ranks):
    first, last = ranks(2).run(overwrite_before_backward, world=False)
    message = "the input of micro-batch 1 was changed in place"
    assert first.error is not None
    assert message in first.error.text
    # The last stage may have ended before the first one detects the change.
    assert last.error is None or message in last.error.text
