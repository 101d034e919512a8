"""Writes a rank's file of a saved state, at once or in a thread, and finds out when all ranks have.

    rank 0                                         rank r
    writes stage-0-of-n.pt                         writes stage-r-of-n.pt
    all have written <── state.save, or wait() ──  has written, or raises its error
    removes old states ──────────────────────────> returns

The thread only writes. What has gone wrong in it is raised, on every rank, by the next call that
all ranks make for it: ``wait()`` or the next save. Without one each rank waits for its own thread
as its script ends, fails if that has failed, and no old state is removed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from procpipe.errors import StageClosedError
from procpipe.job.endings import SAVING_THREAD, error_of_script
from procpipe.notes import write_note
from procpipe.run.coordinator import Agree
from procpipe.state import files
from procpipe.state.member import Member

#: The saves in the background that have not been waited for.
unfinished: weakref.WeakKeyDictionary[nn.Module, Saving] = weakref.WeakKeyDictionary()


class Saving:
    """A save that is under way in the background, or done.

    Attributes:
        path: the folder of the saved state, which is whole when all ranks have written.
    """

    def __init__(self, member: Member, path: Path, keep: int | None) -> None:
        self.path = path
        self._member, self._keep = member, keep
        self._error: BaseException | None = None  # of the thread
        self._pid = os.getpid()

    def wait(self) -> None:
        """Wait until it is done on all ranks; every rank calls it. Returns at once if it was.

        Raises:
            OSError: this rank could not write its part (or any other exception of that).
            RemoteStageError: another rank failed.
        """
        if os.getpid() != self._pid:
            raise StageClosedError(f"only process {self._pid}, which saves it, can wait for it")
        if unfinished.get(self._member.module) is not self:
            return
        calls = self._member.calls
        if calls is not None and calls.pipeline is None:  # it was closed, or a call failed
            self._join()
            return
        with self._member.call("Saving.wait") as agree:
            self.finish(agree, self._join)

    # -- this rank's part -----------------------------------------------------------------------

    def write(self, values: dict[str, Any]) -> None:
        """Write this rank's file."""
        files.write(self.path, self._member.rank, self._member.num_ranks, values)

    def finish(self, agree: Agree, own_part: Callable[[], None]) -> None:
        """Do this rank's part, and return when all ranks have; rank 0 then removes old states."""
        agree(own_part, len)
        if self._member.rank == 0:
            files.remove_old(self.path.parent, self._keep)

    # -- the thread -----------------------------------------------------------------------------

    def start(self, values: dict[str, Any]) -> None:
        """Write values in a thread; they must not change any more."""
        unfinished[self._member.module] = self

        def run() -> None:
            try:
                self.write(values)
            except BaseException as error:
                error.add_note(f"procpipe: while saving {self.path} in the background")
                self._error = error

        atexit.register(self._end_of_script)
        # A daemon: the interpreter joins other threads before atexit reports an error to the peers.
        self._thread = threading.Thread(target=run, name=SAVING_THREAD, daemon=True)
        self._thread.start()

    def _join(self) -> None:
        """Wait for this rank's thread, and raise what went wrong in it."""
        self._thread.join()
        atexit.unregister(self._end_of_script)
        unfinished.pop(self._member.module, None)
        if self._error is not None:
            raise self._error

    def _end_of_script(self) -> None:
        """Wait as the script ends, while the interpreter is whole.

        A failed save is an error like any other, but it is too late for Python to end with one.
        """
        if os.getpid() != self._pid:  # a forked child, which has no such thread
            return
        calls, error = self._member.calls, error_of_script()
        if error is not None and calls is not None:
            calls.fail("the script", error)
        try:
            self._join()  # not with the other ranks, which may be in another call
        except BaseException as failed:
            write_note(traceback.format_exc())
            if calls is not None:
                calls.fail("Saving.wait", failed)
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os._exit(1)
