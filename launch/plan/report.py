"""What ``procpipe plan`` prints: tables, and the line to paste."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from procpipe.launch.plan.replay import Usual
from procpipe.launch.plan.trial import arguments_of
from procpipe.plan.task import KINDS
from procpipe.planner.propose import Proposal
from procpipe.timeline.text import KIND_NAMES, text_table
from procpipe.words import bytes_text, seconds_text


def proposals_table(
    proposals: Sequence[Proposal],
    measured: Mapping[Proposal, Usual],
    chosen: Proposal | None,
    alone_s: float,
) -> str:
    """Lay out proposals: what is predicted of each and, in brackets, what was measured."""
    has_replicas = any(p.num_replicas > 1 for p in proposals)
    heading = ["schedule", "stages", "checkpoint", "chunks", "step", "speed-up", "idle"]
    # Where steps were measured, sums over replicas are a part of their idle time.
    sums = ["all-reduce"] if has_replicas and not measured else []
    rows = [[*heading, *sums, "memory"]]
    for p in proposals:
        found, times = measured.get(p), p.timeline
        step_s = found.step_s if found else times.total_s
        needed, bubble = max(p.needed_bytes), max(0.0, times.bubble - times.exposed)
        rows.append(
            [
                f"{p.schedule}{' *' if p is chosen else ''}",
                f"{times.plan.num_stages}{f' x {p.num_replicas}' if has_replicas else ''}",
                p.checkpoint,
                str(p.chunks),
                seconds_text(times.total_s) + (f" ({seconds_text(found.step_s)})" if found else ""),
                f"{alone_s / step_s:.2f}x",
                f"{bubble:.1%}" + (f" ({found.idle:.1%})" if found else ""),
                *[f"{times.exposed:.1%}" for _ in sums],
                bytes_text(needed) + (f" ({bytes_text(found.needed_bytes)})" if found else ""),
            ]
        )
    what = "predicted (measured)" if measured else "estimated"
    return _table(f"the best of each, {what} (* chosen)", rows, num_left=3)


def balances_table(proposals: Sequence[Proposal]) -> str:
    """Lay out the balances of proposals, in the same order."""
    rows = [(p.schedule, p.checkpoint, str([*p.balance])) for p in proposals]
    return _table("their balances", rows, num_left=3)


def tasks_table(proposal: Proposal, measured: Usual) -> str:
    """Lay out what was predicted of a proposal beside what was measured."""
    planned, rows = proposal.timeline, [("", "predicted", "measured", "difference")]
    rows.append(_compared("step", planned.total_s, measured.step_s))
    idle, found_idle = planned.bubble, f"{measured.idle:.1%}"
    rows.append(("idle", f"{idle:.1%}", found_idle, f"{measured.idle - idle:+.1%}"))
    placement = planned.plan.placement
    for j, stage in enumerate(placement):
        where = f"stage {stage}" if len(set(placement)) == len(placement) else f"partition {j}"
        for kind in KINDS:
            if (found_s := measured.task_s.get((kind, j))) is not None:
                planned_s = planned.costs.seconds[kind][j]
                rows.append(_compared(f"{where}, {KIND_NAMES[kind]}", planned_s, found_s))
    return _table("predicted and measured", rows, num_left=1)


def _compared(what: str, predicted_s: float, found_s: float) -> tuple[str, str, str, str]:
    difference = f"{found_s / predicted_s - 1:+.1%}" if predicted_s else ""
    return what, seconds_text(predicted_s), seconds_text(found_s), difference


def _table(title: str, rows: Sequence[Sequence[str]], num_left: int) -> str:
    """Lay out a table, the heading first; so many columns are flush left, the others right."""
    return "\n".join([title, *(f"  {line}" for line in text_table(rows, num_left))])


def line_to_paste(proposal: Proposal, model: str, loss: str) -> str:
    """Write the line that builds a stage."""
    words = [
        f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"
        for name, value in arguments_of(proposal).items()
    ]
    return f"stage = Stage({model}, {', '.join(words)}, loss_fn={loss})"
