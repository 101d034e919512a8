"""How a length of time is written for people, on pages and in advice."""

from __future__ import annotations

__all__ = ["seconds_text"]


def seconds_text(seconds: float) -> str:
    """Write a length of time with three digits and a unit: "54.3 ms"."""
    if abs(seconds) >= 999.5:
        return f"{seconds:,.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size * 0.9995:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0"
