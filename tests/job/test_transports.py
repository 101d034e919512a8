"""Which transport two ranks use, in every kind of job, and which are refused."""

from __future__ import annotations

import ctypes
import json
from types import SimpleNamespace

import pytest

from procpipe.job.devices import nccl_shares_gpus
from procpipe.job.transports import Offer, choose
from tests.cases import for_each


def on_cpus(hosts):
    """Return the offers of ranks on CPUs, one letter per rank: its host."""
    return [Offer(host) for host in hosts]


def on_gpus(gpus, hosts="", shares_by_nccl=()):
    """Return the offers of ranks on GPUs, one letter per rank: its GPU; by default on one host."""
    hosts = hosts or "x" * len(gpus)
    return [
        Offer(host, gpu, rank in shares_by_nccl)
        for rank, (gpu, host) in enumerate(zip(gpus, hosts, strict=True))
    ]


def table(choice):
    """Write a choice as two letters per pair: sh for shm, so for sockets, nc for nccl, …"""
    num_ranks = len(choice)
    return [
        " ".join("--" if a == b else choice[a][b][:2] for b in range(num_ranks))
        for a in range(num_ranks)
    ]


@for_each(
    ("offers", "expected"),
    [
        (on_cpus("xxy"), ["-- sh so", "sh -- so", "so so --"]),
        (on_gpus("ABA"), ["-- nc cu", "nc -- nc", "cu nc --"]),
        (on_gpus("AABB", "xxyy"), ["-- cu nc nc", "cu -- nc nc", "nc nc -- cu", "nc nc cu --"]),
        (on_gpus("AAB", "", [0, 1, 2]), ["-- nc nc", "nc -- nc", "nc nc --"]),
        (on_gpus("AAB", "", [0, 1]), ["-- cu nc", "cu -- nc", "nc nc --"]),
        ([Offer("x", forced="sockets")] * 2, ["-- so", "so --"]),
    ],
)
def test_the_transport_of_each_pair(offers, expected):
    received = json.loads(json.dumps(offers))

    assert table(json.loads(json.dumps(choose(received)))) == expected


@for_each(
    ("offers", "error", "words"),
    [
        (
            [*on_gpus("AB"), on_gpus("A")[0]._replace(may_share=False)],
            IndexError,
            r"^ranks 0 and 2 see one GPU each.*A\): start fewer .*CUDA_VISIBLE_DEVICES, --gpus",
        ),
        (
            [*on_cpus("x"), *on_gpus("A")],
            ValueError,
            r"^ranks \[1\] compute on GPUs and ranks \[0\] on CPUs: give all ranks devices of one",
        ),
        (
            on_gpus("ABA", "xxy"),
            ValueError,
            r"^ranks 0 and 2 share a GPU, but not their host's sockets: run them as one user in",
        ),
    ],
)
def test_impossible_jobs_are_refused(offers, error, words):
    with pytest.raises(error, match=words):
        choose(offers)


@for_each(
    ("version", "setting", "shares"),
    [(22809, "1", False), (23000, "1", True), (23007, "", False)],
)
def test_nccl_shares_gpus_from_its_version_2_30_on(monkeypatch, version, setting, shares):
    def get_version(found):
        found._obj.value = version

    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", setting)
    loaded = {"libnccl.so.2": SimpleNamespace(ncclGetVersion=get_version)}
    monkeypatch.setattr(ctypes, "CDLL", loaded.__getitem__)

    assert nccl_shares_gpus() == shares
