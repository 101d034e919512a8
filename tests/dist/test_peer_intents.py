"""What the tests of torchgpipe and of PyTorch's Pipe assure their users, on several processes.

docs/peer_tests.md lists each of their tests with ours; here are those that had none elsewhere.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procpipe import NoChunk, RecomputeError, RemoteStageError
from procpipe.skip import pop, skippable, stash
from tests.dist.stages import (
    MODES,
    assert_same,
    assert_same_gradients,
    plain_step,
    stage_of,
)


class Do(nn.Module):
    """A layer from a function, with a linear map of its own before it if asked for."""

    def __init__(self, function: Callable[..., Any], *, learns: bool = False):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4) if learns else None

    def forward(self, *inputs):
        if self.linear is not None:
            inputs = (self.linear(inputs[0]), *inputs[1:])
        return self.function(*inputs)


def rows(num_rows=6, num_columns=4):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64)


def named(**layers: nn.Module) -> nn.Sequential:
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model.double()


# -- what is recomputed --------------------------------------------------------------------------


class Held(torch.autograd.Function):
    """Notes which of its graphs are alive."""

    @staticmethod
    def forward(ctx, input, alive):
        ctx.token = type("Token", (), {})()
        alive.append(weakref.ref(ctx.token))
        return input.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.alive: list[weakref.ref[Any]] = []

    def forward(self, input):
        return Held.apply(input * self.weight, self.alive)


def num_graphs_between(bare, chunks, num_rows):
    """Count this stage's graphs that wait between forward and backward, by mode."""
    found: dict[str, Any] = {}
    for mode in MODES:
        model = nn.Sequential(*(Holding() for _ in range(bare.num_ranks)))
        balance = [1] * bare.num_ranks
        with stage_of(bare, mode, model, balance, chunks=chunks, checkpoint=mode) as stage:
            output = stage(torch.ones(num_rows, 2))
            gc.collect()
            layer: Any = stage[0]
            found[mode] = sum(note() is not None for note in layer.alive)
            output.sum().backward()
            del output
            gc.collect()
            assert not any(note() for note in layer.alive), mode
    return found


@pytest.mark.parametrize(
    ("chunks", "num_rows", "expected"),
    [
        (4, 8, {"always": 0, "except_last": 1, "never": 4}),
        (4, 3, {"always": 0, "except_last": 1, "never": 3}),  # fewer samples than chunks
        (1, 8, {"always": 0, "except_last": 1, "never": 1}),  # the only one is the last
    ],
)
def test_the_mode_says_of_which_micro_batches_a_graph_is_kept(ranks, chunks, num_rows, expected):
    for found in ranks(3).run(num_graphs_between, chunks, num_rows, world=False).values():
        assert found == expected


def grad_modes_seen(bare):
    """Return what the layer of this stage saw of the caller's grad mode, call by call."""
    seen: list[bool] = []

    def look(input):
        seen.append(torch.is_grad_enabled())
        return input

    model = nn.Sequential(*(Do(look, learns=True) for _ in range(bare.num_ranks)))
    with stage_of(bare, "modes", model, [1] * bare.num_ranks, checkpoint="never") as stage:
        with torch.no_grad():
            assert not stage(torch.ones(2, 4)).requires_grad
        stage.eval()
        output = stage(torch.ones(2, 4))
        assert output.requires_grad
        output.sum().backward()  # in eval mode gradients are there for who wants them
        assert all(parameter.grad is not None for parameter in stage.parameters())
        with torch.no_grad():
            stage(torch.ones(2, 4))
        stage.train()
        stage(torch.ones(2, 4)).sum().backward()
    return seen


def test_grad_mode_is_the_callers_on_every_stage(ranks):
    for seen in ranks(3).run(grad_modes_seen, world=False).values():
        assert seen == [False, True, False, True]


# -- failing early -------------------------------------------------------------------------------

MANY = 2000


class Counting(nn.Module):
    """Counts its calls; waits in the second one until the last stage is about to fail."""

    def __init__(self, store):
        super().__init__()
        self.store = store
        self.num_calls = 0

    def __deepcopy__(self, memo):
        return self

    def forward(self, input):
        self.num_calls += 1
        if self.num_calls == 2:
            self.store.wait(["failing"])
        elif self.num_calls > 2:
            self.store.check(["failing"])  # a round trip, so that there is time to hear of it
        return input


class Failing(nn.Module):
    def __init__(self, store):
        super().__init__()
        self.store = store

    def __deepcopy__(self, memo):
        return self

    def forward(self, input):
        self.store.set("failing", "now")
        raise ZeroDivisionError("on purpose")


def calls_until_told(bare):
    counting = Counting(bare.store)
    model = nn.Sequential(counting, nn.Identity(), Failing(bare.store))
    with (
        pytest.raises((ZeroDivisionError, RemoteStageError), match="on purpose"),
        stage_of(bare, "early", model, [1, 1, 1], chunks=MANY, checkpoint="never") as stage,
    ):
        stage(torch.ones(MANY, 2))
    return counting.num_calls


def test_a_stage_does_not_run_to_its_end_when_another_has_failed(ranks):
    num_calls, *_ = ranks(3).run(calls_until_told, world=False).values()
    assert 2 <= num_calls < MANY


# -- inputs and outputs as Pipe has them ---------------------------------------------------------


def check_pipes_values(bare, balance):
    """Several inputs, NoChunk, plain values, and outputs that cannot be concatenated."""
    table, x, mask = rows(4), rows(7), (rows(7) > 0)[:, 0]
    model = named(
        first=Do(lambda x, mask, table, scale: (x @ table * scale, mask, "name"), learns=True),
        # One layer, however many it is made of.
        nested=nn.Sequential(
            Do(lambda t: (torch.tanh(t[0]), *t[1:])),
            nn.Sequential(Do(lambda t: (t[0] * t[1][:, None], t[2], len(t[0])))),
        ),
        last=Do(lambda t: {"out": t[0], "name": t[1], "size": t[2], "none": None, "mean": None}),
    )
    assert len(model) == sum(balance)
    inputs = (x, mask, NoChunk(table), 0.5)

    def loss_fn(output, target):
        return F.mse_loss(output["out"], target)

    for mode in MODES:
        options: Any = {"checkpoint": mode, "loss_fn": loss_fn, "chunks": 3}
        with stage_of(bare, mode, model, balance, **options) as stage:
            expected = plain_step(model, inputs, x, 3, loss_fn)
            assert_same(stage.step(*inputs, target=x), expected, "loss")
            assert_same_gradients(stage, model, mode)
            model.zero_grad()
            with torch.no_grad():
                output = stage.fetch(stage(*inputs))
                assert {k: v for k, v in output.items() if k != "out"} == {
                    "name": ["name"] * 3,
                    "size": [3, 3, 1],
                    "none": None,
                    "mean": None,
                }
                assert output["out"].shape == (7, 4)
                # A batch smaller than chunks makes as many micro-batches as it has samples.
                small = (x[:2], mask[:2], *inputs[2:])
                assert stage.fetch(stage(*small))["size"] == [1, 1]
                # One micro-batch's output is given as it is.
                assert stage.fetch(stage(x[:1], mask[:1], *inputs[2:]))["size"] == 1


@pytest.mark.parametrize("balance", [[3], [1, 2], [2, 1], [1, 1, 1]], ids=str)
def test_values_of_every_kind_go_in_and_come_out_as_with_pipe(ranks, balance):
    ranks(len(balance)).run(check_pipes_values, balance, world=False).values()


def check_tuples_as_one_input(bare, balance):
    """A pair, and a tuple of one, given as one input, are one argument of the first layer."""
    pair = named(first=Do(lambda t: (t[0] * 2, t[1] + 1)), last=Do(lambda t: (t[1], t[0])))
    single = named(first=Do(lambda t: (t[0] * 2,)), last=Do(lambda t: t))
    a, b = rows(5), rows(5)[:, :2]
    for name, model, value in (("pair", pair, (a, b)), ("single", single, (a,))):
        with stage_of(bare, name, model, balance, chunks=2) as stage, torch.no_grad():
            assert_same(stage.fetch(stage(value)), model(value), name)


@pytest.mark.parametrize("balance", [[2], [1, 1]], ids=str)
def test_a_tuple_is_one_input(ranks, balance):
    ranks(len(balance)).run(check_tuples_as_one_input, balance, world=False).values()


# -- in place ------------------------------------------------------------------------------------


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


def change_item(x):
    x[0, 0] = 5.0
    return x


def change_into(x):
    with torch.no_grad():
        torch.mul(x, 2, out=x)
    return x


CHANGES = (
    change_whole,
    change_view,
    change_detached,
    change_without_grad,
    change_item,
    change_into,
)

#: Where in a stage the layer is: first, after a view of the input, after a view of that.
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
    """Train a mini-batch; return "same" if all is as in the plain model, or the error."""
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


def outcomes_of_changes(bare, mode, style):
    found: dict[str, Any] = {}
    for at_stage in range(bare.num_ranks):
        for change in CHANGES:
            for before in BEFORE:
                if before == "after two" and change is change_view:
                    continue  # its first dimension is another then; nothing new
                name = f"{change.__name__} {before}, stage {at_stage}"
                model, balance = model_that_changes(change, before, at_stage, bare.num_ranks)
                found[name] = outcome(bare, name, model, balance, mode, style)
    return found


@pytest.mark.parametrize("style", ["step", "backward"])
@pytest.mark.parametrize("mode", ["always", "except_last"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_change_of_a_checkpointed_input_is_told_with_the_layer(ranks, num_ranks, mode, style):
    by_rank = ranks(num_ranks).run(outcomes_of_changes, mode, style, world=False).values()
    assert len(by_rank[0]) == num_ranks * 17
    for name in by_rank[0]:
        at_stage = int(name[-1])
        for rank, found in enumerate(by_rank):
            kind, text = found[name]
            wanted = RecomputeError if rank == at_stage else RemoteStageError
            assert kind == wanted.__name__, (name, rank, kind, text)
            assert "layer 'change' (Do) changed its partition's input in place" in text, name


@pytest.mark.parametrize("style", ["step", "backward"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_change_where_nothing_is_recomputed_is_as_in_the_plain_model(ranks, num_ranks, style):
    by_rank = ranks(num_ranks).run(outcomes_of_changes, "never", style, world=False).values()
    for name in by_rank[0]:
        for found in by_rank:
            kind, text = found[name]
            # The first stage's micro-batches are parts of one tensor, as x.chunk(3) gives them:
            # autograd counts a change of one as a change of all, and refuses.
            is_told = int(name[-1]) == 0 and "modified by an inplace operation" in text
            assert kind == "same" or is_told, (name, kind, text)


class InPlaceInside(nn.Module):
    """A layer of a user's that holds a module with ``inplace``, after a view."""

    def __init__(self):
        super().__init__()
        self.act = nn.Hardtanh(inplace=True)

    def forward(self, x):
        return self.act(x[:, :])


def outcomes_of_modules(bare, mode, style):
    """Modules with ``inplace=True`` that begin a stage work on copies where that matters."""
    found: dict[str, Any] = {}
    for at_stage in range(bare.num_ranks):
        for first in (
            lambda: nn.ReLU(inplace=True),
            lambda: nn.Sequential(nn.Flatten(), nn.LeakyReLU(0.1, inplace=True)),
            InPlaceInside,
            lambda: nn.Dropout(0.0, inplace=True),
        ):
            layers: list[nn.Module] = []
            balance = []
            for j in range(bare.num_ranks):
                own = [*([first()] if j == at_stage else []), nn.Linear(4, 4)]
                layers += own
                balance.append(len(own))
            name = f"{len(found)}, stage {at_stage}"
            model = nn.Sequential(*layers).double()
            found[name] = outcome(bare, name, model, balance, mode, style)
    return found


@pytest.mark.parametrize("style", ["step", "backward"])
@pytest.mark.parametrize("mode", MODES)
def test_modules_with_inplace_may_begin_any_stage(ranks, mode, style):
    for found in ranks(3).run(outcomes_of_modules, mode, style, world=False).values():
        assert len(found) == 12
        assert set(found.values()) == {("same", "")}


def change_in_the_loss(bare, mode):
    """The last stage only looks at its input, which the loss function changes."""
    model = named(linear=nn.Linear(4, 4), flat=nn.Flatten())
    options: Any = {"chunks": 2, "checkpoint": mode, "loss_fn": lambda x: x.mul_(2).square().mean()}
    plain_step(model, (rows(),), None, 2, lambda x: (x * 2).square().mean())
    with stage_of(bare, mode, model, [1, 1], **options) as stage:
        stage.step(rows(), target=None)
        assert_same_gradients(stage, model, mode, 1e-12)


def test_a_change_by_the_loss_function_is_told(ranks):
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


def test_a_change_of_a_popped_skip_tensor_is_told_with_the_layer(ranks):
    for kind, _ in ranks(3).run(outcome_of_popping_in_place, "never", world=False).values():
        assert kind == "same"
    for mode in ("always", "except_last"):
        by_rank = ranks(3).run(outcome_of_popping_in_place, mode, world=False).values()
        assert [kind for kind, _ in by_rank] == ["RemoteStageError"] * 2 + ["RecomputeError"]
        assert all("layer 'take' (PopInPlace) changed" in text for _, text in by_rank)


def change_a_copy(bare):
    """What is no longer the input may be changed as one likes."""
    found = []
    for mode in MODES:
        model = named(
            linear=nn.Linear(4, 4),
            copy=Do(lambda x: x.clone()),
            change=Do(lambda x: x.add_(1)),
            end=nn.Linear(4, 4),
        )
        found.append(outcome(bare, mode, model, [1, 3], mode, "step"))
    return found


def test_a_change_of_a_copy_is_nobodys_business(ranks):
    for found in ranks(2).run(change_a_copy, world=False).values():
        assert found == [("same", "")] * 3


def overwrite_between(bare, at_backward):
    """Overwrite a mini-batch whose forward is over; ``step`` has then used it up."""
    model = named(linear=nn.Linear(4, 4), end=nn.Linear(4, 4))
    with stage_of(
        bare, "between", model, [1, 1], chunks=2, checkpoint="always", loss_fn=loss_of
    ) as stage:
        input = rows()
        for _ in range(2):
            plain_step(model, (rows(),), None, 2, loss_of)
            stage.step(input, target=None)
            assert_same_gradients(stage, model)
            input.zero_()
            input.copy_(rows())
        if at_backward:
            output = stage(input)
            input.zero_()
            output.sum().backward()


def test_a_mini_batch_may_be_overwritten_after_its_backward_only(ranks):
    ranks(2).run(overwrite_between, False, world=False).values()
    first, last = ranks(2).run(overwrite_between, True, world=False)
    told = "the input of micro-batch 1 was changed in place"
    assert first.error is not None
    assert told in first.error.text
    # The last stage may have done its whole part, and have left, before the first comes to see it.
    assert last.error is None or told in last.error.text
