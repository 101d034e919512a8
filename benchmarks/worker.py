"""The script that ``rounds.launch`` runs by torchrun: calls a function, writes rank 0's result."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    where, options, limit_s, result = sys.argv[1:]
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(limit_s), exit=True)
    module, function = where.split(":")
    # Before the group is made: what is imported later may keep it, as default arguments of
    # torch.distributed.nn.functional do (torch 2.15). Its threads would outlive its destruction,
    # and such a thread that releases a tensor while Python shuts down aborts the process:
    # https://github.com/pytorch/pytorch/issues/190489
    called = getattr(importlib.import_module(module), function)
    if torch.cuda.is_available():  # before NCCL connects, which new releases of torch do at once
        torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if _has_nccl() else "gloo")
    value = called(**json.loads(options))
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(value))
    dist.barrier()
    dist.destroy_process_group()


def _has_nccl() -> bool:
    """Return whether NCCL accepts these ranks: one on each GPU, or where sharing is enabled."""
    num_gpus, num_ranks = torch.cuda.device_count(), int(os.environ["WORLD_SIZE"])
    return num_gpus >= num_ranks or "NCCL_MULTI_RANK_GPU_ENABLE" in os.environ


if __name__ == "__main__":
    main()
