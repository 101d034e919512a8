"""What ``procpipe doctor`` says about what it found: pure functions of the facts (see facts.py).

Each check looks at one thing that has ended or slowed down runs, and says what to do about it. A
failure keeps a run from starting or from ending well; a warning makes it slower or fail later.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from procpipe.launch.doctor.facts import NO_LIMIT, Facts
from procpipe.launch.start_ranks import Result
from procpipe.words import counted

_GIB = 1 << 30

#: A process of torch and its libraries alone takes 0.3 GiB.
_MIN_BYTES_PER_PROCESS = _GIB // 2

#: On CPUs, 7 are open and 3 for each process; loaders, logs and drivers come on top.
_FILES_ALONE, _FILES_PER_PROCESS, _COMFORTABLE_FILES = 40, 4, 1024

#: Settings that make NCCL slower between the GPUs of a host, each with what it turns off.
_SLOW_NCCL = {
    "NCCL_P2P_DISABLE": "direct access to one another's memory",
    "NCCL_SHM_DISABLE": "shared memory between processes",
}

#: A host that is not overloaded is far better: 0.03 ms and 1 GB/s on a 2-core virtual machine.
_SLOW_LATENCY_S = 1e-3
_SLOW_CPU_BYTES_PER_S = 0.25e9
_SLOW_GPU_BYTES_PER_S = 5e9

#: A pair is an outlier below this share of the best one's bandwidth.
_OUTLIER = 0.4


class Status(enum.StrEnum):
    """How good something is."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


OK, WARNING, FAILURE = Status

#: What a check yields: status, what was found, and what to do unless that is good.
Verdict = tuple[Status, str] | tuple[Status, str, str]


@dataclass(frozen=True)
class Check:
    """The outcome of a check."""

    name: str  # what was looked at, in a word or two
    status: Status  # how good it is
    found: str  # what was found
    advice: str = ""  # what to do; "" if nothing


def check_host(facts: Facts) -> list[Check]:
    """Judge what this host has."""
    return [Check(name, *verdict) for name, check in _CHECKS.items() for verdict in check(facts)]


def _check_python(facts: Facts) -> Iterator[Verdict]:
    if tuple(map(int, facts.python.split(".")[:2])) < (3, 11):
        yield FAILURE, facts.python, "procpipe needs Python 3.11 or newer"
    else:
        yield OK, facts.python


def _check_torch(facts: Facts) -> Iterator[Verdict]:
    torch = facts.torch
    found = f"{torch.version}, for {f'CUDA {torch.cuda}' if torch.cuda else 'CPUs only'}"
    if not torch.is_distributed:
        yield FAILURE, f"{found}, without torch.distributed", "install torch's own build"
    elif torch.cuda and not torch.nccl:
        yield FAILURE, f"{found}, without NCCL", "install torch's own build: GPUs need NCCL"
    else:
        yield OK, found


def _check_gpus(facts: Facts) -> Iterator[Verdict]:
    found = counted(len(facts.gpus), "GPU")
    found += f" ({', '.join(sorted({gpu.name for gpu in facts.gpus}))})"
    used = [
        f"GPU {k}, {_gib(gpu.free_bytes)} of {_gib(gpu.total_bytes)} free"
        for k, gpu in enumerate(facts.gpus)
        if gpu.free_bytes < 0.9 * gpu.total_bytes
    ]
    if facts.gpu_error:
        yield (
            FAILURE,
            f"torch cannot ask for them: {facts.gpu_error}",
            "see whether nvidia-smi works; if not, repair the driver or load it again",
        )
    elif used:
        yield (
            WARNING,
            f"{found}; in use already: {', '.join(used)}",
            "nvidia-smi lists the processes that use them; end those, or choose others by "
            "CUDA_VISIBLE_DEVICES",
        )
    elif facts.gpus:
        least = min(gpu.free_bytes for gpu in facts.gpus)
        yield OK, f"{found}, at least {_gib(least)} free on each"
    elif not facts.num_nvidia_devices:
        yield OK, "none: stages run on CPUs"
    else:
        found = f"{counted(facts.num_nvidia_devices, 'GPU')} in this host, none that torch can use"
        yield WARNING, found, _why_no_gpu(facts)


def _why_no_gpu(facts: Facts) -> str:
    if not facts.torch.cuda:
        return "this torch is built for CPUs only: install one that is built for CUDA"
    if (visible := facts.environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides them: unset it"
    return (
        f"the driver may be too old for CUDA {facts.torch.cuda} (see nvidia-smi): update it, or "
        "install a torch that is built for an older CUDA"
    )


def _check_peer_access(facts: Facts) -> Iterator[Verdict]:
    gpus = facts.gpus[: facts.num_processes]
    apart = [
        f"{a}-{b}"
        for a, b in itertools.pairwise(range(len(gpus)))
        if b not in gpus[a].peers or a not in gpus[b].peers
    ]
    if apart:
        yield (
            WARNING,
            f"neighbours that cannot reach one another's memory: GPUs {', '.join(apart)}",
            "their tensors go through the host's memory; nvidia-smi topo -p2p r shows why (in a "
            "virtual machine or with IOMMU on, PCI access control must be off)",
        )
    elif len(gpus) > 1:
        yield OK, "between all neighbours"


def _check_nccl(facts: Facts) -> Iterator[Verdict]:
    """Show what is set for NCCL, and judge what is known to slow it down or to stop it."""
    settings = {k: v for k, v in sorted(facts.environment.items()) if k.startswith("NCCL_")}
    names = settings.get("NCCL_SOCKET_IFNAME", "")
    for name, what in _SLOW_NCCL.items():
        if settings.get(name, "0") != "0":
            found, advice = f"{name} turns off {what}", f"unset {name}, or transfers are slower"
            yield WARNING, found, advice
    if not _names_an_interface(names, facts.interfaces):
        yield (
            FAILURE,
            f"NCCL_SOCKET_IFNAME names {names}, and this host has {', '.join(facts.interfaces)}",
            "unset it, or name an interface that there is on every host",
        )
    if facts.torch.nccl or settings:
        version = ".".join(map(str, facts.torch.nccl)) or "none"
        texts = [f"{name}={value}" for name, value in settings.items()]
        yield OK, ", ".join([version, *(texts or ["no settings in the environment"])])


def _names_an_interface(text: str, interfaces: Sequence[str]) -> bool:
    """Return whether an interface is named; NCCL accepts prefixes, =names and ^exclusions."""
    names = [name.removeprefix("=").partition(":")[0] for name in text.split(",") if name]
    if not names or text.startswith("^"):
        return True
    return any(there.startswith(name) for name in names for there in interfaces)


def _check_cores(facts: Facts) -> Iterator[Verdict]:
    num_cpus, num_processes = facts.limits.num_cpus, facts.num_processes
    shares = sorted(set(facts.cores_of))
    if num_cpus is not None and num_cpus < num_processes:
        yield (
            WARNING,
            f"{facts.cores}, but CPU time of {num_cpus:g} CPUs only, for "
            f"{counted(num_processes, 'process')}",
            "raise the container's CPU limit (docker run --cpus, a pod's resources.limits.cpu): "
            "when it is used up, all processes stop until the next tenth of a second",
        )
    elif shares[0] > 0:
        number = f"{shares[0]}" if len(shares) == 1 else f"{shares[0]} to {shares[-1]}"
        yield OK, f"{facts.cores}; each process has {number} of its own"
    elif facts.environment.get("PROCPIPE_PIN") == "0":
        yield OK, f"{facts.cores}; no process is pinned, because of PROCPIPE_PIN=0"
    else:
        yield (
            WARNING,
            f"{facts.cores}, for {num_processes} processes: none is pinned",
            "start fewer processes, or stages that should run at the same time take turns",
        )


def _check_memory(facts: Facts) -> Iterator[Verdict]:
    limits, available = facts.limits, facts.available_bytes
    found = f"{_gib(available)} available"
    if limits.memory_bytes is not None and limits.memory_bytes - limits.used_bytes < available:
        available = limits.memory_bytes - limits.used_bytes
        whole = _gib(limits.memory_bytes)
        found = f"{_gib(available)} left of the {whole} that this control group may use"
    if available < facts.num_processes * _MIN_BYTES_PER_PROCESS:
        yield (
            WARNING,
            f"{found}, for {counted(facts.num_processes, 'process')}",
            "free some, raise the container's limit or start fewer processes: one that finds none "
            "is killed (each takes 0.3 GiB before it has a model)",
        )
    else:
        yield OK, found


def _check_files(facts: Facts) -> Iterator[Verdict]:
    soft, hard = facts.max_files
    needed = _FILES_ALONE + _FILES_PER_PROCESS * facts.num_processes
    more = max(needed, 65536)
    found = f"{soft} a process" if soft < NO_LIMIT else "no limit"
    ways = [f"ulimit -n {min(more, hard)}"] if soft < hard else []
    if hard < more or not ways:
        ways.append(f"have root allow more (limits.conf, docker run --ulimit nofile={more})")
    if soft < needed:
        yield FAILURE, f"{found}, of which {needed} are needed", ", or ".join(ways)
    elif soft < _COMFORTABLE_FILES:
        yield WARNING, f"{found}, which a loader's workers may use up", ", or ".join(ways)
    else:
        yield OK, found


_CHECKS: Mapping[str, Callable[[Facts], Iterator[Verdict]]] = {
    "Python": _check_python,
    "torch": _check_torch,
    "GPUs": _check_gpus,
    "peer access": _check_peer_access,
    "NCCL": _check_nccl,
    "cores": _check_cores,
    "memory": _check_memory,
    "open files": _check_files,
}


def pairs_of(of_ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Combine what the ranks of each pair of neighbours measured: see ``probe.measure``."""
    pairs: list[dict[str, Any]] = [{} for _ in of_ranks[1:]]
    for part in itertools.chain.from_iterable(rank["pairs"] for rank in of_ranks):
        pairs[part["lower"]] |= part
    return pairs


def check_channels(result: Result, num_processes: int) -> list[Check]:
    """Judge how the measurement of the channels ended, and what it found between each pair."""
    processes = counted(num_processes, "process")
    if result.value is None:
        found = f"{processes} could not measure the channels between them: {result.reason}"
        advice = "repair what is found above; otherwise see what the processes report"
        return [Check("start", FAILURE, found, advice)]
    found = f"{processes} started, connected and ended in {result.seconds:.1f} s"
    pairs = pairs_of(result.value)
    is_cpu = all(rank["device"] == "cpu" for rank in result.value)
    best = max(map(_least, pairs), default=0.0)
    checks = [
        Check(f"stages {pair['lower']} - {pair['lower'] + 1}", *_judge(pair, best, is_cpu=is_cpu))
        for pair in pairs
    ]
    return [Check("start", OK, found), *checks]


def _judge(pair: Mapping[str, Any], best: float, *, is_cpu: bool) -> Verdict:
    """Judge one pair; ``best`` is the bandwidth of the best one."""
    found = (
        f"{pair['small_latency_s'] * 1e6:.0f} us for 8 B, {pair['middle_latency_s'] * 1e6:.0f} us "
        f"for 64 KiB; {pair['down_bytes_per_s'] / 1e9:.2f} GB/s down, "
        f"{pair['up_bytes_per_s'] / 1e9:.2f} GB/s up"
    )
    usual = _SLOW_CPU_BYTES_PER_S if is_cpu else _SLOW_GPU_BYTES_PER_S
    if pair["small_latency_s"] > _SLOW_LATENCY_S:
        advice = "see what else runs on this host (top), and give each process a core of its own"
        return WARNING, found, advice
    if _least(pair) < usual:
        return (
            WARNING,
            f"{found}, where {usual / 1e9:.2f} GB/s and much more is usual",
            "see what else runs on this host (top), and whether its CPU time is limited"
            if is_cpu
            else "run once with NCCL_DEBUG=INFO: 'via SHM' or 'via NET' means that these GPUs "
            "cannot reach one another directly",
        )
    if _least(pair) < _OUTLIER * best:
        return (
            WARNING,
            f"{found}, where others reach {best / 1e9:.2f} GB/s",
            "choose the order of devices so that neighbours are close (nvidia-smi topo -m), or a "
            "balance that cuts where activations are small",
        )
    return OK, found


def _least(pair: Mapping[str, Any]) -> float:
    return float(min(pair["down_bytes_per_s"], pair["up_bytes_per_s"]))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
