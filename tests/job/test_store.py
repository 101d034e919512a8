"""The job's store: sealed by a key that is not in it; failures end waits."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import DistStoreError, HashStore, ProcessGroupGloo, TCPStore

from procpipe.job import store as job_store
from procpipe.job.store import JobStore, launchers_store


def part_of(store, key=None, check=lambda: None, timeout_s=5.0):
    return JobStore(store, "job/", key=key, check=check, timeout_s=timeout_s)


@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_values_are_stored_under_the_prefix(key):
    bare = HashStore()
    store = part_of(bare, key)
    store.set("a", "text")
    store.under("deeper/").set("b", b"\0bytes")

    assert store.get("a") == b"text"
    assert store.under("deeper/").get("b") == b"\0bytes"
    assert store.check(["a"])
    assert not store.check(["a", "b"])
    assert (bare.get("job/a") == b"text") == (key is None)


@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_compare_set_keeps_the_first_value(key):
    store = part_of(HashStore(), key)
    store.compare_set("a", "", "first")
    store.compare_set("a", "", "second")
    assert store.get("a") == b"first"
    store.compare_set("a", "first", "third")
    assert store.get("a") == b"third"


def test_values_written_without_the_key_are_refused():
    bare: Any = HashStore()
    store = part_of(bare, b"k" * 32)
    store.set("right", "value")
    sealed = bare.get("job/right")
    forged = {
        "plain": b"value",
        "empty": b"",
        "of another name": sealed,
        "changed": sealed[:-1] + b"x",
        "longer": sealed + b"x",
        "shorter": sealed[:20],
    }
    for name, value in forged.items():
        bare.set(f"job/{name}", value)
        with pytest.raises(ValueError, match=f"'{name}' was written with another key"):
            store.get(name)
    assert store.get("right") == b"value"


def test_ranks_with_different_keys_or_no_key_fail():
    bare = HashStore()
    part_of(bare, b"a" * 32).set("seat/0", "word")

    with pytest.raises(ValueError, match="was written with another key: give every rank"):
        part_of(bare, b"b" * 32).get("seat/0")
    with pytest.raises(ValueError, match="was written with a key, and this rank has none"):
        part_of(bare).get("seat/0")


def test_a_wait_times_out():
    with pytest.raises(DistStoreError, match=r"a, b: not set within 0\.0 s"):
        part_of(HashStore(), timeout_s=0.0).wait(["a", "b"])
    with pytest.raises(DistStoreError, match=r"in 0\.1 s"):
        part_of(HashStore()).wait(["a"], timedelta(seconds=0.1))


def lost():
    raise KeyError("a peer has ended")


def test_a_wait_inside_of_gloo_ends_with_the_start():
    """As if a rank is killed before gloo connects to it: gloo alone waits its whole timeout."""
    begun_s = time.monotonic()
    with pytest.raises(KeyError, match="a peer has ended"):
        gloo(part_of(HashStore(), check=lost), 0)
    assert time.monotonic() - begun_s < 10.0


def test_gloo_connects_by_a_sealed_store():
    bare, sums = HashStore(), {}

    def run(rank):
        group = gloo(part_of(bare, b"k" * 32), rank)
        ones = torch.ones(3)
        group.allreduce([ones]).wait()
        sums[rank] = ones.tolist()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert sums == {0: [2.0] * 3, 1: [2.0] * 3}


def gloo(store, rank):
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=20)
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return gloo(store, rank, 2, options)


def test_a_thread_that_waits_for_the_store_takes_what_another_has_found(monkeypatch):
    """Symptom: rank 0 was killed during the start, and another rank waited its whole timeout.

    Rank 0 had not opened the store when that rank's main thread looked first. Then the thread that
    announces the rank found it open, rank 0 ended, and the main thread still waited for the port.
    """
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found: list[Any] = []
    is_listening = job_store._is_listening

    def closed_for_the_main_thread(address):
        if threading.current_thread() is not threading.main_thread():
            return is_listening(address)
        if not found:
            thread = threading.Thread(target=lambda: found.append(launchers_store(20.0)))
            thread.start()
            thread.join()
        return False

    monkeypatch.setattr(job_store, "_is_listening", closed_for_the_main_thread)
    assert launchers_store(20.0) is found[0]
