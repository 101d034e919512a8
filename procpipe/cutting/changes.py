"""What a forward changes that its layers would not have, and the line that does.

That is, attributes of opened modules, and the random numbers of Python and NumPy. Whether a forward
changes any is found by comparing them before and after; the line, by comparing them after each line
of another run, which takes long.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import pickle
import random
import sys
from collections.abc import Iterator, Mapping
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from procpipe.cutting.sizes import UNKNOWN, WHOLE, CannotCutError, line_of

np: Any = None
with contextlib.suppress(ImportError):
    import numpy as np

#: What is the same wherever it is used.
PLAIN = (
    *(type(None), bool, int, float, complex, str, type(Ellipsis), enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)

#: What a forward may change: a module's name, and what of it.
Key = tuple[str, str]


def states(modules: Mapping[str, nn.Module]) -> dict[Key, Any]:
    """Return the states of random number generators, and of modules' attributes."""
    drawn = pickle.dumps(random_states())
    found: dict[Key, Any] = {("", "the random numbers of Python or NumPy"): drawn}
    for of, module in modules.items():
        kind, held = type(module), vars(module) | module._parameters | module._buffers
        for name in held.keys() - vars(nn.Module()).keys():
            value = held[name]
            is_cached = isinstance(getattr(kind, name, None), functools.cached_property)
            if is_cached and isinstance(value, PLAIN):
                continue  # each call would compute the same
            with contextlib.suppress(Exception):  # those that cannot be written
                state = id(value) if isinstance(value, Tensor) else pickle.dumps(value)
                found[of, f"{kind.__qualname__}.{name}"] = state
    return found


@contextlib.contextmanager
def watched_by_line(
    recorder: Any, opened: Mapping[str, nn.Module], watched: set[Key]
) -> Iterator[None]:
    """Refuse the line of the model's code after which a watched state is another one.

    The ``Recorder`` is one that records meanwhile.
    """
    if not watched:
        yield
        return
    modules = {name: opened[name] for name, _ in watched}

    def now() -> dict[Key, Any]:
        recorder.is_inside = True  # so that comparing is not recorded
        try:
            return states(modules)
        finally:
            recorder.is_inside = False

    before, last, tracing = now(), "", sys.gettrace()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal last
        if line_of([(frame, frame.f_lineno)]) == UNKNOWN:
            return None
        if not recorder.is_inside:
            found = now()
            if any(found.get(key) != before.get(key) for key in watched):
                raise _refusal(watched, last)
            last = line_of(walk_stack(frame.f_back if event == "return" else frame))
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(tracing)
    raise _refusal(watched, UNKNOWN)


def _refusal(keys: set[Key], where: str) -> CannotCutError:
    names = ", ".join(sorted({name for _, name in keys}))
    return CannotCutError(
        f"the forward changes {names}, which the layers do not have",
        f"draw random numbers by torch, or {WHOLE}",
        where,
    )


def random_states() -> tuple[Any, Any]:
    """Return the states of Python's and NumPy's generators."""
    return random.getstate(), np and np.random.get_state()


def set_random_states(of: tuple[Any, Any]) -> None:
    """Put the generators back."""
    random.setstate(of[0])
    if np:
        np.random.set_state(of[1])
