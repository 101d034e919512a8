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
    "start fewer processes, or give each its device: devices=['cuda:0', 'cuda:0', …] to share "
    "GPUs, devices=['cpu'] * num_processes"
)

#: The first NCCL that accepts several ranks on a GPU, 2.30.0, as ``ncclGetVersion`` returns it.
_SHARING_NCCL = 23000


def devices_of(
    rank: int, num_ranks: int, devices: Sequence[torch.device | str | int] | None
) -> list[torch.device]:
    """Return each rank's device: those given, else the hosts' GPUs in order, else CPUs.

    A process that sees one GPU takes it, whichever local rank it is: it may have been given its own
    (``CUDA_VISIBLE_DEVICES``, Slurm's ``--gpus-per-task=1``). Whether others have the same one
    shows when the ranks are connected (``transports.choose``).

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
        _check_is_seen(rank, listed[rank])
        return listed[:num_ranks]
    if not torch.cuda.is_available():
        return [torch.device("cpu")] * num_ranks
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", str(num_ranks)))
    if torch.cuda.device_count() == 1:
        return [torch.device("cuda", 0)] * num_ranks
    if local_rank >= torch.cuda.device_count():
        raise IndexError(
            f"rank {rank} is process {local_rank} of this host, which has only "
            f"{torch.cuda.device_count()} GPUs{_narrowed()}: {HOW_TO_SHARE}"
        )
    guessed = [torch.device("cuda", other % num_local) for other in range(num_ranks)]
    guessed[rank] = torch.device("cuda", local_rank)  # certain, whatever the hosts' sizes
    return guessed


def use_all_hardware_queues() -> None:
    """Have CUDA give a process as many hardware queues as there can be, if the user chose none.

    Streams of one queue wait for one another, and there are 8 by default: fewer than the streams of
    a stage that receives from several others. Such a stage would be slow, or hang. Has no effect
    once the process has used CUDA.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def is_narrowed(device: torch.device) -> bool:
    """Return whether this process sees one GPU of perhaps more: each rank's has the same name."""
    return device.type == "cuda" and torch.cuda.device_count() == 1


def of_this_host(devices: Sequence[torch.device], rank: int) -> Sequence[torch.device]:
    """Return the devices of this host's ranks, in the order of local ranks."""
    first = rank - int(os.environ.get("LOCAL_RANK", "0"))
    return devices[first : first + int(os.environ.get("LOCAL_WORLD_SIZE", "1"))]


def nccl_shares_gpus() -> bool:
    """Return whether the NCCL of this process accepts several ranks on one GPU.

    Asks the loaded NCCL: ``torch.cuda.nccl.version()`` is the one torch was compiled with.
    """
    version = ctypes.c_int(0)
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value >= _SHARING_NCCL


def pci_addresses(devices: Sequence[torch.device]) -> list[str | None]:
    """Return each GPU's address on this host's PCI bus; None for a CPU or an invisible GPU."""
    if len(devices) > 1 and any(map(is_narrowed, devices)):
        return [None] * len(devices)  # the other ranks' GPUs may be different ones
    num_seen = torch.cuda.device_count()
    return [
        pci_of(device.index) if device.type == "cuda" and device.index < num_seen else None
        for device in devices
    ]


def pci_of(index: int) -> str:
    """Return the PCI address of a GPU that torch can use here."""
    gpu: Any = torch.cuda.get_device_properties(index)
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def _check_is_seen(rank: int, device: torch.device) -> None:
    num_seen = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and device.index >= num_seen:
        names = "cuda:0" if num_seen == 1 else f"cuda:0 to cuda:{num_seen - 1}"
        raise IndexError(
            f"devices gives rank {rank} {device}, but it sees only {names}{_narrowed()}: leave "
            "devices out where each process has a GPU of its own, else list what each one sees"
        )


def _narrowed() -> str:
    """Return the setting that limits the GPUs this process sees, if there is one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"


def _checked_devices(devices: Sequence[torch.device | str | int]) -> list[torch.device]:
    """Return the devices a user has listed, one per rank; ``ValueError`` if they cannot be used."""
    text = f"devices={devices!r}: list one device a process, all CPUs ('cpu') or all CUDA devices"
    if isinstance(devices, str):
        raise ValueError(text)
    try:
        listed = [
            torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
            for device in devices
        ]
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{text}; {error}") from None
    listed = [torch.device("cpu") if device.type == "cpu" else device for device in listed]
    types = {device.type for device in listed}
    if len(types) > 1 or not types <= {"cpu", "cuda"} or torch.device("cuda") in listed:
        raise ValueError(f"{text} with their index ('cuda:0')")
    if types == {"cuda"} and not torch.cuda.is_available():
        raise ValueError(f"{text}; there is no CUDA device that torch can use here")
    return listed
