"""What is added to an exception that ends a task: where it was, and what was held."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch

from procpipe.compute.ledger import Ledger
from procpipe.compute.partition import Partition
from procpipe.plan.task import FORWARD, RECOMPUTE, Task
from procpipe.run.stories import text_of


def note_where(
    error: BaseException,
    task: Task,
    stage: str,
    partitions: Mapping[int, Partition],
    ledger: Ledger,
) -> None:
    """Add notes to an exception: stage, task and layer; where memory ran out, what was held."""
    kind, i, j = task
    has_run_layers = kind in (FORWARD, RECOMPUTE)
    where = partitions[j].where() if has_run_layers else "its layers' backward"
    of = f"micro-batch {i}" if len(partitions) == 1 else f"micro-batch {i}, partition {j}"
    error.add_note(f"procpipe: in {stage}, task {task} ({of}), {where}")
    if _is_out_of_memory(error):
        error.add_note(_memory_note(stage, list(partitions.values()), ledger))


def note_full_device(error: BaseException, rank: int, device: torch.device) -> None:
    """Add a note to an exception, if a GPU had no memory for a stage's layers: its free memory."""
    if device.type != "cuda" or not _is_out_of_memory(error):
        return
    free, of_all, ours = "no memory", "", 0.0
    with contextlib.suppress(RuntimeError):  # there may be no room even for CUDA's own
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        free, of_all = f"{free_bytes / 2**20:.0f} MiB", f" (of {total_bytes / 2**20:.0f})"
        ours = torch.cuda.memory_reserved(device) / 2**20
    error.add_note(
        f"procpipe: rank {rank} found {free} free on {device}, and holds {ours:.0f} MiB there"
        f"{of_all}: give rank {rank} fewer layers (balance) or another GPU (devices), or end other "
        "processes that use this one (nvidia-smi lists them)"
    )


def _memory_note(stage: str, partitions: Sequence[Partition], ledger: Ledger) -> str:
    """Say what the stage held when its memory ran out, and what would need less."""
    device = partitions[0].device
    num_held = sum(partition.num_held for partition in partitions)
    which, _, _ = stage.partition(" (")
    held = (
        f"procpipe: out of memory on {device}: {which} held {num_held} micro-batches "
        f"between forward and backward, whose inputs, outputs and waiting messages take "
        f"{ledger.bytes_now() / 2**20:.1f} MiB"
    )
    if device.type == "cuda":
        mib = [
            value / 2**20
            for value in (
                torch.cuda.memory_allocated(device),
                torch.cuda.memory_reserved(device),
                torch.cuda.mem_get_info(device)[1],
            )
        ]
        held += "; torch has {:.0f} MiB in use, {:.0f} reserved, of {:.0f}".format(*mib)
    return (
        f"{held}. Give the stage fewer layers (balance), split the mini-batch further "
        "(chunks), or recompute more (checkpoint='always')"
    )


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator has failed; on a CPU only torch's message shows it."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    words = ("can't allocate memory", "CUDA error: out of memory")
    return isinstance(error, RuntimeError) and any(each in text_of(error) for each in words)
