"""How the tests for GPUs are distributed to emulated GPUs and seeds."""

from __future__ import annotations

import pytest

from tests.dist.devices import SOME_CASES, some_of


@pytest.mark.parametrize("num_cases", [1, 2, 3, 8, 33])
def test_three_seeds_run_all_cases(monkeypatch, num_cases):
    monkeypatch.setenv(SOME_CASES, "1")
    parts = []
    for seed in (6, 7, 8):
        monkeypatch.setenv("EMULATED_GPU_SEED", str(seed))
        parts.append(some_of(range(num_cases)))

    assert {case for part in parts for case in part} == set(range(num_cases))
    assert all(1 <= len(part) <= num_cases // 3 + 1 for part in parts)
