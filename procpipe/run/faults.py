"""Describes an exception: where in the pipeline it was, what was held, and to other ranks."""

from __future__ import annotations

import traceback
from collections.abc import Mapping

import torch

from procpipe.compute.segment import Segment
from procpipe.plan.task import FORWARD, RECOMPUTE, Task

#: The most characters of an exception's text in a line.
_LINE_LENGTH = 200

#: The most characters of a description, its traceback included, that are sent.
_STORY_LENGTH = 1 << 16


def note_where(
    error: BaseException, task: Task, stage: str, segments: Mapping[int, Segment]
) -> None:
    """Add notes to an exception: stage, task and layer; where memory ran out, what was held."""
    kind, i, j = task
    has_run_layers = kind in (FORWARD, RECOMPUTE)
    where = segments[j].layers.where() if has_run_layers else "its layers' backward"
    of = f"micro-batch {i}" if len(segments) == 1 else f"micro-batch {i}, partition {j}"
    error.add_note(f"procpipe: in {stage}, task {task} ({of}), {where}")
    num_held = sum(segment.num_held for segment in segments.values())
    which, _, _ = stage.partition(" (")
    held = f"{which} held {num_held} micro-batches between forward and backward"
    note_full_device(error, segments[j].device, held)


def note_full_device(error: BaseException, device: torch.device, held: str) -> None:
    """Add a note to an exception, if memory ran out: what is held there, what would need less."""
    words = "can't allocate memory", "CUDA error: out of memory"  # on a CPU, or of another process
    is_full = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if not is_full and not any(each in str(error) for each in words):
        return
    error.add_note(
        f"procpipe: out of memory on {device}: {held}. Give the stage fewer layers (balance) or "
        "another GPU (devices), make micro-batches smaller (chunks), or recompute more "
        "(checkpoint='always')"
    )


def in_a_line(error: BaseException) -> str:
    """Return an exception's type and the first line of what it says."""
    lines = str(error).splitlines() or [""]
    line = lines[0] if len(lines[0]) <= _LINE_LENGTH else f"{lines[0][:_LINE_LENGTH]}…"
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def story_of(error: BaseException) -> str:
    """Return an exception with its traceback, causes and notes, shortened in the middle."""
    story = "".join(traceback.format_exception(error))
    if len(story) > _STORY_LENGTH:  # all peers must receive it before this process ends
        half = _STORY_LENGTH // 2
        story = f"{story[:half]}\n… {len(story) - 2 * half} characters …\n{story[-half:]}"
    return story
