"""Shows other ranks when torch compiles layers of this stage, by ``Stage.compile`` or otherwise.

this rank    F0, first call of a layer ── torch compiles ───────────── layer runs
its board                                 "compiling layer '2' (…)"
its peers                                 busy: timeout_s stops        timeout_s begins anew
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from procpipe.channel.mesh import Mesh
from procpipe.compute.partition import Partition
from procpipe.job.board import Board
from procpipe.job.grid import Grid
from procpipe.notes import write_note
from procpipe.plan.task import INPUT_GRADIENT, Task
from procpipe.run.messages import Order
from procpipe.run.observer import Observer
from procpipe.torch_internals import on_compiling


class Compiling(Observer):
    """Follows torch's compiler; notes once that compiled layers have a whole backward."""

    def __init__(self, board: Board, mesh: Mesh, partitions: Mapping[int, Partition]) -> None:
        self._board = board
        self._mesh = mesh
        self._partitions = partitions
        self._remove: Callable[[], None] | None = None
        self._has_noted = False

    def begin_step(self, order: Order) -> None:
        """Register with torch's compiler, once it is loaded."""
        if self._remove is None:
            self._remove = on_compiling(self._begin, self._end)

    def begin_task(self, task: Task) -> None:
        """Note if a task cannot do what its kind says."""
        is_split = task.kind == INPUT_GRADIENT
        if is_split and not self._has_noted and self._partitions[task.j].is_compiled:
            self._has_noted = True
            name = Grid.of(self._board.read()).stage_name(self._mesh.rank)
            write_note(
                f"procpipe: {name} runs the whole backward of compiled layers in the first of its "
                "two tasks (I), as their weight gradients cannot be put off"
            )

    def leave(self) -> None:
        """Leave torch's compiler alone."""
        if self._remove is not None:
            self._remove()

    def _begin(self) -> None:
        self._board.start_compiling()
        self._mesh.send_busy(is_busy=True)

    def _end(self) -> None:
        self._board.end_compiling()
        self._mesh.send_busy(is_busy=False)
