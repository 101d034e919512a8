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
from torch import nn

from procpipe import Stage
from procpipe.job.transports import NAMES, Offer, TransportChoice, choose
from tests.cases import for_each

SHM = Offer(["shm", "gloo"])
GLOO = Offer(["gloo"])


def on_gpus(text, sees=None, shares_by_nccl=()):
    """Return the offers of ranks on GPUs, one letter per rank; by default all on one host."""
    all_ranks = range(len(text))
    return [
        Offer(
            ["nccl", "cuda_ipc"],
            gpu,
            [*all_ranks] if sees is None else sees[rank],
            rank in shares_by_nccl,
        )
        for rank, gpu in enumerate(text)
    ]


def table(choice):
    """Write a choice as one letter per pair: n for nccl, c for cuda_ipc, …"""
    num_ranks = len(choice.gpus)
    return [
        "".join("." if a == b else choice.between(a, b)[0] for b in range(num_ranks))
        for a in range(num_ranks)
    ]


@for_each(
    ("offers", "requested", "expected"),
    [
        ([SHM, SHM], None, [".s", "s."]),
        ([SHM, SHM], "gloo", [".g", "g."]),
        ([SHM, GLOO, SHM], None, [".gg", "g.g", "gg."]),
        ([SHM], None, ["."]),
        (on_gpus("AB"), None, [".n", "n."]),
        (on_gpus("AB"), "nccl", [".n", "n."]),
        (on_gpus("AA"), None, [".c", "c."]),
        (on_gpus("AAA"), "cuda_ipc", [".cc", "c.c", "cc."]),
        (on_gpus("A"), None, ["."]),
        (on_gpus("A"), "cuda_ipc", ["."]),
        (on_gpus("AABB"), None, [".cnn", "c.nn", "nn.c", "nnc."]),
        (on_gpus("ABAB"), None, [".ncn", "n.nc", "cn.n", "ncn."]),
        # Two hosts, two ranks per GPU: no rank sees the other host's processes.
        (on_gpus("AABB", [[1], [0], [3], [2]]), None, [".cnn", "c.nn", "nn.c", "nnc."]),
        # NCCL_MULTI_RANK_GPU_ENABLE=1 allows NCCL on a shared GPU, but does not choose it.
        (on_gpus("AAB", None, [0, 1, 2]), "nccl", [".nn", "n.n", "nn."]),
        (on_gpus("AAB", None, [0, 1, 2]), None, [".cn", "c.n", "nn."]),
    ],
)
def test_the_transport_of_each_pair(offers, requested, expected):
    assert table(choose(offers, requested)) == expected


def test_ranks_share_a_gpu_only_with_explicit_devices():
    """Without devices=, all ranks of a launcher that see only one GPU would share it."""
    own, same = (
        [offer._replace(may_share=False) for offer in on_gpus(text)] for text in ("AB", "ABA")
    )

    assert table(choose(own, None)) == [".n", "n."]
    with pytest.raises(
        IndexError, match=r"^ranks 0 and 2 see one GPU each, and it is the same \(cu"
    ):
        choose(same, None)
    with pytest.raises(IndexError, match=r"A\): start fewer .*CUDA_VISIBLE_DEVICES, --gpus-per-t"):
        choose([same[0]._replace(may_share=True), same[2]], None)


def test_offers_and_choices_are_plain_json():
    offers = [Offer(*each) for each in json.loads(json.dumps(on_gpus("AAB")))]

    fields = json.loads(json.dumps(choose(offers, None)))

    assert table(TransportChoice(*fields)) == [".cn", "c.n", "nn."]


@for_each(
    ("offers", "requested", "words"),
    [
        (
            [SHM, GLOO, SHM],
            "shm",
            r"^transport='shm' cannot be used on ranks \[1\]; all ranks can use gloo$",
        ),
        (
            [SHM, *on_gpus("A")],
            None,
            r"^no transport can be used by all ranks: rank 0 shm or gloo; rank 1 nccl or cuda_ipc$",
        ),
        ([SHM, SHM], "cuda_ipc", r"cannot be used on ranks \[0, 1\]; all ranks can use shm or gl"),
        (
            on_gpus("ABCB"),
            "nccl",
            r"^transport='nccl' cannot be used between ranks \[1, 3\], which share a GPU: leave",
        ),
        (on_gpus("AA", None, [0]), "nccl", r"ranks \[0, 1\], .* have NCCL_MULTI_RANK_GPU_ENABLE=1"),
        (
            on_gpus("AAB"),
            "cuda_ipc",
            r"^transport='cuda_ipc' is for ranks that share one GPU, and these are on 2: leave",
        ),
        (
            on_gpus("AAB", [[1], [], []]),
            None,
            r"^ranks \[0, 1\] share a GPU, .* but rank 1 may not open those of ranks \[0\]: run",
        ),
    ],
)
def test_impossible_transports_are_refused(offers, requested, words):
    with pytest.raises(ValueError, match=words):
        choose(offers, requested)


def test_every_chosen_transport_has_a_name():
    chosen = {choose(offers, None).name for offers in ([SHM], [GLOO], on_gpus("A"))}

    assert chosen | {"cuda_ipc"} == set(NAMES)


def test_a_stage_checks_the_name_of_its_transport():
    with pytest.raises(ValueError, match="transport is 'tcp', but must be one of 'shm', 'gloo'"):
        Stage(nn.Sequential(nn.ReLU()), [1], transport="tcp")
    Stage(nn.Sequential(nn.ReLU()), [1], transport="cuda_ipc")  # checked when ranks connect


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
