"""Runs FSDP2 as a pipeline needs it: parameters gathered, and gradients reduced, once a step.

    F0  F1  F2      B0  B1  B2
    └ gather                        └ reduce, shard again     all-gather, reduce-scatter of FSDP

By itself FSDP reduces after each backward pass, and so after each micro-batch. Here the passes of
micro-batches leave their gradients where they are gathered. After the last task of the plan that
adds to a partition's gradients, FSDP reduces its layers, in an empty pass through its own hooks
(``torch_internals.finish_backward``).

Every process that shares a layer reduces in the same order, whatever its pipeline has done: the
partitions in the order of the plan, their layers from the last to the first. Parallelism inside of
layers (``parallelize_module``) needs none of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from procpipe.compute.segment import Segment
from procpipe.compute.wrappers import is_sharded
from procpipe.plan.program import Run
from procpipe.plan.task import WEIGHT_GRADIENT
from procpipe.run.replicas import Parameters, Replicas, Work
from procpipe.torch_internals import finish_backward, reduces_in_other_dtype


class Sharded(Replicas):
    """One stage's layers, of which other pipelines hold other shards.

    Args:
        partitions: the names of this stage's layers, by partition.
        layers: these layers, as they are now.
        shared: the names of each parameter that several layers use.

    Raises:
        TypeError: one of these layers is sharded.
    """

    has_others = True

    def __init__(
        self,
        partitions: Mapping[int, Iterable[str]],
        layers: Mapping[str, nn.Module],
        shared: Sequence[tuple[str, ...]],
    ) -> None:
        _check_shared(shared, layers)
        self._roots = {
            j: [root for name in names for root in _roots_of(layers[name])]
            for j, names in partitions.items()
        }
        self._units = [
            unit for roots in self._roots.values() for root in roots for unit in _units_of(root)
        ]
        self._ranks = _ranks_of_shards(p for layer in layers.values() for p in layer.parameters())
        self._to_reduce: list[int] = []
        self._reduces = True  # in the call that runs, or the last one

    def settle(self) -> None:
        """Shard all parameters again, and note the shards."""
        for unit in self._units:
            unit.settle()

    def begin(
        self, parameters: Parameters, of_loss: Parameters, tied: Parameters, *, reduces: bool
    ) -> None:
        """Begin a call with a backward pass."""
        self._reduces = reduces
        self._to_reduce = sorted(self._roots, reverse=True) if reduces else []
        for unit in self._units:
            # As the user has decided for forward passes: to gather once, or to save memory.
            unit.module.set_reshard_after_backward(unit.is_sharded, recurse=False)
            unit.module.set_requires_gradient_sync(False, recurse=False)
            unit.module.set_is_last_backward(False)

    def around(self, step: Run, segment: Segment, work: Work) -> Work:
        """Return what reduces gradients after the last task that adds to them."""
        return partial(self._reducing, step, work)

    def _reducing(self, step: Run, work: Work) -> None:
        with self._naming_others():
            work()
            if step.task.kind == WEIGHT_GRADIENT:  # beside FSDP's hooks, which convert gradients
                for root in filter(reduces_in_other_dtype, self._roots[step.task.j]):
                    finish_backward(root)
            if step.adds_last and self._reduces:
                self._reduce(step.task.j)

    @contextmanager
    def _naming_others(self) -> Iterator[None]:
        """Add a note to what torch.distributed raises within the layers."""
        try:
            yield
        except RuntimeError as error:
            names = {base.__name__ for base in type(error).__mro__}
            if "DistError" in names or "gloo/transport" in str(error):
                error.add_note(
                    f"procpipe: the layers are sharded over ranks {self._ranks}: another of these "
                    "ranks has ended or does not answer; has it failed before, or does its "
                    "pipeline make fewer calls?"
                )
                error.shared_with = self._ranks  # type: ignore[attr-defined]  # for the launcher
            raise

    def end(self) -> None:
        """Reduce what is left."""
        with self._naming_others():
            for j in tuple(self._to_reduce):
                self._reduce(j)

    def check_added_up(self, call: str) -> None:
        """Raise ``RuntimeError`` if calls in ``no_sync()`` have left gradients to be reduced."""
        if self._units and not self._reduces:
            raise RuntimeError(
                f"{call} after calls in no_sync(): gradients are still to be reduced by FSDP; run "
                "the last step of an accumulation outside of it"
            )

    def _reduce(self, j: int) -> None:
        """Reduce the gradients of a partition, and shard its layers again."""
        self._to_reduce.remove(j)
        for root in reversed(self._roots[j]):
            root.set_requires_gradient_sync(True)
            root.set_reshard_after_backward(True)
            root.set_is_last_backward(True)
            finish_backward(root)


def _ranks_of_shards(parameters: Iterable[nn.Parameter]) -> list[int]:
    """Return the ranks, in torch's default process group, that hold shards of these parameters.

    Only where others than this one do.
    """
    meshes = {getattr(parameter, "device_mesh", None) for parameter in parameters}
    ranks = {rank for mesh in meshes if mesh is not None for rank in mesh.mesh.flatten().tolist()}
    return sorted(ranks) if len(ranks) > 1 else []


def _check_shared(shared: Sequence[tuple[str, ...]], layers: Mapping[str, nn.Module]) -> None:
    for names in shared:
        ours = [name for name in names if name.partition(".")[0] in layers]
        if any(is_sharded(layers[name.partition(".")[0]]) for name in ours):
            raise TypeError(
                f"{names[0]} is shared by layers {', '.join(names)}, "
                "and one is sharded (fully_shard, parallelize_module), which would make it a "
                "parameter of its own: leave these layers whole, or give each its own parameter"
            )


@dataclass
class _Unit:
    """A module that FSDP gathers as one, and where its first parameter is: by module and key."""

    module: Any
    owner: nn.Module
    key: str
    shard: Tensor | None = None  # this parameter between calls

    def settle(self) -> None:
        """Shard its parameters, and note the first one."""
        self.module.reshard()
        self.shard = self.owner._parameters[self.key]

    @property
    def is_sharded(self) -> bool:
        """Whether the parameters are shards now, and not gathered."""
        return self.owner._parameters[self.key] is self.shard


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
        place = next(_places_of(module), None) if _is_of_fsdp(module) else None
        if place is not None:
            yield _Unit(module, *place)


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
