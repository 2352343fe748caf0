"""Table of the paper's claims: its number, ours, and whether ours bears it out. Knows claims and evidence; measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from kvferry.report.claims import NOT_RUN, UNDECIDED, Claim, read_claims
from kvferry.report.inputs import Results
from kvferry.report.tables.cells import HIGH, LOW, REASON, UNDEFINED, N, Row, frame_of
from kvferry.report.tables.evidence import Evidence, evidence_for

OURS = "ours"


def reproduction(results: Results) -> pd.DataFrame:
    """A row for each claim and pair, those that were not run last.

    A claim that is a number is held against the paper's own pairs alone, a row for each that the paper gives a number for, or one
    for all where none of them was run; any other is tested on every pair that ran what it needs.

    Raises:
        KvferryError: the claims or the paper's numbers cannot be read, or a record that a claim needs is broken.
    """
    rows = [row for claim in read_claims(results.paper.root) for row in _rows(results, claim)]
    return frame_of(sorted(rows, key=lambda row: row["verdict"] == NOT_RUN))


def _rows(results: Results, claim: Claim) -> Iterator[Row]:
    found = evidence_for(results, claim.ours)
    if not claim.rule.is_number:
        yield from (_tested(claim, own) for own in found)
        if not found:
            yield _not_run(claim, None, claim.paper["words"], _lacking(claim))
        return
    by_pair = {own.paper: own for own in found if own.paper is not None}
    numbers = claim.papers_numbers(results.paper)
    here = {own.paper for own in results.pairs}
    if by_pair.keys().isdisjoint(numbers) and here.isdisjoint(numbers):
        said = ", ".join(f"{number:,.10g} ({pair})" for pair, number in _rounded(numbers).items())
        yield _not_run(claim, None, said, "none of these pairs was run")
        return
    for pair, number in numbers.items():
        if pair in by_pair:
            yield _tested(claim, by_pair[pair], number)
        else:
            note = "run, but not with what the claim needs" if pair in here else "this pair was not run"
            yield _not_run(claim, pair, number, note)


def _rounded(numbers: Mapping[str, float]) -> dict[str, float]:
    """Without the last bits of a difference of two printed numbers."""
    return {pair: round(number, 4) for pair, number in numbers.items()}


def _tested(claim: Claim, own: Evidence, number: float | None = None) -> Row:
    row = _label(claim, own.of, "yes" if own.papers_pair or own.paper is not None else "no")
    row |= {"paper": claim.paper.get("words") if number is None else number}
    if own.value is None:
        row |= {OURS: UNDEFINED, OURS + REASON: own.reason, OURS + N: own.n, "difference": None}
        return row | {"rule": str(claim.rule), "verdict": UNDECIDED}
    ends = [own.value if end is None else end for end in (own.low, own.high)]
    row |= {OURS: own.value, OURS + LOW: own.low, OURS + HIGH: own.high, OURS + N: own.n}
    row |= {"difference": None if number is None else own.value - number}
    return row | {"rule": str(claim.rule), "verdict": claim.rule.verdict(ends[0], ends[1], number)}


def _not_run(claim: Claim, pair: str | None, papers: float | str | None, note: str) -> Row:
    row = _label(claim, pair, None if pair is None else "yes") | {"paper": papers}
    return row | {"rule": str(claim.rule), "verdict": NOT_RUN, "note": note}


def _label(claim: Claim, pair: str | None, papers_pair: str | None) -> Row:
    row: Row = {"id": claim.id, "place": claim.place, "claim": claim.claim, "unit": claim.unit}
    return row | {"pair": pair, "papers_pair": papers_pair}


def _lacking(claim: Claim) -> str:
    """What a run needs for a claim of any pair."""
    if "methods" in claim.ours:
        return f"no mapper of the paper's size with method {', '.join(claim.ours['methods'])}"
    if "sweep" in claim.ours:
        return f"no pair has the variants that it compares in sweeps.{claim.ours['sweep']}"
    return (
        f"needs the table {claim.ours['table']}" if "table" in claim.ours else "no pair has the records that it needs"
    )
