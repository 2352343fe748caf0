"""Tables of time: the hand-off against the target's own prefill by length, their range, and what native tokens cost and bring.

Times in ms: the median over trials, with the 10th and 90th percentile where other tables have a 95 % interval.
"""

from __future__ import annotations

import pandas as pd

from kvferry.errors import KvferryError
from kvferry.records import FIRST, LAST, LATENCY, NATIVE_TOKENS, Record
from kvferry.report import native_tokens as native
from kvferry.report.inputs import Pair, Results
from kvferry.report.papers_recipe import is_papers
from kvferry.report.speed import COLD, WARM, Speed, Spread, load_ms, of_kind, pays_from, speeds
from kvferry.report.tables.cells import HIGH, LOW, PAPER, N, Row, cells, frame_of

WAYS = (WARM, COLD)
NOWHERE = "none measured"


def table5_latency(results: Results) -> pd.DataFrame:
    """A row for each pair, variant and length: mapper, both prefills, and how many times faster the hand-off is.

    Raises:
        KvferryError: no latency was measured.
    """
    return frame_of(
        [
            _length_row(results, pair, variant, own)
            for pair, variant, record in _measured(results)
            for own in speeds(record)
        ]
    )


def _measured(results: Results) -> list[tuple[Pair, str, Record]]:
    found = list(of_kind(results, LATENCY))
    if not found:
        raise KvferryError(f"{LATENCY}: no latency was measured; add the section to the config and run again")
    return found


def _length_row(results: Results, pair: Pair, variant: str, own: Speed) -> Row:
    row: Row = {"pair": pair.name, "system": variant, "k": results.k(pair.name, variant), "tokens": own.length}
    row |= {"trials": own.trials}
    named = {"mapper_ms": own.mapper_ms, "target_prefill_ms": own.target_prefill_ms}
    known = papers_name(results, pair, variant)
    paper = {name: _of_paper(results, known, row["k"], own.length, column) for name, column in PAPER_TABLE5.items()}
    for name, spread in named.items():
        row |= times(name, spread) | {name + PAPER: paper[name]}
    row |= times("source_prefill_ms", own.source_prefill_ms)
    mapper, prefill = paper["mapper_ms"], paper["target_prefill_ms"]
    ratio = None if mapper is None or prefill is None else prefill / mapper
    return row | {WARM: own.warm, WARM + PAPER: ratio, COLD: own.cold}


PAPER_TABLE5 = {"mapper_ms": "mapper_ms", "target_prefill_ms": "reprefill_ms"}
PAPER_TABLE16 = {
    "mapper_ms": "transfer_ms",
    "target_prefill_ms": "reprefill_ms",
    "warm_least": "speedup_low",
    "warm_most": "speedup_high",
}


def papers_name(results: Results, pair: Pair, variant: str) -> str | None:
    """The paper's name of a pair, if the variant is of the paper's shape; its k is looked up in the tables of time."""
    return pair.paper if is_papers(results.recipe(pair.name, variant)) else None


def _of_paper(results: Results, known: str | None, k: int, length: int, column: str) -> float | None:
    return None if known is None else results.paper.where("table5", column, pair=known, k=k, tokens=length)


def times(name: str, spread: Spread) -> Row:
    """Columns of a time."""
    return {name: spread.median, name + LOW: spread.low, name + HIGH: spread.high}


def table16_latency_range(results: Results) -> pd.DataFrame:
    """A row a pair and variant: times at the longest length, ranges of both ratios, and from which length each pays.

    Raises:
        KvferryError: no latency was measured.
    """
    return frame_of([_range_row(results, *entry) for entry in _measured(results)])


def _range_row(results: Results, pair: Pair, variant: str, record: Record) -> Row:
    measured, k = speeds(record), results.k(pair.name, variant)
    if not measured:
        raise KvferryError(
            f"{pair.name} {variant}: every length of {LATENCY}.lengths was skipped ({record.settings.get('skipped')}); "
            "ask for shorter ones"
        )
    longest, known = measured[-1], papers_name(results, pair, variant)
    row: Row = {"pair": pair.name, "system": variant, "k": k, "lengths": len(measured), "tokens": longest.length}
    own: Row = times("mapper_ms", longest.mapper_ms) | times("target_prefill_ms", longest.target_prefill_ms)
    for way in WAYS:
        ratios = [getattr(speed, way) for speed in measured]
        own |= {f"{way}_least": min(ratios), f"{way}_most": max(ratios)}
        own |= {f"{way}_from": pays_from(measured, way) or NOWHERE}
    for name, value in own.items():
        row[name] = value
        if name in PAPER_TABLE16 and known is not None:
            row[name + PAPER] = results.paper.where("table16", PAPER_TABLE16[name], pair=known, k=k)
    return row | times("load_ms", load_ms(record))


def native_tokens(results: Results) -> pd.DataFrame:
    """A row for each pair, variant and point of the curves of native tokens: KL, what it gains, and what it costs.

    KL with its 95 % interval over chunks (bootstrap).

    Raises:
        KvferryError: nothing was measured, or records are broken.
    """
    rows = [
        _point_row(results, pair, variant, point, length)
        for pair, variant, points, length in native.measured(results)
        for point in points
    ]
    if not rows:
        raise KvferryError(f"{NATIVE_TOKENS}: nothing was measured; add the section to the config and run again")
    return frame_of(rows)


def _point_row(results: Results, pair: Pair, variant: str, point: native.Point, length: int) -> Row:
    row: Row = {"pair": pair.name, "system": variant, "k": results.k(pair.name, variant)}
    row |= {"native_at": {LAST: "end", FIRST: "start"}[point.where], "native_count": point.count}
    kl = cells("next_token_kl", point.kl, scale=1) | {"next_token_kl" + N: point.chunks}
    gained = cells("next_token_kl_gained", point.gained, scale=1)
    row |= {name: value for name, value in (kl | gained).items() if value is not None}
    row |= {"tokens": length, "trials": point.trials}
    return row | times("handoff_ms", point.ms) | times("added_ms", point.added_ms)
