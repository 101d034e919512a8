"""What a run has found so far: a file with one JSON object a line, which only grows.

Every process of a run appends each finding at once, with one write a line, so that the end of the
run costs at most the line that is being written.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

#: The variable that names the file, for all processes of a run.
RESULTS = "PROCPIPE_GPU_HOUR_RESULTS"

#: One finding, plain JSON; "kind" says what was found, "step" in which step.
Record = dict[str, Any]


def append(path: Path, record: Record) -> None:
    """Add a record."""
    with path.open("ab", buffering=0) as file:
        file.write((json.dumps(record) + "\n").encode())


def read(path: Path) -> list[Record]:
    """Return all records that are whole."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):  # cut off
            record = json.loads(line)
            found += [record] if isinstance(record, dict) else []
    return found
