"""What a run has found so far: a file with one JSON object a line, which only grows.

Every process of a run appends to it as soon as it knows something, with one write a line, so that
whatever ends the run costs at most the line that is being written.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "Record", "append", "read"]

#: The variable that names the file, for all processes of a run.
RESULTS = "PROCPIPE_GPU_HOUR_RESULTS"

#: One finding, plain JSON; "kind" says what it is of, "step" which step found it.
Record = dict[str, Any]


def append(path: Path, record: Record) -> None:
    """Add a record."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (json.dumps(record) + "\n").encode())
    finally:
        os.close(descriptor)


def read(path: Path) -> list[Record]:
    """Return all records that are whole."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:  # cut off
            continue
        if isinstance(record, dict):
            found.append(record)
    return found
