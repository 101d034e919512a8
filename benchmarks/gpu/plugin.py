"""A plugin of pytest: records every test as it ends, and runs the most important tests first.

pytest -p benchmarks.gpu.plugin --gpus
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

#: The variable that names the file to which each test adds a line of JSON.
TESTS = "PROCPIPE_GPU_HOUR_TESTS"

#: Words in the names of tests, the most important first.
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
    """Record a test once its outcome is known; write down a failure now, not at the end."""
    if report.when != "call" and report.passed:
        return
    why = str(report.longrepr[2]).removeprefix("Skipped: ") if report.skipped else ""
    if report.failed:
        print(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)
        errors = [line[2:].strip() for line in report.longreprtext.splitlines() if line[:2] == "E "]
        why = next((line for line in errors if "Error" in line), errors[0] if errors else "")
    found = {"name": report.nodeid, "outcome": report.outcome, "why": why}
    with Path(os.environ[TESTS]).open("a") as file:
        file.write(json.dumps(found | {"seconds": report.duration}) + "\n")
