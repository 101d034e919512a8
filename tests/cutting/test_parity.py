"""Models of all kinds, cut and run over processes, against the plain models in float64."""

from __future__ import annotations

from tests.cutting.cases import CASES
from tests.cutting.compare import differences, steps

#: Models of this folder, each in one way; all models in all ways: ``python -m tests.cutting``.
WAYS = [
    ("U-Net", "gpipe", "always", 3),
    ("U-Net of a time", "1f1b", "never", 2),
    ("nanoGPT", "1f1b", "always", 2),
    ("two towers", "gpipe", "except_last", 2),
    ("shared block", "1f1b", "never", 2),
    ("GRU", "1f1b", "always", 2),
    ("nn.Transformer", "gpipe", "except_last", 3),
]


def test_models_over_processes_are_the_plain_models(ranks):
    assert {name for name, *_ in WAYS} == {
        n for n, case in CASES.items() if case.package == "torch"
    }
    found = ranks(3).run(steps, WAYS, world=False, timeout_s=100).values()

    faults = {way: differences(way, [r[way] for r in found[: way[-1]]]) for way in WAYS}
    assert faults == {way: [] for way in WAYS}
