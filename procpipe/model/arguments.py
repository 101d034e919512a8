"""Checks the arguments of a ``Stage`` other than model and balance, which ``cut.py`` checks."""

from __future__ import annotations

import os
from typing import Any

from procpipe.errors import BalanceError
from procpipe.words import counted


def checked_replicas(replicas: int, num_ranks: int) -> int:
    """Return the number of replicas; ``TypeError`` or ``BalanceError`` if it cannot be."""
    if not isinstance(replicas, int):
        raise TypeError(f"replicas is {replicas!r}, but must be an int")
    if replicas < 1 or num_ranks % replicas:
        raise BalanceError(
            f"replicas={replicas}, but {counted(num_ranks, 'process')} cannot be divided into so "
            "many: their number is that of stages times replicas"
        )
    return replicas


def ranks_of(mesh: Any, replicas: int) -> tuple[int, ...] | None:
    """Return the ranks of a pipeline, from what the user gave as ``mesh``; None for all.

    Raises:
        ValueError: it has several dimensions, or not this process; there are replicas, too; or the
            environment does not say which rank this process is.
    """
    if mesh is None:
        return None
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions, {tuple(names or mesh.mesh.shape)}, but a pipeline "
            "runs along one: give that one, by its name, as in mesh=device_mesh['pp']"
        )
    if replicas != 1:
        raise ValueError(
            f"replicas={replicas} and mesh are given: with a mesh, its other dimensions say how "
            "many pipelines there are, and FSDP adds up their gradients; give one of the two, see "
            "docs/replicas.md"
        )
    ranks, rank = tuple(mesh.mesh.tolist()), mesh.get_rank()
    if rank not in ranks:
        raise ValueError(
            f"rank {rank} is not in the mesh of ranks {list(ranks)}, so it runs no stage of this "
            "pipeline: build the Stage on the mesh's ranks only, or with the mesh that has it"
        )
    if os.environ.get("RANK") != str(rank):
        raise ValueError(
            f"torch.distributed says that this is rank {rank}, the environment that RANK is "
            f"{os.environ.get('RANK', 'not set')}: a Stage with a mesh needs torchrun's variables "
            "(RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) for the processes of the whole job"
        )
    return ranks
