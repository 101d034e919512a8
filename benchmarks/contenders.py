"""The contenders, by name, with what each one cannot do.

All are steps of one mini-batch in the same processes (see ``rounds.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from benchmarks.peers import alone, bare, ours, torch_pipelining, torchgpipe_peer
from benchmarks.rounds import Step
from benchmarks.workloads import Job

PROCPIPE, ONE_PROCESS, COPIES = "procpipe", "one process", "independent copies at once"
BARE, THREADS = "bare gloo", "one process, n threads"

#: GPipe that recomputes; all others recompute nothing.
RECOMPUTED = ("procpipe always", "procpipe except_last")

#: Schedules that procpipe and a peer both have, by name: the contenders of each.
SCHEDULES: dict[str, tuple[str, str | None]] = {
    "GPipe": (PROCPIPE, "torch GPipe"),
    "1F1B": ("procpipe 1F1B", "torch 1F1B"),
    "interleaved 1F1B": ("procpipe interleaved", "torch Interleaved1F1B"),
    "ZB-H1": ("procpipe ZB-H1", None),
    "ZB-V": ("procpipe ZB-V", "torch ZBV"),
}


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        name: as in the tables.
        make: makes its step, on every rank.
        why_not: returns why it cannot do a job; None if it can.
        is_bubble_free: whether its limit has no bubble of fill and drain. Interleaved 1F1B and
            ZB-H1 have a smaller bubble, so they cannot reach that limit.
    """

    name: str
    make: Callable[[Job], Step]
    why_not: Callable[[Job], str | None] = lambda job: None
    is_bubble_free: bool = False


def _nccl(job: Job) -> str | None:
    if job.shares_gpus and not os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE"):
        return "torch.distributed.pipelining needs a GPU a rank, or NCCL 2.30 that shares one"
    return None


def _no_skips(job: Job) -> str | None:
    if job.workload.has_skips:
        return "torch.distributed.pipelining has no skips in schedules of several stages a process"
    return _nccl(job)


def _same_shapes(job: Job) -> str | None:
    if job.device != "cpu":
        return "gloo is for CPUs"
    if job.workload.has_skips or job.workload.num_classes:
        return "written for boundaries that have the input's shape"
    return None


def _threads(job: Job) -> str | None:
    return None if job.device == "cpu" else "threads are for CPUs"


def _own_devices(job: Job) -> str | None:
    return "stages share a GPU, so there is no limit of several" if job.shares_gpus else None


def _torchgpipe(job: Job) -> str | None:
    if job.device != "cpu":
        return "not run on GPUs: torchgpipe 0.0.7 is of the time of torch 1.3"
    return torchgpipe_peer.why_not()


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(PROCPIPE, ours.procpipe),
        *(
            Contender(name, partial(ours.procpipe, checkpoint=name.split()[1]))
            for name in RECOMPUTED
        ),
        Contender("procpipe 1F1B", partial(ours.procpipe, schedule="1f1b")),
        Contender(
            "procpipe interleaved",
            partial(ours.procpipe, schedule="interleaved", partitions_per_stage=2),
            is_bubble_free=True,
        ),
        Contender("procpipe ZB-H1", partial(ours.procpipe, schedule="zb-h1"), is_bubble_free=True),
        Contender(
            "procpipe ZB-V",
            partial(ours.procpipe, schedule="zb-v", partitions_per_stage=2),
            is_bubble_free=True,
        ),
        Contender("torch GPipe", torch_pipelining.gpipe, _nccl),
        Contender("torch 1F1B", torch_pipelining.one_f_one_b, _nccl),
        Contender("torch Interleaved1F1B", torch_pipelining.interleaved, _no_skips, True),
        Contender("torch ZBV", torch_pipelining.zero_bubble_v, _no_skips, True),
        Contender("torchgpipe", torchgpipe_peer.torchgpipe, _torchgpipe),
        Contender(
            "torchgpipe always",
            partial(torchgpipe_peer.torchgpipe, checkpoint="always"),
            _torchgpipe,
        ),
        Contender(BARE, bare.bare_gloo, _same_shapes),
        Contender(ONE_PROCESS, alone.one_process),
        Contender(THREADS, alone.one_process_with_threads, _threads),
        Contender(COPIES, alone.copies_at_once, _own_devices),
    )
}


def notes(names: Iterable[str], absent: Mapping[str, str | None]) -> list[str]:
    """Return the notes under a table of contenders.

    Args:
        names: the contenders in the table.
        absent: by name, why a contender is not in the table.
    """
    lines = [
        "all run in the same processes, pinned to their cores by procpipe where there is one each",
        "limit: independent copies / n, times (m + n - 1) / m; that of interleaved and zero-bubble "
        "schedules has no bubble",
        "ratios are medians of those of each round",
    ]
    if "torchgpipe" in names:
        lines.append(torchgpipe_peer.NOTE)
    return lines + [f"not run: {name}: {reason}" for name, reason in absent.items() if reason]


def limit_s(copies_s: float, m: int, n: int, *, is_bubble_free: bool = False) -> float:
    """Return the least seconds a step that a pipeline can take on this machine.

    m: number of micro-batches    n: number of stages

    Args:
        copies_s: seconds in which ``n`` independent one-thread copies of the model each do a
            mini-batch at once. A pipeline does one of those ``n`` mini-batches.
        m: see above.
        n: see above.
        is_bubble_free: leave out the bubble of fill-and-drain, ``(m + n - 1) / m``.
    """
    return copies_s / n * (1.0 if is_bubble_free else (m + n - 1) / m)
