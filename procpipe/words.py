"""How counts, seconds and bytes are written for people: on screens, pages and in errors."""

from __future__ import annotations


def seconds_text(seconds: float) -> str:
    """Write a length of time with three digits and a unit: "54.3 ms"."""
    if abs(seconds) >= 999.5:
        return f"{seconds:,.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size * 0.9995:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0"


def bytes_text(num_bytes: float) -> str:
    """Write an amount of bytes with three digits and a unit: "1.91 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} GiB" if num_bytes < 999.5 else f"{num_bytes:,.0f} GiB"


def counted(number: int, noun: str) -> str:
    """Write a count with its noun: "1 stage", "4 micro-batches"."""
    ending = "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number} {noun}{'' if number == 1 else ending}"
