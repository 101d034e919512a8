"""The device of each rank: what the user listed, this host's GPUs in order, or CPUs."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch

from procpipe.words import counted

#: What to do where ranks outnumber GPUs.
HOW_TO_SHARE = (
    "start fewer processes, or give each a device that it sees: devices=['cuda:0', 'cuda:0', …] to "
    "share GPUs, devices=['cpu'] * num_processes"
)

#: The first NCCL that accepts several ranks on a GPU, 2.30.0, as ``ncclGetVersion`` returns it.
_SHARING_NCCL = 23000


def devices_of(
    rank: int, num_ranks: int, devices: Sequence[torch.device | str | int] | None
) -> list[torch.device]:
    """Return each rank's device: those given, else the hosts' GPUs in order, else CPUs.

    A process that sees one GPU takes it: it may have been given its own (Slurm's
    ``--gpus-per-task=1``). ``transports.choose`` finds whether others have the same one.

    Raises:
        IndexError: there are fewer devices than processes, or this rank's index is too high.
        ValueError: the devices are of several types, or cannot be used.
    """
    if devices is not None:
        listed = _checked_devices(devices)
        if len(listed) < num_ranks:
            raise IndexError(
                f"{counted(num_ranks, 'process')} but {counted(len(listed), 'device')} "
                f"{[str(d) for d in listed]}: give one device a process, or leave devices out"
            )
    elif not torch.cuda.is_available():
        listed = [torch.device("cpu")] * num_ranks
    elif torch.cuda.device_count() == 1:
        listed = [torch.device("cuda", 0)] * num_ranks
    else:
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", str(num_ranks)))
        listed = [torch.device("cuda", other % num_local) for other in range(num_ranks)]
        # Certain, whatever the hosts' sizes.
        listed[rank] = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    ours = listed[rank]
    if ours.type == "cuda" and ours.index >= torch.cuda.device_count():
        raise IndexError(
            f"rank {rank} would use {ours}, but sees {counted(torch.cuda.device_count(), 'GPU')} "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}): {HOW_TO_SHARE}"
        )
    return listed[:num_ranks]


def nccl_shares_gpus() -> bool:
    """Return whether the NCCL of this process accepts several ranks on one GPU.

    Asks the loaded NCCL: ``torch.cuda.nccl.version()`` is the one torch was compiled with.
    """
    version = ctypes.c_int(0)
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value >= _SHARING_NCCL


def pci_addresses(devices: Sequence[torch.device], rank: int) -> list[str]:
    """Return the address of each local rank's GPU on this host's PCI bus; [] where unknown.

    ``devices`` are those of all ranks. A process that sees one GPU does not know the others'.
    """
    first = rank - int(os.environ.get("LOCAL_RANK", "0"))
    local = devices[first : first + int(os.environ.get("LOCAL_WORLD_SIZE", "1"))]
    num_seen = torch.cuda.device_count()
    is_known = (num_seen > 1 or len(local) == 1) and all(
        device.type == "cuda" and device.index < num_seen for device in local
    )
    return [pci_of(device.index) for device in local] if is_known else []


def pci_of(index: int) -> str:
    """Return the PCI address of a GPU that torch can use here."""
    gpu: Any = torch.cuda.get_device_properties(index)
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def _checked_devices(devices: Sequence[torch.device | str | int]) -> list[torch.device]:
    """Return the devices a user has listed, one per rank; ``ValueError`` if they cannot be used."""
    text = (
        f"devices={devices!r}: list one device a process, all CPUs ('cpu') or all CUDA devices "
        "with their index ('cuda:0')"
    )
    if isinstance(devices, str):
        raise ValueError(f"{text}, or leave devices out to use the GPUs that there are, else CPUs")
    try:
        listed = [
            torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
            for device in devices
        ]
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{text}; {error}") from None
    types = {device.type for device in listed}
    if types <= {"cpu"}:
        return [torch.device("cpu")] * len(listed)
    if types != {"cuda"} or torch.device("cuda") in listed:
        raise ValueError(text)
    if not torch.cuda.is_available():
        raise ValueError(f"{text}; there is no CUDA device that torch can use here")
    return listed
