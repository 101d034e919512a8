"""Numbers as people read them."""

from __future__ import annotations

from procpipe.words import bytes_text, counted, seconds_text
from tests.cases import for_each


@for_each(
    ("num_bytes", "expected"),
    [
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (2**20 - 1, "1 MiB"),
        (2**40, "1,024 GiB"),
    ],
)
def test_a_size_has_the_unit_that_suits_it(num_bytes: int, expected: str) -> None:
    assert bytes_text(num_bytes) == expected


def test_a_time_has_the_unit_that_suits_it() -> None:
    assert [seconds_text(s) for s in (0, 0.00001, 0.0123, 0.9994, 0.99951, 75.0)] == [
        *("0", "10 µs", "12.3 ms", "999 ms", "1 s", "75 s")
    ]


def test_a_count_has_its_noun_in_the_right_number() -> None:
    cases = [(0, "layer"), (1, "stage"), (2, "stage"), (1, "process"), (2, "process"), (3, "batch")]
    assert [counted(number, noun) for number, noun in cases] == [
        *("0 layers", "1 stage", "2 stages", "1 process", "2 processes", "3 batches")
    ]
