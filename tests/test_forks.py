"""Shared resources are given up in a forked child, and nowhere else."""

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
    def __init__(self, error=None):
        self.error = error
        self.num_given_up = 0
        give_up_in_children(self)

    def give_up_in_child(self):
        self.num_given_up += 1
        if self.error is not None:
            raise self.error


def test_resources_are_given_up_in_the_child_only():
    holder = Holder()

    assert in_child(lambda: holder.num_given_up) == "1"
    assert holder.num_given_up == 0


def test_a_child_of_a_child_gives_up_nothing():
    holder = Holder()

    assert in_child(lambda: in_child(lambda: holder.num_given_up)) == "1"


@pytest.mark.parametrize("first", [True, False])
def test_after_an_error_the_other_resources_are_given_up_too(first, capfd):
    holders = [Holder(), Holder()]
    faulty = Holder(ValueError("faulty")) if first else None
    holders += [Holder(), Holder()]

    assert in_child(lambda: [holder.num_given_up for holder in holders]) == "[1, 1, 1, 1]"
    assert ("ValueError: faulty" in capfd.readouterr().err) == (faulty is not None)


def test_deleted_objects_are_not_called():
    holder = Holder(ValueError("faulty"))
    del holder

    assert in_child(lambda: "fine") == "fine"
