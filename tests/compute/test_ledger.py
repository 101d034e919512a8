"""The ledger of held bytes: counted in program order, whenever the sizes become known."""

from __future__ import annotations

import pytest
import torch

from procpipe.compute.ledger import Ledger, num_bytes


def test_the_peak_is_the_most_held_at_one_time():
    ledger = Ledger()
    ledger.hold("a", 10)
    ledger.hold("b", 5)
    ledger.release("a")
    ledger.hold("c", 7)
    ledger.settle()
    assert (ledger.peak_bytes, ledger.held_bytes) == (15, 12)
    ledger.release("b")
    ledger.release("c")
    ledger.settle()
    assert (ledger.peak_bytes, ledger.held_bytes) == (15, 0)


def test_a_size_may_be_set_after_holding():
    ledger = Ledger()
    ledger.hold("early")
    ledger.hold("b", 5)
    ledger.release("b")
    ledger.size("early", 100)
    ledger.release("early")
    ledger.settle()
    assert (ledger.peak_bytes, ledger.held_bytes) == (105, 0)


def test_a_key_may_be_used_again():
    ledger = Ledger()
    for size in (3, 8, 2):
        ledger.hold("a", size)
        ledger.release("a")
        ledger.settle()
    assert (ledger.peak_bytes, ledger.held_bytes) == (8, 0)


def test_clear_forgets_all_but_the_peak():
    ledger = Ledger()
    ledger.hold("a", 3)
    ledger.settle()
    ledger.hold("b")  # of a step that fails
    ledger.clear()
    ledger.settle()
    assert (ledger.peak_bytes, ledger.held_bytes) == (3, 0)


def test_a_reset_peak_starts_from_what_is_held():
    ledger = Ledger()
    ledger.hold("a", 5)
    ledger.hold("b", 3)
    ledger.release("a")
    ledger.settle()

    ledger.reset_peak()
    assert ledger.peak_bytes == 3

    ledger.hold("c", 1)
    ledger.settle()
    assert ledger.peak_bytes == 4


def test_every_held_entry_must_have_a_size():
    ledger = Ledger()
    ledger.hold("a")
    with pytest.raises(KeyError):
        ledger.settle()


def test_the_bytes_of_tensors():
    tensors = [
        torch.ones(2, 3),
        None,
        torch.ones(4, dtype=torch.bool),
        torch.ones(0),
        torch.ones(()),
    ]
    assert num_bytes(tensors) == 24 + 4 + 0 + 4
    assert num_bytes([]) == 0
    # Of a view only its own elements count.
    assert num_bytes([torch.ones(10, 10)[0]]) == 40
