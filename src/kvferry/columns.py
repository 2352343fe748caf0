"""Numbers and tables as plain text. Knows nothing of what they say."""

from __future__ import annotations

import math


def figure(value: float | None, unit: float) -> str:
    """A positive value in its unit, to three significant digits and without an exponent; a dash for None."""
    if value is None:
        return "–"
    return f"{value / unit:,.{max(0, 2 - math.floor(math.log10(value / unit)))}f}"


def aligned(title: str, head: list[list[str]], rows: list[list[str]], names: int) -> str:
    """A title and columns: the first `names` to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*head, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if index < names else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (*head, *rows)
    ]
    return "\n".join([title, *lines])
