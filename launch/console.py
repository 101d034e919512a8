"""What the commands share: numbers that they read from the command line."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Read a whole number of at least 1 from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a number of at least 1")
    return int(text)
