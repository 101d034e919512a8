"""The processes that run the same stage, one of each replica, and their collective operations.

Process groups of torch's own kind, made here: neither the script's default group nor its names
are touched. Operations of a group run in the order in which they are begun, which must be the same
on all of its processes.

    CPUs                              gloo
    GPUs, each of one process         NCCL; what is on the hosts, gloo
    GPUs that some of them share      gloo, by way of the hosts' memory: the hosts wait
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.distributed import Store

from procpipe.channel.gloo import GlooGroup
from procpipe.channel.mesh import Mesh
from procpipe.job.grid import Grid
from procpipe.plan.all_reduce import bucketed

if TYPE_CHECKING:
    from procpipe.job.transports import TransportChoice
    from procpipe.job.world import World
    from procpipe.replicas.nccl import NcclGroup

#: How often a wait looks whether an operation is over.
_LOOK_EVERY_S = 0.0005


class Operation(Protocol):
    """An operation of a group that is under way.

    Attributes:
        is_queued: whether the host does not wait for it, but a stream of its GPU does.
    """

    is_queued: bool

    @property
    def is_over(self) -> bool:
        """Whether the result is there; never blocks."""

    def wait(self) -> None:
        """Return once the result may be used: by what is queued on the current stream, on a GPU.

        Raises:
            RemoteStageError: another rank failed.
        """


class Group:
    """One process's end of a group; building it waits for the others.

    Args:
        store: one that these processes share, for this group alone.
        ranks: those of the group, by replica.
        mesh: the connections to all ranks, from which failures are learned.
        host: the local address to listen on.
        nccl: their communicator, if each has a GPU of its own.
    """

    def __init__(
        self,
        store: Store,
        ranks: Sequence[int],
        mesh: Mesh,
        host: str,
        nccl: NcclGroup | None = None,
    ) -> None:
        self._mesh = mesh
        self._ranks = ranks
        self._gloo = GlooGroup(store, ranks.index(mesh.rank), len(ranks), mesh.timeout_s, host)
        self._nccl = nccl
        self.num_replicas = len(ranks)

    def begin_sum(self, tensor: Tensor) -> Operation:
        """Begin to replace a contiguous tensor by its sum over all replicas, in place."""
        return self._begin(tensor, tensor, lambda group, _, out: group.allreduce([out]))

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all replicas, of the same shape and dtype, by replica."""
        flat = tensor.contiguous().view(-1)
        found = flat.new_empty(self.num_replicas, flat.numel())
        self._begin(
            flat, found, lambda group, one, out: group.allgather([[*out.unbind()]], [one])
        ).wait()
        return [part.view(tensor.shape) for part in found.unbind()]

    @torch.no_grad()
    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Give tensors the values that they have on replica 0; small ones travel together.

        Their versions stay as they are: layers may have saved them for a backward pass.
        """
        found = [one for one in tensors if one.numel() and one.layout == torch.strided]
        buckets = bucketed((one.device, one.nbytes) for one in found)
        for finish in [self._begin_copy_first([found[k] for k in bucket]) for bucket in buckets]:
            finish()

    def _begin_copy_first(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Begin to copy the tensors of a bucket; what is returned waits."""
        whole = [tensor.data.contiguous() for tensor in tensors]
        bits = [one.view(-1).view(torch.uint8) for one in whole]
        flat = bits[0] if len(bits) == 1 else torch.cat(bits)
        operation = self._begin(flat, flat, lambda group, _, out: group.broadcast([out]))

        def finish() -> None:
            operation.wait()
            if len(bits) > 1:
                for own, found in zip(bits, flat.split([*map(len, bits)]), strict=True):
                    own.copy_(found)
            for tensor, one in zip(tensors, whole, strict=True):
                if one.data_ptr() != tensor.data_ptr() and not torch.equal(one, tensor):
                    tensor.copy_(one)

        return finish

    def close(self) -> None:
        """Drop the group; nothing may be under way. Who opened the communicator closes that."""
        self._gloo.close()

    def _begin(
        self, given: Tensor, out: Tensor, operate: Callable[[Any, Tensor, Tensor], Any]
    ) -> Operation:
        """Begin an operation of torch's that reads one tensor and writes another, or the same."""
        if given.device.type == "cpu":
            return _OnHosts(self._mesh, self._ranks, operate(self._gloo.torchs, given, out))
        if self._nccl is not None:
            from procpipe.replicas.nccl import Queued

            return Queued(self._nccl.begin(lambda group: operate(group, given, out)), given, out)
        on_host = given.cpu()
        found = on_host if out is given else torch.empty_like(out, device="cpu")
        work = operate(self._gloo.torchs, on_host, found)
        return _OnHosts(self._mesh, self._ranks, work, lambda: out.copy_(found))


def group_of(world: World, grid: Grid, choice: TransportChoice, mesh: Mesh) -> Group:
    """Connect the processes that run this rank's stage; waits for them.

    Args:
        world: this process's place in the job.
        grid: its place among stages and replicas.
        choice: which transport is between which ranks.
        mesh: the connections to all ranks.
    """
    ranks = grid.same_stage()
    store, host = world.store_for_group(f"stage-{grid.stage}")
    nccl = None
    if all(choice.between(a, b) == "nccl" for a, b in combinations(ranks, 2)):
        from procpipe.replicas.nccl import NcclGroup

        nccl = NcclGroup(ranks, grid.rank, world.device)
        world.transports.add_of_device(nccl)
        nccl.connect(store.bare())
    return Group(store, ranks, mesh, host, nccl)


class _OnHosts:
    """An operation of gloo."""

    is_queued = False

    def __init__(
        self,
        mesh: Mesh,
        ranks: Sequence[int],
        work: Any,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        self._mesh = mesh
        self._ranks = ranks
        self._work = work
        self._finish = finish

    @property
    def is_over(self) -> bool:
        """Whether the result is there; never blocks."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        """Block until the result is there."""
        mesh = self._mesh
        mesh.wait(self._work.is_completed, self._described, every_s=_LOOK_EVERY_S)
        try:
            self._work.wait()
        except RuntimeError:  # a process of the group is gone; its own failure says why
            mesh.wait_failure(self._ranks, "adds up with it over replicas")
            raise
        self._work = None
        self._finish()

    def _described(self) -> str:
        others = sorted(set(self._ranks) - {self._mesh.rank})
        return f"an all-reduce with {', '.join(map(self._mesh.name_of, others))}"
