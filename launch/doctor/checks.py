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
from procpipe.words import bytes_text, counted

_MIB, _GIB = 1 << 20, 1 << 30

#: NCCL takes about 10 MiB for each pair of GPUs without peer access, a loader more.
_MIN_SHM_BYTES = 256 * _MIB

#: A process of torch and its libraries alone takes 0.3 GiB.
_MIN_BYTES_PER_PROCESS = _GIB // 2

#: On CPUs, 7 are open and 3 for each process; loaders, logs and drivers come on top.
_FILES_ALONE, _FILES_PER_PROCESS, _COMFORTABLE_FILES = 40, 4, 1024

#: CUDA's hardware queues, as a rank sets them (``job/devices.py``).
_QUEUES_IF_UNSET = "32"

_SLOW_NAME_S = 2.0

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
        yield OK, found + (f", NCCL {'.'.join(map(str, torch.nccl))}" if torch.nccl else "")


def _check_gpus(facts: Facts) -> Iterator[Verdict]:
    used = [k for k, gpu in enumerate(facts.gpus) if gpu.free_bytes < 0.9 * gpu.total_bytes]
    found = counted(len(facts.gpus), "GPU")
    found += f" ({', '.join(sorted({gpu.name for gpu in facts.gpus}))})"
    if facts.gpu_error:
        yield (
            FAILURE,
            f"torch cannot ask for them: {facts.gpu_error}",
            "see whether nvidia-smi works; if not, repair the driver or load it again",
        )
    elif used:
        shares = [
            f"GPU {k}, {_gib(facts.gpus[k].free_bytes)} of {_gib(facts.gpus[k].total_bytes)} free"
            for k in used
        ]
        yield (
            WARNING,
            f"{found}; in use already: {', '.join(shares)}",
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
        if not facts.torch.cuda:
            advice = "this torch is built for CPUs only: install one that is built for CUDA"
        elif (visible := facts.environment.get("CUDA_VISIBLE_DEVICES")) is not None:
            advice = f"CUDA_VISIBLE_DEVICES={visible!r} hides them: unset it"
        else:
            advice = (
                f"the driver may be too old for CUDA {facts.torch.cuda} (see nvidia-smi): update "
                "it, or install a torch that is built for an older CUDA"
            )
        yield WARNING, found, advice


def _check_sharing(facts: Facts) -> Iterator[Verdict]:
    if 0 < len(facts.gpus) < facts.num_processes:
        yield (
            WARNING,
            f"{facts.num_processes} processes for {counted(len(facts.gpus), 'GPU')}",
            f"start {counted(len(facts.gpus), 'process')}, or set the GPU of each one: "
            "Stage(..., devices=['cuda:0', 'cuda:0', ...])",
        )


def _check_peer_access(facts: Facts) -> Iterator[Verdict]:
    gpus = facts.gpus[: facts.num_processes]
    apart = [
        f"{a}-{b}"
        for a, b in itertools.pairwise(range(len(gpus)))
        if b not in gpus[a].peers or a not in gpus[b].peers
    ]
    if len(gpus) < 2:
        return
    if apart:
        yield (
            WARNING,
            f"neighbours that cannot reach one another's memory: GPUs {', '.join(apart)}",
            "their tensors go through the host's memory; nvidia-smi topo -p2p r shows why (in a "
            "virtual machine or with IOMMU on, PCI access control must be off)",
        )
    elif facts.environment.get("NCCL_P2P_DISABLE", "0") != "0":
        yield (
            WARNING,
            "turned off by NCCL_P2P_DISABLE",
            "unset NCCL_P2P_DISABLE, or tensors go through the host's memory",
        )
    else:
        yield OK, "between all neighbours"


def _check_hardware_queues(facts: Facts) -> Iterator[Verdict]:
    number = facts.environment.get("CUDA_DEVICE_MAX_CONNECTIONS", _QUEUES_IF_UNSET)
    if facts.gpus and number == _QUEUES_IF_UNSET:
        yield OK, f"{number} hardware queues a process"
    elif facts.gpus:
        yield (
            WARNING,
            f"CUDA_DEVICE_MAX_CONNECTIONS={number}",
            "unset it, if nothing else needs it: a stage has a stream for each rank it sends to "
            "or receives from, and streams of one hardware queue wait for one another",
        )


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


def _check_threads(facts: Facts) -> Iterator[Verdict]:
    number = facts.environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    least = min(facts.cores_of) or 1
    if number.isdigit() and 0 < int(number) <= least:
        yield OK, f"OMP_NUM_THREADS={number}"
    elif number:
        yield (
            WARNING,
            f"OMP_NUM_THREADS={number}, and {counted(least, 'core')} a process",
            f"unset it, or set it to {least}: more threads than cores wait for one another",
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
    elif facts.swapped_bytes > _GIB:
        yield (
            WARNING,
            f"{found}, {_gib(facts.swapped_bytes)} swapped out",
            "end what needs it: a stage that waits for its memory delays all others",
        )
    else:
        yield OK, found


def _check_shared_memory(facts: Facts) -> Iterator[Verdict]:
    advice = (
        "give the container more (docker run --shm-size=1g or --ipc=host; an emptyDir of medium "
        "Memory at /dev/shm in a pod): NCCL and loaders' workers need it"
    )
    if facts.shm_bytes is None:
        yield WARNING, "there is no /dev/shm", advice
        return
    free, size = facts.shm_bytes
    if free >= _MIN_SHM_BYTES:
        yield OK, f"{_gib(free)} free in /dev/shm"
        return
    if size >= _MIN_SHM_BYTES:
        advice = "remove files that programs which have ended left in /dev/shm"
    yield WARNING, f"{bytes_text(free)} of {bytes_text(size)} free in /dev/shm", advice


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


def _check_address_space(facts: Facts) -> Iterator[Verdict]:
    if facts.max_address_bytes < NO_LIMIT:
        yield (
            FAILURE,
            f"a process may have {_gib(facts.max_address_bytes)}",
            "ulimit -v unlimited: shared memory and CUDA reserve far more than they use",
        )


def _check_sockets(facts: Facts) -> Iterator[Verdict]:
    faults: list[Verdict] = []
    if error := facts.loopback_error:
        advice = "bring the loopback interface up (ip link set lo up), and let a firewall pass it"
        faults.append((FAILURE, f"nothing can be sent over 127.0.0.1 ({error})", advice))
    sandbox = "run on Linux, and in a sandbox that allows {}"
    if error := facts.unix_error:
        found = f"abstract unix sockets cannot be used ({error})"
        faults.append((FAILURE, found, sandbox.format("them")))
    if error := facts.memfd_error:
        found = f"memory cannot be shared by memfd_create ({error})"
        faults.append((FAILURE, found, sandbox.format("it")))
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        names = facts.environment.get(variable, "")
        if not _names_an_interface(names, facts.interfaces):
            found = f"{variable} names {names}, and this host has {', '.join(facts.interfaces)}"
            advice = "unset it, or name an interface that there is on every host"
            faults.append((FAILURE, found, advice))
    yield from faults or [(OK, "loopback and abstract unix sockets")]


def _names_an_interface(text: str, interfaces: Sequence[str]) -> bool:
    """Return whether an interface is named; NCCL accepts prefixes, =names and ^exclusions."""
    names = [name.removeprefix("=").partition(":")[0] for name in text.split(",") if name]
    if not names or text.startswith("^"):
        return True
    return any(there.startswith(name) for name in names for there in interfaces)


def _check_name(facts: Facts) -> Iterator[Verdict]:
    name, (error, seconds) = facts.host_name, facts.name_lookup
    advice = (
        f"put {name} into /etc/hosts; until then give torchrun --local-addr=127.0.0.1 "
        "(procpipe run needs no such address)"
    )
    if error:
        yield WARNING, f"no address is found for {name} ({error})", advice
    elif seconds > _SLOW_NAME_S:
        yield WARNING, f"finding the address of {name} took {seconds:.1f} s", advice
    else:
        yield OK, name


_CHECKS: Mapping[str, Callable[[Facts], Iterator[Verdict]]] = {
    "Python": _check_python,
    "torch": _check_torch,
    "GPUs": _check_gpus,
    "sharing GPUs": _check_sharing,
    "peer access": _check_peer_access,
    "streams": _check_hardware_queues,
    "cores": _check_cores,
    "threads": _check_threads,
    "memory": _check_memory,
    "shared memory": _check_shared_memory,
    "open files": _check_files,
    "address space": _check_address_space,
    "sockets": _check_sockets,
    "host name": _check_name,
}


def pairs_of(of_ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Combine what the ranks of each pair of neighbours measured: see ``probe.measure``."""
    pairs: list[dict[str, Any]] = [{} for _ in of_ranks[1:]]
    for part in itertools.chain.from_iterable(rank["pairs"] for rank in of_ranks):
        pairs[part["lower"]] |= part
    return pairs


def check_channels(result: Result, num_processes: int) -> list[Check]:
    """Judge how the measurement of the channels ended, and what it found."""
    processes = counted(num_processes, "process")
    if result.value is None:
        found = f"{processes} could not measure the channels between them: {result.reason}"
        advice = "repair what is found above; otherwise see what the processes report"
        return [Check("start", FAILURE, found, advice)]
    found = f"{processes} started, connected and ended in {result.seconds:.1f} s"
    start = Check("start", OK, found)
    pairs = pairs_of(result.value)
    if not pairs:
        return [start, Check("channels", OK, "none, as one process has no neighbours")]
    is_cpu = all(rank["device"] == "cpu" for rank in result.value)
    faults = [*_check_latency(pairs), *_check_bandwidth(pairs, is_cpu=is_cpu)]
    found = f"{min(map(_least, pairs)) / 1e9:.2f} GB/s and more between neighbouring stages"
    return [start, *(faults or [Check("channels", OK, found)])]


def _check_latency(pairs: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    slowest = max(pairs, key=lambda pair: float(pair["small_latency_s"]))
    latency_s = slowest["small_latency_s"]
    if latency_s > _SLOW_LATENCY_S:
        yield Check(
            "latency",
            WARNING,
            f"a message of 8 bytes takes {latency_s * 1e3:.1f} ms between {_stages(slowest)}",
            "see what else runs on this host (top), and give each process a core of its own",
        )


def _check_bandwidth(pairs: Sequence[Mapping[str, Any]], *, is_cpu: bool) -> Iterator[Check]:
    narrowest = min(pairs, key=_least)
    least, most = _least(narrowest), max(map(_least, pairs))
    usual = _SLOW_CPU_BYTES_PER_S if is_cpu else _SLOW_GPU_BYTES_PER_S
    found = f"{least / 1e9:.2f} GB/s between {_stages(narrowest)}"
    if least < usual:
        yield Check(
            "bandwidth",
            WARNING,
            f"{found}, where {usual / 1e9:.2f} GB/s and much more is usual",
            "see what else runs on this host (top), and whether its CPU time is limited"
            if is_cpu
            else "run once with NCCL_DEBUG=INFO: 'via SHM' or 'via NET' means that these GPUs "
            "cannot reach one another directly",
        )
    elif least < _OUTLIER * most:
        yield Check(
            "bandwidth",
            WARNING,
            f"{found}, {most / 1e9:.2f} GB/s between others",
            "choose the order of devices so that neighbours are close (nvidia-smi topo -m), or a "
            "balance that cuts where activations are small",
        )


def _stages(pair: Mapping[str, Any]) -> str:
    return f"stages {pair['lower']} and {pair['lower'] + 1}"


def _least(pair: Mapping[str, Any]) -> float:
    return float(min(pair["down_bytes_per_s"], pair["up_bytes_per_s"]))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
