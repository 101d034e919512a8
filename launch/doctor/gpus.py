"""The GPUs that torch can use here. A driver may hang, so another process queries it."""

from __future__ import annotations

import multiprocessing
from typing import NamedTuple

import torch

from procpipe.job.devices import pci_of

#: A driver that has to start takes seconds; a broken one never answers.
_TIMEOUT_S = 60.0


class Gpu(NamedTuple):
    """A GPU that torch can use."""

    name: str  # its model
    pci: str  # its address on the PCI bus
    free_bytes: int  # unused memory
    total_bytes: int  # all its memory
    peers: tuple[int, ...]  # the GPUs whose memory it can reach directly, by index


def find_gpus() -> tuple[list[Gpu], str]:
    """Ask the driver for the GPUs; return them, and what went wrong."""
    if not torch.version.cuda:
        return [], ""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            return pool.apply_async(_query).get(_TIMEOUT_S), ""
        except multiprocessing.TimeoutError:
            return [], f"no answer in {_TIMEOUT_S:.0f} s"
        except Exception as error:
            return [], f"{type(error).__name__}: {error}"


def _query() -> list[Gpu]:
    found = []
    num_gpus = torch.cuda.device_count()
    for index in range(num_gpus):
        reachable = torch.cuda.can_device_access_peer
        peers = tuple(k for k in range(num_gpus) if k != index and reachable(index, k))
        memory = torch.cuda.mem_get_info(index)
        found.append(Gpu(torch.cuda.get_device_name(index), pci_of(index), *memory, peers))
    return found
