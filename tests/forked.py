"""Calls a function in a forked child."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def in_child(act: Callable[[], object]) -> str:
    """Call a function in a forked child; return its result or its error as text."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            result = str(act())
        except BaseException:
            result = traceback.format_exc()
        os.write(writer, result.encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        result = file.read()
    os.waitpid(pid, 0)
    return result
