"""Copies tensors to a stage's device without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from procpipe.tree import map_tensors


def on_device(value: Any, device: torch.device) -> Any:
    """Return a nested value with its tensors on a device; the host waits for no device."""
    return map_tensors(lambda tensor: uploaded(tensor, device), value)


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, as ``tensor.to(device)``; does not wait for the device.

    A copy from ordinary memory waits for all work queued on the stream. One from pinned memory does
    not, but that memory must not change until the device has read it, and a user may fill it with
    the next mini-batch. So a tensor is first copied into pinned memory of torch's allocator, which
    reuses it once the device has read it:

        user's tensor ── host copies ──> pinned memory ══ the device copies, later ══> GPU
    """
    if device.type != "cuda" or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return tensor.to(device)
    pinned = torch.empty_like(tensor, memory_format=torch.preserve_format, pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)
