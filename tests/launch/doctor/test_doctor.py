"""What the doctor finds, advises and measures: checks on made-up facts, the rest on this host."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from procpipe.job.pin import shares
from procpipe.launch.doctor import command as doctor
from procpipe.launch.doctor.checks import Check, Status, check_channels, check_host
from procpipe.launch.doctor.facts import (
    Facts,
    GroupLimits,
    TorchBuild,
    VisibleGpu,
    limits_of,
)
from procpipe.launch.start_ranks import Result
from tests.launch.forked import start_as_forks

GIB = 1 << 30

GOOD = Facts(
    num_processes=2,
    python="3.12.1",
    torch=TorchBuild("2.13.0+cpu"),
    num_nvidia_devices=0,
    gpus=(),
    gpu_error="",
    cores="8 cores",
    cores_of=(4, 4),
    limits=GroupLimits(),
    available_bytes=16 * GIB,
    max_files=(65536, 65536),
    interfaces=("lo", "eth0"),
    environment={},
)


def gpus(num_gpus, free_bytes=80 * GIB, peers=None):
    return tuple(
        VisibleGpu(
            "H200",
            f"0000:{k:02x}:00.0",
            free_bytes,
            80 * GIB,
            tuple(range(num_gpus)) if peers is None else peers,
        )
        for k in range(num_gpus)
    )


WITH_GPUS = {"torch": TorchBuild("2.13.0+cu130", True, "13.0", (2, 28, 9)), "num_nvidia_devices": 2}


def test_a_good_host_passes_all_checks():
    checks = {check.name: check for check in check_host(replace(GOOD, gpus=gpus(2), **WITH_GPUS))}

    for check in (*check_host(GOOD), *checks.values()):
        assert (check.status, check.advice) == (Status.OK, "")
    assert checks["torch"].found == "2.13.0+cu130, for CUDA 13.0"
    assert checks["NCCL"].found == "2.28.9, no settings in the environment"
    assert checks["GPUs"].found == "2 GPUs (H200), at least 80.0 GiB free on each"
    assert checks["peer access"].found == "between all neighbours"


BAD = [
    ({"python": "3.10.9"}, "Python: failure", "3.10.9", "needs Python 3.11 or newer"),
    (
        {"torch": TorchBuild("2.11.0", False)},
        "torch: failure",
        "without torch.distributed",
        "build",
    ),
    (
        {"torch": TorchBuild("2.11.0", True, "12.4")},
        "torch: failure",
        "without NCCL",
        "GPUs need NCCL",
    ),
    ({"gpu_error": "E 999"}, "GPUs: failure", "torch cannot ask for them: E 999", "nvidia-smi"),
    (
        {"num_nvidia_devices": 4},
        "GPUs: warning",
        "4 GPUs in this host, none that torch can use",
        "this torch is built for CPUs only: install one that is built for CUDA",
    ),
    (
        {**WITH_GPUS, "environment": {"CUDA_VISIBLE_DEVICES": ""}},
        "GPUs: warning",
        "2 GPUs in this host, none",
        "CUDA_VISIBLE_DEVICES='' hides them: unset it",
    ),
    (WITH_GPUS, "GPUs: warning", "none that torch can use", "may be too old for CUDA 13.0"),
    (
        {**WITH_GPUS, "gpus": gpus(2, free_bytes=GIB)},
        "GPUs: warning",
        "in use already: GPU 0, 1.0 GiB of 80.0 GiB free, GPU 1",
        "choose others by CUDA_VISIBLE_DEVICES",
    ),
    (
        {**WITH_GPUS, "gpus": gpus(2, peers=())},
        "peer access: warning",
        "cannot reach one another's memory: GPUs 0-1",
        "nvidia-smi topo -p2p r",
    ),
    (
        {**WITH_GPUS, "gpus": gpus(2), "environment": {"NCCL_P2P_DISABLE": "1"}},
        "NCCL: warning",
        "NCCL_P2P_DISABLE turns off direct access",
        "unset NCCL_P2P_DISABLE",
    ),
    (
        {"limits": GroupLimits(num_cpus=1.5)},
        "cores: warning",
        "8 cores, but CPU time of 1.5 CPUs only, for 2 processes",
        "docker run --cpus",
    ),
    (
        {"cores_of": (0, 0)},
        "cores: warning",
        "for 2 processes: none is pinned",
        "start fewer processes",
    ),
    (
        {"available_bytes": GIB // 2},
        "memory: warning",
        "0.5 GiB available, for 2 processes",
        "one that finds none is killed",
    ),
    (
        {"limits": GroupLimits(None, 4 * GIB, 7 * GIB // 2)},
        "memory: warning",
        "0.5 GiB left of the 4.0 GiB that this control group may use",
        "raise the container's limit",
    ),
    (
        {"max_files": (40, 65536)},
        "open files: failure",
        "40 a process, of which 48 are",
        "ulimit -n 65536",
    ),
    (
        {"max_files": (256, 4096)},
        "open files: warning",
        "256 a process, which a loader's workers may use up",
        "ulimit -n 4096, or have root allow more (limits.conf,",
    ),
    (
        {"max_files": (256, 256)},
        "open files: warning",
        "256 a process",
        "have root allow more",
    ),
    (
        {"environment": {"NCCL_SOCKET_IFNAME": "=ib0,bond"}},
        "NCCL: failure",
        "NCCL_SOCKET_IFNAME names =ib0,bond, and this host has lo, eth0",
        "unset it, or name an interface",
    ),
]


def test_each_fault_is_found_with_advice():
    for changes, what, found, advice in BAD:
        (fault,) = [check for check in check_host(replace(GOOD, **changes)) if check.status != "ok"]

        assert f"{fault.name}: {fault.status}" == what, changes
        assert found in fault.found, changes
        assert advice in fault.advice, changes


def test_interfaces_are_named_as_nccl_reads_them():
    for named in ("eth0", "eth", "=eth0", "^docker0", "ib0,eth0", "eth0:23", ""):
        facts = replace(GOOD, environment={"NCCL_SOCKET_IFNAME": named})

        assert {check.status for check in check_host(facts)} == {Status.OK}, named


def test_settings_of_nccl_are_shown():
    settings = {"NCCL_DEBUG": "WARN", "NCCL_P2P_DISABLE": "1", "OTHER": "1"}
    checks = check_host(replace(GOOD, environment=settings))

    found = [(check.status, check.found) for check in checks if check.name == "NCCL"]
    assert [status for status, _ in found] == [Status.WARNING, Status.OK]
    assert found[1][1] == "none, NCCL_DEBUG=WARN, NCCL_P2P_DISABLE=1"


def test_pinning_that_was_turned_off_is_no_warning():
    facts = replace(GOOD, cores_of=(0, 0), environment={"PROCPIPE_PIN": "0"})

    (cores,) = (check for check in check_host(facts) if check.name == "cores")
    assert cores.status == "ok"
    assert cores.found.endswith("no process is pinned, because of PROCPIPE_PIN=0")


# -- what is measured ----------------------------------------------------------------------------


def measured(*gb_per_s, small_s=4e-5, device="cpu"):
    pairs = [
        {
            "lower": lower,
            "small_latency_s": small_s,
            "middle_latency_s": small_s,
            "down_bytes_per_s": speed * 1e9,
            "up_bytes_per_s": 2 * speed * 1e9,
        }
        for lower, speed in enumerate(gb_per_s)
    ]
    of_ranks = [[pair] for pair in pairs] + [[]]
    return [{"device": device, "pairs": of_rank} for of_rank in of_ranks]


def test_the_measured_channels_are_judged():
    good = "40 us for 8 B, 40 us for 64 KiB; 2.00 GB/s down, 4.00 GB/s up"
    cases = [
        (measured(2, 1.5), ["ok", "ok"], good, ""),
        (measured(2, 0.1), ["ok", "warning"], "where 0.25 GB/s and much more is usual", "top"),
        (measured(2, device="cuda:0"), ["warning"], "where 5.00 GB/s", "NCCL_DEBUG=INFO"),
        (
            measured(100, 20, device="cuda:0"),
            ["ok", "warning"],
            "where others reach 100.00 GB/s",
            "nvidia-smi topo -m",
        ),
        (measured(2, small_s=0.004), ["warning"], "4000 us for 8 B", "a core of its own"),
        (measured(), [], "", ""),
    ]
    for report, statuses, found, advice in cases:
        start, *checks = check_channels(Result(report, "", 4.0), 2)

        assert start.status == "ok"
        assert [check.status for check in checks] == statuses
        assert [check.name for check in checks] == ["stages 0 - 1", "stages 1 - 2"][: len(statuses)]
        assert any(found in check.found for check in checks) or not checks
        assert any(advice in check.advice for check in checks) or not checks


# -- how it is printed ---------------------------------------------------------------------------

CHECKS = [
    Check("torch", Status.OK, "2.13"),
    Check("memory", Status.WARNING, "0.1 GiB available", "free some"),
    Check("start", Status.FAILURE, "exit code 1\n  rank 1: ValueError: [no markup]", "mend it"),
]


def test_there_is_a_line_a_check_and_its_advice(capsys):
    doctor.print_table(Console(), CHECKS)

    assert capsys.readouterr().out.splitlines() == [
        "ok       torch   2.13",
        "warning  memory  0.1 GiB available",
        "                 -> free some",
        "failure  start   exit code 1",
        "                   rank 1: ValueError: [no markup]",
        "                 -> mend it",
    ]


def test_a_terminal_shows_all_checks():
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=40, color_system=None)

    doctor.print_table(console, CHECKS)

    for words in ("ok", "free some", "[no markup]"):
        assert words in written.getvalue()
    assert all(len(line) <= 40 for line in written.getvalue().splitlines())


def test_with_fewer_gpus_than_processes_nothing_is_measured(capsys):
    facts = replace(GOOD, gpus=gpus(1), **WITH_GPUS)

    code = doctor._examine(facts, Console(), doctor._parser().parse_args([]))

    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert lines[-2].split(maxsplit=2) == [
        *("warning", "start"),
        "not tried: 2 processes for 1 GPU",
    ]
    assert lines[-1].endswith("procpipe doctor -n 1 measures")


# -- this host -----------------------------------------------------------------------------------


@pytest.mark.dist
def test_the_doctor_examines_this_host(capsys, monkeypatch):
    start_as_forks(monkeypatch, 2)
    code = doctor.main(["-n", "2", "--json"])

    report = json.loads(capsys.readouterr().out)
    by_name = {check["name"]: check for check in report["checks"]}
    assert by_name["start"]["status"] == "ok", by_name["start"]["found"]
    assert by_name["start"]["found"].startswith("2 processes started, connected and ended in ")
    (pair,) = report["pairs"]
    assert pair["lower"] == 0
    assert all(1e-6 < pair[f"{size}_latency_s"] < 1 for size in ("small", "middle"))
    assert all(1e6 < pair[f"{way}_bytes_per_s"] < 1e12 for way in ("down", "up"))
    assert report["is_good"] == (code == 0)
    assert {"Python", "torch", "GPUs", "cores", "memory", "open files"} <= set(by_name)
    if shares(2)[0]:
        assert "of its own" in by_name["cores"]["found"] or "CPU time" in by_name["cores"]["found"]


# -- limits --------------------------------------------------------------------------------------


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, GroupLimits()),
        (
            {
                "proc/self/cgroup": "0::/",
                "sys/fs/cgroup/cpu.max": "150000 100000",
                "sys/fs/cgroup/memory.max": "1000",
                "sys/fs/cgroup/memory.current": "700",
                "sys/fs/cgroup/memory.stat": "anon 400\ninactive_file 200\nslab 3",
            },
            GroupLimits(1.5, 1000, 500),
        ),
        (
            {  # the narrowest of the groups around this process
                "proc/self/cgroup": "0::/jobs/job-1/task",
                "sys/fs/cgroup/jobs/cpu.max": "200000 100000",
                "sys/fs/cgroup/jobs/job-1/cpu.max": "400000 100000",
                "sys/fs/cgroup/jobs/job-1/task/cpu.max": "max 100000",
                "sys/fs/cgroup/jobs/memory.max": "9000",
                "sys/fs/cgroup/jobs/memory.current": "8500",
                "sys/fs/cgroup/jobs/job-1/memory.max": "2000",
                "sys/fs/cgroup/jobs/job-1/memory.current": "10",
            },
            GroupLimits(2.0, 9000, 8500),
        ),
        (
            {  # version 1, in a container that sees its own group as the root
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/1\n3:memory:/docker/1\n1:name=x:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "4000",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "3000",
                "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 1000",
            },
            GroupLimits(0.5, 4000, 2000),
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/\n3:memory:/",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            },
            GroupLimits(),
        ),
    ],
    ids=["nothing", "version 2", "nested", "version 1", "version 1 without"],
)
def test_the_limits_of_control_groups(tmp_path, files, expected):
    assert limits_of(write(tmp_path, files)) == expected
