"""What the doctor finds, advises and measures: checks on made-up hosts, the rest on this one."""

from __future__ import annotations

import re
import resource
from types import SimpleNamespace

import psutil
import pytest
import torch
from rich.console import Console

from procpipe.job.pin import shares
from procpipe.launch.doctor import command as doctor
from procpipe.launch.doctor.checks import (
    CHECKS,
    FAILURE,
    OK,
    WARNING,
    Host,
    Verdict,
    check_channels,
    cpu_quota,
    memory_left,
)
from procpipe.launch.doctor.gpus import Gpu
from procpipe.launch.start_ranks import Result
from tests.launch.started import start_as_forks

GIB = 1 << 30


def gpus(num_gpus, free_bytes=80 * GIB, peers=(0, 1)):
    return [Gpu("H200", f"0000:{k}:00.0", free_bytes, 80 * GIB, peers) for k in range(num_gpus)]


def write(root, **files):
    """Write files of the kernel: ``proc_self_cgroup="0::/"`` is proc/self/cgroup."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


@pytest.fixture
def verdict(monkeypatch, tmp_path):
    """Return what a check says of a host on which all is well, but for what is given."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=16 * GIB))
    for name in ("NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "PROCPIPE_PIN"):
        monkeypatch.delenv(name, raising=False)

    def judge(check, *, cuda=None, files=(65536, 65536), kernel=None, environment=None, **given):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(resource, "getrlimit", lambda _: files)
        for name, value in (environment or {}).items():
            monkeypatch.setenv(name, value)
        write(tmp_path, **(kernel or {}))
        return CHECKS[check](Host(**{"num_processes": 1, "root": tmp_path} | given))

    return judge


def quota(text):
    return {"proc__self__cgroup": "0::/job", "sys__fs__cgroup__job__cpu.max": text}


NEIGHBOURS = {"num_processes": 2, "gpus": gpus(2)}
UNPINNED = {"num_processes": 999, "environment": {"PROCPIPE_PIN": "0"}}
UNUSED = {
    "kernel": {"proc__driver__nvidia__gpus__0": "", "proc__driver__nvidia__gpus__1": ""},
    "environment": {"CUDA_VISIBLE_DEVICES": "7"},
}

#: A check, the host, and what is found.
GOOD = [
    ("torch", {"cuda": "13.0"}, "for CUDA 13.0"),
    ("GPUs", {}, "none: stages run on CPUs"),
    ("GPUs", {"gpus": gpus(2)}, "2 GPUs (H200), at least 80 GiB free"),
    ("peer access", NEIGHBOURS, "between all neighbours"),
    ("NCCL", {"cuda": "13.0"}, "no settings in the environment"),
    ("NCCL", {"environment": {"NCCL_DEBUG": "WARN"}}, "NCCL_DEBUG=WARN"),
    ("cores", {"kernel": quota("max 100000")}, "of its own"),
    ("cores", UNPINNED, "no process is pinned, because of PROCPIPE_PIN=0"),
    ("memory", {}, "16 GiB available"),
    ("open files", {"files": (9, resource.RLIM_INFINITY)}, "no limit"),
]

#: A check, the host, how bad it is, what is found, and the advice.
BAD = [
    ("GPUs", {"gpu_error": "E 999"}, FAILURE, "torch cannot ask for them: E 999", "nvidia-smi"),
    ("GPUs", UNUSED, WARNING, "2 GPUs in this host, none", "is for CPUs only"),
    ("GPUs", UNUSED, WARNING, "none that torch can use", "unset CUDA_VISIBLE_DEVICES (it is 7)"),
    ("GPUs", {"gpus": gpus(2, GIB)}, WARNING, "GPU 0, 1 GiB of 80 GiB free", "choose others"),
    ("peer access", NEIGHBOURS | {"gpus": gpus(2, peers=())}, WARNING, "GPUs 0-1", "topo -p2p r"),
    ("cores", {"kernel": quota("50000 100000")}, WARNING, "0.5 CPUs only, for 1", "--cpus"),
    ("cores", {"num_processes": 999}, WARNING, "none is pinned", "start fewer processes"),
    ("memory", {"num_processes": 99}, WARNING, "16 GiB available, for 99 processes", "is killed"),
    ("open files", {"files": (9, 256)}, WARNING, "256 a process", "have root allow more"),
]


@pytest.mark.parametrize(("check", "host", "found"), GOOD)
def test_what_is_good_is_found_without_advice(verdict, check, host, found):
    result = verdict(check, **host)

    assert (result.status, result.advice) == (OK, "")
    assert found in result.found


@pytest.mark.parametrize(("check", "host", "status", "found", "advice"), BAD)
def test_each_fault_is_found_with_advice(verdict, check, host, status, found, advice):
    result = verdict(check, **host)

    assert result.status == status
    assert found in result.found
    assert advice in result.advice


def test_the_narrowest_control_group_counts(verdict, tmp_path):
    assert cpu_quota(tmp_path) == float("inf")
    assert memory_left(tmp_path) == []
    write(
        tmp_path,
        proc__self__cgroup="0::/jobs/one",
        **{
            "sys__fs__cgroup__jobs__cpu.max": "200000 100000",
            "sys__fs__cgroup__jobs__one__cpu.max": "400000 100000",
            "sys__fs__cgroup__jobs__memory.max": "9000",
            "sys__fs__cgroup__jobs__memory.current": "8900",
            "sys__fs__cgroup__jobs__memory.stat": "anon 400\ninactive_file 400\nslab 3",
            "sys__fs__cgroup__jobs__one__memory.max": "2000",
            "sys__fs__cgroup__jobs__one__memory.current": "10",
        },
    )

    assert cpu_quota(tmp_path) == 2.0
    assert memory_left(tmp_path) == [(1990, 2000), (500, 9000)]
    found = verdict("memory").found
    assert found == "500 B left of the 8.79 KiB that this control group may use, for 1 process"


# -- what is measured ----------------------------------------------------------------------------


def measured(*gb_per_s, latency_s=4e-5, device="cpu"):
    pairs = [
        {"device": device, "latency_s": latency_s, "bytes_per_s": speed * 1e9} for speed in gb_per_s
    ]
    return [*pairs, {"device": device}]


def test_the_measured_channels_are_judged():
    cases = [
        (measured(2, 1.5), [OK, OK], "40 us for 8 B, 2.00 GB/s", ""),
        (measured(2, 0.1), [OK, WARNING], "0.10 GB/s", "top"),
        (measured(2, latency_s=0.004), [WARNING], "4000 us for 8 B", "top"),
        (measured(2, device="cuda"), [WARNING], "2.00 GB/s", "NCCL_DEBUG=INFO"),
        (measured(99, 20, device="cuda"), [OK, WARNING], "others reach 99.00 GB/s", "topo -m"),
        (measured(), [], "", ""),
    ]
    for report, statuses, found, advice in cases:
        verdicts = check_channels(Result(report, "", 4.0), 2)

        assert verdicts.pop("start") == Verdict(
            OK, "2 processes started, connected and ended in 4.0 s"
        )
        assert list(verdicts) == ["stages 0 - 1", "stages 1 - 2"][: len(statuses)]
        assert [each.status for each in verdicts.values()] == statuses
        assert found in str(verdicts)
        assert advice in str(verdicts)


def test_ranks_that_could_not_measure_are_a_failure():
    (verdict,) = check_channels(Result(None, "rank 1 failed", 4.0), 2).values()

    assert verdict.status == FAILURE
    assert verdict.found.endswith("could not measure the channels between them: rank 1 failed")


def test_there_is_a_row_a_check_with_its_advice_below(capsys):
    found = {
        "torch": Verdict(OK, "2.13"),
        "start": Verdict(FAILURE, "exit code 1\n  ValueError: [no markup]", "mend it"),
    }

    Console(width=44).print(doctor.table_of(found))

    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "ok       torch  2.13",
        "failure  start  exit code 1",
        "                  ValueError: [no markup]",
        "                -> mend it",
    ]


@pytest.mark.dist
def test_the_doctor_examines_this_host(capsys, monkeypatch):
    start_as_forks(monkeypatch, 2)
    code = doctor.main(["-n", "2"])

    printed = " ".join(capsys.readouterr().out.split())
    assert code == int("failure" in printed)
    assert "ok start 2 processes started, connected and ended in " in printed
    assert re.search(r"stages 0 - 1 \d+ us for 8 B, [\d.]+ GB/s", printed)
    for name in ("torch", "GPUs", "cores", "memory", "open files"):
        assert re.search(f"(ok|warning) {name} ", printed)
    if shares(2)[0]:
        assert "of its own" in printed or "CPU time" in printed
