"""Handlers of signals run only after the block that delays them."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from procpipe.signals import put_off


class WokenError(Exception):
    """Raised by the handler."""


@pytest.fixture
def raising():
    """Make SIGUSR1 raise in the main thread."""

    def handler(number, frame):
        raise WokenError

    previous = signal.signal(signal.SIGUSR1, handler)
    yield handler
    signal.signal(signal.SIGUSR1, previous)


def test_a_handler_runs_after_the_block(raising):
    done = []

    def block():
        with put_off():
            os.kill(os.getpid(), signal.SIGUSR1)
            done.append("the block")

    with pytest.raises(WokenError):
        block()
    assert done == ["the block"]
    assert signal.getsignal(signal.SIGUSR1) is raising


def test_an_error_of_the_block_is_not_lost(raising):
    def block():
        with put_off():
            os.kill(os.getpid(), signal.SIGUSR1)
            raise KeyError("boom")

    with pytest.raises(WokenError) as caught:
        block()
    assert isinstance(caught.value.__context__, KeyError)


def test_blocks_may_be_nested(raising):
    done = []

    def block():
        with put_off():
            with put_off():
                os.kill(os.getpid(), signal.SIGUSR1)
            done.append("the outer block")

    with pytest.raises(WokenError):
        block()
    assert done == ["the outer block"]


def test_without_a_signal_nothing_changes():
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with put_off():
        pass

    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before


def test_other_threads_have_no_handlers_to_delay(raising):
    seen = []

    def run():
        with put_off():
            seen.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [raising]


@pytest.fixture
def noting():
    """Make SIGUSR2 add its name to a list."""
    seen = []

    def handler(number, frame):
        seen.append("SIGUSR2")

    previous = signal.signal(signal.SIGUSR2, handler)
    yield seen
    assert signal.signal(signal.SIGUSR2, previous) is handler


def test_of_two_signals_of_a_block_both_count_if_one_raises(raising, noting):
    def block():
        with put_off():
            os.kill(os.getpid(), signal.SIGUSR2)
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(WokenError):
        block()
    assert signal.getsignal(signal.SIGUSR1) is raising
    assert noting == ["SIGUSR2"]


def test_all_handlers_return_if_one_raises_meanwhile(raising, noting, monkeypatch):
    """Symptom: after Ctrl-C and SIGTERM a process could not be ended by SIGTERM any more."""
    came: list[int] = []
    set_handler = signal.signal

    def set_and_raise(number, handler):
        before = set_handler(number, handler)
        if handler is raising and not came:
            came.append(number)
            os.kill(os.getpid(), signal.SIGUSR1)
        return before

    def block():
        with put_off():
            os.kill(os.getpid(), signal.SIGUSR2)

    monkeypatch.setattr("procpipe.signals.signal.signal", set_and_raise)
    with pytest.raises(WokenError):
        block()
    monkeypatch.undo()
    assert came == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is raising
    assert noting == ["SIGUSR2"]
