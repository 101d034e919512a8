"""The processes that run the same stage, one of each replica, and their collective operations.

Process groups of torch's own kind, made here: neither the script's default group nor its names
are touched. Operations of a group run in the order in which they are begun, which must be the same
on all of its processes.

    CPUs                              gloo
    GPUs, each of one process         NCCL; what is on the hosts, gloo
    GPUs that some of them share      gloo, by way of the hosts' memory: the hosts wait
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from procpipe.channel.mesh import Mesh
from procpipe.job.grid import Grid
from procpipe.plan.buckets import bucketed
from procpipe.replicas.gloo import GlooGroup

if TYPE_CHECKING:
    from torch.distributed import Work

    from procpipe.channel.nccl import NcclGroup
    from procpipe.job.transports import TransportChoice
    from procpipe.job.world import World

#: How often a wait looks whether an operation is over.
_LOOK_EVERY_S = 0.0005


@dataclass
class Operation:
    """An operation of a group that is under way.

    Attributes:
        finish: returns once the result may be used: by what is queued on the current stream, on a
            GPU. Raises ``RemoteStageError`` if another rank failed.
        tensors: what it reads and, as the last one, its result; kept until it is over.
        begun_ns: when it was begun.
    """

    finish: Callable[[], None]
    tensors: tuple[Tensor, ...]
    begun_ns: int = field(default_factory=time.perf_counter_ns)

    def wait(self) -> Tensor:
        """Wait until the result may be used, and return it."""
        self.finish()
        return self.tensors[-1]


class Group:
    """One process's end of the group that runs its stage; building it waits for the others.

    ``Transports`` closes what it opens, also where the pipeline is not built to its end.

    ``grid`` is this process's place among stages and replicas; ``choice`` says which transport is
    between which ranks; from ``mesh`` failures are learned.
    """

    def __init__(self, world: World, grid: Grid, choice: TransportChoice, mesh: Mesh) -> None:
        ranks = self._ranks = grid.same_stage()
        self._mesh = mesh
        self._nccl: NcclGroup | None = None
        self.num_replicas = len(ranks)
        store = PrefixStore(f"stage-{grid.stage}", world.transports.store)
        if all(choice[a][b] == "nccl" for a, b in combinations(ranks, 2)):
            from procpipe.channel.nccl import NcclGroup

            self._nccl = NcclGroup(ranks, grid.rank, world.device)
            world.transports.add(self._nccl)
            self._nccl.connect(store)
        gloo = GlooGroup(store, ranks.index(mesh.rank), len(ranks), mesh.timeout_s, world.address)
        self._gloo = world.transports.add(gloo)

    def begin_sum(self, tensor: Tensor) -> Operation:
        """Begin to replace a contiguous tensor by its sum over all replicas, in place."""
        return self._begin(tensor, tensor, lambda group, _, out: group.allreduce([out]))

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all replicas, of the same shape and dtype, by replica; waits."""
        flat = tensor.contiguous().view(-1)
        found = flat.new_empty(self.num_replicas, flat.numel())
        self._begin(
            flat, found, lambda group, one, out: group.allgather([[*out.unbind()]], [one])
        ).wait()
        return [row.view(tensor.shape) for row in found.unbind()]

    @torch.no_grad()
    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Give tensors the values that they have on replica 0; small ones travel together.

        Their versions stay as they are: layers may have saved them for a backward pass.
        """
        found = [one for one in tensors if one.numel() and one.layout == torch.strided]
        for bucket in bucketed((one.device, one.nbytes) for one in found):
            own = [found[k].data for k in bucket]
            whole = [tensor.contiguous() for tensor in own]
            bits = [one.view(-1).view(torch.uint8) for one in whole]
            flat = bits[0] if len(bits) == 1 else torch.cat(bits)
            self._begin(flat, flat, lambda group, _, out: group.broadcast([out])).wait()
            for into, part in zip(bits, flat.split([*map(len, bits)]), strict=True):
                into.copy_(part)
            for tensor, one in zip(own, whole, strict=True):
                if one.data_ptr() != tensor.data_ptr() and not torch.equal(one, tensor):
                    tensor.copy_(one)

    def _begin(
        self, given: Tensor, out: Tensor, operate: Callable[[Any, Tensor, Tensor], Any]
    ) -> Operation:
        """Begin an operation of torch's that reads one tensor and writes another, or the same."""
        is_on_host = given.device.type == "cpu"
        if self._nccl is not None and not is_on_host:
            work = self._nccl.begin(lambda group: operate(group, given, out))
            return Operation(work.block_current_stream, (given, out))
        on_host = given.cpu()
        found = out
        if not is_on_host:
            found = on_host if out is given else torch.empty_like(out, device="cpu")
        work = self._gloo.begin(lambda group: operate(group, on_host, found))

        def finish() -> None:
            self._wait(work)
            if not is_on_host:
                out.copy_(found)

        return Operation(finish, (on_host, found, out))

    def _wait(self, work: Work) -> None:
        """Wait for an operation of gloo."""
        mesh = self._mesh
        others = map(mesh.name_of, sorted({*self._ranks} - {mesh.rank}))
        what = f"an all-reduce with {', '.join(others)}"
        mesh.wait(work.is_completed, lambda: what, every_s=_LOOK_EVERY_S)
        try:
            self._gloo.end(work)
        except RuntimeError:  # a process of the group is gone; its own failure says why
            mesh.wait_failure(self._ranks, "adds up with it over replicas")
            raise
