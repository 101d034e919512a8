"""Which transport two ranks use, in every kind of job, and which are refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from procpipe.job.transports import Offer, TransportChoice, choose
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
    num_ranks = len(choice.places)
    return [
        " ".join("--" if a == b else choice.between(a, b)[:2] for b in range(num_ranks))
        for a in range(num_ranks)
    ]


@for_each(
    ("offers", "expected"),
    [
        (on_cpus("x"), ["--"]),
        (on_cpus("xx"), ["-- sh", "sh --"]),
        (on_cpus("xy"), ["-- so", "so --"]),
        (on_cpus("xxy"), ["-- sh so", "sh -- so", "so so --"]),
        (on_gpus("A"), ["--"]),
        (on_gpus("AB"), ["-- nc", "nc --"]),
        (on_gpus("AA"), ["-- cu", "cu --"]),
        (on_gpus("ABA"), ["-- nc cu", "nc -- nc", "cu nc --"]),
        (on_gpus("AABB", "xxyy"), ["-- cu nc nc", "cu -- nc nc", "nc nc -- cu", "nc nc cu --"]),
        (on_gpus("AAB", "", [0, 1, 2]), ["-- nc nc", "nc -- nc", "nc nc --"]),
        (on_gpus("AAB", "", [0, 1]), ["-- cu nc", "cu -- nc", "nc nc --"]),
        ([Offer("x", forced="sockets")] * 2, ["-- so", "so --"]),
    ],
)
def test_the_transport_of_each_pair(offers, expected):
    assert table(choose(offers)) == expected


def test_offers_and_choices_are_plain_json():
    offers = [Offer(*each) for each in json.loads(json.dumps(on_gpus("AAB")))]

    fields = json.loads(json.dumps(choose(offers)))

    assert TransportChoice(*fields) == ("cuda_ipc", "nccl", ["A", "A", "B"])


def guessed(gpus):
    return [offer._replace(may_share=False) for offer in on_gpus(gpus)]


@for_each(
    ("offers", "error", "words"),
    [
        (guessed("ABA"), IndexError, r"^ranks 0 and 2 see one GPU each, and it is the same \(cu"),
        (
            [*on_gpus("A"), *guessed("A")],
            IndexError,
            r"A\): start fewer .*CUDA_VISIBLE_DEVICES, --gpus-per-t",
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


PRINT_NCCL = """
import os
from procpipe.job.devices import nccl_shares_gpus
for version, setting in [("22809", "1"), ("23000", "1"), ("23007", "")]:
    os.environ |= {"VERSION": version, "NCCL_MULTI_RANK_GPU_ENABLE": setting}
    print(version, setting, nccl_shares_gpus())
"""


@pytest.mark.dist
def test_the_version_of_the_loaded_nccl_is_used(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    code = "#include <stdlib.h>\n"
    code += 'int ncclGetVersion(int *version) { *version = atoi(getenv("VERSION")); return 0; }\n'
    source.write_text(code + "".join(f"void {name}(void) {{}}\n" for name in functions_of_nccl()))
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", library, source]
    subprocess.run(command, check=True, timeout=60)
    done = subprocess.run(
        [sys.executable, "-c", PRINT_NCCL],
        env=os.environ | {"LD_PRELOAD": str(library), "VERSION": "0"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert done.stdout.splitlines() == ["22809 1 False", "23000 1 True", "23007  False"]


def functions_of_nccl():
    """Return NCCL's functions that a CUDA build of torch needs to be imported."""
    library = Path(torch.__file__).with_name("lib") / "libtorch_cuda.so"
    if not library.exists():
        return set()
    command = ["nm", "-D", "--undefined-only", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return set(re.findall(r" U (nccl\w+)", listed)) - {"ncclGetVersion"}
