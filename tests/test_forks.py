"""What holds something shared gives it up in a forked child, and nowhere else."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import pytest

from procpipe.forks import give_up_in_children


def in_child(act: Callable[[], object]) -> str:
    """Run something in a forked child; return what it returns, or its error, as text."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            told = str(act())
        except BaseException:
            told = traceback.format_exc()
        os.write(writer, told.encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        told = file.read()
    os.waitpid(pid, 0)
    return told


class Holder:
    def __init__(self, error=None):
        self.error = error
        self.num_given_up = 0
        give_up_in_children(self)

    def give_up_in_child(self):
        self.num_given_up += 1
        if self.error is not None:
            raise self.error


def test_it_is_given_up_in_the_child_only():
    holder = Holder()

    assert in_child(lambda: holder.num_given_up) == "1"
    assert holder.num_given_up == 0


def test_a_child_of_a_child_gives_up_nothing():
    holder = Holder()

    assert in_child(lambda: in_child(lambda: holder.num_given_up)) == "1"


@pytest.mark.parametrize("first", [True, False])
def test_an_error_does_not_keep_others_from_being_given_up(first, capfd):
    others = [Holder(), Holder()]
    faulty = Holder(ValueError("faulty")) if first else None
    others += [Holder(), Holder()]

    assert in_child(lambda: [holder.num_given_up for holder in others]) == "[1, 1, 1, 1]"
    assert ("ValueError: faulty" in capfd.readouterr().err) == (faulty is not None)


def test_deleted_objects_are_not_called():
    holder = Holder(ValueError("faulty"))
    del holder

    assert in_child(lambda: "fine") == "fine"
