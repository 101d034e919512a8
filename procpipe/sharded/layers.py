"""Runs FSDP2 as a pipeline needs it: parameters gathered, and gradients reduced, once a step.

    F0  F1  F2      B0  B1  B2
    └ gather              └ reduce, shard again           all-gather, reduce-scatter of FSDP's own

By itself FSDP reduces after each backward pass, and so after each micro-batch. Here the passes of
micro-batches leave their gradients where they are gathered, and the last task of the plan that adds
to a partition's gradients is followed by an empty pass through FSDP's hooks
(``torch_internals.finish_backward``), whatever that task is: B, W of a backward in two, or the end
of the call, where gradients have to be corrected before.

Every process that shares a layer reduces in the same order, whatever its pipeline has done: the
partitions in the order of the plan, their layers from the last to the first. Parallelism inside of
layers (``parallelize_module``) needs none of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from procpipe.compute.partition import Partition
from procpipe.compute.wrappers import is_sharded
from procpipe.data.minibatch import MiniBatch
from procpipe.model.ties import Tie
from procpipe.plan.program import Program, Run
from procpipe.plan.schedules.named import Schedule
from procpipe.plan.task import BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Task
from procpipe.run.replicas import Replicas
from procpipe.torch_internals import (
    finish_backward,
    reduces_in_other_dtype,
    scale_unreduced,
)


class _Unit(NamedTuple):
    """A module that FSDP gathers as one, and where its parameters are: by module and key."""

    module: Any
    places: list[tuple[nn.Module, str]]

    def parameters(self) -> list[Any]:
        """Return the parameters, as they are now: shards, or gathered."""
        return [owner._parameters[key] for owner, key in self.places]


class Sharded(Replicas):
    """One stage's layers, of which other pipelines hold other shards.

    Args:
        partitions: the names of this stage's layers, by partition.
        layers: these layers, as they are now.
        ties: the parameters that several partitions use.
        schedule: the plan of each step.

    Raises:
        TypeError: a layer shares a parameter with another stage.
        ValueError: a schedule that each pipeline would choose for itself.
    """

    def __init__(
        self,
        partitions: Mapping[int, Iterable[str]],
        layers: Mapping[str, nn.Module],
        ties: Sequence[Tie],
        schedule: Schedule,
    ) -> None:
        if schedule.is_measured:
            raise ValueError(
                f"schedule={schedule.name!r} with sharded layers: each pipeline would find a plan "
                "of its own, but those that share a layer must run it in one order: give the name "
                "of a schedule"
            )
        _check_ties(ties, layers)
        self._roots = {
            j: [root for name in names for root in _roots_of(layers[name])]
            for j, names in partitions.items()
        }
        self._units = [
            unit for roots in self._roots.values() for root in roots for unit in _units_of(root)
        ]
        self._shards: list[Tensor] = []
        self._last: dict[Task, int] = {}
        self._to_reduce: list[int] = []
        self._reduces = True
        self._holds_own = False

    def settle(self) -> None:
        """Shard all parameters again, and note the shards."""
        for unit in self._units:
            unit.module.reshard()
        self._shards = [unit.parameters()[0] for unit in self._units]

    def begin(
        self, batch: MiniBatch, parameters: Iterable[nn.Parameter], tied: Iterable[nn.Parameter]
    ) -> Iterable[nn.Parameter]:
        """Begin a call with a backward pass; return the parameters that FSDP does not hold."""
        self.overlaps = not batch.may_correct
        self._reduces = batch.reduces
        self._to_reduce = sorted(self._roots, reverse=True)
        for unit, shard in zip(self._units, self._shards, strict=True):
            # As the user has decided for forward passes: to gather once, or to save memory.
            is_kept = unit.parameters()[0] is not shard
            unit.module.set_reshard_after_backward(not is_kept, recurse=False)
            unit.module.set_requires_gradient_sync(False, recurse=False)
            unit.module.set_is_last_backward(False)
        held = {parameter for unit in self._units for parameter in unit.parameters()}
        return [parameter for parameter in parameters if parameter not in held]

    def start(self, program: Program, partitions: Mapping[int, Partition]) -> None:
        """Find the last task that adds to the gradients of each partition."""
        found: dict[int, Task] = {}
        for step in reversed(program):
            if isinstance(step, Run) and step.task.kind in _ADDS:
                found.setdefault(step.task.j, step.task)
        self._last = {task: j for j, task in found.items()}

    @contextmanager
    def during(self, task: Task) -> Iterator[None]:
        """Reduce the gradients of a partition after the last task that adds to them."""
        yield
        if task.kind == WEIGHT_GRADIENT:  # runs beside FSDP's hooks, which convert gradients
            for root in filter(reduces_in_other_dtype, self._roots[task.j]):
                finish_backward(root)
        j = self._last.get(task)
        if j is not None and self.overlaps and self._reduces:
            self._reduce(j)

    def end(self, factor: Tensor | None = None) -> None:
        """Reduce what is left."""
        if factor is not None and self._holds_own:
            raise RuntimeError(
                "loss_fn returns sums and weights, so gradients are corrected at the end of "
                "step(), but FSDP holds those of calls in no_sync(), too: give step() the "
                "total_weight of all mini-batches, Stage a loss_weight, or use schedule='gpipe'"
            )
        if factor is not None:
            for unit in self._units:
                scale_unreduced(unit.module, factor)
        for j in tuple(self._to_reduce) if self._reduces else ():
            self._reduce(j)
        self._holds_own = not self._reduces

    def check_added_up(self, call: str) -> None:
        """Raise ``RuntimeError`` if calls in ``no_sync()`` have left gradients to be reduced."""
        if self._holds_own and self._units:
            raise RuntimeError(
                f"{call} after calls in no_sync(): gradients are still to be reduced by FSDP; run "
                "the last step of an accumulation outside of it"
            )

    def _reduce(self, j: int) -> None:
        self._to_reduce.remove(j)
        for root in reversed(self._roots[j]):
            root.set_requires_gradient_sync(True)
            root.set_reshard_after_backward(True)
            root.set_is_last_backward(True)
            finish_backward(root)


#: The tasks that add to gradients of parameters.
_ADDS = (BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)


def _roots_of(module: nn.Module) -> Iterator[Any]:
    """Yield the outermost modules that FSDP gathers."""
    if _is_of_fsdp(module):
        if next(module.parameters(), None) is not None:
            yield module
        return
    for child in module.children():
        yield from _roots_of(child)


def _units_of(root: nn.Module) -> Iterator[_Unit]:
    """Yield the modules below that FSDP gathers, and have parameters."""
    for module in root.modules():
        if _is_of_fsdp(module):
            places = list(_places_of(module))
            if places:
                yield _Unit(module, places)


def _places_of(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield where the parameters are that FSDP gathers with a module."""
    for key, parameter in module._parameters.items():
        if hasattr(parameter, "device_mesh"):
            yield module, key
    for child in module.children():
        if not _is_of_fsdp(child):
            yield from _places_of(child)


def _is_of_fsdp(module: nn.Module) -> bool:
    return hasattr(module, "set_requires_gradient_sync")


def _check_ties(ties: Sequence[Tie], layers: Mapping[str, nn.Module]) -> None:
    for tie in ties:
        ours = [name for name in tie.all_names if name.partition(".")[0] in layers]
        if any(is_sharded(layers[name.partition(".")[0]]) for name in ours):
            raise TypeError(
                f"{tie.name} is shared by layers {', '.join(tie.all_names)} of several partitions, "
                "and one is sharded (fully_shard, parallelize_module), which would make it a "
                "parameter of its own: leave these layers whole, or give each its own parameter"
            )
