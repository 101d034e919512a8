"""What ``procpipe plan`` prints: tables, and the line to paste."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from procpipe.launch.console import Table
from procpipe.launch.plan.check import Rehearsal
from procpipe.plan.placement import partitions_of
from procpipe.plan.task import KINDS
from procpipe.planner.model import Model, TiedLayers
from procpipe.planner.propose import Proposal
from procpipe.timeline.text import KIND_NAMES
from procpipe.words import bytes_text, seconds_text


def best_of_each(proposals: Sequence[Proposal], memory_bytes: int | None) -> list[Proposal]:
    """Choose the fastest of each schedule and mode that fits, or else the one that needs least."""
    best: dict[tuple[str, str], Proposal] = {}
    in_order = sorted(proposals, key=lambda proposal: proposal.order(memory_bytes))
    for proposal in in_order:
        best.setdefault((proposal.schedule, proposal.checkpoint), proposal)
    return list(best.values())


def overview_table(
    proposals: Sequence[Proposal], chosen: Proposal | None, alone_s: float, memory_bytes: int | None
) -> Table:
    """Lay out the best of each schedule and checkpoint mode."""
    heading = ("schedule", "checkpoint", "chunks", "step", "speed-up", "idle", "memory", "fits")
    rows = [
        (
            f"{p.schedule}{' *' if p is chosen else ''}",
            p.checkpoint,
            str(p.chunks),
            seconds_text(p.total_s),
            f"{alone_s / p.total_s:.2f}x",
            f"{p.timeline.bubble:.1%}",
            bytes_text(max(p.needed_bytes)),
            "yes" if p.fits(memory_bytes) else "no",
        )
        for p in proposals
    ]
    return Table("the best of each (* chosen)", [heading, *rows], num_left=2)


def splits_table(
    proposals: Sequence[Proposal], chosen: Proposal | None, alone_s: float, memory_bytes: int | None
) -> Table:
    """Lay out the best of each number of replicas; the chosen one first, then by seconds."""
    heading = ("stages x replicas", "schedule", "checkpoint", "chunks", "step", "speed-up",
               "bubble", "all-reduce", "hidden", "memory", "fits")  # fmt: skip
    rows = [
        (
            f"{p.plan.num_stages} x {p.num_replicas}{' *' if p is chosen else ''}",
            p.schedule,
            p.checkpoint,
            str(p.chunks),
            seconds_text(p.total_s),
            f"{alone_s / p.total_s:.2f}x",
            f"{max(0.0, p.timeline.bubble - p.timeline.exposed):.1%}",
            f"{p.timeline.exposed:.1%}" if p.num_replicas > 1 else "",
            f"{p.timeline.hidden:.0%}" if p.num_replicas > 1 else "",
            bytes_text(max(p.needed_bytes)),
            "yes" if p.fits(memory_bytes) else "no",
        )
        for p in sorted(
            proposals, key=lambda p: (p is not chosen, not p.fits(memory_bytes), p.total_s)
        )
    ]
    return Table("stages and replicas (* chosen)", [heading, *rows], num_left=3)


def stages_table(model: Model, proposal: Proposal, memory_bytes: int | None) -> Table:
    """Lay out what each stage of a proposal does and holds."""
    whole = f" of {bytes_text(memory_bytes)}" if memory_bytes else ""
    rows = [("stage", "layers", "busy", "parameters", "held", f"memory{whole}")]
    for stage in range(proposal.plan.num_stages):
        needed = proposal.needed_bytes[stage]
        share = f" {needed / memory_bytes:.0%}" if memory_bytes else ""
        rows.append(
            (
                str(stage),
                "; ".join(_layers_text(model, proposal, stage)),
                seconds_text(proposal.timeline.busy_s(stage)),
                bytes_text(proposal.static_bytes[stage]),
                bytes_text(proposal.held_bytes[stage]),
                f"{bytes_text(needed)}{share}",
            )
        )
    return Table("a step of the chosen one", rows, num_left=2)


def ties_table(model: Model, proposal: Proposal) -> Table | None:
    """Lay out which parameters and buffers several stages have, and what they send of them."""
    cuts = list(itertools.accumulate(proposal.balance))
    placement = proposal.plan.placement
    found: dict[tuple[int, ...], list[TiedLayers]] = {}
    for tie in model.ties:
        users = {placement[bisect.bisect_right(cuts, k)] for k in tie.layers}
        if len(users) > 1:
            found.setdefault(tuple(sorted(users)), []).append(tie)
    if not found:
        return None
    rows = [("name", "stages", "a copy", "sent a step")]
    for stages, ties in found.items():
        names = f"{ties[0].name}{f' and {len(ties) - 1} more' if len(ties) > 1 else ''}"
        copy_bytes = sum(tie.num_bytes for tie in ties)
        num_messages = len(stages) * (len(stages) - 1)  # each stage sends to each other
        sent_bytes = num_messages * sum(tie.num_bytes for tie in ties if tie.is_trained)
        whose = ", ".join(map(str, stages))
        rows.append((names, whose, bytes_text(copy_bytes), bytes_text(sent_bytes)))
    return Table("parameters and buffers that several stages have", rows, num_left=2)


def check_table(proposal: Proposal, measured: Rehearsal, *, is_cpu: bool) -> Table:
    """Lay out what was predicted beside what was measured.

    Tasks are left out on a GPU, where their measured time is the host's and not the device's.
    """
    rows = [("", "predicted", "measured", "difference")]
    rows.append(_compared("step", proposal.total_s, measured.step_s))
    if is_cpu:
        idle, found_idle = proposal.timeline.bubble, f"{measured.idle:.1%}"
        rows.append(("idle", f"{idle:.1%}", found_idle, f"{measured.idle - idle:+.1%}"))
        rows += _tasks_compared(proposal, measured)
    return Table("predicted and measured", rows)


def _tasks_compared(proposal: Proposal, measured: Rehearsal) -> Iterator[tuple[str, str, str, str]]:
    placement, timeline = proposal.plan.placement, proposal.timeline
    planned_s = {
        (task.kind, task.j): timeline.end_s(task) - timeline.start_s(task)
        for task in proposal.plan.tasks()
    }
    for j, stage in enumerate(placement):
        where = f"stage {stage}" if len(set(placement)) == len(placement) else f"partition {j}"
        for kind in KINDS:
            if (found_s := measured.task_s.get(f"{kind}{j}")) is None:
                continue
            yield _compared(f"{where}, {KIND_NAMES[kind]}", planned_s[kind, j], found_s)


def _compared(what: str, predicted_s: float, found_s: float) -> tuple[str, str, str, str]:
    difference = _difference(found_s, predicted_s)
    return what, seconds_text(predicted_s), seconds_text(found_s), difference


def _difference(found: float, predicted: float) -> str:
    return f"{found / predicted - 1:+.1%}" if predicted else ""


def _layers_text(model: Model, proposal: Proposal, stage: int) -> Iterator[str]:
    cuts = [0, *itertools.accumulate(proposal.balance)]
    for j in partitions_of(proposal.plan.placement, stage):
        names = [layer.name for layer in model.layers[cuts[j] : cuts[j + 1]]]
        yield names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})"


def arguments_of(proposal: Proposal) -> dict[str, Any]:
    """Return the arguments of ``Stage`` for a proposal, but for model and loss."""
    return {
        "balance": list(proposal.balance),
        **({"replicas": proposal.num_replicas} if proposal.num_replicas > 1 else {}),
        "chunks": proposal.chunks,
        "checkpoint": proposal.checkpoint,
        "schedule": proposal.schedule,
    }


def line_to_paste(arguments: Mapping[str, Any], loss: str, model: str = "model") -> str:
    """Write the line that builds a stage."""
    words = [
        f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"
        for name, value in arguments.items()
    ]
    return f"stage = Stage({model}, {', '.join(words)}, loss_fn={loss})"
