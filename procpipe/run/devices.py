"""Which device each rank computes on: what the user listed, this host's GPUs in order, or CPUs."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence

import torch

from procpipe.host.topology import pci_of

__all__ = ["devices_of", "nccl_shares_gpus", "of_this_host", "pci_addresses"]

#: The first NCCL that takes several ranks on a GPU, 2.30.0, as ``ncclGetVersion`` tells it.
_SHARING_NCCL = 23000


def devices_of(
    rank: int, num_ranks: int, devices: Sequence[torch.device | str | int] | None
) -> list[torch.device]:
    """Return each rank's device: those given, else the hosts' GPUs in order, else CPUs."""
    if devices is not None:
        listed = _checked_devices(devices)
        if len(listed) < num_ranks:
            raise IndexError(
                f"{num_ranks} processes but {len(listed)} devices {[str(d) for d in listed]}: give "
                "one device a process, or leave devices out"
            )
        return listed[:num_ranks]
    if not torch.cuda.is_available():
        return [torch.device("cpu")] * num_ranks
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", str(num_ranks)))
    if local_rank >= torch.cuda.device_count():
        raise IndexError(
            f"rank {rank} is process {local_rank} of this host, which has only "
            f"{torch.cuda.device_count()} GPUs: start fewer processes, or give each its device: "
            "devices=['cuda:0', 'cuda:0', …] to share GPUs, devices=['cpu'] * num_processes"
        )
    guessed = [torch.device("cuda", other % num_local) for other in range(num_ranks)]
    guessed[rank] = torch.device("cuda", local_rank)  # sure, whatever the hosts' sizes
    return guessed


def of_this_host(devices: Sequence[torch.device], rank: int) -> Sequence[torch.device]:
    """Return the devices of this host's ranks, in the order of local ranks."""
    first = rank - int(os.environ.get("LOCAL_RANK", "0"))
    return devices[first : first + int(os.environ.get("LOCAL_WORLD_SIZE", "1"))]


def nccl_shares_gpus() -> bool:
    """Say whether the NCCL of this process takes several ranks on one GPU.

    It is asked itself: ``torch.cuda.nccl.version()`` is that of the NCCL with which torch was
    compiled, whichever is loaded.
    """
    version = ctypes.c_int(0)
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value >= _SHARING_NCCL


def pci_addresses(devices: Sequence[torch.device]) -> list[str | None]:
    """Return where each GPU is on this host's PCI bus; None for a CPU, or an old torch."""
    return [
        pci_of(torch.cuda.get_device_properties(device)) if device.type == "cuda" else None
        for device in devices
    ]


def _checked_devices(devices: Sequence[torch.device | str | int]) -> list[torch.device]:
    """Return the devices a user has listed, one a rank.

    Raises:
        ValueError: a device that there is not, or of several types.
    """
    told = f"devices={devices!r}: list one device a process, all CPUs ('cpu') or all CUDA devices"
    if isinstance(devices, str):
        raise ValueError(told)
    try:
        listed = [
            torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
            for device in devices
        ]
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{told}; {error}") from None
    listed = [torch.device("cpu") if device.type == "cpu" else device for device in listed]
    types = {device.type for device in listed}
    if len(types) > 1 or not types <= {"cpu", "cuda"} or torch.device("cuda") in listed:
        raise ValueError(f"{told} with their index ('cuda:0')")
    if types == {"cuda"} and not torch.cuda.is_available():
        raise ValueError(f"{told}; there is no CUDA device that torch can use here")
    return listed
