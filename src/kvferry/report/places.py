"""Where a table or figure stands in a report: the paper's own figures and tables in its order, what is beyond it apart.

Knows names alone. Does not know who makes the report, but that it sorts places as words, hence numbers of two digits.
"""

from __future__ import annotations

import re

SUMMARY = "1. Reproduction and verdicts"
FIGURES, TABLES = "2. Figures of the paper", "3. Tables of the paper"
BEYOND, PROVENANCE = "4. Beyond the paper", "5. Provenance"
APART = {"reproduction": SUMMARY, "verdict": SUMMARY, "provenance": PROVENANCE}
LAST_FIGURE = 9  # of the paper; further ones are ours
NUMBERED = re.compile(r"(fig|table)(\d+)_(\w+)")
WORDS = {"fig": "Figure", "table": "Table"}


def category(name: str) -> str:
    """The part of the report that a table or figure is in."""
    found = NUMBERED.fullmatch(name)
    if found is None:
        return APART.get(name, BEYOND)
    if found[1] == "table":
        return TABLES
    return FIGURES if int(found[2]) <= LAST_FIGURE else BEYOND


def labels(name: str, pair: str = "all") -> dict[str, str]:
    """Number, subject and pair of a table or figure."""
    found = NUMBERED.fullmatch(name)
    number, subject = ("Table", name) if found is None else (f"{WORDS[found[1]]} {int(found[2]):02d}", found[3])
    return {"number": number, "subject": subject.replace("_", " "), "pair": pair}
