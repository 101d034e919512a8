"""Refuses modules that average gradients, or replicate layers, over processes or devices.

``DistributedDataParallel`` averages the gradients of all ranks after each backward pass. The ranks
of a pipeline hold different layers, or run the same layer's backward once a micro-batch, so its
averages are of unrelated or unfinished gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import NoReturn

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

#: Classes of torch's, by their names, since importing some of them takes long and few scripts do;
#: the last two are those that ``replicate`` gives a module.
_WRAPPERS = {
    *("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"),
    *("DDP", "ReplicateModule"),
}


def check_not_data_parallel(model: nn.Module) -> None:
    """Check that neither a model nor any module in it is data parallel.

    Raises:
        TypeError: one is.
    """
    for name, module in model.named_modules():
        if _is_data_parallel(type(module)):
            place = f"layer {name!r}" if name else "the model"
            refuse_data_parallel(f"{place} is a {type(module).__name__}")


def refuse_wrappers_of(stage: nn.Module) -> RemovableHandle:
    """Refuse data parallelism around a stage, or any module in it, until the handle is removed.

    torch calls the hook when a module becomes part of another one, as in the constructors of
    ``DistributedDataParallel`` (before it writes into parameters) and ``DataParallel``.
    """
    reference = weakref.ref(stage)  # one that failed is not closed, and torch has the hook

    def check(wrapper: nn.Module, _: str, module: nn.Module) -> None:
        stage = reference()
        if stage is None or not _is_data_parallel(type(wrapper)):
            return
        if not set(stage.modules()).isdisjoint(module.modules()):
            name = type(wrapper).__name__
            refuse_data_parallel(f"the Stage, or a layer of it, was given to {name}")

    return register_module_module_registration_hook(check)


def refuse_data_parallel(what: str) -> NoReturn:
    """Raise the error that says what to do instead."""
    raise TypeError(
        f"{what}, which averages gradients over ranks or copies layers to other devices, but "
        "each rank of a pipeline holds other layers: remove the wrapper, since step() and "
        "backward() give the gradients of the whole mini-batch on every rank. To train several "
        "replicas, give Stage(…, replicas=2), or Stage(…, mesh=mesh['pp']) and FSDP2 "
        "(fully_shard(layer, mesh=mesh['dp']) for each layer of the stage), as docs/replicas.md "
        "shows"
    )


def _is_data_parallel(of: type) -> bool:
    bases = (base for base in of.__mro__ if base.__module__.startswith("torch."))
    return any(base.__name__ in _WRAPPERS for base in bases)


def is_sharded(layer: nn.Module) -> bool:
    """Return whether any parameter of a layer is a DTensor, also of one process."""
    return any(hasattr(parameter, "device_mesh") for parameter in layer.parameters())


def is_of_fsdp(kind: type) -> bool:
    """Return whether ``fully_shard`` has made a class of modules."""
    return hasattr(kind, "set_requires_gradient_sync")


def check_sharded_before(first: Iterable[type], now: Iterable[type]) -> None:
    """Check the classes of a partition's modules, in the stage's first call and now.

    Raises:
        RuntimeError: ``fully_shard`` was called after the first call, which sets FSDP up.
    """
    before, after = (sum(map(is_of_fsdp, types)) for types in (first, now))
    if before != after:
        raise RuntimeError(
            f"fully_shard was called after the stage's first call: a partition had {before} "
            f"sharded modules then, and has {after} now; shard layers after building the Stage and "
            "before its first call, see docs/replicas.md"
        )


def check_not_sharded(module: nn.Module, pipeline: Collection[int]) -> None:
    """Check that no parameter is sharded over ranks of a pipeline, each of which is a stage.

    Raises:
        TypeError: one is.
    """
    for name, parameter in module.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        ranks = [] if mesh is None else mesh.mesh.flatten().tolist()
        if len(stages := sorted(set(ranks).intersection(pipeline))) > 1:
            raise TypeError(
                f"parameter {name!r} is a DTensor, sharded over ranks {stages} of this pipeline "
                "(fully_shard, distribute_tensor), each of which runs other layers: leave the "
                "layers as they are, or give the pipeline one dimension of a DeviceMesh, as "
                "Stage(…, mesh=mesh['pp']), and shard over another one, see docs/replicas.md"
            )
