"""A plugin of pytest: records every test as it ends, and runs those first that matter most.

pytest -p benchmarks.gpu.plugin --gpus
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.results import RESULTS, append

__all__ = ["importance"]

#: What a test's name has in it, the most important first.
_ORDER = ("parity", "ipc", "nccl", "share", "message", "kill", "fail", "stall", "state", "trace")


def importance(nodeid: str) -> int:
    """Return the place of a test in the order; a smaller number runs earlier."""
    name = nodeid.lower()
    return next((place for place, word in enumerate(_ORDER) if word in name), len(_ORDER))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests; those of equal importance stay in their order."""
    items.sort(key=lambda item: importance(item.nodeid))


def pytest_runtest_logreport(report: Any) -> None:
    """Record a test once its outcome is known."""
    if report.when == "call" or (report.when == "setup" and not report.passed) or report.failed:
        if report.skipped:
            why = str(report.longrepr[2])
        else:
            lines = [line for line in str(report.longrepr or "").splitlines() if line[:2] == "E "]
            why = lines[0][2:].strip() if lines else ""
        append(
            Path(os.environ[RESULTS]),
            {
                "step": "tests",
                "kind": "test",
                "name": report.nodeid,
                "outcome": report.outcome,
                "seconds": report.duration,
                "why": why,
            },
        )
