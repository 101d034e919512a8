"""The state of a process's random number generators, as values that can be saved."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def states(device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of torch's generators, Python's, and numpy's where it is in use.

    Args:
        device: whose generator to include besides the CPU's.
    """
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device is not None and device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        name, words, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = (name, words.tolist(), *rest)
    return found


def restore(saved: dict[str, Any], device: torch.device | None = None) -> None:
    """Set the generators to states that :func:`states` returned, perhaps in another process."""
    torch.set_rng_state(saved["torch"])
    random.setstate(saved["python"])
    if device is not None and device.type == "cuda" and "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"], device)
    if "numpy" in saved:
        import numpy as np

        np.random.set_state(saved["numpy"])
