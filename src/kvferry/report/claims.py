"""The paper's claims as data, and the rules that say whether a number bears one out.

A claim says where the paper makes it, its number, which of our numbers it is compared with, and a rule. Verdicts are on the whole
95 % interval of ours where it has one: REPRODUCED if all of it keeps to the rule, NOT_REPRODUCED if none of it does, UNDECIDED if
the samples leave both open. Knows the file of claims and the paper's numbers; does not know where ours come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd

from kvferry.errors import KvferryError
from kvferry.report.paper import ABLATED, Paper, same
from kvferry.yamlfile import read_yaml

CLAIMS = "claims.yaml"
REPRODUCED, NOT_REPRODUCED, UNDECIDED, NOT_RUN = "reproduced", "not reproduced", "undecided", "not run"

Kind = Literal["within", "above", "below", "at_most"]
WORDS: dict[Kind, str] = {
    "within": "within {} of the paper's",
    "above": "above {}",
    "below": "below {}",
    "at_most": "at most {} in size",
}


@dataclass(frozen=True)
class Rule:
    """What a number must keep to: a distance from the paper's (`within`), a side of a bound, or a size (`at_most`)."""

    kind: Kind
    bound: float

    @property
    def is_number(self) -> bool:
        """Whether it compares with the paper's number, so that only the paper's own pair and recipe can be judged."""
        return self.kind == "within"

    def __str__(self) -> str:
        return WORDS[self.kind].format(f"{self.bound:,.10g}")

    def range(self, paper: float | None) -> tuple[float, float]:
        """The least and the greatest value that keep to the rule; the bound itself does for `within` and `at_most` alone."""
        if self.kind == "within":
            assert paper is not None
            return paper - self.bound, paper + self.bound
        if self.kind == "at_most":
            return -self.bound, self.bound
        if self.kind == "above":
            return math.nextafter(self.bound, math.inf), math.inf
        return -math.inf, math.nextafter(self.bound, -math.inf)

    def verdict(self, low: float, high: float, paper: float | None = None) -> str:
        """On an interval, or on one value that is both ends."""
        least, most = self.range(paper)
        if least <= low and high <= most:
            return REPRODUCED
        return NOT_REPRODUCED if high < least or most < low else UNDECIDED


@dataclass(frozen=True)
class Claim:
    """One entry of the file; see its head for what the keys mean."""

    id: str
    place: str
    claim: str
    unit: str
    paper: Mapping[str, Any]
    ours: Mapping[str, Any]
    rule: Rule

    def papers_numbers(self, paper: Paper) -> dict[str, float]:
        """The paper's number by pair, as the paper names it; none for a claim in words.

        Raises:
            KvferryError: a csv cannot be read.
            KeyError, ValueError: it lacks a column or a pair, or has words there: claims.yaml does not fit it.
        """
        if "table" not in self.paper:
            return {}
        numbers = _column(paper, self.paper)
        if "less" not in self.paper:
            return numbers
        base = _column(paper, dict(self.paper) | dict(self.paper["less"]))
        return {pair: value - base[pair] for pair, value in numbers.items()}


def _column(paper: Paper, place: Mapping[str, Any]) -> dict[str, float]:
    """A column of the rows that are wanted, by pair: that of the row, the one named, or that of tables without pairs."""
    frame = paper.table(place["table"]).reset_index()
    rows = wanted_rows(frame, place.get("where", {}))
    pairs = rows["pair"] if "pair" in rows else pd.Series(place.get("pair", ABLATED), index=rows.index)
    found = rows[place["column"]].astype(float)
    return {str(pair): float(value) for pair, value in zip(pairs, found, strict=True) if not pd.isna(value)}


def wanted_rows(frame: pd.DataFrame, where: Mapping[str, Any]) -> pd.DataFrame:
    """The rows whose cells are as wanted, words in any case.

    Raises:
        KvferryError: there is no such column.
    """
    for name, value in where.items():
        if name not in frame:
            raise KvferryError(
                f"{CLAIMS}: there is no column {name!r}; use one of {', '.join(map(str, frame.columns))}"
            )
        frame = frame[[same(cell, value) for cell in frame[name]]]
    return frame


def read_claims(root: Path) -> list[Claim]:
    """The claims of the file under `root`, in its order.

    Raises:
        KvferryError: the file cannot be read, an entry lacks a key or has one too many, or an id is there twice.
    """
    path = root / CLAIMS
    entries = read_yaml(path)
    if not isinstance(entries, dict) or not isinstance(entries.get("claims"), list):
        raise KvferryError(f"{path}: claims: it has no list of claims; restore the file")
    claims = [_claim(path, number, entry) for number, entry in enumerate(entries["claims"])]
    ids = [claim.id for claim in claims]
    twice = next((name for name in ids if ids.count(name) > 1), None)
    if twice is not None:
        raise KvferryError(f"{path}: the id {twice!r} is there twice; rename one of the two")
    return claims


def _claim(path: Path, number: int, entry: Any) -> Claim:
    try:
        ((kind, bound),) = entry["rule"].items()
        if kind not in get_args(Kind):
            raise ValueError(f"rule.{kind} is none of {', '.join(get_args(Kind))}")
        return Claim(**(entry | {"rule": Rule(kind, float(bound))}))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise KvferryError(f"{path}: claims[{number}]: not a claim ({error}); correct the entry") from error
