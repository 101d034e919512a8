"""The processes that run the same stage, one of each replica, and their collective operations.

A process group of torch's own kind, made here: neither the script's default group nor its names
are touched. Operations of a group run in the order in which they are begun, which must be the same
on all of its processes.

Up to now by gloo.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from procpipe.channel.gloo import GlooGroup
from procpipe.channel.mesh import Mesh

#: How often a wait looks whether an operation is over.
_LOOK_EVERY_S = 0.0005


class Group:
    """One process's end of a group; building it waits for the others.

    Args:
        store: one that these processes share, for this group alone.
        replica: this process's number in the group.
        num_replicas: how many processes there are.
        mesh: the connections to all ranks, from which failures are learned.
        host: the local address to listen on.
        others: names of the other processes, for people.
    """

    def __init__(
        self,
        store: Store,
        replica: int,
        num_replicas: int,
        mesh: Mesh,
        host: str,
        others: str = "the other replicas",
    ) -> None:
        self._mesh = mesh
        self.others = others
        self._gloo = GlooGroup(store, replica, num_replicas, mesh.timeout_s, host)
        self.num_replicas = num_replicas

    def begin_sum(self, tensor: Tensor) -> Sum:
        """Begin to replace a contiguous tensor by its sum over all replicas, in place."""
        return Sum(self, self._gloo.torchs.allreduce([tensor]))

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all replicas, of the same shape and dtype, by replica."""
        found = [torch.empty_like(tensor) for _ in range(self.num_replicas)]
        Sum(self, self._gloo.torchs.allgather([found], [tensor])).wait()
        return found

    @torch.no_grad()
    def copy_first(self, tensor: Tensor) -> None:
        """Give a tensor the value that it has on replica 0."""
        if not tensor.numel() or tensor.layout != torch.strided:
            return
        data = tensor.detach().contiguous()
        Sum(self, self._gloo.torchs.broadcast([data.view(-1).view(torch.uint8)])).wait()
        if data.data_ptr() != tensor.data_ptr() and not torch.equal(data, tensor):
            tensor.copy_(data)

    def close(self) -> None:
        """Drop the group; nothing may be under way."""
        self._gloo.close()


class Sum:
    """An operation of a group that is under way."""

    def __init__(self, group: Group, work: Any) -> None:
        self._group = group
        self._work = work

    @property
    def is_over(self) -> bool:
        """Whether the result is there; never blocks."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        """Block until the result is there.

        Raises:
            RemoteStageError: another rank failed.
        """
        group, mesh = self._group, self._group._mesh
        mesh.wait(
            self._work.is_completed,
            lambda: f"an all-reduce with {group.others}",
            every_s=_LOOK_EVERY_S,
        )
        try:
            self._work.wait()
        except RuntimeError:  # a process of the group is gone; its own failure says why
            mesh.wait_failure()
            raise
        self._work = None
