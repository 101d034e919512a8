"""Makes launchers with torch's agent quick: their ranks can be forks, which need not import torch.

    fork server     launcher                             rank
      Start ----->    forks one process for each   --->    waits
                      runs torch's agent
                      starts a rank: Start         --->    runs as ``python <argv>``
                                                   <---    ends
                      waitpid

The launcher forks before it runs its own main module, while it has one thread and no open files. So
ranks are its children and have their own session, as otherwise, and end as it does; a process that
is not used ends with the launcher. If more ranks are started, after a restart for instance, they
are new processes. This file replaces only how torch's agent starts a process, and how it finds its
own method's name.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from tests.dist.forks import Forked, Start, receive, send_start


def name_methods_fast() -> None:
    """Let torch's agent log each step of its rendezvous without reading the source of all callers.

    That takes a second for each start, most of what a launcher needs.
    """
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def fork_ranks(start: Start, descriptors: list[int]) -> tuple[Start, list[int]]:
    """Fork ``start.num_ranks`` times, and let torch's agent use the children for its ranks.

    Returns in the launcher with the given arguments, and in each rank with its own.
    """
    waiting: list[tuple[int, socket.socket]] = []  # children that wait for their requests
    for _ in range(start.num_ranks):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            os.setsid()  # before the agent can send a signal to the group
            for end in (ours, *(other for _, other in waiting)):
                end.close()
            for descriptor in descriptors:
                os.close(descriptor)
            with theirs:
                start_of_rank, descriptors = receive(theirs)
            if start_of_rank is None:
                os._exit(0)
            return start_of_rank, descriptors
        theirs.close()
        waiting.append((pid, ours))
    new_process = SubprocessHandler._popen
    popen = _starter(waiting, new_process, start.tears_down)
    SubprocessHandler._popen = popen  # type: ignore[method-assign]
    return start, descriptors


def _starter(
    waiting: list[tuple[int, socket.socket]], new_process: Callable[..., Any], tears_down: bool
) -> Callable[..., Any]:
    """Return what replaces ``SubprocessHandler._popen``."""

    def start_rank(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        if not waiting or args[:2] != (sys.executable, "-u"):
            return new_process(handler, args, env)
        pid, requests = waiting.pop(0)
        env = env | {"PYTHONUNBUFFERED": "1"}  # what -u does
        streams = handler._stdout, handler._stderr  # files, if they are not the launcher's
        files = [stream.fileno() if stream else 1 + k for k, stream in enumerate(streams)]
        with requests:
            start = Start(args[2:], env, os.getcwd(), tears_down)
            send_start(requests, start, (0, *files))
        return Forked(pid)

    return start_rank
