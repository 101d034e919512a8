"""What ``stage.report()`` brings together: all stages' statistics, and how each spent a step.

    rank r   its statistics, its record of the last step  ──▶  rank 0: splits (timeline/idle.py)
             statistics with its split                    ◀──

Which part of a stage's idle time is the plan's, the balance's or the messages' fault depends on
what all stages did. So ``statistics()``, which talks to nobody, has it from the last report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from procpipe.run.trace import StageStatistics
from procpipe.timeline.clocks import Reading
from procpipe.timeline.idle import Split, split
from procpipe.timeline.merging import merged_step


def with_splits(
    values: Sequence[Mapping[str, Any]], clocks: Mapping[int, Reading]
) -> list[dict[str, Any]]:
    """Put into each stage's statistics how it spent the last step; plain JSON.

    Args:
        values: by rank, its "statistics" and its record of the last "step".
        clocks: each other rank's clock, compared with rank 0's.
    """
    of_all = [dict(value["statistics"]) for value in values]
    records = [value["step"] for value in values]
    if any(record["step"] != records[0]["step"] or not record["tasks"] for record in records):
        return of_all  # before the first step there is nothing to divide
    readings = [[clocks[rank]] if rank in clocks else [] for rank in range(len(values))]
    for statistics, one in zip(of_all, split(merged_step(records, readings)), strict=True):
        statistics["split"] = asdict(one)
    return of_all


def statistics_of(told: Mapping[str, Any]) -> StageStatistics:
    """Read one stage's statistics from plain JSON."""
    one = told["split"]
    return StageStatistics(**{**told, "split": None if one is None else Split(**one)})
