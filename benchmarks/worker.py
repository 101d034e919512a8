"""The script that ``rounds.launch`` runs by torchrun: calls a function, writes rank 0's result."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import torch.distributed as dist


def main() -> None:
    where, options, result = sys.argv[1:]
    module, function = where.split(":")
    dist.init_process_group("gloo")
    value = getattr(importlib.import_module(module), function)(**json.loads(options))
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(value))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
