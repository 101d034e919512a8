"""How a launched process ends: with its launcher, and without a second, misleading traceback.

When one rank fails, all the others raise ``RemoteStageError`` with its story. Each of them would
print that story once more, and a traceback of its own that leads nowhere; so a rank that ends by
another's failure prints one line instead, and so does one that is interrupted:

    procpipe: rank 0 ends, because rank 1 failed in step(): KeyError: 'boom'; it was in B3, …
    procpipe: rank 2 was interrupted in F4, layer 'conv1' (Conv2d), for 0.1 s

The reason is there because the rank that failed may not print it: a ``SystemExit`` prints
nothing, nor does an exception that its user catches.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from types import TracebackType

from procpipe.errors import FOUND_BY_EACH, PeerLostError, RemoteStageError
from procpipe.host.board import Board, Reading
from procpipe.notes import write_note

__all__ = ["end_with_launcher", "print_victims_briefly"]

_PR_SET_PDEATHSIG = 1

_CONNECT_TIMEOUT_S = 2.0

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def end_with_launcher() -> None:
    """Have the kernel kill this process when torchrun's agent dies, which started it.

    A killed launcher cannot end its workers, and they would train on, or wait, for nobody. That of
    ``procpipe run`` has a warden who ends them, and what they have started, which he finds by them;
    so there the kernel leaves them to him.

    Raises:
        ConnectionRefusedError: it has died already, while this process was starting.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        if "PROCPIPE_RUN" not in os.environ:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _check_launcher()


def _check_launcher() -> None:
    """Check that the launcher's store, which was there before its workers, has not gone.

    Else the first use of the store would wait for it for half an hour.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
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
        pass  # a network that is slow to start; whoever uses the store waits for it, and says so


def print_victims_briefly(rank: int, board: Board) -> None:
    """Print one line, and no traceback, for an uncaught error that is not this rank's to tell.

    Args:
        rank: this rank.
        board: says where it was when the error came.
    """
    previous: Hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        line = _line(rank, error, board.read())
        if line:
            write_note(line)
        else:
            previous(kind, error, trace)

    sys.excepthook = hook


def _line(rank: int, error: BaseException, reading: Reading) -> str:
    """Return what to print instead of a traceback; "" to leave it as it is."""
    if isinstance(error, KeyboardInterrupt):
        return f"procpipe: rank {rank} was interrupted {reading.where()}"
    if isinstance(error, FOUND_BY_EACH) and rank != 0:
        return f"procpipe: rank {rank} ends, because the ranks do not agree (rank 0 tells on what)"
    if not isinstance(error, RemoteStageError):
        return ""
    meanwhile = f"; it was {reading.where()}" if reading.wait else ""
    if isinstance(error, PeerLostError):
        return f"procpipe: rank {rank} ends, because {error.story}{meanwhile}"
    return (
        f"procpipe: rank {rank} ends, because rank {error.rank} failed{_reason(error)}{meanwhile}"
    )


def _reason(error: RemoteStageError) -> str:
    """Return what a story's first line says beside who tells it: " in step(): KeyError: 'boom'"."""
    first_line, _, _ = error.story.partition("\n")
    _, _, reason = first_line.partition(f"(rank {error.rank}),")
    return reason
