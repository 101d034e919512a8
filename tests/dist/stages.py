"""Many stages in one run on the same processes, and the plain models to compare them with.

    def f(bare):                                  ranks(2).run(f, world=False)
        for chunks in (1, 2, 8):
            with stage_of(bare, f"{chunks} chunks", model, [2, 1], chunks=chunks) as stage:
                ...                               a failure here ends the case on every rank

Each case connects under a name of its own. Truth is the plain ``nn.Sequential``, run over
the same micro-batches: all forward, then backward in reverse, as fill and drain does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from procpipe import Stage
from procpipe.data.microbatch import gather, scatter, scatter_like
from procpipe.job.grid import Grid
from procpipe.job.start import Meeting
from procpipe.job.world import World
from procpipe.plan.placement import folded, looped
from procpipe.plan.schedules.rows import plan_of_rows
from procpipe.plan.task import BACKWARD, FORWARD, RECOMPUTE, Plan, Task
from procpipe.tree import Flat, flatten, map_tensors, unflatten
from tests.dist.devices import REAL_GPU_TOLERANCES, is_on_real_gpus
from tests.dist.worker import BareWorld


def num_held(stage: Stage) -> int:
    """Return how many messages and micro-batches wait for a task; 0 between calls."""
    pipeline = stage._calls.pipeline
    if pipeline is None:
        return 0
    in_slots = sum(message is not None for message in pipeline._slots)
    return in_slots + sum(segment.num_held for segment in pipeline.segments.values())


def world_of(bare: BareWorld, name: str) -> World:
    """Return a new world for one case."""
    return World(
        Grid(bare.rank, bare.num_ranks),
        bare.devices,
        Meeting(f"{bare.name}/{name}"),
        timeout_s=bare.timeout_s,
    )


@contextmanager
def stage_of(
    bare: BareWorld, name: str, model: nn.Sequential, balance: Iterable[int] | None, **options: Any
) -> Iterator[Stage]:
    """Yield a stage of a copy of the model, and close it; a failure names the case."""
    world = world_of(bare, name)
    world.transport = options.pop("transport", None)
    stage = Stage(copy.deepcopy(model), balance, world=world, **options)
    with failing_all(stage, name):
        yield stage


@contextmanager
def failing_all(stage: Stage, name: str) -> Iterator[None]:
    """Close a stage; a failure names the case, and no peer waits for this rank."""
    try:
        yield
        stage.close()
    except BaseException as error:
        error.add_note(f"in the case {name!r} on rank {stage._world.grid.job_rank}")
        stage._calls.fail("the test", error)  # after a failed call of the stage, this does nothing
        raise


def make_batch(size: int = 10, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Return samples of four numbers, and their classes, of which there are three."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (size,), generator=generator)


def plain_forward(
    model: nn.Sequential, inputs: tuple[Any], chunks: int
) -> tuple[list[Any], list[int]]:
    """Run a plain model over the micro-batches; return their outputs and sizes."""
    parts, structure, sizes = scatter(inputs, chunks)
    return [model(*unflatten(part, structure)) for part in parts], sizes


def plain_step(
    model: nn.Sequential,
    inputs: tuple[Any],
    target: Any,
    chunks: int,
    loss_fn: Callable[..., Tensor],
    scaled: Callable[[Tensor], Tensor] = lambda loss: loss,
    *,
    is_backward_reversed: bool = True,
) -> Tensor:
    """Run a plain model forward and backward in the plan's order; return the mini-batch's loss."""
    outputs, sizes = plain_forward(model, inputs, chunks)
    parts = [
        loss_fn(output, target) * (size / sum(sizes))
        for output, target, size in zip(outputs, scatter_like(target, sizes), sizes, strict=True)
    ]
    for part in reversed(parts) if is_backward_reversed else parts:
        if part.requires_grad:
            scaled(part).backward()
    total = parts[0].detach()
    for part in parts[1:]:
        total = total + part.detach()
    return total


def plain_backward(
    model: nn.Sequential,
    inputs: tuple[Any],
    chunks: int,
    loss_of: Callable[[Any], Tensor],
) -> tuple[Any, Tensor]:
    """Run backward from a loss of a plain model's whole output; return output and loss, detached.

    The graph is cut at the outputs, so that the micro-batches run backward in the plan's order;
    autograd would choose its own order.
    """
    flats = [Flat(*flatten(part), ()) for part in plain_forward(model, inputs, chunks)[0]]
    cut = [[t.detach().requires_grad_(t.requires_grad) for t in tensors] for tensors, _, _ in flats]
    parts = [unflatten(tensors, flat[1]) for tensors, flat in zip(cut, flats, strict=True)]
    output = gather(parts)
    loss = loss_of(output)
    loss.backward()
    for (tensors, _, _), leaves in reversed(list(zip(flats, cut, strict=True))):
        pairs = [(t, leaf.grad) for t, leaf in zip(tensors, leaves, strict=True)]
        pairs = [(t, gradient) for t, gradient in pairs if gradient is not None]
        if pairs:
            roots, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(roots, gradients)
    return map_tensors(lambda tensor: tensor.detach(), output), loss.detach()


def assert_same(
    found: Any, expected: Any, what: str, tolerance: float = 0.0, scale: float | None = None
) -> None:
    """Compare nested values of tensors: types, dtypes, shapes and, without tolerance, every bit.

    The tolerance is relative to ``scale``, by default each tensor's largest value.
    """
    assert type(found) is type(expected), f"{what}: {type(found)}, not {type(expected)}"
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, f"{what}: {found.dtype}, not {expected.dtype}"
        assert found.shape == expected.shape, f"{what}: {found.shape}, not {expected.shape}"
        if is_on_real_gpus():  # also where the result has been copied to the CPU
            tolerance = max(tolerance, REAL_GPU_TOLERANCES.get(str(found.dtype), 0.0))
        found, expected = found.cpu(), expected.cpu()
        if not torch.equal(found, expected):
            distance = (found.double() - expected.double()).abs().max()
            limit = tolerance * (expected.abs().max() if scale is None else scale)
            assert distance <= limit, f"{what}: off by {distance}"
    elif isinstance(expected, (tuple, list)):
        assert len(found) == len(expected), f"{what}: {len(found)} entries, not {len(expected)}"
        for k, (found_entry, expected_entry) in enumerate(zip(found, expected, strict=True)):
            assert_same(found_entry, expected_entry, f"{what}[{k}]", tolerance, scale)
    elif isinstance(expected, dict):
        assert list(found) == list(expected), f"{what}: keys {list(found)}, not {list(expected)}"
        for key, value in expected.items():
            assert_same(found[key], value, f"{what}[{key!r}]", tolerance, scale)
    elif not pytree.tree_is_leaf(expected):
        leaves, form = pytree.tree_flatten(expected)
        found_leaves, found_form = pytree.tree_flatten(found)
        assert found_form == form, f"{what}: {found_form}, not {form}"
        assert_same(found_leaves, leaves, f"{what}, leaves", tolerance, scale)
    else:
        assert found == expected, f"{what}: {found!r}, not {expected!r}"


def assert_same_gradients(
    stage: nn.Module, plain: nn.Module, what: str = "", tolerance: float = 0.0
) -> None:
    """Compare the gradients of all of a stage's parameters with the plain model's.

    A GPU computes other last digits than the CPU of the plain model. A gradient that is 0 but for
    rounding, as that of a bias before a normalization, consists of such digits.
    """
    named = plain.named_parameters(remove_duplicate=False)
    expected = {name: parameter.grad for name, parameter in named}
    sizes = {name: 0.0 if g is None else g.abs().max().item() for name, g in expected.items()}
    largest = max(sizes.values(), default=0.0)
    for name, parameter in stage.named_parameters():
        is_rounding = is_on_real_gpus() and sizes[name] < 1e-10 * largest
        scale = largest if is_rounding else None
        assert_same(parameter.grad, expected[name], f"{what} gradient of {name}", tolerance, scale)


def assert_same_state(stage: nn.Module, plain: nn.Module, what: str = "") -> None:
    """Compare parameters and buffers, every bit."""
    expected = plain.state_dict()
    for key, value in stage.state_dict().items():
        assert_same(value, expected[key], f"{what} {key}")


def two_at_a_time(m: int, n: int) -> Plan:
    """A user's plan: two micro-batches forward and backward, then the next two.

    The last stage recomputes the first of each two; the other stages recompute nothing.
    """

    def row(j: int) -> list[Task]:
        tasks = []
        for first in range(0, m, 2):
            pair = range(first, min(first + 2, m))
            tasks += [Task(FORWARD, i, j) for i in pair]
            for i in pair:
                if i == first and j == n - 1:
                    tasks.append(Task(RECOMPUTE, i, j))
                tasks.append(Task(BACKWARD, i, j))
        return tasks

    return plan_of_rows(m, [row(j) for j in range(n)])


def one_at_a_time(m: int, n: int, placement: tuple[int, ...]) -> Plan:
    """Run each micro-batch forward and backward before the next, and recompute nothing."""
    js = range(len(placement))
    path = [*((FORWARD, j) for j in js), *((BACKWARD, j) for j in reversed(js))]
    return Plan(m, n, [(Task(kind, i, j),) for i in range(m) for kind, j in path], placement)


def in_a_loop(m: int, n: int) -> Plan:
    return one_at_a_time(m, n, looped(2 * n, n))


def in_a_fold(m: int, n: int) -> Plan:
    return one_at_a_time(m, n, folded(2 * n, n))


def without_the_turn(m: int, n: int) -> Plan:
    """Fold, with one partition on the last stage and two on the others."""
    return one_at_a_time(m, n, (*range(n), *reversed(range(n - 1))))


#: Users' plans, by what cases of tests/fuzz call them.
USERS_PLANS = {
    "pairs": two_at_a_time,
    "in a loop": in_a_loop,
    "in a fold": in_a_fold,
    "without the turn": without_the_turn,
}
