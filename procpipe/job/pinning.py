"""Divides a host's cores among its processes, and pins each process to its own.

Without pinning, the kernel moves a stage's threads between cores, away from the memory that they
filled first and from their GPU, and stages that run at the same time displace one another. So each
process gets physical cores of its own, contiguous and next to its GPU:

    node 0                                  node 1
    cores 0 1 2 3 4 5 6 7                   cores 8 9 10 11 12 13 14 15
          └─ 0 ─┘ └─ 1 ─┘                         └─ 2 ──┘  └─── 3 ───┘      process

1  A process goes to its GPU's node, if that has a core for it. All others are spread so that the
   smallest share is as large as possible, with neighbouring processes on one node.
2  The processes of a node divide its cores, the first ones getting one more where there is a
   remainder. On a host with several core types each type is divided.
3  With fewer cores than processes no process is pinned: the kernel does better.

``places`` computes that, equally on every process; ``pin_this_process`` is what a process calls
as it starts. Memory needs no binding: a page is on the node of the core that first writes to it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import psutil

from procpipe.job.topology import Core, Device, Topology, cpus_text, read_device, read_topology
from procpipe.notes import write_note
from procpipe.words import text_table

#: Set it to 0, and no process is pinned.
SWITCH = "PROCPIPE_PIN"

#: Torchrun's engine sets it for the processes it starts.
_RUN_ID = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True)
class ProcessPlace:
    """Where a process of this host runs."""

    local_rank: int
    cpus: tuple[int, ...]  # logical ones, to which it is pinned; empty if it is not pinned
    num_cores: int  # how many physical cores these are
    node: int | None  # their NUMA node; None if they are in several, or it is not pinned
    device: str  # what it computes on: "CPU" or "GPU 0000:3b:00.0"
    why: str  # the reason, for people


def places(
    topology: Topology, num_processes: int, devices: Sequence[Device | None] = ()
) -> list[ProcessPlace]:
    """Divide a host's cores among its processes; pure.

    ``devices`` holds each process's GPU; None, or a shorter list, where there is none or it is
    unknown.
    """
    devices = [*devices, *[None] * num_processes][:num_processes]
    names = ["CPU" if device is None else f"GPU {device.pci}" for device in devices]
    if len(topology.cores) < num_processes:
        why = f"not pinned: {num_processes} processes, and {topology.summary()}"
        return [ProcessPlace(rank, (), 0, None, name, why) for rank, name in enumerate(names)]
    wanted = [device.node if device is not None else None for device in devices]
    domains = _domains(topology, wanted)
    chosen = _choose_domains(domains, wanted)
    found: dict[int, ProcessPlace] = {}
    for index, domain in enumerate(domains):
        ranks = [rank for rank in range(num_processes) if chosen[rank] == index]
        for rank, cores in zip(ranks, _divide(domain, len(ranks)), strict=True):
            nodes = {core.node for core in cores}
            found[rank] = ProcessPlace(
                local_rank=rank,
                cpus=tuple(sorted(cpu for core in cores for cpu in core.cpus)),
                num_cores=len(cores),
                node=nodes.pop() if len(nodes) == 1 else None,
                device=names[rank],
                why=_reason(devices[rank], domain, len(ranks), topology),
            )
    return [found[rank] for rank in range(num_processes)]


def places_of_host(
    num_processes: int, device_pcis: Sequence[str | None] = ()
) -> list[ProcessPlace]:
    """Divide this host's cores, those this process may use, among ``num_processes`` processes.

    ``device_pcis`` holds the PCI address of each process's GPU; None, or a shorter list, for none.
    Raises ``ValueError`` for an invalid one.
    """
    devices = [None if pci is None else read_device(pci) for pci in device_pcis]
    found = places(read_topology(), num_processes, devices)
    if os.environ.get(SWITCH) == "0":
        why = f"not pinned: {SWITCH}=0"
        found = [replace(place, cpus=(), num_cores=0, node=None, why=why) for place in found]
    return found


def pin(place: ProcessPlace) -> None:
    """Restrict all threads of this process, and those they start, to a place's CPUs."""
    done: set[str] = set()
    # A thread started meanwhile inherits the old CPUs: repeat until there is no new one.
    while place.cpus and (threads := set(os.listdir("/proc/self/task")) - done):
        for thread in threads:
            try:
                os.sched_setaffinity(int(thread), place.cpus)
            except ProcessLookupError:  # it has ended
                continue
        done |= threads


def pin_this_process(device_pcis: Sequence[str | None] = ()) -> ProcessPlace | None:
    """Pin this process to its share of the host's cores; return it, or None if nothing was done.

    ``World.from_environment`` calls it once in each process that a launcher has started, before
    much memory is used. It takes a few milliseconds at most and never raises: an error is one line
    on standard error. ``device_pcis`` is as for ``places_of_host``, in the order of local ranks.

    It does nothing in a process that was not started by torchrun's engine (Slurm and MPI bind
    their processes themselves), in one that is pinned already, so that it may not run where its
    launcher may (``torchrun --numa-binding``, ``numactl``), and if PROCPIPE_PIN is 0.
    """
    try:
        run_id = os.environ.get(_RUN_ID)
        if run_id is None or os.environ.get(SWITCH) == "0" or _was_pinned_already(run_id):
            return None
        local_rank = int(os.environ["LOCAL_RANK"])
        num_processes = int(os.environ["LOCAL_WORLD_SIZE"])
        if not 0 <= local_rank < num_processes:
            raise ValueError(
                f"LOCAL_RANK is {local_rank}, but must be from 0 and below LOCAL_WORLD_SIZE, "
                f"{num_processes}"
            )
        place = places_of_host(num_processes, device_pcis)[local_rank]
        pin(place)
    except Exception as error:  # hosts differ, and a run must not fail because of pinning
        write_note(
            f"procpipe: this process is not pinned to cores ({type(error).__name__}: {error}); "
            f"{SWITCH}=0 turns it off"
        )
        return None
    return place


def table(found: Sequence[ProcessPlace]) -> str:
    """Return the places as a table, a line per process."""
    rows = [("process", "device", "cores", "CPUs", "NUMA node", "why")]
    for place in found:
        node = "-" if place.node is None else str(place.node)
        cores, cpus = (str(place.num_cores), cpus_text(place.cpus)) if place.cpus else ("-", "any")
        rows.append((str(place.local_rank), place.device, cores, cpus, node, place.why))
    return "\n".join(text_table(rows, num_left=len(rows[0])))


def _was_pinned_already(run_id: str) -> bool:
    """Return whether this process may not run where its launcher may.

    The launcher need not be the parent: in ``torchrun --no-python start.sh``, where the script has
    ``taskset -p … $$; python train.py``, it is the first ancestor that is not of the run itself.
    """
    others = (each for each in psutil.Process().parents() if not _is_of_run(each, run_id))
    launcher = next(others, None)
    return launcher is not None and set(launcher.cpu_affinity()) != os.sched_getaffinity(0)


def _is_of_run(process: psutil.Process, run_id: str) -> bool:
    try:
        return bool(process.environ().get(_RUN_ID) == run_id)
    except psutil.AccessDenied:  # of another user
        return False


def _domains(topology: Topology, wanted: Sequence[int | None]) -> list[tuple[Core, ...]]:
    """Return the groups of cores to divide: NUMA nodes, or sequences of whole ones.

    If there are fewer processes than nodes, and none is bound to one, they share all nodes.
    """
    nodes = topology.nodes
    num_domains = len(nodes)
    if not any(node in nodes for node in wanted):
        num_domains = min(num_domains, len(wanted))
    return [
        tuple(core for node in nodes[run] for core in topology.cores_of(node))
        for run in _runs(len(nodes), num_domains)
    ]


def _choose_domains(domains: Sequence[Sequence[Core]], wanted: Sequence[int | None]) -> list[int]:
    """Step 1 above."""
    counts = [0] * len(domains)
    chosen: dict[int, int] = {}
    of_node = {core.node: index for index, domain in enumerate(domains) for core in domain}
    for rank, node in enumerate(wanted):
        index = None if node is None else of_node.get(node)
        if index is not None and counts[index] < len(domains[index]):
            chosen[rank] = index
            counts[index] += 1
    others = [rank for rank in range(len(wanted)) if rank not in chosen]
    taken: list[int] = []
    for _ in others:
        # Where one more process gets most cores; of several, where there are fewest processes.
        index = max(
            range(len(domains)), key=lambda k: (len(domains[k]) // (counts[k] + 1), -counts[k])
        )
        counts[index] += 1
        taken.append(index)
    chosen |= dict(zip(others, sorted(taken), strict=True))
    return [chosen[rank] for rank in range(len(wanted))]


def _divide(cores: Sequence[Core], num_processes: int) -> list[list[Core]]:
    """Step 2 above."""
    parts: list[list[Core]] = [[] for _ in range(num_processes)]
    if not parts:
        return parts
    for core_type in sorted({core.core_type for core in cores}):
        of_type = [core for core in cores if core.core_type == core_type]
        runs = _runs(len(of_type), num_processes, by=lambda k: len(parts[k]))
        for part, run in zip(parts, runs, strict=True):
            part.extend(of_type[run])
    return parts


def _runs(total: int, num_runs: int, by: Callable[[int], int] = lambda run: run) -> list[slice]:
    """Divide ``total`` items into runs; the remainder goes to those lowest in ``by``."""
    least, remainder = divmod(total, num_runs)
    larger = set(sorted(range(num_runs), key=by)[:remainder])
    ends = list(itertools.accumulate(least + (run in larger) for run in range(num_runs)))
    return [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]


def _reason(
    device: Device | None, domain: Sequence[Core], num_sharing: int, topology: Topology
) -> str:
    share = "all of" if num_sharing == 1 else f"1/{num_sharing} of"
    nodes = {core.node for core in domain}
    if len(domain) == len(topology.cores):
        where = "the host's cores"
    else:
        where = f"node{'s' if len(nodes) > 1 else ''} {cpus_text(nodes)}"
    if device is not None and device.node in nodes:
        where += ", next to its GPU"
    elif device is not None and device.node is not None:
        where += f": node {device.node}, next to its GPU, has no core left"
    return f"{share} {where}"
