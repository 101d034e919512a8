"""The comparison with torch's pipelining and FSDP2: how the lines of a script are counted."""

from __future__ import annotations

from benchmarks.sharded import _TORCH, MAKERS, num_lines, tabulate


def two_statements(x: int) -> int:
    if x:
        x += 1
    return (
        x,
    )[0]  # fmt: skip


def test_lines_are_statements_those_inside_of_others_included():
    assert num_lines(two_statements) == 3


def test_times_are_beside_those_of_torch():
    times = {name: [0.1 * k, 0.2 * k, 0.3 * k] for k, name in enumerate(MAKERS, 1)}
    rows = tabulate(times, 8).rows
    assert [row[0] for row in rows] == list(MAKERS)
    assert rows[-1][0] == _TORCH
    assert rows[-1][3] == 1.0
