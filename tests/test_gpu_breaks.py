"""Each deliberate fault still applies to the code; ``gpu_breaks.py`` runs them, for minutes."""

import shlex
from pathlib import Path

from tests.gpu_breaks_list import BREAKS

ROOT = Path(__file__).parents[1]


def test_breaks_fit_the_code():
    assert len({each.name for each in BREAKS}) == len(BREAKS) >= 25
    for each in BREAKS:
        text = (ROOT / each.file).read_text()
        assert each.broken(text) != text, each.name
        for argument in shlex.split(each.tests.arguments):
            is_file = argument.startswith("tests/")
            assert not is_file or (ROOT / argument.split("::")[0]).exists(), (each.name, argument)
