"""What our results say to a claim: a number for each pair that was run, out of a cell of another table or of a measure made here.

Knows the tables that claims refer to, and how two variants of a sweep are told apart by their recipes. Judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from kvferry.errors import KvferryError
from kvferry.records import LATENCY, NEXT_TOKEN_KL, PERPLEXITY
from kvferry.report import compare
from kvferry.report.claims import wanted_rows
from kvferry.report.inputs import Pair, Results
from kvferry.report.items import has_record, shared_items
from kvferry.report.papers_recipe import LINEAR, ROPES, is_papers, method_of
from kvferry.report.speed import MAPPER, TARGET_PREFILL, speeds, trials_of
from kvferry.report.stats import Sampled
from kvferry.report.tables.anchors import table14_anchors
from kvferry.report.tables.cells import HIGH, LOW, PAPER, REASON, UNDEFINED, N
from kvferry.report.tables.coqa import coqa_drift
from kvferry.report.tables.diagnostics import HEADLINES, correlations, table4_error_placement
from kvferry.report.tables.geometry import fit_quality, table12_size
from kvferry.report.tables.held_out import table18_held_out
from kvferry.report.tables.layers import table7_r2_vs_k, table17_loo_k, variants_by_k
from kvferry.report.tables.mlp import table3_mlp
from kvferry.report.tables.speed import table16_latency_range
from kvferry.report.tables.transfer import table1_retention

HEADLINE = "headline"
FEWEST, MOST = "fewest", "most"
ALL_TWELVE = "all twelve"  # the paper's six pairs in both directions
TABLES: dict[str, Callable[[Results], pd.DataFrame]] = {
    own.__name__: own
    for own in (
        table1_retention,
        table3_mlp,
        table4_error_placement,
        table7_r2_vs_k,
        table12_size,
        table14_anchors,
        table16_latency_range,
        table17_loo_k,
        table18_held_out,
        correlations,
        coqa_drift,
    )
}
# Measures that are no accuracy, as they are: nats a token.
NATS = (NEXT_TOKEN_KL, PERPLEXITY)


@dataclass(frozen=True)
class Evidence:
    """One number of ours. `of` is a pair of ours, or whatever else the number is of; `paper` its name in the paper if the number
    may be held against the paper's: same pair, same recipe. low, high: 95 % interval. reason: why there is no value.
    """

    of: str
    value: float | None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    reason: str | None = None
    paper: str | None = None
    papers_pair: bool = False


def evidence_for(results: Results, ours: Mapping[str, Any]) -> list[Evidence]:
    """Every number of ours that a claim asks for; none where what it needs was not run.

    Raises:
        KvferryError: the claim refers to a table, column or measure that is not there, or a record is broken.
    """
    if "table" in ours:
        return list(_cells(results, ours))
    if ours["measure"] not in MEASURES:
        raise KvferryError(f"claims.yaml: there is no measure {ours['measure']!r}; use one of {', '.join(MEASURES)}")
    asked = {key: value for key, value in ours.items() if key != "measure"}
    measured = ((pair, MEASURES[ours["measure"]](results, pair, **asked)) for pair in results.pairs)
    return [_of_pair(results, pair, found) for pair, found in measured if found is not None]


def _of_pair(results: Results, pair: Pair, found: tuple[float, Sampled | None, int]) -> Evidence:
    value, sampled, n = found
    low, high = (None, None) if sampled is None else sampled.interval()
    return Evidence(pair.name, value, low, high, n, paper=results.comparable(pair), papers_pair=pair.paper is not None)


@lru_cache(maxsize=32)
def _table(results: Results, name: str) -> pd.DataFrame:
    """A table of this run, empty where it is not one of its tables."""
    if name not in TABLES:
        raise KvferryError(f"claims.yaml: no claim can refer to the table {name!r}; use one of {', '.join(TABLES)}")
    return TABLES[name](results) if name in results.tables else pd.DataFrame()


def _cells(results: Results, ours: Mapping[str, Any]) -> Iterator[Evidence]:
    frame, key, column = _table(results, ours["table"]), ours.get("key", "pair"), ours["column"]
    if column not in frame:
        return
    where = {name: value for name, value in ours.get("where", {}).items() if value != HEADLINE}
    for row in wanted_rows(frame, where).to_dict("records"):
        pair = next((own for own in results.pairs if own.name == row[key]), None)
        if _asked(results, pair, row, ours) and not pd.isna(row[column]):
            yield _cell(results, pair, row, ours)


def _asked(results: Results, pair: Pair | None, row: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Whether a row is that of the headline, or of a recipe of the paper's shape, where that is asked for."""
    if ours.get("where", {}).get("system") == HEADLINE and (pair is None or row["system"] != results.headline(pair)):
        return False
    return "methods" not in ours or (
        pair is not None and is_papers(results.recipe(pair.name, row["system"]), ours["methods"])
    )


def _cell(results: Results, pair: Pair | None, row: Mapping[str, Any], ours: Mapping[str, Any]) -> Evidence:
    column, name = ours["column"], row[ours.get("key", "pair")]
    names = (column, column + LOW, column + HIGH, ours.get("n", column + N))
    value, low, high, n = (_number(row.get(name)) for name in names)
    reason = row.get(column + REASON) if row[column] == UNDEFINED else None
    known = _papers_name(results, pair, row, ours)
    papers_pair = pair is not None and pair.paper is not None
    return Evidence(name, value, low, high, None if n is None else int(n), reason, known, papers_pair)


def _number(cell: object) -> float | None:
    return float(cell) if isinstance(cell, int | float) and not pd.isna(cell) else None


def _papers_name(results: Results, pair: Pair | None, row: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """What the paper calls the pair of a row, if the row is of a recipe that its number can be held against."""
    if pair is None:
        return ALL_TWELVE if row[ours.get("key", "pair")] == HEADLINES and _has_all_twelve(results) else None
    if ours.get("where", {}).get("system") == HEADLINE:
        return _papers_headline(results, pair)
    return pair.paper if _number(row.get(ours["column"] + PAPER)) is not None else None


def _papers_headline(results: Results, pair: Pair) -> str | None:
    """The paper's name where the headline is of its shape and has its k; any k where it states none."""
    if pair.paper is None or results.paper.k(pair.paper) is not None:
        return results.comparable(pair)
    return pair.paper if is_papers(results.recipe(pair.name, results.headline(pair))) else None


def _has_all_twelve(results: Results) -> bool:
    own = {_papers_headline(results, pair) for pair in results.pairs}
    return own >= set(results.paper.table("pairs").index)


def difference(
    results: Results, pair: Pair, of: str, sweep: str, this: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[float, Sampled, int] | None:
    """Score of one variant of a sweep less that of another, on the same items: points for accuracies, else nats a token.

    None where the sweep was not run on the pair, has no such two variants, or did not have them answer.
    """
    own = results.sweeps.get(sweep)
    if own is None or pair.name not in own.pairs:
        return None
    chosen = [_first(results, pair, own.variants, wanted) for wanted in (this, other)]
    there = [name for name in chosen if name is not None and has_record(results, pair, name, of)]
    if len(there) < 2:
        return None
    items = shared_items(results, pair, there, of)
    gained = compare.gained(results, pair, there[0], there[1], of, items)
    scaled = gained if of in NATS else gained.map(lambda share: 100 * share)
    return scaled.value, scaled, len(items)


def _first(results: Results, pair: Pair, variants: Sequence[str], wanted: Mapping[str, Any]) -> str | None:
    """The first variant of the paper's shape with what is wanted."""
    shaped = [name for name in variants if is_papers(results.recipe(pair.name, name), LINEAR, ROPES)]
    known = {name: _known(results, pair, name) for name in shaped}
    counts = [own["sequences"] for own in known.values()]
    named = {FEWEST: min(counts, default=None), MOST: max(counts, default=None)}
    named |= {HEADLINE: results.k(pair.name, results.headline(pair))}
    for name, own in known.items():
        if all(own[key] in _values(value, named) for key, value in wanted.items()):
            return name
    return None


def _known(results: Results, pair: Pair, variant: str) -> dict[str, Any]:
    recipe = results.recipe(pair.name, variant)
    return dict(recipe) | {"method": method_of(recipe), "k": results.k(pair.name, variant)}


def _values(value: Any, named: Mapping[str, Any]) -> list[Any]:
    """What a key may be: one value or some, by name or as they are."""
    return [named.get(one, one) for one in (value if isinstance(value, list) else [value])]


def least_step_of_r2(results: Results, pair: Pair, sweep: str) -> tuple[float, None, int] | None:
    """The least that in-sample R² of keys or values gains from one k of a sweep to the next; the number of k."""
    own = results.sweeps.get(sweep)
    if own is None or pair.name not in own.pairs:
        return None
    fits = [fit_quality(results.manifests[pair.name, name]) for name in variants_by_k(results, own, pair).values()]
    steps = [b[name] - a[name] for a, b in pairwise(fits) for name in ("r2_k_in_sample", "r2_v_in_sample")]
    return (min(steps), None, len(fits)) if steps else None


def deviation_from_size(results: Results, pair: Pair) -> tuple[float, None, int] | None:
    """The largest relative deviation of the parameters of linear mappers that read all heads from the paper's equation."""
    source, target = results.cards[pair.source], results.cards[pair.target]
    outputs = 2 * target["layers"] * target["kv_heads"] * target["head_dim"]
    found = []
    for name in results.variants_of(pair.name):
        if is_papers(results.recipe(pair.name, name), LINEAR, ROPES):
            features = results.k(pair.name, name) * source["kv_heads"] * source["head_dim"]
            found.append(results.manifests[pair.name, name]["parameters"] / (outputs * features) - 1)
    return (max(found, key=abs), None, len(found)) if found else None


def growth_of_speed_up(results: Results, pair: Pair) -> tuple[float, Sampled, int] | None:
    """Warm speed-up at the longest measured length over that at the shortest, medians over rounds, with draws over rounds."""
    record = results.transfers.get((pair.name, results.headline(pair), LATENCY))
    lengths = [own.length for own in speeds(record)] if record is not None else []
    if record is None or len(lengths) < 2:
        return None
    trials, rng = trials_of(record), np.random.default_rng(compare.seed_of(results, LATENCY))
    ends = [(trials[TARGET_PREFILL, n], trials[MAPPER, n]) for n in (lengths[0], lengths[-1])]
    first, last = (_speed_ups(prefill, mapper, results.draws, rng) for prefill, mapper in ends)
    grown = Sampled(last.value / first.value, last.draws / first.draws)
    return grown.value, grown, min(len(mapper) for _, mapper in ends)


def _speed_ups(prefill: Sequence[float], mapper: Sequence[float], draws: int, rng: np.random.Generator) -> Sampled:
    """Median prefill over median mapper; both are timed in the same rounds, so a draw takes the same rounds of both."""
    rounds = rng.integers(len(prefill), size=(draws, len(prefill)))
    above, below = (np.median(np.asarray(own)[rounds], axis=1) for own in (prefill, mapper))
    return Sampled(float(np.median(prefill) / np.median(mapper)), above / below)


MEASURES: dict[str, Callable[..., tuple[float, Sampled | None, int] | None]] = {
    own.__name__: own for own in (difference, least_step_of_r2, deviation_from_size, growth_of_speed_up)
}
