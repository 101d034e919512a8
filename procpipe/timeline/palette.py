"""What all pictures of plans and timelines share: colours, the distance of ticks, elements of SVG.

The colours are Okabe and Ito's, which colour-blind people can distinguish.

Source: Okabe and Ito, "Color Universal Design" (2008), https://jfly.uni-koeln.de/color/
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """How the tasks of one kind are drawn."""

    name: str  # the kind in words
    fill: str  # colour of the box
    ink: str  # colour of its text


LOOKS = {
    "F": Look("forward", "#0072b2", "#ffffff"),
    "R": Look("recompute", "#c4c4c4", "#000000"),
    "B": Look("backward", "#e69f00", "#000000"),
    "I": Look("input gradient", "#d55e00", "#000000"),
    "W": Look("weight gradient", "#009e73", "#000000"),
}

#: Sums over replicas, which are not tasks.
ALL_REDUCE = Look("all-reduce", "#56b4e9", "#000000")


def tick_distance(least: float) -> float:
    """Return the first of …, 0.1, 0.2, 0.5, 1, 2, 5, 10, … that is not less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least)


def element(name: str, content: str = "", **attributes: object) -> str:
    """Return an SVG element; ``text_anchor`` is the attribute "text-anchor", ``class_`` "class"."""
    words = [name]
    for key, value in attributes.items():
        text = f"{value:g}" if isinstance(value, float) else value
        words.append(f"{key.rstrip('_').replace('_', '-')}='{text}'")
    return f"<{' '.join(words)}>{content}</{name}>" if content else f"<{' '.join(words)}/>"
