"""Which transport carries tensors between two ranks: agreed by all, from what each one can use.

    CPUs of one host        shm, or gloo where a process may not look into another's files
    CPUs of several hosts   gloo
    different GPUs          nccl
    one GPU                 cuda_ipc, since NCCL refuses two ranks on one GPU; from 2.30 on it takes
                            them with NCCL_MULTI_RANK_GPU_ENABLE=1, then "nccl" can be asked for

So in a job of four ranks on two GPUs, each rank may use two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from procpipe.job.devices import HOW_TO_SHARE

#: All there are.
NAMES = ("shm", "gloo", "nccl", "cuda_ipc")


class Offer(NamedTuple):
    """What one rank can use; plain JSON."""

    names: list[str]  # the transports, the best first
    gpu: str = ""  # what identifies its GPU; "" on a CPU
    sees: Sequence[int] = ()  # the ranks whose open files it may open
    shares_by_nccl: bool = False  # whether NCCL accepts several ranks on its GPU
    may_share: bool = True  # whether its user chose its GPU, perhaps that of another rank


class TransportChoice(NamedTuple):
    """What was agreed; plain JSON."""

    name: str  # the transport of all ranks that do not share a GPU
    gpus: Sequence[str]  # each rank's GPU; "" where it does not matter

    def between(self, a: int, b: int) -> str:
        """Return the name of the transport between two ranks."""
        return "cuda_ipc" if self.gpus[a] and self.gpus[a] == self.gpus[b] else self.name


def choose(offers: Sequence[Offer], wanted: str | None) -> TransportChoice:
    """Return the best transports that every rank can use, or the one that was asked for; pure.

    Raises:
        IndexError: ranks would share a GPU without being allowed to.
        ValueError: ranks cannot use the one that is wanted, or none.
    """
    name = _best_name(offers, wanted)
    _check_may_share(offers)
    gpus = [offer.gpu for offer in offers]
    if wanted == "nccl" and all(offer.shares_by_nccl for offer in offers):
        gpus = [""] * len(gpus)
    ranks_on: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        ranks_on.setdefault(gpu or str(rank), []).append(rank)
    if wanted == "cuda_ipc" and len(ranks_on) > 1:
        raise ValueError(
            f"transport='cuda_ipc' is for ranks that share one GPU, and these are on "
            f"{len(ranks_on)}: leave transport out, and different GPUs use NCCL"
        )
    for ranks in ranks_on.values():
        _check_shared(ranks, offers, wanted)
    return TransportChoice(name, gpus)


def _best_name(offers: Sequence[Offer], wanted: str | None) -> str:
    """Return the best transport that every rank can use, or the one that was asked for."""
    common = [name for name in offers[0].names if all(name in offer.names for offer in offers)]
    if not common:
        lists = (f"rank {rank} {' or '.join(offer.names)}" for rank, offer in enumerate(offers))
        raise ValueError(f"no transport can be used by all ranks: {'; '.join(lists)}")
    if wanted not in (None, *common):
        without = [rank for rank, offer in enumerate(offers) if wanted not in offer.names]
        raise ValueError(
            f"transport={wanted!r} cannot be used on ranks {without}; all ranks can use "
            f"{' or '.join(common)}"
        )
    return wanted or common[0]


def _check_may_share(offers: Sequence[Offer]) -> None:
    """Check that ranks share a GPU only if their user gave it to them."""
    first_on: dict[str, int] = {}
    for rank, offer in enumerate(offers):
        first = first_on.setdefault(offer.gpu or str(rank), rank)
        if first != rank and not (offer.may_share and offers[first].may_share):
            raise IndexError(
                f"ranks {first} and {rank} see one GPU each, and it is the same (cuda:0, "
                f"{offer.gpu}): {HOW_TO_SHARE}; or let each process see a GPU of its own "
                "(CUDA_VISIBLE_DEVICES, --gpus-per-task=1)"
            )


def _check_shared(ranks: Sequence[int], offers: Sequence[Offer], wanted: str | None) -> None:
    """Check that these ranks can use one GPU together."""
    if len(ranks) > 1 and wanted == "nccl":
        raise ValueError(
            f"transport='nccl' cannot be used between ranks {ranks}, which share a GPU: leave "
            "transport out, and they use CUDA IPC (NCCL 2.30 and newer can, if all ranks have "
            "NCCL_MULTI_RANK_GPU_ENABLE=1)"
        )
    for rank in ranks:
        unseen = [other for other in ranks if other != rank and other not in offers[rank].sees]
        if unseen:
            raise ValueError(
                f"ranks {ranks} share a GPU, for which each must be allowed to open the others' "
                f"files (/proc/<pid>/fd), but rank {rank} may not open those of ranks {unseen}: "
                "run them as one user in one container, or give each a GPU of its own"
            )
