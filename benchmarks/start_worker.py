"""The script that ``start.py`` runs by torchrun: a user's, with the time at each point.

Each contender imports only what its user would: so all imports are in functions, and the first
stamp comes before any of them.
"""

import time

_PROCESS_S = time.time()

# ruff: noqa: E402 - the clock comes first
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Notes the time of a point, by its name.
Stamp = Callable[[str], None]

_NUM_MICRO_BATCHES = 4
_WIDTH, _NUM_LAYERS = 16, 8


def procpipe(stamp: Stamp) -> None:
    import torch

    stamp("torch")
    from procpipe import Stage

    stamp("library")
    n = int(os.environ["WORLD_SIZE"])
    stage = Stage(
        torch.nn.Sequential(*_layers()),
        [_NUM_LAYERS // n] * n,
        chunks=_NUM_MICRO_BATCHES,
        checkpoint="never",
        loss_fn=torch.nn.functional.mse_loss,
    )
    data = _data()
    stamp("built")
    stage.step(data, data)
    stamp("first step")
    stage.step(data, data)
    stamp("second step")


def torch_gpipe(stamp: Stamp) -> None:
    import torch
    import torch.distributed as dist

    stamp("torch")
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stamp("library")
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    part = torch.nn.Sequential(*_layers()[: _NUM_LAYERS // n])
    stage = PipelineStage(part, rank, n, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, _NUM_MICRO_BATCHES, torch.nn.functional.mse_loss)
    data = _data()
    inputs = (data,) if rank == 0 else ()
    targets = {"target": data} if rank == n - 1 else {}
    stamp("built")
    schedule.step(*inputs, **targets)
    stamp("first step")
    schedule.step(*inputs, **targets)
    stamp("second step")
    dist.destroy_process_group()


def bare(stamp: Stamp) -> None:
    """Send one message down the ranks and one back up: the least that a pipeline needs."""
    import torch
    import torch.distributed as dist

    stamp("torch")
    stamp("library")
    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    part, x = torch.nn.Sequential(*_layers()[: _NUM_LAYERS // (last + 1)]), _data()
    stamp("built")
    for point in ("first step", "second step"):
        if rank > 0:
            _wait(dist.irecv(x, rank - 1))
        y = part(x.requires_grad_())
        if rank < last:
            _wait(dist.isend(y.detach(), rank + 1))
            gradient = torch.empty_like(y)
            _wait(dist.irecv(gradient, rank + 1))
        else:
            gradient = torch.ones_like(y)
        y.backward(gradient)
        x, gradient = x.detach(), x.grad
        if rank > 0:
            _wait(dist.isend(gradient, rank - 1))
        stamp(point)
    dist.destroy_process_group()


CONTENDERS = {"procpipe": procpipe, "torch GPipe": torch_gpipe, "bare gloo": bare}


def main() -> None:
    name, folder = sys.argv[1:]
    stamps = {"process": _PROCESS_S}
    CONTENDERS[name](lambda point: stamps.update({point: time.time()}))
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(stamps))


def _layers() -> list[Any]:
    from torch import nn

    return [nn.Linear(_WIDTH, _WIDTH) for _ in range(_NUM_LAYERS)]


def _data() -> Any:
    import torch

    return torch.zeros(4 * _NUM_MICRO_BATCHES, _WIDTH)


def _wait(work: Any) -> None:
    work.wait()


if __name__ == "__main__":
    main()
