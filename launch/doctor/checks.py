"""What ``procpipe doctor`` says of what it found: pure functions of the facts (see facts.py).

Each check looks at one thing that has ended or slowed down runs, and for whatever is not well says
what to do. A failure keeps a run from starting or from ending well, a warning makes it slower or
fail later.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from procpipe.launch.doctor.facts import Facts
from procpipe.words import bytes_text, counted

_MIB, _GIB = 1 << 20, 1 << 30


#: NCCL takes about 10 MiB a pair of GPUs that cannot reach one another, a loader more.
_MIN_SHM_BYTES = 256 * _MIB

#: A process of torch and its libraries alone takes 0.3 GiB.
_MIN_BYTES_A_PROCESS = _GIB // 2

#: 7 and 3 a process are open on CPUs; loaders, logs and drivers come on top.
_FILES_ALONE, _FILES_A_PROCESS, _COMFORTABLE_FILES = 40, 4, 1024

_SLOW_NAME_S = 2.0


class Status(enum.StrEnum):
    """How well something is."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Check:
    """The outcome of a check.

    Attributes:
        name: what was looked at, in a word or two.
        status: how well it is.
        told: what was found.
        mend: what to do; "" if all is well.
    """

    name: str
    status: Status
    told: str
    mend: str = ""


def ok(name: str, told: str) -> Check:
    """Return what all is well with."""
    return Check(name, Status.OK, told)


def warning(name: str, told: str, mend: str) -> Check:
    """Return what makes a run slower, or fail later."""
    return Check(name, Status.WARNING, told, mend)


def failure(name: str, told: str, mend: str) -> Check:
    """Return what keeps a run from starting, or from ending well."""
    return Check(name, Status.FAILURE, told, mend)


def check_host(facts: Facts) -> list[Check]:
    """Judge what this host has."""
    parts = (
        _check_python,
        _check_torch,
        _check_gpus,
        _check_sharing,
        _check_peer_access,
        _check_cores,
        _check_threads,
        _check_memory,
        _check_shared_memory,
        _check_files,
        _check_address_space,
        _check_sockets,
        _check_name,
    )
    return [check for part in parts for check in part(facts)]


def _check_python(facts: Facts) -> Iterator[Check]:
    if _numbers(facts.python) < (3, 11):
        yield failure("Python", facts.python, "procpipe needs Python 3.11 or newer")
    else:
        yield ok("Python", facts.python)


def _check_torch(facts: Facts) -> Iterator[Check]:
    torch = facts.torch
    built = f"for CUDA {torch.cuda}" if torch.cuda else "for CPUs only"
    told = f"{torch.version}, {built}"
    if not torch.is_distributed:
        yield failure("torch", f"{told}, without torch.distributed", "install torch's own build")
    elif torch.cuda and not torch.nccl:
        yield failure("torch", f"{told}, without NCCL", "install torch's own build: GPUs need NCCL")
    else:
        nccl = f", NCCL {'.'.join(map(str, torch.nccl))}" if torch.nccl else ""
        yield ok("torch", f"{told}{nccl}")


def _check_gpus(facts: Facts) -> Iterator[Check]:
    if facts.gpu_error:
        yield failure(
            "GPUs",
            f"torch cannot be asked for them: {facts.gpu_error}",
            "see whether nvidia-smi works; if not, the driver must be mended or loaded again",
        )
    elif not facts.gpus and facts.num_nvidia_devices:
        told = f"{counted(facts.num_nvidia_devices, 'GPU')} in this host, none that torch can use"
        if not facts.torch.cuda:
            mend = "this torch is built for CPUs only: install one that is built for CUDA"
        elif "CUDA_VISIBLE_DEVICES" in facts.environment:
            seen = facts.environment["CUDA_VISIBLE_DEVICES"]
            mend = f"CUDA_VISIBLE_DEVICES={seen!r} hides them: unset it"
        else:
            mend = (
                f"the driver may be too old for CUDA {facts.torch.cuda} (see nvidia-smi): update "
                "it, or install a torch that is built for an older CUDA"
            )
        yield warning("GPUs", told, mend)
    elif not facts.gpus:
        yield ok("GPUs", "none: stages run on CPUs")
    else:
        used = [k for k, gpu in enumerate(facts.gpus) if gpu.free_bytes < 0.9 * gpu.total_bytes]
        names = ", ".join(sorted({gpu.name for gpu in facts.gpus}))
        told = f"{counted(len(facts.gpus), 'GPU')} ({names})"
        if used:
            yield warning(
                "GPUs",
                f"{told}; in use already: "
                + ", ".join(
                    f"GPU {k}, {_gib(facts.gpus[k].free_bytes)} of "
                    f"{_gib(facts.gpus[k].total_bytes)} free"
                    for k in used
                ),
                "nvidia-smi tells who uses them; end it, or choose others by CUDA_VISIBLE_DEVICES",
            )
        else:
            least = min(gpu.free_bytes for gpu in facts.gpus)
            yield ok("GPUs", f"{told}, at least {_gib(least)} free on each")


def _check_sharing(facts: Facts) -> Iterator[Check]:
    """More processes than GPUs."""
    if not 0 < len(facts.gpus) < facts.num_processes:
        return
    yield warning(
        "sharing GPUs",
        f"{facts.num_processes} processes for {counted(len(facts.gpus), 'GPU')}",
        f"start {counted(len(facts.gpus), 'process')}, or say which GPU each one uses: "
        "Stage(..., devices=['cuda:0', 'cuda:0', ...])",
    )


def _check_peer_access(facts: Facts) -> Iterator[Check]:
    gpus = facts.gpus[: facts.num_processes]
    if len(gpus) < 2:
        return
    apart = [
        f"{a}-{b}"
        for a, b in itertools.pairwise(range(len(gpus)))
        if b not in gpus[a].peers or a not in gpus[b].peers
    ]
    if apart:
        yield warning(
            "peer access",
            f"neighbours that cannot reach one another's memory: GPUs {', '.join(apart)}",
            "their tensors go through the host's memory; nvidia-smi topo -p2p r tells why (in a "
            "virtual machine or with IOMMU on, PCI access control must be off)",
        )
    elif facts.environment.get("NCCL_P2P_DISABLE", "0") != "0":
        yield warning(
            "peer access",
            "turned off by NCCL_P2P_DISABLE",
            "unset NCCL_P2P_DISABLE, or tensors go through the host's memory",
        )
    else:
        yield ok("peer access", "between all neighbours")


def _check_cores(facts: Facts) -> Iterator[Check]:
    num_cpus = facts.limits.num_cpus
    shares = sorted({place.num_cores for place in facts.places})
    if num_cpus is not None and num_cpus < facts.num_processes:
        yield warning(
            "cores",
            f"{facts.topology}, but CPU time of {num_cpus:g} CPUs only, for "
            f"{counted(facts.num_processes, 'process')}",
            "raise the container's CPU limit (docker run --cpus, a pod's resources.limits.cpu): "
            "who has used it up stands still until the next tenth of a second",
        )
    elif shares[0] > 0:
        told = f"{shares[0]}" if len(shares) == 1 else f"{shares[0]} to {shares[-1]}"
        yield ok("cores", f"{facts.topology}; each process has {told} of its own")
    elif facts.environment.get("PROCPIPE_PIN") == "0":
        yield ok("cores", f"{facts.topology}; nobody is pinned, by PROCPIPE_PIN=0")
    else:
        yield warning(
            "cores",
            f"{facts.topology}, for {facts.num_processes} processes: nobody is pinned",
            "start fewer processes, or stages that should run at the same time take turns",
        )


def _check_threads(facts: Facts) -> Iterator[Check]:
    told = facts.environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    if not told:
        return
    least = min(place.num_cores for place in facts.places) or 1
    if told.isdigit() and 0 < int(told) <= least:
        yield ok("threads", f"OMP_NUM_THREADS={told}")
    else:
        yield warning(
            "threads",
            f"OMP_NUM_THREADS={told}, and {counted(least, 'core')} a process",
            f"unset it, or set it to {least}: more threads than cores wait for one another",
        )


def _check_memory(facts: Facts) -> Iterator[Check]:
    limits = facts.limits
    available_bytes, told = facts.available_bytes, f"{_gib(facts.available_bytes)} available"
    if limits.memory_bytes is not None:
        left_bytes = limits.memory_bytes - limits.used_bytes
        if left_bytes < available_bytes:
            available_bytes = left_bytes
            told = (
                f"{_gib(left_bytes)} left of the {_gib(limits.memory_bytes)} that this control "
                "group may use"
            )
    if available_bytes < facts.num_processes * _MIN_BYTES_A_PROCESS:
        yield warning(
            "memory",
            f"{told}, for {counted(facts.num_processes, 'process')}",
            "free some, raise the container's limit or start fewer processes: one that finds none "
            "is killed (each takes 0.3 GiB before it has a model)",
        )
    elif facts.swapped_bytes > _GIB:
        yield warning(
            "memory",
            f"{told}, {_gib(facts.swapped_bytes)} swapped out",
            "end what needs it: a stage that waits for its memory holds up all others",
        )
    else:
        yield ok("memory", told)


def _check_shared_memory(facts: Facts) -> Iterator[Check]:
    name = "shared memory"
    mend = (
        "give the container more (docker run --shm-size=1g or --ipc=host; an emptyDir of medium "
        "Memory at /dev/shm in a pod): NCCL and loaders' workers need it"
    )
    if facts.shm_bytes is None:
        yield warning(name, "there is no /dev/shm", mend)
    elif facts.shm_free_bytes < _MIN_SHM_BYTES:
        free, whole = bytes_text(facts.shm_free_bytes), bytes_text(facts.shm_bytes)
        told = f"{free} of {whole} free in /dev/shm"
        if facts.shm_bytes >= _MIN_SHM_BYTES:
            mend = "see what is left in /dev/shm by programs that have ended, and remove it"
        yield warning(name, told, mend)
    else:
        yield ok(name, f"{_gib(facts.shm_free_bytes)} free in /dev/shm")


def _check_files(facts: Facts) -> Iterator[Check]:
    needed = _FILES_ALONE + _FILES_A_PROCESS * facts.num_processes
    told = f"{facts.max_files} a process" if facts.max_files < 1 << 60 else "no limit"
    more = max(needed, 65536)
    mends = [f"ulimit -n {min(more, facts.max_files_hard)}"]
    if facts.max_files_hard < more:
        mends.append(f"have root allow more (limits.conf, docker run --ulimit nofile={more})")
    mend = ", or ".join(mends if facts.max_files < facts.max_files_hard else mends[-1:])
    if facts.max_files < needed:
        yield failure("open files", f"{told}, of which {needed} are needed", mend)
    elif facts.max_files < _COMFORTABLE_FILES:
        yield warning("open files", f"{told}, which a loader's workers may use up", mend)
    else:
        yield ok("open files", told)


def _check_address_space(facts: Facts) -> Iterator[Check]:
    if facts.max_address_bytes is not None:
        told = f"a process may have {_gib(facts.max_address_bytes)}"
        mend = "ulimit -v unlimited: threads' stacks count, and CUDA reserves far more than it uses"
        yield (failure if facts.gpus else warning)("address space", told, mend)


def _check_sockets(facts: Facts) -> Iterator[Check]:
    faults = [
        Check("sockets", Status.FAILURE, told.format(error), mend)
        for error, told, mend in (
            (
                facts.loopback_error,
                "nothing can be sent over 127.0.0.1 ({})",
                "bring the loopback interface up (ip link set lo up), and let a firewall pass it",
            ),
            (
                facts.unix_error,
                "abstract unix sockets cannot be used ({})",
                "run on Linux, and in a sandbox that allows them",
            ),
            (
                facts.memfd_error,
                "memory cannot be shared by memfd_create ({})",
                "run on Linux, and in a sandbox that allows it",
            ),
        )
        if error
    ]
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    faults += [
        failure(
            "sockets",
            f"{variable} names {facts.environment[variable]}, and this host has "
            f"{', '.join(facts.interfaces)}",
            "unset it, or name an interface that there is on every host",
        )
        for variable in variables
        if not _names_an_interface(facts.environment.get(variable, ""), facts.interfaces)
    ]
    yield from faults or [ok("sockets", "loopback and abstract unix sockets")]


def _names_an_interface(named: str, interfaces: Sequence[str]) -> bool:
    """Tell whether an interface is named; NCCL takes beginnings too, =names and ^exceptions."""
    names = [name.removeprefix("=").partition(":")[0] for name in named.split(",") if name]
    if not names or named.startswith("^"):
        return True
    return any(there.startswith(name) for name in names for there in interfaces)


def _check_name(facts: Facts) -> Iterator[Check]:
    mend = (
        f"put {facts.host_name} into /etc/hosts; until then give torchrun --local-addr=127.0.0.1 "
        "(procpipe run does not ask)"
    )
    if facts.name_error:
        told = f"no address is found for {facts.host_name} ({facts.name_error})"
        yield warning("host name", told, mend)
    elif facts.name_s > _SLOW_NAME_S:
        told = f"finding the address of {facts.host_name} took {facts.name_s:.1f} s"
        yield warning("host name", told, mend)
    else:
        yield ok("host name", facts.host_name)


def _numbers(version: str) -> tuple[int, ...]:
    """Return (2, 13) for "2.13.0a0+cpu"."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
