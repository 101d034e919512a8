"""How the tasks of each kind look in pictures: one palette for plans, timelines and pages.

The colours are Okabe and Ito's, which people who do not see all of them can tell apart; what goes
forward is blue, what goes back is warm, and each ink can be read on its fill.

Source: Okabe and Ito, "Color Universal Design" (2008), https://jfly.uni-koeln.de/color/
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """How the tasks of one kind are drawn.

    Attributes:
        name: the kind in words.
        fill: colour of the box.
        ink: colour of what is written in it.
    """

    name: str
    fill: str
    ink: str


LOOKS = {
    "F": Look("forward", "#0072b2", "#ffffff"),
    "R": Look("recompute", "#c4c4c4", "#000000"),
    "B": Look("backward", "#e69f00", "#000000"),
    "I": Look("input gradient", "#d55e00", "#000000"),
    "W": Look("weight gradient", "#009e73", "#000000"),
}
