"""How counts, seconds, bytes and tables are written for people: on screens, pages and in errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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


def cpus_text(cpus: Iterable[int]) -> str:
    """Write CPUs as the kernel does: 0, 1, 2 and 8 are "0-2,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs)


def text_table(rows: Sequence[Sequence[str]], num_left: int) -> list[str]:
    """Lay out a table as lines: its first columns flush left, the others right."""
    adjust = (str.ljust if k < num_left else str.rjust for k in range(len(rows[0])))
    widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    columns = list(zip(adjust, widths, strict=True))
    return [
        "  ".join(to(cell, width) for cell, (to, width) in zip(row, columns, strict=True)).rstrip()
        for row in rows
    ]
