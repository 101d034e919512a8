"""Which transport carries tensors between two ranks: it follows from where they compute.

    CPUs of one host        shm
    CPUs of several hosts   sockets    (no transport of its own: a block behind the token)
    one GPU                 cuda_ipc   (nccl, if NCCL takes several ranks on a GPU for all ranks)
    different GPUs          nccl

So in a job of four ranks on two GPUs, or on CPUs of two hosts, each rank may use two of them. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from procpipe.job.devices import HOW_TO_SHARE


class Offer(NamedTuple):
    """What matters of one rank; plain JSON."""

    host: str  # equal for ranks that can share memory
    gpu: str = ""  # what identifies its GPU; "" on a CPU
    shares_by_nccl: bool = False  # whether NCCL accepts several ranks on its GPU
    may_share: bool = True  # whether its user chose its GPU, perhaps that of another rank
    forced: str | None = None  # the only transport, in tests


class TransportChoice(NamedTuple):
    """What was agreed; plain JSON."""

    within: str  # the transport between ranks of one place
    across: str  # that between ranks of different places
    places: Sequence[str]  # each rank's: its GPU, or on CPUs its host

    def between(self, a: int, b: int) -> str:
        """Return the name of the transport between two ranks."""
        return self.within if self.places[a] == self.places[b] else self.across


def choose(offers: Sequence[Offer]) -> TransportChoice:
    """Return the transports of a job.

    Raises:
        IndexError: ranks would share a GPU without being allowed to.
        ValueError: some ranks compute on GPUs and others on CPUs, or ranks of different hosts (or
            containers) on one GPU.
    """
    forced = offers[0].forced
    on_gpus = [rank for rank, offer in enumerate(offers) if offer.gpu]
    if not on_gpus:
        hosts = [offer.host for offer in offers]
        return TransportChoice(forced or "shm", forced or "sockets", hosts)
    if len(on_gpus) < len(offers):
        on_cpus = [rank for rank, offer in enumerate(offers) if not offer.gpu]
        raise ValueError(
            f"ranks {on_gpus} compute on GPUs and ranks {on_cpus} on CPUs: give all ranks devices "
            "of one kind"
        )
    _check_shared(offers)
    by_nccl = all(offer.shares_by_nccl for offer in offers)
    within = forced or ("nccl" if by_nccl else "cuda_ipc")
    return TransportChoice(within, forced or "nccl", [offer.gpu for offer in offers])


def _check_shared(offers: Sequence[Offer]) -> None:
    """Check that ranks share a GPU only if their user gave it to them, and within a host."""
    first_on: dict[str, int] = {}
    for rank, offer in enumerate(offers):
        first = first_on.setdefault(offer.gpu, rank)
        if first != rank and not (offer.may_share and offers[first].may_share):
            raise IndexError(
                f"ranks {first} and {rank} see one GPU each, and it is the same (cuda:0, "
                f"{offer.gpu}): {HOW_TO_SHARE}; or let each process see a GPU of its own "
                "(CUDA_VISIBLE_DEVICES, --gpus-per-task=1)"
            )
        if offers[first].host != offer.host:
            raise ValueError(
                f"ranks {first} and {rank} share a GPU, but not their host's sockets: run them as "
                "one user in one container, or give each a GPU of its own"
            )
