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
from pathlib import Path
from typing import Any

from torch import nn

from procpipe.errors import RemoteStageError, StageClosedError, WaitTimeoutError
from procpipe.job.endings import SAVING_THREAD
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


class Saving:
    """A save that is under way in the background, or done.

    Attributes:
        path: the folder of the saved state, which is there once it is whole.
    """

    def __init__(self, member: Member, folder: Path, path: Path, draft: Draft | None) -> None:
        self.path = path
        self._member = member
        self._folder = folder  # the draft's
        self._hold: Hold | None = draft  # so that no other job removes it
        self._error: BaseException | None = None
        self._is_abandoned = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

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
        if os.getpid() != self._pid:
            raise StageClosedError(
                f"{self.path} is saved by the process ({self._pid}) from which this one "
                f"({os.getpid()}) was forked: only that one can wait for it"
            )
        calls = self._member.calls
        if calls is None or calls.pipeline is None:
            if self._thread is not None:
                self._thread.join()
            self._close()
            return
        with calls.together("Saving.wait") as pipeline:
            what = f"{self.path} to be saved in the background"
            pipeline.wires.mesh.wait(self.is_done, lambda: what, every_s=_FIRST_LOOK_S)
            try:
                self._close()
            except RemoteStageError as error:
                pipeline.wires.mesh.fail(error)  # it came through the folder
                raise

    # -- this rank's part -----------------------------------------------------------------------

    def _write(self, values: dict[str, Any]) -> None:
        if not self._folder.is_dir():
            where = "where rank 0 has made it"
            raise not_shared(self._member.rank, self._folder, where, "save to a folder on")
        if self._hold is None:
            self._hold = Hold(self._folder)
        write_part(self._part_of(self._member.rank), values)

    def _publish(self, keep: int | None) -> None:
        """Merge the parts and give the folder its name, on rank 0; leave ``keep`` saved states."""
        parts = [self._part_of(rank) for rank in range(self._member.num_ranks)]
        for rank, part in enumerate(parts):
            if not (part / INDEX).is_file():
                raise not_shared(0, part, f"which rank {rank} has written", "save to a folder on")
        merge_parts(self._folder, [part.name for part in parts])
        assert isinstance(self._hold, Draft), "only rank 0 publishes"
        self._hold.publish(keep)

    def _let_go(self) -> None:
        """Leave the folder to the next save to remove, unless it was published."""
        if self._hold is not None:
            self._hold.let_go()

    def _part_of(self, rank: int) -> Path:
        return self._folder / f"stage-{rank}"

    # -- the thread -----------------------------------------------------------------------------

    def start(self, values: dict[str, Any], keep: int | None) -> None:
        """Write values in a thread, and publish; they must not change any more."""
        _unfinished[self._member.module] = self
        # A daemon: the interpreter joins other threads before atexit reports an error to the peers.
        self._thread = threading.Thread(
            target=self._run, args=(values, keep), name=SAVING_THREAD, daemon=True
        )
        atexit.register(self._end_of_script)
        self._thread.start()

    def _run(self, values: dict[str, Any], keep: int | None) -> None:
        try:
            self._write(values)
            if self._member.rank == 0:
                for rank in range(self._member.num_ranks):
                    part = self._part_of(rank)
                    self._wait_until((part / INDEX).is_file, f"rank {rank} to write {part}")
                self._publish(keep)
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
            self._let_go()

    def _wait_until(self, ready: Callable[[], bool], what: str) -> None:
        rank, timeout_s = self._member.rank, self._member.timeout_s
        deadline_s, look_s = time.monotonic() + timeout_s, _FIRST_LOOK_S
        gone_s: float | None = None
        while not ready():
            # If it is gone, it has just got its name; some file systems show that late.
            if not self._raise_marked_failure():
                gone_s = gone_s or time.monotonic()
                if time.monotonic() > gone_s + min(_GONE_AFTER_S, timeout_s / 2):
                    raise FileNotFoundError(
                        f"{self._folder} was removed while rank {rank} waited for {what}: does "
                        "another run save to this folder?"
                    )
            if self._has_failed():
                raise RuntimeError(f"rank {rank} no longer waits for {what}: the run has failed")
            if time.monotonic() > deadline_s:
                raise WaitTimeoutError(f"rank {rank} has waited {timeout_s:.1f} s for {what}")
            time.sleep(look_s)
            look_s = min(2 * look_s, _LONGEST_LOOK_S)

    def _has_failed(self) -> bool:
        calls = self._member.calls
        return self._is_abandoned or (calls is not None and calls.has_failed)

    def _mark_failure(self, error: BaseException) -> None:
        rank, story = self._member.rank, "".join(traceback.format_exception(error))
        mark = self._mark_of(rank)
        try:
            mark.with_suffix(".tmp").write_text(json.dumps(story))
            os.rename(mark.with_suffix(".tmp"), mark)
        except OSError:
            pass  # the disk is full, say; this rank's next call reports it to the others

    def _raise_marked_failure(self) -> bool:
        """Raise the failure that another rank has marked; return whether the folder is there."""
        for rank in range(self._member.num_ranks):
            # The folder may get its name between any two looks: nothing is asked before reading.
            with contextlib.suppress(FileNotFoundError):
                raise RemoteStageError(rank, json.loads(self._mark_of(rank).read_text()))
        return self._folder.is_dir()

    def _mark_of(self, rank: int) -> Path:
        return self._folder / f"failed-{rank}.json"

    # -- the end --------------------------------------------------------------------------------

    def _close(self) -> None:
        """Forget a save that is done; raise what went wrong."""
        atexit.unregister(self._end_of_script)
        if _unfinished.get(self._member.module) is self:
            del _unfinished[self._member.module]
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _end_of_script(self) -> None:
        """Wait as the script ends, while the interpreter is whole.

        A failed save is an error like any other, but it is too late for Python to end with one.
        """
        if os.getpid() != self._pid:  # the thread is in the process that this one was forked from
            return
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is not None:
            self._is_abandoned = True
            if self._member.calls is not None:
                self._member.calls.fail("the script", error)
        if self._has_failed():
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
