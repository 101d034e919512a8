"""What ``stage.report()`` brings together: all stages' statistics, and how each spent a step.

    rank r   its statistics, its record of the last step  ──▶  rank 0: how each rank spent it
             statistics with its split                    ◀──

How a stage's idle time divides depends on what all stages did. So ``statistics()``, which does not
communicate, has the split of the last report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from procpipe.run.runner import Runner
from procpipe.run.statistics import Split, StageStatistics
from procpipe.timeline.split import split
from procpipe.timeline.steps import Clock, common_offsets, merged_step


def report_of_all(pipeline: Runner) -> list[StageStatistics]:
    """Return every stage's statistics, with their splits; all ranks call it, and wait for all."""
    ours = {
        "statistics": asdict(pipeline.statistics()),
        "step": pipeline.log.last_record(),
        "clock": Clock.here(),
    }
    return [statistics_of(of_one) for of_one in pipeline.coordinator.agree(ours, with_splits)]


def with_splits(values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Put into each stage's statistics how it spent the last step; plain JSON.

    Args:
        values: by rank, its "statistics", its record of the last "step", and its "clock".
    """
    of_all = [dict(value["statistics"]) for value in values]
    records = [value["step"] for value in values]
    num_replicas = 1 + max(int(statistics["replica"]) for statistics in of_all)
    has_tasks = any(record["tasks"] for record in records)  # a replica may have no samples
    if not has_tasks or any(record["step"] != records[0]["step"] for record in records):
        return of_all  # before the first step there is nothing to divide
    offsets_ns = common_offsets([Clock(*value["clock"]) for value in values])
    step = merged_step(records, offsets_ns, num_replicas)
    for statistics, one in zip(of_all, split(step), strict=True):
        statistics["split"] = asdict(one)
    return of_all


def statistics_of(plain: Mapping[str, Any]) -> StageStatistics:
    """Read one stage's statistics from plain JSON."""
    one = plain["split"]
    return StageStatistics(**{**plain, "split": None if one is None else Split(**one)})
