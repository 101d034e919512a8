"""What the commands share at the console: numbers that they read, tables that they write."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as RichTable

from procpipe.words import column_widths, text_table


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
        """Write it: with lines on a terminal that is wide enough for it, plain elsewhere."""
        heading, *rows = self.rows
        widths = column_widths(self.rows)
        if console.is_terminal and sum(widths) + 3 * len(widths) + 1 <= console.width:
            drawn = RichTable(title=self.title, title_justify="left")
            for k, name in enumerate(heading):
                drawn.add_column(name, justify="left" if k < self.num_left else "right")
            for row in rows:
                drawn.add_row(*row)
            console.print(drawn)
        else:
            print(self.title)
            for line in text_table(self.rows, self.num_left):
                print(f"  {line}")
