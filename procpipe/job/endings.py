"""How a launched process ends: with its launcher, and without a second, misleading traceback.

When one rank fails, all others raise ``RemoteStageError`` with its traceback. Each of them would
print that once more, with its own traceback, which does not help. So a rank that ends because
another failed, or that is interrupted, prints one line instead:

    procpipe: rank 0 ends, because rank 1 failed in step(): KeyError: 'boom'; it was in B3, …
    procpipe: rank 2 was interrupted in F4, layer 'conv1' (Conv2d), for 0.1 s

The line has the reason because the rank that failed may not print it: ``SystemExit`` and
exceptions that the user catches print nothing.

The user's threads may keep a process alive long after its main thread has ended:

    main thread raises ─> sys.excepthook ─┐
    main thread ends ─────────────────────┴> threading's exit functions ─> threads end ─> atexit
                          reported here      here a thread begins to wait for the end, too

Once the job has failed and its exception has ended the main thread, threads and children that
Python waits for keep the process alive only for a moment.

A forked child has these hooks, too, but they do nothing there.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NoReturn

from procpipe.errors import (
    FOUND_BY_EACH,
    MemoryLimitError,
    PeerLostError,
    RemoteStageError,
    StageClosedError,
)
from procpipe.job.board import Board, BoardReading
from procpipe.job.grid import Grid
from procpipe.job.rollcall import has_launchers_store
from procpipe.notes import write_note

_PR_SET_PDEATHSIG = 1

_CONNECT_TIMEOUT_S = 2.0

#: How often to check whether threads still run after the main one.
_LOOK_EVERY_S = 0.05

#: How long threads and children may keep a process alive whose job has failed.
_LIVE_ON_S = 1.0

Hook = Callable[[BaseException | None, Callable[[], object]], None]


def end_with_launcher() -> None:
    """Make the kernel kill this process when torchrun's agent, which started it, dies.

    A killed launcher cannot end its workers, and they would train on, or wait for ever. Under
    ``procpipe run`` a warden process kills the ranks and their children, which it finds through
    them; so there the kernel does not kill the ranks.

    Raises:
        ConnectionRefusedError: it has died already, while this process was starting.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if "PROCPIPE_RUN" not in os.environ:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _check_launcher()


def _check_launcher() -> None:
    """Check that the launcher's store, which existed before its workers, still does.

    Otherwise the first use of the store would wait for it for half an hour.
    """
    if not has_launchers_store():
        return
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S).close()
    except ConnectionRefusedError:
        raise ConnectionRefusedError(
            f"rank {os.environ.get('RANK')} finds no launcher at {address[0]}:{address[1]}: it "
            "ended while this process was starting"
        ) from None
    except OSError:
        pass  # perhaps a slow network; the first use of the store waits for it


def print_victims_briefly(rank: int, board: Board, first: int = 0) -> None:
    """Print one line, and no traceback, for an uncaught error that began on another rank.

    The board says where this rank was when the error came; the newest one counts. ``first`` is the
    rank that prints what all have found.
    """
    _victims()[os.getpid()] = rank, board, first


@functools.cache  # once a process, whatever the number of its stages
def _victims() -> dict[int, tuple[int, Board, int]]:
    """Replace the hooks that print tracebacks; return what they read: the newest, by process."""
    victims: dict[int, tuple[int, Board, int]] = {}

    def handle(error: BaseException | None, print_traceback: Callable[[], object]) -> None:
        line, ours = "", victims.get(os.getpid())
        if error is not None and ours is not None:
            rank, board, first = ours
            line = line_of(rank, error, board.read(), first)
        if line:
            write_note(line)
        else:
            print_traceback()

    _replace_hooks(handle, handle)
    return victims


def _replace_hooks(of_main_thread: Hook, of_threads: Hook) -> None:
    """Call functions for uncaught errors, with the error and what the hook before would do."""
    previous, previous_of_threads = sys.excepthook, threading.excepthook

    def hook(
        error_type: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        with _without_interrupts():
            of_main_thread(error, lambda: previous(error_type, error, trace))

    def hook_of_threads(args: threading.ExceptHookArgs) -> None:
        of_threads(args.exc_value, lambda: previous_of_threads(args))

    sys.excepthook = hook
    threading.excepthook = hook_of_threads


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C while the main thread reports what ended it: it would replace the report.

    A launcher's Ctrl-C reaches a rank after the failure of another rank that it has interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:  # it came just before
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        if before is not None:  # one that was not set from Python cannot be set again
            signal.signal(signal.SIGINT, before)


def error_of_script() -> BaseException | None:
    """Return the exception that has ended the main thread, if one has and was not SystemExit."""
    if _is_at_prompt():
        return None
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def _is_at_prompt() -> bool:
    """Return whether Python reads from a prompt, where an exception ends nothing."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


@functools.cache  # once a process
def watch_threads(
    raised: Callable[[BaseException], None],
    main_ended: Callable[[float], None],
    has_failed: Callable[[], bool],
) -> None:
    """Register functions for the end of the main thread, and of others by an exception.

    Args:
        raised: called with an exception that ends a thread, in that thread.
        main_ended: called repeatedly with the seconds since the main thread has ended, in a
            thread of its own, while another thread keeps the process alive.
        has_failed: returns whether the job has failed; then a process whose main thread an
            exception has ended does not stay alive for long.
    """
    main_thread_ends = threading.Event()

    @functools.cache
    def start_to_end() -> None:
        """Start a thread that ends the process, if Python waits for others too long."""
        _start(lambda: _end_after_failure(main_thread_ends, has_failed))

    def of_main_thread(error: BaseException | None, go_on: Callable[[], object]) -> None:
        if error is not None and not _is_at_prompt():
            raised(error)
            start_to_end()
        go_on()

    def of_thread(error: BaseException | None, go_on: Callable[[], object]) -> None:
        if error is not None and not isinstance(error, SystemExit):
            raised(error)
        go_on()

    def at_end_of_main_thread() -> None:
        error = error_of_script()
        if error is not None:  # in case another excepthook has replaced ours
            raised(error)
            start_to_end()
            main_thread_ends.set()
        if _others():
            _report_until_exit(main_ended)

    _replace_hooks(of_main_thread, of_thread)
    # The last one registered runs first: this one before threads of pools are joined.
    importlib.import_module("concurrent.futures.thread")
    with contextlib.suppress(AttributeError, RuntimeError):  # then atexit does it
        threading._register_atexit(at_end_of_main_thread)  # type: ignore[attr-defined]


def _others() -> list[threading.Thread]:
    """Return the threads that the interpreter waits for before it ends."""
    main = threading.main_thread()
    return [t for t in threading.enumerate() if t is not main and not t.daemon]


def _report_until_exit(main_ended: Callable[[float], None]) -> None:
    """Call ``main_ended`` in a thread until there are no other threads to wait for."""
    started_s, is_exiting = time.monotonic(), threading.Event()

    def report() -> None:
        while _others() and not is_exiting.wait(_LOOK_EVERY_S):
            main_ended(time.monotonic() - started_s)

    thread = _start(report)
    if thread is not None:
        atexit.register(thread.join)  # it may be sending a goodbye
        atexit.register(is_exiting.set)  # the last one registered runs first


def _end_after_failure(main_thread_ends: threading.Event, has_failed: Callable[[], bool]) -> None:
    main_thread_ends.wait()
    time.sleep(_LIVE_ON_S)
    while not ((alive := _waited_for()) and has_failed()):
        time.sleep(_LOOK_EVERY_S)
    end_at_once(f"process {os.getpid()} (rank {os.environ.get('RANK')})", alive)


def _start(act: Callable[[], None]) -> threading.Thread | None:
    """Start a thread; None in Python 3.12.0 to 3.12.2, which start none while they end.

    https://github.com/python/cpython/issues/113964
    """
    thread = threading.Thread(target=act, name="procpipe end", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def end_at_once(who: str, waiting_for: str = "its device, which is stuck in transfers") -> NoReturn:
    """End the process without Python's own shutdown, which would wait."""
    write_note(f"procpipe: {who} ends without waiting for {waiting_for}")
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(1)


def _waited_for() -> str:
    """Name the threads and the children for which the interpreter waits before it ends."""
    alive = [f"thread {thread.name!r}" for thread in _others()]
    if "multiprocessing" in sys.modules:
        children = sys.modules["multiprocessing"].active_children()
        alive += [f"child {child.pid}" for child in children if not child.daemon]
    return ", ".join(alive)


def line_of(
    rank: int, error: BaseException, reading: BoardReading | None = None, first: int = 0
) -> str:
    """Return the line to print instead of a traceback; "" to print the traceback.

    ``reading`` says where the rank was; None leaves that out. ``first`` is the rank that prints
    what all have found.
    """
    grid = Grid(rank, rank + 1) if reading is None else Grid.of(reading)
    ours = grid.rank_name(rank)
    if isinstance(error, KeyboardInterrupt) and reading is not None:
        return f"procpipe: {ours} was interrupted {reading.where()}"
    if isinstance(error, FOUND_BY_EACH) and rank != first:
        what, details = "the ranks do not agree", "on what"
        if isinstance(error, MemoryLimitError):
            what, details = "no plan keeps to memory_limit_bytes", "what each stage needs"
        return f"procpipe: {ours} ends, because {what} (rank {first} prints {details})"
    before = error.__context__
    if isinstance(error, StageClosedError) and isinstance(before, RemoteStageError):
        # In a ``finally``: a state.save, for instance, which has saved nothing.
        return f"{line_of(rank, before, reading, first)}; then {error}"
    if not isinstance(error, RemoteStageError):
        return ""
    meanwhile = f"; it was {reading.where()}" if reading is not None and reading.wait else ""
    if isinstance(error, PeerLostError):
        return f"procpipe: {ours} ends, because {error.story}{meanwhile}"
    cause = grid.rank_name(error.rank)
    # The rest of the failure's first line: " in step(): KeyError: 'boom'".
    _, _, reason = error.story.partition("\n")[0].partition(f"(rank {error.rank}),")
    return f"procpipe: {ours} ends, because {cause} failed{reason}{meanwhile}"
