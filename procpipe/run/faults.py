"""Describes an exception: where in the pipeline it was, what was held, and to other ranks."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Mapping, Sequence

import torch

from procpipe.compute.ledger import Ledger
from procpipe.compute.partition import Partition
from procpipe.plan.task import FORWARD, RECOMPUTE, Task

#: The most characters of an exception's text in a line.
_LINE_LENGTH = 200

#: The most characters of a description, its traceback included, that are sent.
_STORY_LENGTH = 1 << 16


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
    where = partitions[j].layers.where() if has_run_layers else "its layers' backward"
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
        in_use, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        of_all = torch.cuda.mem_get_info(device)[1]
        held += (
            f"; torch has {in_use / 2**20:.0f} MiB in use, {reserved / 2**20:.0f} reserved, "
            f"of {of_all / 2**20:.0f}"
        )
    return (
        f"{held}. Give the stage fewer layers (balance), make micro-batches smaller "
        "(chunks), or recompute more (checkpoint='always')"
    )


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator has failed; on a CPU only torch's message shows it."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    words = ("can't allocate memory", "CUDA error: out of memory")
    return isinstance(error, RuntimeError) and any(each in text_of(error) for each in words)


def text_of(error: BaseException) -> str:
    """Return an exception's text; the ``__str__`` of a user's may raise."""
    try:
        return str(error)
    except Exception as another:
        return f"(what it says is not known: its __str__ raised {type(another).__name__})"


def in_a_line(error: BaseException) -> str:
    """Return an exception's type and the first line of what it says."""
    lines = text_of(error).splitlines() or [""]
    line = lines[0] if len(lines[0]) <= _LINE_LENGTH else f"{lines[0][:_LINE_LENGTH]}…"
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def story_of(error: BaseException) -> str:
    """Return an exception with its traceback, causes and notes, shortened in the middle."""
    story = "".join(traceback.format_exception(error))
    if len(story) > _STORY_LENGTH:  # all peers must receive it before this process ends
        half = _STORY_LENGTH // 2
        story = f"{story[:half]}\n… {len(story) - 2 * half} characters …\n{story[-half:]}"
    return story
