"""Streams of a GPU that do nothing until a test lets them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import torch

from procpipe.channel.gpu import Gpu

#: Numbers that streams wait for: the allocator would queue events on streams to free them.
_kept: list[torch.Tensor] = []


def hold(stream: torch.cuda.Stream) -> Callable[[], None]:
    """Hold what will be queued on a stream; return what lets it go on, for any thread to call."""
    gpu, number = Gpu(stream.device), torch.zeros(1, dtype=torch.int64, device=stream.device)
    torch.cuda.synchronize(stream.device)
    _kept.append(number)
    gpu.wait(stream, number.data_ptr(), 1)

    def let_go() -> None:
        letting_go = torch.cuda.Stream(stream.device)
        gpu.write(letting_go, number.data_ptr(), 1)
        letting_go.synchronize()

    return let_go


@contextlib.contextmanager
def held(stream: torch.cuda.Stream) -> Iterator[None]:
    """Hold a stream until the block ends."""
    let_go = hold(stream)
    try:
        yield
    finally:
        let_go()


def hold_for(stream: torch.cuda.Stream, seconds: float) -> threading.Event:
    """Hold a stream for some time; return what is set once it may go on."""
    let_go, may_go_on = hold(stream), threading.Event()

    def end() -> None:
        may_go_on.set()
        let_go()

    threading.Timer(seconds, end).start()
    return may_go_on


def happens(condition: Callable[[], bool], in_s: float) -> bool:
    """Say whether something comes to be true in some time."""
    deadline_s = time.monotonic() + in_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.001)
    return True
