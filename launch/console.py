"""What the commands share at the console: numbers that they read, tables that they write."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from procpipe.words import text_table


def positive(text: str) -> int:
    """Read a whole number of at least 1 from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a number of at least 1")
    return int(text)


@dataclass(frozen=True)
class Table:
    """A table as text."""

    title: str  # what it shows
    rows: Sequence[Sequence[str]]  # its cells, the heading first
    num_left: int = 1  # so many columns are flush left, the others right

    def print(self, console: Console) -> None:
        """Write it, in lines that a narrow terminal wraps."""
        lines = [f"  {line}" for line in text_table(self.rows, self.num_left)]
        console.print(Text("\n".join([self.title, *lines])), soft_wrap=True)
