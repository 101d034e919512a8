"""What a job holds is given up in a forked child, and nowhere else."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import pytest

from procpipe.forks import give_up_in_children

pytestmark = pytest.mark.dist


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


class Holder:
    num_given_up = 0

    def give_up_in_child(self):
        self.num_given_up += 1


def test_what_lives_is_given_up_in_a_child_only():
    holder, dropped = Holder(), Holder()
    for each in (holder, dropped):
        give_up_in_children(each)
    del dropped

    assert in_child(lambda: holder.num_given_up) == "1"
    assert holder.num_given_up == 0
