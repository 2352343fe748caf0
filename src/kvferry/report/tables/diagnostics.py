"""Tables of diagnostics: where errors lie and what they do to attention outputs, and what goes together with retention.

Cosine, concentrations and R² are measured on the same texts for all mappers of a pair. Does not know how they are measured.
"""

from __future__ import annotations

import pandas as pd

from kvferry.records import (
    ATTENTION_COSINE,
    ATTENTION_COSINE_HELD_OUT,
    K_CONCENTRATION,
    NEXT_TOKEN_KL,
    R2_K,
    R2_V,
    V_CONCENTRATION,
)
from kvferry.report import compare
from kvferry.report.correlation import FEWEST, pearson, spearman
from kvferry.report.diagnosis import by_layer, diagnosed, mean_of, sampled
from kvferry.report.inputs import Pair, Results
from kvferry.report.items import TARGET, record_of, shared_items
from kvferry.report.papers_recipe import NETWORK, RIDGE
from kvferry.report.stats import Undefined
from kvferry.report.tables.cells import PAPER, UNDEFINED, N, Row, cell, cells, empty, frame_of
from kvferry.report.tables.geometry import fit_quality
from kvferry.report.tables.mlp import HELLASWAG, OVER_RIDGE, matched
from kvferry.report.wanted import MLP

RETENTION = HELLASWAG + "_retention"
CALIBRATION_R2 = "r2_k_held_out"
PLAIN = (R2_K, R2_V)
OVER_TEXTS = (K_CONCENTRATION, V_CONCENTRATION, ATTENTION_COSINE)
ALL_PAIRS = "all pairs"
HEADLINES = "headlines of all pairs"  # what the paper correlates
BY_LAYER = (ATTENTION_COSINE, ATTENTION_COSINE_HELD_OUT, K_CONCENTRATION, V_CONCENTRATION, R2_K, R2_V)
PAPERS_WORDS = {ATTENTION_COSINE: "cosine"}  # where the csv of Table 4 names a column otherwise
# What retention is correlated with; the paper has the first on evaluation tokens and the R² of its calibration.
MEASURES = (ATTENTION_COSINE, ATTENTION_COSINE_HELD_OUT, R2_K, CALIBRATION_R2, NEXT_TOKEN_KL)


def table4_error_placement(results: Results) -> pd.DataFrame:
    """A row for each pair and diagnosed mapper: R², concentrations and cosine on evaluation tokens, HellaSwag retention.

    An MLP of the sweep of MLPs also has what it gains over the ridge that it is compared with, paired over texts or items. R²
    is pooled over tokens and averaged over heads and layers, so it has no interval; the others' is over texts.

    Raises:
        KvferryError: a record of a diagnosed mapper is missing.
    """
    rows = []
    for pair in results.pairs:
        names = diagnosed(results, pair)
        ridges = {mlp: ridge for mlp, ridge in _ridges(results, pair).items() if {mlp, ridge} <= set(names)}
        rows += [_found(results, pair, name) | _gains(results, pair, name, ridges.get(name)) for name in names]
    return frame_of(rows)


def _ridges(results: Results, pair: Pair) -> dict[str, str]:
    """The ridge that each MLP of the sweep of MLPs is compared with."""
    sweep = results.sweeps.get(MLP)
    if sweep is None or pair.name not in sweep.pairs:
        return {}
    return {mlp: ridge for ridge, mlp in matched(results, sweep, pair)}


def _found(results: Results, pair: Pair, variant: str) -> Row:
    """What a mapper's own records say, with the paper's number where that is a ridge of the same shape."""
    row: Row = {"pair": pair.name, "system": variant, "method": results.recipe(pair.name, variant)["method"]}
    row |= {"k": results.k(pair.name, variant)}
    for name in PLAIN:
        row |= {name: mean_of(results, pair, variant, name), name + PAPER: _paper(results, pair, variant, RIDGE, name)}
    for name in (*OVER_TEXTS, ATTENTION_COSINE_HELD_OUT):
        row |= _over_texts(results, pair, variant, name)
    return row | _retention(results, pair, variant)


def _over_texts(results: Results, pair: Pair, variant: str, name: str) -> Row:
    if (pair.name, variant, name) not in results.transfers:
        return empty(name) | {name + N: None}
    count = record_of(results, pair, variant, name)[1].n
    return cells(name, sampled(results, pair, variant, name), scale=1) | {name + N: count}


def _retention(results: Results, pair: Pair, variant: str) -> Row:
    record = results.transfers.get((pair.name, variant, HELLASWAG))
    if record is None:
        return empty(RETENTION) | {RETENTION + N: None, RETENTION + PAPER: None}
    row = cells(RETENTION, compare.retention(results, pair, variant, HELLASWAG)) | {RETENTION + N: record.n}
    return row | {RETENTION + PAPER: _paper(results, pair, variant, RIDGE, HELLASWAG)}


def _gains(results: Results, pair: Pair, mlp: str, ridge: str | None) -> Row:
    """What an MLP gains over a ridge; empty columns for what is compared with none."""
    row: Row = {}
    for name in (*PLAIN, *OVER_TEXTS, HELLASWAG):
        gained = empty(name + OVER_RIDGE) if ridge is None else _gained(results, pair, mlp, ridge, name)
        paper = None if ridge is None else _paper(results, pair, mlp, NETWORK, name)
        row |= gained | {name + OVER_RIDGE + PAPER: paper}
    return row


def _gained(results: Results, pair: Pair, mlp: str, ridge: str, name: str) -> Row:
    if name in PLAIN:
        return {name + OVER_RIDGE: mean_of(results, pair, mlp, name) - mean_of(results, pair, ridge, name)}
    if name != HELLASWAG:
        return cells(name + OVER_RIDGE, compare.gained(results, pair, mlp, ridge, name), scale=1)
    if not all((pair.name, system, HELLASWAG) in results.transfers for system in (mlp, ridge)):
        return empty(name + OVER_RIDGE)
    items = shared_items(results, pair, [ridge, mlp, TARGET], HELLASWAG)
    return cells(name + OVER_RIDGE, compare.retention_gained(results, pair, mlp, ridge, HELLASWAG, items))


def _paper(results: Results, pair: Pair, variant: str, method: str, name: str) -> float | None:
    """The paper's number for a mapper of its shape: its Table 4 has those of ridge, and what an MLP gains over them."""
    row = results.comparable(pair, variant, methods=(method,))
    column = ("ridge_" if method == RIDGE else "delta_") + PAPERS_WORDS.get(name, name)
    return None if row is None else results.paper.value("table4", row, column)


def diagnostics_by_layer(results: Results) -> pd.DataFrame:
    """A row for each pair, diagnosed mapper and target layer: every measure, mean over texts and heads."""
    rows = []
    for pair in results.pairs:
        for variant in diagnosed(results, pair):
            names = [name for name in BY_LAYER if (pair.name, variant, name) in results.transfers]
            columns = {name: by_layer(results, pair, variant, name) for name in names}
            for layer, values in enumerate(zip(*columns.values(), strict=True)):
                rows.append(
                    {"pair": pair.name, "system": variant, "layer": layer, **dict(zip(names, values, strict=True))}
                )
    return frame_of(rows)


def points(results: Results) -> pd.DataFrame:
    """A row for each pair and mapper with diagnostics and HellaSwag: MEASURES, and retention in percent with its n.

    Retention is on all items of the mapper's own record, `undefined` where the target answers none of them right.
    """
    return frame_of([_point(results, pair, variant) for pair in results.pairs for variant in _both(results, pair)])


def _both(results: Results, pair: Pair) -> list[str]:
    return [name for name in diagnosed(results, pair) if (pair.name, name, HELLASWAG) in results.transfers]


def _point(results: Results, pair: Pair, variant: str) -> Row:
    target, _, own = compare.paired(results, pair, variant, HELLASWAG)
    retention = 100 * own.value / target.value if target.value > 0 else Undefined("the target scores 0")
    row: Row = {"pair": pair.name, "system": variant, "method": results.recipe(pair.name, variant)["method"]}
    row |= cell(RETENTION, retention)
    row |= {RETENTION + N: results.transfers[pair.name, variant, HELLASWAG].n}
    return row | {name: _measure(results, pair, variant, name) for name in MEASURES}


def _measure(results: Results, pair: Pair, variant: str, name: str) -> float | None:
    """What retention is correlated with: from the manifest or a record, None where there is no such record."""
    if name == CALIBRATION_R2:
        return fit_quality(results.manifests[pair.name, variant])[name]
    measured = (pair.name, variant, name) in results.transfers
    return mean_of(results, pair, variant, name) if measured else None


def correlations(results: Results) -> pd.DataFrame:
    """Correlation of HellaSwag retention with each of MEASURES: over all points, those of headlines, those of each pair.

    Pearson's r with a bootstrap interval over points, beside the paper's, and Spearman's. Points without a retention are left
    out and counted. Points of one pair share models, texts and items, so they are not independent.
    """
    found = points(results)
    scopes = _scopes(results, found) if len(found) else {}
    return frame_of(
        [_correlation(results, points, scope, name) for scope, points in scopes.items() for name in MEASURES]
    )


def _scopes(results: Results, found: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Points by what is correlated over; headlines where there are enough of them."""
    names = zip(found["pair"], found["system"], strict=True)
    headlines = found[[results.headlines[pair] == system for pair, system in names]]
    of_headlines = {HEADLINES: headlines} if len(headlines) >= FEWEST else {}
    own = {pair: found[found["pair"] == pair] for pair in dict.fromkeys(found["pair"])}
    return {ALL_PAIRS: found} | of_headlines | own


def _correlation(results: Results, found: pd.DataFrame, scope: str, name: str) -> Row:
    of_scope = found[found[name].notna()]
    drawn = with_retention(of_scope)
    x, y = (drawn[column].to_numpy(dtype=float) for column in (name, RETENTION))
    paper = results.paper.value("correlation", name, "pearson") if scope in (ALL_PAIRS, HEADLINES) else None
    row: Row = {"over": scope, "measure": name}
    row |= cells("pearson", pearson(x, y, results.draws, compare.seed_of(results, name)), scale=1)
    row |= {"pearson" + N: len(drawn), "pearson" + PAPER: paper}
    return row | cell("spearman", spearman(x, y)) | {"left_out": len(of_scope) - len(drawn)}


def with_retention(found: pd.DataFrame) -> pd.DataFrame:
    """The points that have a retention."""
    return found[found[RETENTION] != UNDEFINED]
