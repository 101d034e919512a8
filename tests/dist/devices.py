"""Which devices the ranks of a test compute on: CPUs, or the machine's GPUs in turn.

    4 ranks on   1 GPU    all of them share it            CUDA IPC
                 2 GPUs   cuda:0, cuda:1, cuda:0, cuda:1  NCCL and CUDA IPC
                 4 GPUs   one each                        NCCL

Nothing else in a test needs to differ (tests/conftest.py).
"""

from __future__ import annotations

import functools
import os

#: What all processes of a test run compute on: "cpus" or "gpus".
VARIABLE = "PROCPIPE_TEST_DEVICES"

#: Allowed differences between a real GPU and the CPU, relative to a tensor's largest value: its
#: kernels sum in another order. An emulated GPU gives the same bits as the CPU.
REAL_GPU_TOLERANCES = {"torch.float64": 1e-11, "torch.float32": 1e-4, "torch.bfloat16": 0.02}


def is_on_gpus() -> bool:
    """Return whether the ranks of tests compute on GPUs."""
    return os.environ.get(VARIABLE) == "gpus"


def seed_only_cpu() -> None:
    """Let ``torch.manual_seed`` seed only the CPU in this process, if the tests are on CPUs.

    For each kind of GPU it otherwise stores the stack of its caller, which takes a hundred times as
    long (torch 2.13).
    """
    if not is_on_gpus():
        import torch

        for devices in (torch.cuda, torch.xpu, torch.mtia):
            devices.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]


def is_emulated() -> bool:
    """Return whether this process's GPUs are emulated (tests/emulated_gpu)."""
    return "EMULATED_GPU_COUNT" in os.environ


def is_on_real_gpus() -> bool:
    """Return whether the ranks of tests compute on GPUs that are not emulated."""
    return is_on_gpus() and not is_emulated()


@functools.cache
def num_gpus() -> int:
    """Return how many GPUs this process may use."""
    import torch

    return torch.cuda.device_count()


def devices_of_ranks(num_ranks: int) -> list[str]:
    """Return the device of each rank of a test."""
    if not is_on_gpus():
        return ["cpu"] * num_ranks
    return [f"cuda:{rank % num_gpus()}" for rank in range(num_ranks)]


def visible_to_script() -> dict[str, str]:
    """Return environment variables that hide the GPUs from a script, if the test is on CPUs."""
    return {} if is_on_gpus() else {"CUDA_VISIBLE_DEVICES": ""}
