"""Writes a saved state, at once or in the background, and detects when every rank has.

    rank 0                                         rank r
    draft's folder                                 finds it, or raises an error
    writes stage-0/                                writes stage-r/
      at once: over the control plane
    all have written <───────────────────────────  have written
    merges, publishes ───────────────────────────> returns
      in the background: through the folder, as no thread but the main one uses the network
    waits for each part's index, merges            waits for the folder to get its name
    a rank that fails leaves failed-r.json, which ends the waits of all threads

Each process has one thread a save, which the next save and the end of the script wait for.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from procpipe.errors import RemoteStageError, StageClosedError, WaitTimeoutError
from procpipe.forks import give_up_in_children
from procpipe.notes import write_note
from procpipe.state.files import INDEX, merge_parts, write_part
from procpipe.state.folders import Draft, Hold, not_shared
from procpipe.state.member import Member

#: How often a thread looks at the folder: first, and at most, each time twice as long.
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.005, 0.2

#: For how long a folder has neither its old name nor its new one before it counts as removed.
_GONE_AFTER_S = 30.0

#: The saves in the background that have not been waited for.
_unfinished: weakref.WeakKeyDictionary[nn.Module, Saving] = weakref.WeakKeyDictionary()


@dataclass
class Target:
    """Where all ranks write one saved state."""

    draft: Draft | None  # rank 0's; None elsewhere
    path: Path  # the draft's folder
    final_path: Path  # its name when it is whole
    rank: int
    num_ranks: int
    keep: int | None  # how many saved states to leave
    _hold: Hold | None = None

    def write(self, values: dict[str, Any]) -> None:
        """Write this rank's part."""
        if not self.path.is_dir():
            where = "where rank 0 has made it"
            raise not_shared(self.rank, self.path, where, "save to a folder on")
        if self.draft is None:
            self._hold = Hold(self.path)
        write_part(self.part_of(self.rank), values)

    def part_of(self, rank: int) -> Path:
        """Return the folder of a rank's part."""
        return self.path / f"stage-{rank}"

    def has_part_of(self, rank: int) -> bool:
        """Return whether a rank has written its part."""
        return (self.part_of(rank) / INDEX).is_file()

    def publish(self) -> None:
        """Merge the parts and give the folder its name, on rank 0."""
        assert self.draft is not None, "only rank 0 publishes"
        for rank in range(self.num_ranks):
            if not self.has_part_of(rank):
                which = f"which rank {rank} has written"
                raise not_shared(0, self.part_of(rank), which, "save to a folder on")
        merge_parts(self.path, [self.part_of(rank).name for rank in range(self.num_ranks)])
        self.draft.publish(self.keep)

    def let_go(self) -> None:
        """Leave the folder to the next save to remove, unless it was published."""
        for held in (self.draft, self._hold):
            if held is not None:
                held.let_go()


class Saving:
    """A save that is under way in the background, or done.

    Attributes:
        path: the folder of the saved state, which is there once it is whole.
    """

    def __init__(self, member: Member, target: Target) -> None:
        self.path = target.final_path
        self._module = member.module
        self._calls = member.calls
        self._target = target
        self._timeout_s = member.timeout_s
        self._error: BaseException | None = None
        self._is_abandoned = False
        self._thread: threading.Thread | None = None

    def is_done(self) -> bool:
        """Return whether this rank has finished its part; does not communicate."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until it is done on all ranks; every rank calls it. Returns at once if it is.

        Raises:
            OSError: this rank could not write its part (or any other exception of that).
            RemoteStageError: another rank failed.
            WaitTimeoutError: a rank took longer than the stage's ``timeout_s``.
        """
        calls = self._calls
        if calls is None or calls.pipeline is None:
            if self._thread is not None:
                self._thread.join()
            self._close()
            return
        with calls.together("Saving.wait") as pipeline:
            pipeline.wait_until(self.is_done, f"{self.path} to be saved in the background")
            try:
                self._close()
            except RemoteStageError as error:
                pipeline.pass_on(error)  # it came through the folder
                raise

    def start(self, values: dict[str, Any]) -> None:
        """Write values in a thread; they must not change any more."""
        _unfinished[self._module] = self
        # A daemon: the interpreter joins other threads before atexit reports an error to the peers.
        self._thread = threading.Thread(
            target=self._run, args=(values,), name="procpipe-save", daemon=True
        )
        atexit.register(self._end_of_script)
        give_up_in_children(self)
        self._thread.start()

    # -- the thread -----------------------------------------------------------------------------

    def _run(self, values: dict[str, Any]) -> None:
        target = self._target
        try:
            target.write(values)
            if target.rank == 0:
                for rank in range(target.num_ranks):
                    self._wait_until(
                        lambda rank=rank: target.has_part_of(rank),  # type: ignore[misc]
                        f"rank {rank} to write {target.part_of(rank)}",
                    )
                target.publish()
            else:
                self._wait_until(
                    self.path.is_dir, f"rank 0 to make {self.path} of what all have written"
                )
        except BaseException as error:
            error.add_note(f"procpipe: while saving {self.path} in the background")
            self._error = error
            if not isinstance(error, RemoteStageError):
                self._mark_failure(error)
        finally:
            target.let_go()

    def _wait_until(self, ready: Callable[[], bool], what: str) -> None:
        deadline_s, look_s = time.monotonic() + self._timeout_s, _FIRST_LOOK_S
        gone_s: float | None = None
        while not ready():
            # If it is gone, it has just got its name; some file systems show that late.
            if not self._raise_marked_failure():
                gone_s = gone_s or time.monotonic()
                if time.monotonic() > gone_s + min(_GONE_AFTER_S, self._timeout_s / 2):
                    raise FileNotFoundError(
                        f"{self._target.path} was removed while rank {self._target.rank} waited "
                        f"for {what}: does another run save to this folder?"
                    )
            if self._is_abandoned or (self._calls is not None and self._calls.has_failed):
                raise RuntimeError(
                    f"rank {self._target.rank} no longer waits for {what}: the run has failed"
                )
            if time.monotonic() > deadline_s:
                raise WaitTimeoutError(
                    f"rank {self._target.rank} has waited {self._timeout_s:.1f} s for {what}"
                )
            time.sleep(look_s)
            look_s = min(2 * look_s, _LONGEST_LOOK_S)

    def _mark_failure(self, error: BaseException) -> None:
        target = self._target
        story = "".join(traceback.format_exception(error))
        note = json.dumps({"rank": target.rank, "story": story})
        mark = target.path / f"failed-{target.rank}.json"
        try:
            mark.with_suffix(".tmp").write_text(note)
            os.rename(mark.with_suffix(".tmp"), mark)
        except OSError:
            pass  # the disk is full, say; this rank's next call reports it to the others

    def _raise_marked_failure(self) -> bool:
        """Raise the failure that another rank has marked; return whether the folder is there."""
        try:
            names = os.listdir(self._target.path)
        except FileNotFoundError:
            return False
        for name in names:
            if name.startswith("failed-") and name.endswith(".json"):
                note = json.loads((self._target.path / name).read_text())
                raise RemoteStageError(note["rank"], note["story"])
        return True

    # -- the end --------------------------------------------------------------------------------

    def _close(self) -> None:
        """Forget a save that is done; raise what went wrong."""
        atexit.unregister(self._end_of_script)
        if _unfinished.get(self._module) is self:
            del _unfinished[self._module]
        error, self._error = self._error, None
        if error is not None:
            raise error

    def give_up_in_child(self) -> None:
        """Leave the save to the process that has the thread."""
        atexit.unregister(self._end_of_script)
        if _unfinished.get(self._module) is self:
            self._error = StageClosedError(
                f"{self.path} is saved by the process ({os.getppid()}) from which this one "
                f"({os.getpid()}) was forked: only that one can wait for it"
            )
        self._thread = None

    def _end_of_script(self) -> None:
        """Wait as the script ends, while the interpreter is whole.

        A failed save is an error like any other, but it is too late for Python to end with one.
        """
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is not None:
            self._is_abandoned = True
            if self._calls is not None:
                self._calls.fail("the script", error)
        if self._is_abandoned or (self._calls is not None and self._calls.has_failed):
            assert self._thread is not None, "it was started"
            self._thread.join()
            return
        try:
            self.wait()
        except BaseException:
            write_note(traceback.format_exc())
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os._exit(1)


def wait_unfinished(module: nn.Module) -> None:
    """Wait for the save of this module that is still under way, as :meth:`Saving.wait` does."""
    saving = _unfinished.get(module)
    if saving is not None:
        saving.wait()
