"""Each deliberate break still fits the code; ``gpu_breaks.py`` runs them, which takes minutes."""

from pathlib import Path

from tests.gpu_breaks_list import BREAKS

ROOT = Path(__file__).parents[1]


def test_breaks_fit_the_code():
    assert len({each.name for each in BREAKS}) == len(BREAKS) >= 25
    for each in BREAKS:
        text = (ROOT / each.file).read_text()
        assert each.broken(text) != text, each.name
        for test in filter(lambda part: part.startswith("tests/"), each.tests.split()):
            assert (ROOT / test).exists(), (each.name, test)
